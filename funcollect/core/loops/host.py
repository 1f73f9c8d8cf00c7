"""The loop over real simulators: one policy call per step for all lanes, rows written where they stay."""

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

from funcollect.core.loops.delivery import RolloutColumns, count, deliver, reset_counters
from funcollect.core.request import Request, open_actor
from funcollect.core.simulators.forking import fork_simulation
from funcollect.core.simulators.simulation import FinishedLanes, Simulation, SimulatorHandle
from funcollect.core.state import CollectorState, all_lanes, first_state, policy_start
from funcollect.envs.host.host_env import check_outcome, check_rewards
from funcollect.errors import EnvError
from funcollect.keys import Key
from funcollect.messages import shown
from funcollect.protocols import Actor, Column, HostEnv, Outcome, Policy
from funcollect.specs import assemble
from funcollect.tree import Path

Array = npt.NDArray[Any]


def init(env: HostEnv, policy: Policy, key: Key, first_lane: int, total_lanes: int) -> CollectorState:
    """`funcollect.init`: simulators opened and reset."""
    lane = torch.arange(first_lane, first_lane + (env.num_envs or 1))
    policy_state = policy_start(policy, key, len(lane), first_lane)
    simulation = Simulation(env, key, lane)
    try:
        simulation.restart(range(len(lane)))
    except BaseException:
        simulation.close()
        raise
    return first_state(
        env,
        key=key,
        lane=lane,
        total_lanes=total_lanes,
        env_state=simulation.release(),
        observation=simulation.observation(),
        policy_state=policy_state,
    )


def reset(env: HostEnv, state: CollectorState, lanes: Tensor) -> CollectorState:
    """`funcollect.reset` of the lanes of a mask [P]."""
    return _begin_episodes(state, lanes, stale=False)


def recover(env: HostEnv, state: CollectorState) -> CollectorState:
    """`funcollect.recover`: also from a handle that is superseded by a later one."""
    return _begin_episodes(state, all_lanes(state), stale=True)


def _begin_episodes(state: CollectorState, lanes: Tensor, *, stale: bool) -> CollectorState:
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


def fork(env: HostEnv, state: CollectorState) -> CollectorState:
    """`funcollect.fork`: the simulators rebuilt, and brought to where these are."""
    handle: SimulatorHandle = state.env_state
    handle.check()
    return state.replace(env_state=fork_simulation(handle.simulation, state))


def run(env: HostEnv, policy: Policy, state: CollectorState, request: Request) -> tuple[CollectorState, TensorDict]:
    """`funcollect.rollout`."""
    handle: SimulatorHandle = state.env_state
    handle.check()
    rows = handle.simulation.simulators.observation
    recording = Recording(rows, request, env.info_keys)
    views = {path: torch.from_numpy(row) for path, row in rows.items()} if policy.backend == "torch" else rows
    observation = assemble(env.observation_space, views)
    actor = open_actor(env, policy, state, request, observation)  # bad arguments are said before the state is used
    simulation = handle.claim()
    simulation.steps = state.steps_made + request.length
    simulation.show(state.observation)
    with actor.running():
        _loop(simulation, actor, recording, state, request)
        policy_state, outputs = actor.finish()
    check_rewards(recording.reward)
    columns = recording.to_columns(outputs)
    counters = count(state, columns, simulation.action_log.ages, reset_when_done=request.reset_when_done)
    batch = deliver(state, columns, counters, batched=env.num_envs is not None)
    simulation.action_log.extend(outputs[("action",)], counters.age)
    after = state.replace(
        env_state=simulation.release(),
        observation=simulation.observation(),
        policy_state=policy_state,
        steps=simulation.steps,
        **counters.after,
    )
    return after, batch


def _loop(simulation: Simulation, actor: Actor, recording: Recording, state: CollectorState, request: Request) -> None:
    act, reward = actor.act, recording.reward
    send, receive, every = simulation.simulators.send, simulation.simulators.receive, range(state.num_lanes)
    limit = Limit(state.step, request.max_frames_per_traj) if request.max_frames_per_traj else None
    finished = None
    if not request.reset_when_done:
        finished = FinishedLanes(simulation, (state.terminated | state.truncated).nonzero()[:, 0].tolist())
    for t in range(request.length):
        for store, row in recording.roots:
            store[t] = row
        action = act(t)
        if finished is None:
            send(every, action)
            _, outcome = receive()
            if limit is not None:
                outcome = limit.apply(outcome)
        else:
            recording.restore(t, list(finished.lanes))
            outcome = finished.step(action)
        for store, row in recording.nexts:
            store[t] = row
        numbers, terminated, truncated, info = outcome
        try:
            reward[t] = numbers
            over = any(terminated) or any(truncated)
        except (TypeError, ValueError) as error:
            raise _bad(outcome) from error
        if info:
            recording.inform(info)
        if over:
            _end(recording.end(t, outcome), simulation, actor, finished)
    check_outcome(outcome)  # what an environment answers wrongly, it answers so in the last step, too


