"""The loop over simulators: one policy call per step for all lanes, whose observations are copied to columns."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.core.loops.delivery import OUTCOME_KEYS, TrajectoryLimit, deliver, new_columns, reset_counters
from funcollect.core.request import Request, open_actor
from funcollect.core.simulators.forking import fork_simulation
from funcollect.core.simulators.simulation import FinishedLanes, Simulation, SimulatorHandle
from funcollect.core.state import CollectorState, all_lanes, first_state
from funcollect.envs.host.host_env import check_outcome
from funcollect.errors import EnvError
from funcollect.keys import Key
from funcollect.messages import shown
from funcollect.protocols import Actor, Column, HostEnv, Outcome, Policy, SnapshotSimulators
from funcollect.specs import assemble
from funcollect.tree import Path

Array = npt.NDArray[Any]


def init(env: HostEnv, policy: Policy, key: Key, first_lane: int, total_lanes: int) -> CollectorState:
    """Implement `funcollect.init`: open and reset simulators."""
    lane = torch.arange(first_lane, first_lane + (env.num_envs or 1))
    simulation = Simulation(env, key, lane)
    try:
        if env.forking == "snapshot" and not isinstance(simulation.simulators, SnapshotSimulators):
            raise TypeError(
                f"{type(simulation.simulators).__name__} lacks snapshot() or restore(), expected both, since {env} "
                "has forking='snapshot': write both (see funcollect.envs.SnapshotSimulators), or change forking"
            )
        simulation.restart(range(len(lane)))
        observation, env_state = simulation.observation(), simulation.release()
        return first_state(env, policy, key, lane, total_lanes, env_state=env_state, observation=observation)
    except BaseException:
        simulation.close()
        raise


def reset(env: HostEnv, state: CollectorState, lanes: Tensor, *, stale: bool = False) -> CollectorState:
    """Implement `funcollect.reset` of the lanes of a mask [P]; with `stale`, also of a superseded state."""
    simulation: Simulation = state.env_state.claim(stale=stale)
    simulation.show(state.observation)
    simulation.restart(lanes.nonzero()[:, 0].tolist())
    simulation.action_log.ages = torch.where(lanes, 0, simulation.action_log.ages)
    return state.replace(
        env_state=simulation.release(),
        observation=simulation.observation(),
        steps=max(simulation.steps, state.steps_made),
        **reset_counters(state, lanes, torch.tensor(simulation.episodes)),
    )


def recover(env: HostEnv, state: CollectorState) -> CollectorState:
    """Implement `funcollect.recover`, also of a superseded state."""
    return reset(env, state, all_lanes(state), stale=True)


def fork(env: HostEnv, state: CollectorState) -> CollectorState:
    """Implement `funcollect.fork`: rebuild the simulators and bring them to the same state."""
    handle: SimulatorHandle = state.env_state
    handle.check()
    return state.replace(env_state=fork_simulation(handle.simulation, state))


def run(env: HostEnv, policy: Policy, state: CollectorState, request: Request) -> tuple[CollectorState, TensorDict]:
    """Implement `funcollect.rollout`."""
    handle: SimulatorHandle = state.env_state
    handle.check()
    rows = handle.simulation.simulators.observation
    recording = _Recording(rows, request, env.info_keys)
    views = {path: torch.from_numpy(row) for path, row in rows.items()} if policy.backend == "torch" else rows
    observation = assemble(env.observation_space, views)
    actor = open_actor(env, policy, state, request, observation)  # bad arguments raise before the state is used
    simulation = handle.claim()
    simulation.steps = state.steps_made + request.length
    simulation.show(state.observation)
    with actor.running():
        _loop(simulation, actor, recording, state, request)
        policy_state, outputs = actor.finish()
    counters, batch, ages = deliver(env, state, request, recording.columns(), outputs, simulation.action_log.ages)
    simulation.action_log.extend(outputs[("action",)], ages)
    after = state.replace(
        env_state=simulation.release(),
        observation=simulation.observation(),
        policy_state=policy_state,
        steps=simulation.steps,
        **counters,
    )
    return after, batch


def _loop(simulation: Simulation, actor: Actor, recording: _Recording, state: CollectorState, request: Request) -> None:
    """Run the steps of a rollout, and restart lanes whose episode ends unless they stay finished."""
    act, reward = actor.act, recording.reward
    send, receive, every = simulation.simulators.send, simulation.simulators.receive, range(state.num_lanes)
    limit = TrajectoryLimit(state.step.numpy(), request.max_frames_per_traj) if request.max_frames_per_traj else None
    next_cut = min(limit.due.tolist()) if limit else request.length  # the first step at which a lane reaches the limit
    finished = (
        None
        if request.reset_when_done
        else FinishedLanes(simulation, (state.terminated | state.truncated).nonzero()[:, 0].tolist())
    )
    for t in range(request.length):
        for store, row in recording.roots:
            store[t] = row
        action = act(t)
        if finished is None:
            send(every, action)
            _, outcome = receive()
        else:
            recording.restore(t, list(finished.lanes))
            outcome = finished.step(action)
        for store, row in recording.nexts:
            store[t] = row
        numbers, terminated, truncated, info = outcome
        try:
            reward[t] = numbers
            over = any(terminated) or any(truncated) or t >= next_cut
        except (TypeError, ValueError) as error:
            raise _bad(outcome) from error
        if info:
            recording.inform(info)
        if over:
            ended = recording.end(t, outcome, limit)
            if finished is not None:
                finished.add(ended)
                continue
            simulation.restart(ended)
            actor.restart(ended)
            if limit is not None:
                limit.restart(t, ended)
                next_cut = min(limit.due.tolist())
    check_outcome(outcome)  # an environment that returns wrong values does so in the last step, too


def _bad(outcome: Outcome) -> EnvError:
    """Return the error for an outcome that could not be recorded."""
    try:
        check_outcome(outcome)
    except EnvError as error:
        return error
    return EnvError(f"step returned {shown(outcome, 200)}, expected one reward and two flags per lane: correct that")


class _Recording:
    """The columns of a rollout, written step by step.

    Attributes:
        roots, nexts: pairs of a column [T, P, ...] and the row [P, ...] that goes into it, before and after each step.
        reward: [T, P] float32.
    """

    def __init__(self, rows: Mapping[Path, Array], request: Request, info_keys: Sequence[str]) -> None:
        self._columns = new_columns({path: torch.from_numpy(row) for path, row in rows.items()}, request)
        self.roots = [(self._columns[path].numpy(), row) for path, row in rows.items()]
        self.nexts = [(self._columns["next", *path].numpy(), row) for path, row in rows.items()]
        self.reward, self._terminated, self._truncated = (self._columns[path].numpy() for path in OUTCOME_KEYS)
        self._lanes = range(self.reward.shape[1])
        self._info: dict[str, list[Any]] = {key: [] for key in info_keys}

    def restore(self, t: int, lanes: list[int]) -> None:
        """Undo a policy's writes into the rows of finished lanes, which no step writes again."""
        for store, row in self.roots:
            row[lanes] = store[t, lanes]

    def inform(self, info: Sequence[Column]) -> None:
        """Record copies of a step's infos: an environment may write the next ones into the same arrays."""
        for (key, values), value in zip(self._info.items(), info, strict=True):
            try:
                values.append(np.array(value))
            except (TypeError, ValueError) as error:
                raise _bad_info(key, value, error) from error

    def end(self, t: int, outcome: Outcome, limit: TrajectoryLimit | None) -> list[int]:
        """Record the flags of a step at which some lane is done, and return which lanes are."""
        _, terminated, truncated, _ = outcome
        try:
            if limit is not None:
                truncated = list(map(operator.or_, truncated, limit.reached(t).tolist()))
            ended = list(itertools.compress(self._lanes, map(operator.or_, terminated, truncated)))
            for lane in ended:
                self._terminated[t, lane] = terminated[lane]
                self._truncated[t, lane] = truncated[lane]
        except (TypeError, ValueError) as error:
            raise _bad(outcome) from error
        return ended

    def columns(self) -> dict[Path, Tensor]:
        """Return all columns under the batch's keys."""
        infos = self._info.items()
        return self._columns | {("next", "info", key): _info_column(key, values) for key, values in infos}


def _info_column(key: str, values: list[Any]) -> Tensor:
    try:
        column = np.array(values)
        return torch.from_numpy(column.astype(np.float32) if column.dtype == np.float64 else column)
    except (TypeError, ValueError) as error:
        raise _bad_info(key, values[0], error) from error


def _bad_info(key: str, lanes: Column, error: Exception) -> EnvError:
    return EnvError(
        f"the info key {key!r} holds {type(lanes[0]).__name__} of varying shape or no number ({error}): "
        "name keys that hold numbers or arrays of one shape"
    )
