"""The loop over simulators: one policy call per step for all lanes, whose observations are copied to columns."""

from __future__ import annotations

import collections
import contextlib
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy.typing as npt
import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.core.loops.delivery import TrajectoryLimit, deliver, new_columns, reset_counters
from funcollect.core.loops.recording import Recording, final_observations, joined_infos, side_by_side
from funcollect.core.loops.replaced_lanes import ReplacedLanes, shifted
from funcollect.core.request import Request, open_actor
from funcollect.core.routes import of_lanes
from funcollect.core.simulators.forking import fork_simulation
from funcollect.core.simulators.simulation import FinishedLanes, Simulation, SimulatorHandle
from funcollect.core.state import CollectorState, all_lanes, first_state, joined_policy_states, lanes_of_state
from funcollect.envs.host.host_env import NOT_RECORDED, bad_outcome, check_outcome
from funcollect.errors import LanesLostError, PolicyError
from funcollect.keys import Key
from funcollect.policies.actors.checks import check_32_bits
from funcollect.processes.life import SIGNS
from funcollect.protocols import (
    Actor,
    Columns,
    HostEnv,
    Outcome,
    Policy,
    SnapshotSimulators,
)
from funcollect.specs import assemble
from funcollect.trajectories.final_observations import attach
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
    if stale:
        simulation.renew()
    lanes = simulation.restart_with_lost(lanes)
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
    if handle.simulation.replaced is not None and handle.simulation.replaced.replaces:
        lanes_of_state(state, slice(0, 1))  # a loss should find no policy whose state cannot be taken apart
    every = handle.simulation.parts if request.reset_when_done else [range(state.num_lanes)]
    parts = [_Part(env, policy, state, request, rows, columns, lanes) for lanes in every]
    simulation = handle.claim()  # not before: bad arguments have raised, and the state has not been used
    simulation.steps = state.steps_made + request.length
    simulation.show(state.observation)
    simulation.announce(request.reset_when_done)
    with contextlib.ExitStack() as running:
        for part in parts:
            running.enter_context(part.actor.running())
        _take_turns([part.steps(simulation, state, request) for part in parts])
        while simulation.lost_in(range(state.num_lanes)):  # a part that waited longer may have lost another's lanes
            for part in parts:
                part.replace_lost(simulation, request)
        policy_states, outputs = zip(*(part.finish() for part in parts), strict=True)
    if policy.backend == "jax":
        check_32_bits({leaf.path: columns[leaf.path] for leaf in env.observation_leaves})
    columns |= joined_infos([part.recording for part in parts])
    acted = side_by_side(outputs)
    before, ages = _restarted(state, [lane for part in parts for lane in part.replaced_at_once], simulation)
    counters, batch, ages = deliver(env, before, request, columns, acted, ages)
    if request.compact_obs:
        attach(batch.unlock_(), final_observations(batch, rows, [part.recording for part in parts]))
        batch.lock_()
    simulation.action_log.extend(acted[("action",)], ages)
    after = state.replace(
        env_state=simulation.release(),
        observation=simulation.observation(),
        policy_state=joined_policy_states(policy_states),
        steps=simulation.steps,
        **counters,
    )
    return after, batch


def _restarted(state: CollectorState, lanes: list[int], simulation: Simulation) -> tuple[CollectorState, Tensor]:
    """Return the state and the lanes' ages as if these lanes had begun an episode before the rollout."""
    ages = simulation.action_log.ages
    if not lanes:
        return state, ages
    mask = torch.zeros(state.num_lanes, dtype=torch.bool)
    mask[lanes] = True
    return state.replace(**reset_counters(state, mask, state.episode + mask)), torch.where(mask, 0, ages)


def _take_turns(runs: Sequence[Iterator[None]]) -> None:
    """Run the parts of the lanes in turn: each continues after its lanes have begun a step."""
    collections.deque(runs[0] if len(runs) == 1 else itertools.zip_longest(*runs), maxlen=0)


