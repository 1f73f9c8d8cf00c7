"""The loop over simulators on the host: each step copies their observations into columns."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from typing_extensions import override

from funcollect.core.batch import restarted
from funcollect.core.loops.eager import Stepper, TrajectoryLimit, timed
from funcollect.core.request import Request
from funcollect.core.simulators import Simulation, SimulatorHandle, rebuild, record_of
from funcollect.core.state import CollectorState, first_state
from funcollect.envs.host.host_env import NOT_RECORDED, bad_info, bad_outcome, check_outcome, takes_options
from funcollect.errors import NoResetError
from funcollect.keys import Key
from funcollect.policies.checks import check_32_bits
from funcollect.protocols import Columns, HostEnv, Outcome, Policy, SnapshotSimulators
from funcollect.specs import PRESENT, GroupedSpec, assemble
from funcollect.trajectories.final_observations import FinalObservations, attach
from funcollect.trajectories.split import STEP, TRAJECTORY_IDS
from funcollect.tree import Path


def init(env: HostEnv, policy: Policy, key: Key, first_lane: int, total_lanes: int) -> CollectorState:
    """Implement `funcollect.init`."""
    lane = torch.arange(first_lane, first_lane + (env.num_envs or 1))
    simulation = Simulation(env, key, lane)
    try:
        if env.forking == "snapshot" and not isinstance(simulation.simulators, SnapshotSimulators):
            what = f"{type(simulation.simulators).__name__} lacks snapshot() or restore(), expected both"
            mend = "write both (see funcollect.envs.SnapshotSimulators), or change forking"
            raise TypeError(f"{what}, since {env} has forking='snapshot': {mend}")
        simulation.restart(range(len(lane)))
        observation, env_state = simulation.observation(), simulation.release()
        return first_state(env, policy, key, lane, total_lanes, env_state=env_state, observation=observation)
    except BaseException:
        simulation.close()
        raise


def reset(
    env: HostEnv, state: CollectorState, lanes: Tensor, *, stale: bool = False, options: Any = None
) -> CollectorState:
    """Implement `funcollect.reset` of the lanes of a mask [P]; with `stale`, `funcollect.recover`."""
    if options is not None and not takes_options(state.env_state.simulation.simulators):
        mend = "make it from an id or a function of Gymnasium's, not of Atari games, or leave options out"
        raise TypeError(f"options are given, but resets of {env} take none: {mend}")
    simulation: Simulation = state.env_state.claim(stale=stale)
    simulation.show(state.observation)
    if stale and simulation.worker_lanes is not None and simulation.worker_lanes.renew():
        simulation.seed_again()
    chosen = lanes.nonzero()[:, 0].tolist()
    if options is not None:
        kept = deepcopy(dict(options))  # the caller may change theirs
        simulation.options |= {lane: (simulation.episodes[lane] + 1, kept) for lane in chosen}
    episodes = [*simulation.episodes]
    try:
        simulation.restart(chosen)
    except NoResetError:  # nothing was reset, so the state can still be used
        simulation.episodes, simulation.version, simulation.busy = episodes, state.env_state.version, False
        raise
    simulation.action_log.ages = torch.where(lanes, 0, simulation.action_log.ages)
    if simulation.carried:
        simulation.carried = None if lanes.all() else simulation.carried.without(lanes.numpy())
    episode = torch.where(lanes, torch.tensor(simulation.episodes), state.episode)  # other lanes may be ahead of theirs
    steps, env_state = max(simulation.steps, state.steps_made), simulation.release()
    observation = simulation.observation()
    return restarted(state, lanes, episode, env_state=env_state, observation=observation, steps=steps)


def fork(env: HostEnv, state: CollectorState) -> CollectorState:
    """Implement `funcollect.fork`: rebuild the simulators and bring them to the same state."""
    state.env_state.check()
    source: Simulation = state.env_state.simulation
    other = ", or take the same simulator through funcollect.envs.from_gymnasium"
    advice = "begin a second run with funcollect.init" + other * (env.seeding != "episode")
    return state.changed(env_state=rebuild(source.env, record_of(source, "forked", advice), state))


class HostStepper(Stepper):
    """Steps simulators, and restarts lanes whose episode has ended, unless they stay finished."""

    in_numpy = True
    _simulation: Simulation

    def __init__(self, env: HostEnv, policy: Policy, state: CollectorState, request: Request) -> None:
        super().__init__(env, policy, state, request)
        self._simulators = live = state.env_state.simulation.simulators
        self._rows = rows = live.observation
        self._send, self._receive = timed("environment", live.send), timed("environment", live.receive)
        self._views = views = {path: torch.from_numpy(row) for path, row in rows.items()}
        self.observation = assemble(env.observation_space, views if policy.backend == "torch" else rows)
        self._lanes, self._info_keys = range(state.num_lanes), env.info_keys
        self.again(state, request)

    @override
    def again(self, state: CollectorState, request: Request) -> bool:
        if state.env_state.simulation.simulators is not self._simulators:
            return False
        self.state, self.request, self.ended = state, request, False
        columns, rows = self._turn_page(self._views, {} if request.compact_obs else self._views), self._rows.values()
        self.roots = [*zip(columns, rows)]  # noqa: B905  (the other columns follow)
        self._nexts = [*zip(columns[len(rows) : -1], rows)]  # noqa: B905  (none with `compact_obs`)
        self._reward, self._terminated, self._truncated = columns[-1], self.book.terminated, self.book.truncated
        self._values: dict[str, list[Any]] = {key: [] for key in self._info_keys} if self._info_keys else {}
        self._final: list[tuple[Any, Any, list[Any]]] = []  # next observations without a column: step, lanes, rows
        most = request.max_frames_per_traj
        self._limit = TrajectoryLimit(state.step.numpy(), most) if most else None
        # the first step at which a lane reaches the limit, or a step after the rollout
        self._next_cut = request.length if self._limit is None else min(self._limit.due.tolist())
        return True

    @override
    def begin(self) -> None:
        state, request = self.state, self.request
        simulation = self._simulation = state.env_state.claim()
        simulation.steps = state.steps_made + request.length
        simulation.show(state.observation)
        simulation.announce(request.reset_when_done)
        self._finished = None
        if not request.reset_when_done:
            over = (state.terminated | state.truncated).nonzero()[:, 0].tolist()
            self._finished = live = _FinishedLanes(simulation, over)
            self._send, self._receive = timed("environment", live.send), timed("environment", live.receive)

    @override
    def step(self, t: int, action: Any) -> list[int] | None:
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
            self._inform(info)
        return self._end_episodes(t, outcome) if over else None

    def _inform(self, info: Sequence[Any]) -> None:
        for (key, values), value in zip(self._values.items(), info, strict=True):
            try:
                values.append(np.array(value))  # a copy: an environment may write the next info into the same array
            except (TypeError, ValueError) as error:
                raise bad_info(key, value, error) from error

    def _end_episodes(self, t: int, outcome: Outcome) -> list[int] | None:
        """Record the flags of a step that ends episodes; return the lanes that began another one."""
        _, terminated, truncated, _ = outcome
        self.ended = True
        try:
            if self._limit is not None:
                truncated = list(map(operator.or_, truncated, self._limit.reached(t).tolist()))
            ended = list(itertools.compress(self._lanes, map(operator.or_, terminated, truncated)))
            for lane in ended:
                self._terminated[t, lane] = terminated[lane]
                self._truncated[t, lane] = truncated[lane]
        except NOT_RECORDED as error:
            raise bad_outcome(outcome, self._lanes) from error
        if self.request.compact_obs:
            self._keep_final(t, ended)
        if self._finished is not None:
            self._finished.add(ended)
            return None
        timed("environment", self._simulation.restart)(ended)
        if self._limit is not None:
            self._limit.restart(t, ended)
            self._next_cut = min(self._limit.due.tolist())
        return ended

    def _keep_final(self, t: Any, lanes: Any) -> None:
        self._final.append((t, np.asarray(lanes, np.int64), [row[lanes] for row in self._rows.values()]))

    def _keep_last_of_agents(self) -> None:
        """Keep the frames in which an agent leaves: what it observes next is left out of the following root."""
        columns = {path: column for path, (column, _) in zip(self._rows, self.roots, strict=True)}
        groups = self.env.action_spec.groups if isinstance(self.env.action_spec, GroupedSpec) else {}
        leave = np.zeros_like(self._terminated)
        for name in (name for name, group in groups.items() if group.comes_and_goes):
            leave[:-1] |= (columns[name, PRESENT][:-1] & ~columns[name, PRESENT][1:]).any(-1)
        t, lanes = (leave & ~(self._terminated | self._truncated)).nonzero()
        if len(t):
            self._final.append((t, lanes, [column[t + 1, lanes] for column in columns.values()]))

    @override
    def deliver(self, outputs: Columns) -> tuple[dict[str, Tensor], TensorDict]:
        check_outcome(self._outcome, self._lanes)
        if self.request.compact_obs:
            self._keep_final(self.request.length - 1, (~(self._terminated[-1] | self._truncated[-1])).nonzero()[0])
            self._keep_last_of_agents()
        if not outputs["action",].is_cpu:
            outputs = {path: column.cpu() for path, column in outputs.items()}
        if self.policy.backend == "jax":
            roots = zip(self._rows, self.roots, strict=True)
            check_32_bits({path: torch.from_numpy(column) for path, (column, _) in roots})
        if self._values:
            self.infos = {("next", "info", key): _info_column(key, values) for key, values in self._values.items()}
        log = self._simulation.action_log
        counters, batch = super().deliver(outputs)
        if self.request.compact_obs:
            self._attach_final(batch)
        ages = log.ages + self.request.length
        if self.ended and "episode" in counters:
            ages = torch.where(counters["episode"] == self.state.episode, ages, counters["step"])
        log.extend(outputs["action",], ages)
        return counters, batch

    def _attach_final(self, batch: TensorDict) -> None:
        """Attach the next observations that are not the root of another frame of the batch."""
        time = np.concatenate([np.full(len(lanes), t) for t, lanes, _ in self._final])
        at = (np.concatenate([lanes for _, lanes, _ in self._final]), time)[2 - batch.batch_dims :]
        columns = zip(*(rows for _, _, rows in self._final), strict=True)
        leaves = {path: torch.from_numpy(np.concatenate(rows)) for path, rows in zip(self._rows, columns, strict=True)}
        attach(batch.unlock_(), FinalObservations(batch[TRAJECTORY_IDS][at], batch[STEP][at], leaves))
        batch.lock_()

    @override
    def end(self, counters: dict[str, Tensor]) -> tuple[SimulatorHandle, dict[Path, Tensor]]:
        return self._simulation.release(), self._simulation.observation()


def _info_column(key: str, values: list[Any]) -> Tensor:
    try:
        column = np.array(values)
        return torch.from_numpy(column.astype(np.float32) if column.dtype == np.float64 else column)
    except (TypeError, ValueError) as error:
        raise bad_info(key, values[0], error) from error


class _FinishedLanes:
    """Steps only unfinished lanes. The others repeat their last outcome, and `deliver` sets their rewards to 0."""

    def __init__(self, simulation: Simulation, lanes: Iterable[int]) -> None:
        self._simulation, self._lanes = simulation, set[int]()
        self.add(lanes)

    def add(self, lanes: Iterable[int]) -> None:
        simulation = self._simulation
        self._lanes.update(lanes)
        self._live = [lane for lane in range(len(simulation.lanes)) if lane not in self._lanes]
        self._rows = {path: array[[*self._lanes]] for path, array in simulation.simulators.observation.items()}
        reward, terminated, truncated, info = simulation.last_outcome
        # copies, since simulators may write the next outcome into the same arrays
        self._columns: list[Any] = [[*np.array(column)] for column in (reward, terminated, truncated, *info)]

    def send(self, lanes: Sequence[int], action: Any) -> None:
        """Undo a policy's writes into the rows of finished lanes, and send the other lanes their actions."""
        simulators = self._simulation.simulators
        for path, rows in self._rows.items():
            simulators.observation[path][[*self._lanes]] = rows
        if self._live:
            simulators.send(self._live, action[self._live] if self._lanes else action)

    def receive(self) -> tuple[Sequence[int], Outcome]:
        """Return the lanes that were stepped, and the outcome of all lanes."""
        simulation = self._simulation
        if not self._lanes:
            _, simulation.last_outcome = simulation.simulators.receive()
        elif self._live:
            lanes, (reward, terminated, truncated, info) = simulation.simulators.receive()
            for column, values in zip(self._columns, (reward, terminated, truncated, *info), strict=True):
                for lane, value in zip(lanes, values, strict=True):
                    column[lane] = value
            simulation.last_outcome = self._columns[0], self._columns[1], self._columns[2], self._columns[3:]
        return self._live, simulation.last_outcome
