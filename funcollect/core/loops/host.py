"""The loop over simulators: one policy call per step for all lanes, whose observations are copied to columns."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.core.loops.delivery import TrajectoryLimit, deliver, new_columns, reset_counters
from funcollect.core.loops.eager import step_all
from funcollect.core.loops.recording import Recording
from funcollect.core.request import Request, open_actor
from funcollect.core.simulators.forking import fork_simulation
from funcollect.core.simulators.simulation import FinishedLanes, Simulation, SimulatorHandle
from funcollect.core.state import CollectorState, all_lanes, first_state
from funcollect.envs.host.host_env import NOT_RECORDED, bad_outcome, check_outcome
from funcollect.keys import Key
from funcollect.policies.checks import check_32_bits
from funcollect.protocols import HostEnv, Outcome, Policy, SnapshotSimulators
from funcollect.specs import assemble
from funcollect.trajectories.final_observations import attach


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
    if stale:
        simulation.renew()
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
    return state.changed(env_state=fork_simulation(handle.simulation, state))


def run(env: HostEnv, policy: Policy, state: CollectorState, request: Request) -> tuple[CollectorState, TensorDict]:
    """Implement `funcollect.rollout`."""
    handle: SimulatorHandle = state.env_state
    handle.check()
    rows = handle.simulation.simulators.observation
    views = {path: torch.from_numpy(row) for path, row in rows.items()}
    columns = new_columns(views, request, compact=request.compact_obs)
    recording = Recording(rows, columns, env.info_keys)
    actor = open_actor(
        env, policy, state, request, assemble(env.observation_space, views if policy.backend == "torch" else rows)
    )
    simulation = handle.claim()  # not before: bad arguments have raised, and the state has not been used
    simulation.steps = state.steps_made + request.length
    simulation.show(state.observation)
    simulation.announce(request.reset_when_done)
    stepper = HostStepper(simulation, recording, state, request)
    with actor.running():
        step_all(stepper, actor, request.length)
        stepper.finish()
        policy_state, outputs = actor.finish()
    outputs = {path: column.cpu() for path, column in outputs.items()}
    if policy.backend == "jax":
        check_32_bits({leaf.path: columns[leaf.path] for leaf in env.observation_leaves})
    columns |= recording.infos()
    counters, batch, ages = deliver(env, state, request, columns, outputs, simulation.action_log.ages)
    if request.compact_obs:
        attach(batch.unlock_(), recording.final_observations(batch, rows))
        batch.lock_()
    simulation.action_log.extend(outputs[("action",)], ages)
    after = state.replace(
        env_state=simulation.release(),
        observation=simulation.observation(),
        policy_state=policy_state,
        steps=simulation.steps,
        **counters,
    )
    return after, batch


class HostStepper:
    """Steps simulators, and restarts lanes whose episode ends unless they stay finished."""

    def __init__(self, simulation: Simulation, recording: Recording, state: CollectorState, request: Request) -> None:
        self._simulation, self._recording, self._request = simulation, recording, request
        self._lanes, self._reward = range(state.num_lanes), recording.reward
        self._roots, self._nexts = recording.roots, recording.nexts
        most = request.max_frames_per_traj
        self._limit = TrajectoryLimit(state.step.numpy(), most) if most else None
        self._next_cut = _next_cut(self._limit, request)
        self._finished = None if request.reset_when_done else FinishedLanes(simulation, _over(state))
        live = simulation.simulators if self._finished is None else self._finished
        self._send, self._receive = live.send, live.receive
        self._outcome: Outcome

    def record(self, t: int) -> None:
        """See `Stepper`."""
        for store, row in self._roots:
            store[t] = row

    def step(self, t: int, action: Any) -> list[int] | None:
        """See `Stepper`."""
        self._send(self._lanes, action if getattr(action, "is_cpu", True) else action.cpu())
        _, outcome = self._receive()
        for store, row in self._nexts:
            store[t] = row
        self._outcome = outcome
        reward, terminated, truncated, info = outcome
        try:
            self._reward[t] = reward
            over = any(terminated) or any(truncated) or t >= self._next_cut
        except NOT_RECORDED as error:
            raise bad_outcome(outcome, self._lanes) from error
        if info:
            self._recording.inform(info)
        return self._end(t, outcome) if over else None

    def _end(self, t: int, outcome: Outcome) -> list[int] | None:
        """End the episodes that are over with step `t`; return the lanes that began another one."""
        ended = self._recording.end(t, outcome, self._limit)
        if self._finished is not None:
            self._finished.add(ended)
            return None
        self._simulation.restart(ended)
        if self._limit is not None:
            self._limit.restart(t, ended)
            self._next_cut = _next_cut(self._limit, self._request)
        return ended

    def finish(self) -> None:
        """Check the outcome of the last step, and record what follows it."""
        check_outcome(self._outcome, self._lanes)
        self._recording.finish()


def _next_cut(limit: TrajectoryLimit | None, request: Request) -> int:
    """Return the first step at which a lane reaches the limit, or one after the rollout."""
    return request.length if limit is None else min(limit.due.tolist())


def _over(state: CollectorState) -> list[int]:
    """Return the lanes that are finished."""
    lanes: list[int] = (state.terminated | state.truncated).nonzero()[:, 0].tolist()
    return lanes