class _Part:
    """Lanes that the policy acts for in one call, the only ones unless other lanes step meanwhile.

    Attributes:
        actor: the policy bound to the rollout of these lanes.
        replaced_at_once: the lanes, of all, whose simulators were lost before their first step.
        recording: where the rollout is recorded.
    """

    def __init__(
        self,
        env: HostEnv,
        policy: Policy,
        state: CollectorState,
        request: Request,
        rows: Mapping[Path, Array],
        columns: Mapping[Path, Tensor],
        lanes: range,
    ) -> None:
        own = slice(lanes.start, lanes.stop)
        rows = {path: row[own] for path, row in rows.items()}
        self._open = partial(_open_actor, env, policy, rows)
        self._state = state if len(lanes) == state.num_lanes else lanes_of_state(state, own)
        self.actor: Actor = self._open(self._state, request)
        by_path = {path: column[:, own] for path, column in columns.items()}
        self.recording = Recording(rows, by_path, env.info_keys, lanes.start)
        self.replaced_at_once: list[int] = []
        self._lanes = lanes

    def finish(self) -> tuple[Any, Columns]:
        """Return the policy's next state, and its outputs on the host. A PolicyError counts lanes over all parts."""
        try:
            policy_state, outputs = self.actor.finish()
            return policy_state, {path: column.cpu() for path, column in outputs.items()}
        except PolicyError as error:
            if not self._lanes.start:
                raise
            raise shifted(error, self._lanes.start) from error

    def _go_on_without(
        self, t: int, loss: LanesLostError, simulation: Simulation, request: Request, limit: TrajectoryLimit | None
    ) -> Outcome:
        """Begin other episodes in lanes that were lost at step `t`, and make that step there; return all outcomes."""
        if not request.reset_when_done:
            raise loss
        simulators = simulation.replaced
        assert simulators is not None
        pieces, lost = [(loss.others, loss.outcome)], collections.deque(loss.lanes)
        rest = replace(request, length=request.length - t)
        while lost:
            lanes = lost.popleft()
            own = self._begin_again(t, lanes, simulation)
            for store, row in self.recording.roots:
                store[t, own] = row[own]
            if limit is not None:
                limit.restart(t - 1, own)
            state = lanes_of_state(self._state, own)
            fresh = state.replace(step=torch.zeros_like(state.step), steps=state.steps_made + t)
            actor = self._open(fresh, rest, own)
            try:
                pieces.append((lanes, simulators.step(lanes, _on_host(actor.act(0)))))
            except LanesLostError:
                lost.append(lanes)
                continue
            if not isinstance(self.actor, ReplacedLanes):
                self.actor = ReplacedLanes(self.actor)
            self.actor.replace(t, own, actor)
        return _in_order(pieces)

    def _begin_again(self, t: int, lanes: range, simulation: Simulation) -> slice:
        """Begin other episodes before step `t` in lanes that were lost; return them, counted from the part's first."""
        own = slice(lanes.start - self._lanes.start, lanes.stop - self._lanes.start)
        simulation.begin_again(lanes, self._cut(t, own))
        return own

    def replace_lost(self, simulation: Simulation, request: Request) -> None:
        """Begin other episodes after the last step in lanes that are lost by then."""
        for lost in simulation.lost_in(self._lanes):
            own = self._begin_again(request.length, lost, simulation)
            self.actor.restart(range(own.start, own.stop))

    def _cut(self, t: int, own: slice) -> list[bool]:
        """End the trajectories of lanes before step `t`; return for each whether it had begun another one at `t`."""
        if t:
            return self.recording.cut(t - 1, own)
        lanes, steps = self._lanes[own], self._state.step[own].tolist()
        begun = [not step or lane in self.replaced_at_once for lane, step in zip(lanes, steps, strict=True)]
        self.replaced_at_once += itertools.compress(lanes, map(operator.not_, begun))
        return begun

    def steps(self, simulation: Simulation, state: CollectorState, request: Request) -> Iterator[None]:
        """Make the steps of a rollout, and restart lanes whose episode ends unless they stay finished.

        Yields at each step, once it has been sent to the simulators.
        """
        recording, lanes, first = self.recording, self._lanes, self._lanes.start
        act, reward = self.actor.act, recording.reward
        most = request.max_frames_per_traj
        limit = TrajectoryLimit(state.step[first : lanes.stop].numpy(), most) if most else None
        next_cut = _next_cut(limit, request)
        finished = None if request.reset_when_done else FinishedLanes(simulation, _over(state))
        live = simulation.simulators if finished is None else finished
        send, receive, signs = live.send, live.receive, SIGNS.count
        for t in range(request.length):
            for store, row in recording.roots:
                store[t] = row
            send(lanes, _on_host(act(t)))
            yield
            signs[0] += 1
            try:
                _, outcome = receive()
            except LanesLostError as loss:
                outcome, act = self._go_on_without(t, loss, simulation, request, limit), self.actor.act
                next_cut = _next_cut(limit, request)
            for store, row in recording.nexts:
                store[t] = row
            numbers, terminated, truncated, info = outcome
            try:
                reward[t] = numbers
                over = any(terminated) or any(truncated) or t >= next_cut
            except NOT_RECORDED as error:
                raise bad_outcome(outcome, lanes) from error
            if info:
                recording.inform(info)
            if over:
                ended = recording.end(t, outcome, limit, lanes)
                if finished is not None:
                    finished.add(ended)
                    continue
                simulation.restart([first + lane for lane in ended] if first else ended)
                self.actor.restart(ended)
                if limit is not None:
                    limit.restart(t, ended)
                    next_cut = _next_cut(limit, request)
        check_outcome(outcome, lanes)  # also after the last step
        recording.finish()