def _end(lanes: list[int], simulation: Simulation, actor: Actor, finished: FinishedLanes | None) -> None:
    """These lanes begin another episode, or stay finished."""
    if finished is not None:
        finished.add(lanes)
        return
    simulation.restart(lanes)
    actor.restart(lanes)


def _bad(outcome: Outcome) -> EnvError:
    """Why an outcome could not be recorded."""
    try:
        check_outcome(outcome)
    except EnvError as error:
        return error
    return EnvError(f"step returned {shown(outcome, 200)}, expected one reward and two flags per lane: correct that")


class Limit:
    """`max_frames_per_traj`: truncates what goes on too long."""

    def __init__(self, step: Tensor, limit: int) -> None:
        self._step = step.tolist()
        self._limit = limit

    def apply(self, outcome: Outcome) -> Outcome:
        """The outcome, with lanes truncated that reach the limit."""
        reward, terminated, cut, info = outcome
        truncated = list(cut)
        try:
            for lane, over in enumerate(terminated):
                self._step[lane] += 1
                truncated[lane] = bool(truncated[lane]) or self._step[lane] >= self._limit
                if over or truncated[lane]:
                    self._step[lane] = 0
        except (TypeError, ValueError) as error:
            raise _bad(outcome) from error
        return reward, terminated, truncated, info


class Recording:
    """What the simulators answered, written as it comes.

    Attributes:
        roots, nexts: pairs of a column [T, P, ...] and the row [P, ...] that goes into it, before and after each step.
        reward: [T, P] float32.
    """

    def __init__(self, rows: Mapping[Path, Array], request: Request, info_keys: Sequence[str]) -> None:
        self._paths = list(rows)
        self.roots = [self._pair(request, path, row) for path, row in rows.items()]
        self.nexts = [self._pair(request, ("next", *path), row) for path, row in rows.items()]
        shape = (request.length, len(self.roots[0][1]))
        self._lanes = range(shape[1])
        self.reward = np.empty(shape, np.float32)
        self._terminated = np.zeros(shape, bool)
        self._truncated = np.zeros(shape, bool)
        self._info: dict[str, list[Any]] = {key: [] for key in info_keys}

    @staticmethod
    def _pair(request: Request, path: Path, row: Array) -> tuple[Array, Array]:
        return request.column(path, torch.from_numpy(row)).numpy(), row

    def restore(self, t: int, lanes: list[int]) -> None:
        """Undo what a policy wrote into the rows of finished lanes, which no step writes again."""
        for store, row in self.roots:
            row[lanes] = store[t, lanes]

    def inform(self, info: Sequence[Column]) -> None:
        """Keep copies of a step's infos: an environment may write the next ones into the same arrays."""
        for (key, values), value in zip(self._info.items(), info, strict=True):
            try:
                values.append(np.array(value))
            except (TypeError, ValueError) as error:
                raise _bad_info(key, value, error) from error

    def end(self, t: int, outcome: Outcome) -> list[int]:
        """Keep the flags of a step at which some lane is done: which lanes are."""
        _, terminated, truncated, _ = outcome
        try:
            ended = list(itertools.compress(self._lanes, map(operator.or_, terminated, truncated)))
            for lane in ended:
                self._terminated[t, lane] = terminated[lane]
                self._truncated[t, lane] = truncated[lane]
        except (TypeError, ValueError) as error:
            raise _bad(outcome) from error
        return ended

    def to_columns(self, outputs: dict[Path, Tensor]) -> RolloutColumns:
        """All of it, as columns."""
        return RolloutColumns(
            observation=self._columns(self.roots),
            next_observation=self._columns(self.nexts),
            outputs=outputs,
            reward=torch.from_numpy(self.reward),
            terminated=torch.from_numpy(self._terminated),
            truncated=torch.from_numpy(self._truncated),
            info={(key,): _info_column(key, values) for key, values in self._info.items()},
        )

    def _columns(self, pairs: list[tuple[Array, Array]]) -> dict[Path, Tensor]:
        return {path: torch.from_numpy(store) for path, (store, _) in zip(self._paths, pairs, strict=True)}


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
