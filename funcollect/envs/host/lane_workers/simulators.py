"""Simulators whose lanes live in worker processes."""

from __future__ import annotations

import itertools
import operator
import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import numpy.typing as npt
from torch import Tensor

from funcollect.envs.host.host_env import Camera, SimulatedEnv, bad_info
from funcollect.envs.host.lane_workers.block import NO_RESTART, NO_SEED, RESET, STEP, STEP_CHOSEN
from funcollect.envs.host.lane_workers.lane_processes import LaneProcesses
from funcollect.envs.host.lane_workers.worker_process import Applied, Snapshot
from funcollect.processes.failures import UnsentResultError, sending
from funcollect.protocols import Outcome
from funcollect.tree import Path

Array = npt.NDArray[Any]

_NEVER = object()  # in place of the seed of a lane that is not restarted


class _Target(NamedTuple):
    """The lanes that an order is for, and their workers."""

    lanes: Sequence[int]
    rows: slice | list[int]  # of the lanes; a slice if they are all lanes
    workers: Sequence[int]  # a range if they are all workers


class WorkerLanes:
    """P lanes over worker processes, in memory that all of them share."""

    def __init__(self, env: SimulatedEnv) -> None:
        num_envs = env.num_envs or 1
        self._info_keys = env.info_keys
        self._next_seeds: dict[int, Any] = dict.fromkeys(range(num_envs), _NEVER)  # by lane, as announced
        self._restarted: dict[int, Any] = {}  # by lane that has begun its next episode already: the seed
        self._sent: deque[_Target] = deque()
        self._processes = LaneProcesses(env)
        shares = self._processes.shares
        self._worker_of = np.repeat(np.arange(len(shares)), [len(lanes) for lanes in shares])
        self._block = self._processes.block
        self.observation: Mapping[Path, Array] = self._block.observation  # which workers write in place
        self._every = _Target(range(num_envs), slice(num_envs), range(len(shares)))
        self.check_owner = self._processes.check_owner
        self.close = self._processes.end

    def _some(self, lanes: Sequence[int]) -> _Target:
        """The target of some lanes, which are marked in the block."""
        rows = list(lanes)
        workers = sorted({int(worker) for worker in self._worker_of[rows]})
        for index in workers:
            share = self._processes.shares[index]
            self._block.chosen[share.start : share.stop] = False
        self._block.chosen[rows] = True
        return _Target(lanes, rows, workers)

    def reset(self, lanes: Sequence[int], seeds: Sequence[int | None], /) -> None:
        """Start an episode in these lanes."""
        asked = dict(zip(lanes, seeds, strict=True))
        if self._restarted:
            begun = [lane for lane, seed in asked.items() if self._restarted.pop(lane, _NEVER) == seed]
            self._show(begun)
            for lane in begun:
                del asked[lane]
        if asked:
            target = self._some([*asked])
            self._block.seeds[target.rows] = _numbers([*asked.values()])
            self._processes.order(RESET, target.workers)
            self._processes.await_answers(target.workers)

    def renew(self) -> bool:
        """Make all workers ready for a reset of all lanes; return whether some are new, and need seeds."""
        renewed = self._processes.settle()
        self._sent.clear()
        self._restarted.clear()
        return renewed

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
        if lanes == self._every.lanes:
            target, order = self._every, STEP
            _write(self._block.action, action)
        else:
            target, order = self._some(lanes), STEP_CHOSEN
            actions = self._block.action[target.rows]  # a copy
            _write(actions, action)
            self._block.action[target.rows] = actions
        self._processes.order(order, target.workers)
        self._sent.append(target)

    def receive(self) -> tuple[Sequence[int], Outcome]:
        """Wait for the workers of the oldest `send`."""
        target = self._sent.popleft()
        self._processes.await_answers(target.workers)
        block, rows = self._block, target.rows
        terminated, truncated = block.terminated[rows].tolist(), block.truncated[rows].tolist()
        infos = self._infos(target) if self._info_keys else ()
        if target is self._every and (any(terminated) or any(truncated)):
            self._note_restarts(map(operator.or_, terminated, truncated))
        return target.lanes, (block.reward[rows].copy(), terminated, truncated, infos)

    def _note_restarts(self, over: Any) -> None:
        """Note which lanes have been restarted, and show the last observations of their episodes until `reset`."""
        ended = itertools.compress(self._every.lanes, over)
        restarted = {lane: seed for lane in ended if (seed := self._next_seeds[lane]) is not _NEVER}
        if restarted:
            self._restarted |= restarted
            self._show([*restarted])

    def _infos(self, target: _Target) -> list[Array]:
        """For each info key, the values of the target's lanes."""
        sizes = {index: int(self._block.info_size[index]) for index in target.workers}
        packed = {index: self._block.info[index, :size].tobytes() for index, size in sizes.items() if size >= 0}
        if large := {index: () for index, size in sizes.items() if size < 0}:
            packed |= zip(large, self._processes.call_in(large, "infos"), strict=True)
        by_worker = [pickle.loads(packed[index]) for index in target.workers]
        infos = []
        for key, parts in zip(self._info_keys, zip(*by_worker, strict=True), strict=True):
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
        with sending(
            "function or its arguments", "the worker processes", "pass a function of a module, and plain arguments"
        ):
            packed = cloudpickle.dumps((function, args))
        own: dict[int, list[int]] = {}
        for lane in lanes:
            own.setdefault(int(self._worker_of[lane]), []).append(lane)
        calls: dict[int, Applied] = {index: (self._counted_in(index, some), packed) for index, some in own.items()}
        answers, unsent = [], None
        try:
            answers = self._processes.call_in(calls, "apply")
        except UnsentResultError as error:
            unsent = error
        for index, call in calls.items():
            self._processes.applied[index].append(call)
        if unsent is not None:
            raise unsent
        results = dict(zip(itertools.chain(*own.values()), itertools.chain(*answers), strict=True))
        return [results[lane] for lane in lanes]

    def _counted_in(self, index: int, lanes: Sequence[int]) -> list[int]:
        """The lanes of a worker, counted from its first."""
        return [lane - self._processes.shares[index].start for lane in lanes]

    def snapshot(self) -> list[Snapshot]:
        """The snapshots of all workers."""
        return self._processes.call_in(dict.fromkeys(self._every.workers, ()), "snapshot")

    def restore(self, snapshot: Sequence[Snapshot]) -> None:
        """Restore a snapshot."""
        self._processes.call_in(dict(enumerate(snapshot)), "restore")

    def snapshot_data(self, snapshot: Sequence[Snapshot]) -> list[Any]:
        """The snapshots of all lanes as plain data; TypeError if their simulators cannot tell them so."""
        for each in snapshot:
            if each.refusal:
                raise TypeError(each.refusal)
        return [lane for each in snapshot for lane in each.lanes]

    def snapshot_from(self, data: list[Any]) -> list[Snapshot]:
        """The snapshots from `snapshot_data`."""
        return [Snapshot(data[share.start : share.stop]) for share in self._processes.shares]

    def camera(self, lane: int) -> Camera:
        """The camera of one lane, which is asked for each picture."""
        index = int(self._worker_of[lane])
        own = {index: self._counted_in(index, [lane])}

        def ask(name: str) -> Any:
            return self._processes.call_in(own, name)[0]

        mode, fps = ask("camera")
        return Camera(mode, fps, partial(ask, "picture"))


def _numbers(seeds: Sequence[int | None]) -> list[int]:
    return [NO_SEED if seed is None else seed for seed in seeds]


def _write(rows: Array, action: Any) -> None:
    """Write a batch's action into rows."""
    np.copyto(rows, action.numpy() if isinstance(action, Tensor) else np.asarray(action), casting="unsafe")