def _on_host(action: Any) -> Any:
    """Return an action in memory that simulators can read: that of a Torch policy may be on an accelerator."""
    return action if getattr(action, "is_cpu", True) else action.cpu()


def _next_cut(limit: TrajectoryLimit | None, request: Request) -> int:
    """Return the first step at which a lane reaches the limit, or one after the rollout."""
    return request.length if limit is None else min(limit.due.tolist())


def _over(state: CollectorState) -> list[int]:
    """Return the lanes that are finished."""
    lanes: list[int] = (state.terminated | state.truncated).nonzero()[:, 0].tolist()
    return lanes


def _open_actor(
    env: HostEnv,
    policy: Policy,
    rows: Mapping[Path, Array],
    state: CollectorState,
    request: Request,
    lanes: slice = slice(None),
) -> Actor:
    """Return the policy bound to a rollout of some of the lanes whose observations are in `rows`."""
    if state.num_lanes != (env.num_envs or 1):
        policy = of_lanes(env, policy, state)
    rows = {path: row[lanes] for path, row in rows.items()}
    views = {path: torch.from_numpy(row) for path, row in rows.items()} if policy.backend == "torch" else rows
    return open_actor(env, policy, state, request, assemble(env.observation_space, views))


def _in_order(pieces: Sequence[tuple[Sequence[int], Outcome]]) -> Outcome:
    """Return the outcomes of some lanes and of others as one, in the order of the lanes."""
    lanes = [lane for some, _ in pieces for lane in some]
    order = sorted(range(len(lanes)), key=lanes.__getitem__)
    reward, terminated, truncated = ([value for _, each in pieces for value in each[column]] for column in range(3))
    infos = zip(*(each[3] for some, each in pieces if some), strict=True)
    columns = [reward, terminated, truncated, *([value for part in key for value in part] for key in infos)]
    reward, terminated, truncated, *info = ([column[place] for place in order] for column in columns)
    return reward, terminated, truncated, info
