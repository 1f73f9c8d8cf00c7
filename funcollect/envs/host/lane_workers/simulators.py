"""Simulators whose lanes live in worker processes."""

from __future__ import annotations

import itertools
import operator
import pickle
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import numpy.typing as npt
from torch import Tensor

from funcollect.envs.host.host_env import Camera, SimulatedEnv, bad_info
from funcollect.envs.host.lane_workers import served
from funcollect.envs.host.lane_workers.block import NO_RESTART, NO_SEED, RESET, STEP, STEP_CHOSEN
from funcollect.envs.host.lane_workers.lane_processes import LaneProcesses
from funcollect.errors import LanesLostError
from funcollect.messages import shown
from funcollect.processes.failures import UnsentResultError
from funcollect.protocols import Outcome
from funcollect.tree import Path

Array = npt.NDArray[Any]

_NEVER = object()  # in place of the seed of a lane that is not restarted


class _Target(NamedTuple):
    """The lanes that an order is for, and their groups."""

    lanes: Sequence[int]
    rows: slice | list[int]  # of the lanes; a slice if they are all lanes of their groups
    groups: Sequence[int]  # a range if the lanes are all of one part, or of all parts
    counts: tuple[int, int]  # of the groups in each part


class WorkerLanes:
    """P lanes over worker processes, in memory that all of them share. A worker has at most one group in each part.

    Attributes:
        observation: the current observations of all lanes, which workers write in place.
        parts: the lanes of each part; one may be stepped, by `send` and `receive`, while another one steps.
        lost_frames: the number of lanes' steps that were lost with them.
    """

    def __init__(self, env: SimulatedEnv) -> None:
        assert env.workers is not None
        self._num_envs = env.num_envs or 1
        self._info_keys = env.info_keys
        self._on_failure = env.workers.on_failure
        self._next_seeds: dict[int, Any] = dict.fromkeys(range(self._num_envs), _NEVER)  # by lane, as announced
        self._restarted: dict[int, Any] = {}  # by lane that has begun its next episode already: the seed
        self._sent: deque[_Target] = deque()
        self.lost_frames = 0
        self._processes = LaneProcesses(env)
        groups = self._processes.groups
        self._group_of = np.repeat(np.arange(len(groups)), [group.end - group.first for group in groups])
        self._block = self._processes.block
        self.observation: Mapping[Path, Array] = self._block.observation
        self.parts = [self._lanes_of(part) for part in range(env.workers.overlap)]
        self._whole = {lanes: self._all_of(lanes) for lanes in (*self.parts, range(self._num_envs))}

    @property
    def restarts(self) -> int:
        """The number of workers that took the place of lost ones."""
        return self._processes.restarts

    def _lanes_of(self, part: int) -> range:
        own = [group for group in self._processes.groups if group.part == part]
        return range(own[0].first, own[-1].end)

    def _all_of(self, lanes: range) -> _Target:
        """The target of all lanes of one part, or of all parts."""
        own = [index for index, group in enumerate(self._processes.groups) if group.first in lanes]
        groups = range(own[0], own[-1] + 1)
        return _Target(lanes, slice(lanes.start, lanes.stop), groups, self._processes.counts(groups))

    def _some(self, lanes: Sequence[int]) -> _Target:
        """The target of some lanes, which are marked in the block."""
        rows = list(lanes)
        groups = sorted({int(group) for group in self._group_of[rows]})
        for index in groups:
            group = self._processes.groups[index]
            self._block.chosen[group.first : group.end] = False
        self._block.chosen[rows] = True
        return _Target(lanes, rows, groups, self._processes.counts(groups))

    def reset(self, lanes: Sequence[int], seeds: Sequence[int | None], /) -> None:
        """Start an episode in these lanes; new workers take the places of lost ones whose lanes all get seeds.

        Raises LanesLostError for lost groups all of whose lanes are asked for, but not all with seeds. Lanes of other
        lost groups are left as they are.
        """
        asked = dict(zip(lanes, seeds, strict=True))
        if self._restarted:
            begun = [lane for lane, seed in asked.items() if self._restarted.pop(lane, _NEVER) == seed]
            self._show(begun)
            for lane in begun:
                del asked[lane]
        if self._processes.lost:
            wanted = self._wholly(asked, self._processes.lost)
            self._processes.begin_again([i for i in wanted if None not in (asked[lane] for lane in self._lanes_in(i))])
        if lanes := [lane for lane in asked if self._group_of[lane] not in self._processes.lost]:
            target = self._some(lanes)
            self._block.seeds[target.rows] = _numbers([asked[lane] for lane in lanes])
            self._processes.order(RESET, target.groups)
            self._processes.wait(target.groups, target.counts)
        if gone := self._wholly(asked, self._processes.lost):
            error = self._processes.lost[gone[0]]
            raise LanesLostError(str(error), [self._lanes_in(index) for index in gone]) from error

    def _wholly(self, asked: Collection[int], groups: Iterable[int]) -> list[int]:
        """Those of the groups all of whose lanes are asked for."""
        return [index for index in groups if all(lane in asked for lane in self._lanes_in(index))]

    def check_owner(self) -> None:
        """Raise ClosedError in a process that was forked from the one that has started the workers."""
        self._processes.check_owner()

    def renew(self) -> bool:
        """Make all workers ready for a reset of all lanes; return whether some are new, and need seeds."""
        renewed = self._processes.settle()
        self._sent.clear()
        self._restarted.clear()
        return renewed

    @property
    def lost_lanes(self) -> list[range]:
        """The lanes without simulators, in ranges that are reset together."""
        return [self._lanes_in(index) for index in sorted(self._processes.lost)]

    @property
    def replaces(self) -> bool:
        """Whether lost simulators are replaced during a rollout."""
        return self._on_failure == "restart"

    def _lanes_in(self, index: int) -> range:
        group = self._processes.groups[index]
        return range(group.first, group.end)

    def announce(self, lanes: Sequence[int], seeds: Sequence[int | None] | None, /) -> None:
        """Let workers restart these lanes with these seeds as soon as their episodes end; for None, not any more."""
        self._next_seeds.update(zip(lanes, seeds or itertools.repeat(_NEVER), strict=False))
        self._block.next_seeds[list(lanes)] = NO_RESTART if seeds is None else _numbers(seeds)

    def _show(self, lanes: list[int]) -> None:
        """Exchange the rows of these lanes: the last observations of their episodes, and the first ones of the next."""
        for path, rows in self.observation.items():
            ends = self._block.ends[path]
            rows[lanes], ends[lanes] = ends[lanes], rows[lanes]

    def send(self, lanes: Sequence[int], action: Any, /) -> None:
        """Write the actions into the block, and let the workers step."""
        self._sent.append(self._begin_step(lanes, action))

    def receive(self) -> tuple[Sequence[int], Outcome]:
        """Wait for the workers of the oldest `send`."""
        target = self._sent.popleft()
        return target.lanes, self._end_step(target)

    def step(self, lanes: Sequence[int], action: Any, /) -> Outcome:
        """Step these lanes at once, before what was sent is received."""
        return self._end_step(self._begin_step(lanes, action))

    def _begin_step(self, lanes: Sequence[int], action: Any) -> _Target:
        target = self._whole.get(lanes) if isinstance(lanes, range) else None
        if target is not None:
            _write(self._block.action[target.rows], action)
            order = STEP
        else:
            target, order = self._some(lanes), STEP_CHOSEN
            actions = self._block.action[target.rows]  # a copy
            _write(actions, action)
            self._block.action[target.rows] = actions
        if self._processes.lost:
            target = self._without(target, self._processes.lost.keys())
        self._processes.order(order, target.groups)
        return target

    def _without(self, target: _Target, groups: Collection[int]) -> _Target:
        """A target of the same lanes, without groups that are lost."""
        live = [index for index in target.groups if index not in groups]
        return target._replace(groups=live, counts=self._processes.counts(live))

    def _end_step(self, target: _Target) -> Outcome:
        self._processes.wait(target.groups, target.counts)
        if self._processes.lost:
            self._raise_losses(target)
        if self._processes.restarts:
            self._processes.step_made(target.groups)
        return self._outcome(target)

    def _outcome(self, target: _Target) -> Outcome:
        """The outcome of a step of the target's lanes."""
        block, rows = self._block, target.rows
        terminated, truncated = block.terminated[rows].tolist(), block.truncated[rows].tolist()
        infos = self._infos(target) if self._info_keys else ()
        if any(terminated) or any(truncated):
            self._note_restarts(target.lanes, terminated, truncated)
        return block.reward[rows].copy(), terminated, truncated, infos

    def _raise_losses(self, target: _Target) -> None:
        """Raise LanesLostError, with the outcome of the others, if lanes of a target are lost."""
        gone = {int(group) for group in self._group_of[list(target.lanes)]} & self._processes.lost.keys()
        if not gone:
            return
        lanes = [lane for lane in target.lanes if int(self._group_of[lane]) not in gone]
        others = self._without(target._replace(lanes=lanes, rows=lanes), gone)
        outcome = self._outcome(others) if lanes else ((), (), (), ())
        self._processes.step_made(others.groups)
        lost = [self._lanes_in(index) for index in sorted(gone)]
        self.lost_frames += len(target.lanes) - len(lanes)
        error = self._processes.lost[min(gone)]
        raise LanesLostError(str(error), lost, lanes, outcome) from error

    def _note_restarts(self, lanes: Sequence[int], terminated: Sequence[bool], truncated: Sequence[bool]) -> None:
        """Note which lanes have been restarted, and show the last observations of their episodes until `reset`."""
        over = itertools.compress(lanes, map(operator.or_, terminated, truncated))
        restarted = {lane: seed for lane in over if (seed := self._next_seeds[lane]) is not _NEVER}
        own = {lane: seed for lane, seed in restarted.items() if self._block.order[self._group_of[lane]] == STEP}
        if own:
            self._restarted |= own
            self._show([*own])

    def _infos(self, target: _Target) -> list[Array]:
        """For each info key, the values of the target's lanes."""
        by_group = []
        for index in target.groups:
            size = int(self._block.info_size[index])
            small = size >= 0
            worker = self._processes.worker_of(index)
            packed = self._block.info[index, :size].tobytes() if small else worker.message(index)
            by_group.append(pickle.loads(packed))
        self._processes.infos_read()
        infos = []
        for key, parts in zip(self._info_keys, zip(*by_group, strict=True), strict=True):
            try:
                infos.append(np.concatenate(parts))
            except ValueError as error:
                raise bad_info(key, parts[0], error) from error
        if isinstance(target.rows, slice) or target.rows == sorted(target.rows):
            return infos
        places = np.argsort(np.argsort(target.rows))  # workers answer in the order of their lanes
        return [values[places] for values in infos]

    def apply(self, lanes: Sequence[int], function: Callable[..., Any], args: tuple[Any, ...], /) -> list[Any]:
        """Call a function with the environments of these lanes."""
        try:
            packed = cloudpickle.dumps((function, args))
        except Exception as error:
            raise TypeError(
                f"function or its arguments cannot be sent to the worker processes ({shown(error, 200)}): pass a "
                "function of a module, and plain arguments"
            ) from error
        by_group: dict[int, list[int]] = {}
        for lane in lanes:
            by_group.setdefault(int(self._group_of[lane]), []).append(lane)
        first = {index: self._lanes_in(index).start for index in by_group}
        orders = {index: ([lane - first[index] for lane in own], packed) for index, own in by_group.items()}
        unsent, answers = None, []
        try:
            answers = self._processes.call(served.results_of, orders)
        except UnsentResultError as error:
            unsent = error
        for index, order in orders.items():
            self._processes.applied[index].append(order)
        if unsent is not None:
            raise unsent
        results = {
            lane: result
            for own, answer in zip(by_group.values(), answers, strict=True)
            for lane, result in zip(own, answer, strict=True)
        }
        return [results[lane] for lane in lanes]

    def snapshot(self) -> list[served.Snapshot]:
        """The snapshots of all groups."""
        return self._processes.call(served.snapshot, dict.fromkeys(range(len(self._processes.groups)), ()))

    def restore(self, snapshot: Sequence[served.Snapshot]) -> None:
        """Restore a snapshot."""
        self._processes.call(served.restore, dict(enumerate(snapshot)))

    def snapshot_data(self, snapshot: Sequence[served.Snapshot]) -> list[Any]:
        """The snapshots of all lanes as plain data; TypeError if their simulators cannot tell them so."""
        for group in snapshot:
            if group.refusal:
                raise TypeError(group.refusal)
        return [each for group in snapshot for each in group.lanes]

    def snapshot_from(self, data: list[Any]) -> list[served.Snapshot]:
        """The snapshots from `snapshot_data`."""
        return [served.Snapshot(data[group.first : group.end]) for group in self._processes.groups]

    def camera(self, lane: int) -> Camera:
        """The camera of one lane, which is asked for each picture."""
        index = int(self._group_of[lane])
        local = lane - self._processes.groups[index].first

        def ask(function: Callable[..., Any]) -> Any:
            return self._processes.call(function, {index: (local,)})[0]

        mode, fps = ask(served.camera)
        return Camera(mode, fps, partial(ask, served.picture))

    def close(self) -> None:
        """Close all environments and end the processes; then raise the first error of a lane that could not be."""
        self._processes.close()


def _numbers(seeds: Sequence[int | None]) -> list[int]:
    return [NO_SEED if seed is None else seed for seed in seeds]


def _write(rows: Array, action: Any) -> None:
    """Write a batch's action into rows."""
    np.copyto(rows, action.numpy() if isinstance(action, Tensor) else np.asarray(action), casting="unsafe")
