"""Simulators whose lanes live in worker processes: steps, resets, snapshots and cameras."""

from __future__ import annotations

import itertools
import operator
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from torch import Tensor
from typing_extensions import override

from funcollect.envs.host.host_env import Camera, SimulatedEnv, bad_info
from funcollect.envs.host.lane_workers.block import NO_RESTART, RESET, STEP, STEP_APART, STEP_CHOSEN, Array, LaneBlock
from funcollect.envs.host.lane_workers.lane_pool import LanePool
from funcollect.envs.host.lane_workers.worker_process import Applied, Snapshot
from funcollect.processes.failures import sending
from funcollect.protocols import Outcome


class _Target(NamedTuple):
    """The lanes that an order is for, and their workers."""

    lanes: Sequence[int]
    rows: slice | list[int]  # of the lanes; a slice if they are all lanes
    workers: Sequence[int]  # a range if they are all workers


class WorkerLanes(LanePool):
    """P lanes over worker processes, as simulators."""

    def __init__(self, env: SimulatedEnv) -> None:
        assert env.workers is not None
        super().__init__(env)
        num_envs, self._info_keys = env.num_envs or 1, env.info_keys
        self._worker_of = [index for index, lanes in enumerate(self._shares) for _ in lanes]
        self._all = _Target(range(num_envs), slice(num_envs), range(len(self._shares)))
        self._restarted: dict[int, int] = {}  # the seeds of lanes whose workers have begun the next episode already
        self._target = self._all  # of the last `send`
        self._under_way: set[int] = set()  # workers of `send_some` whose answers have not been received yet
        self.least_ready, self.most_ahead, self.busy = env.workers.least_ready, 0, frozenset[int]()

    @override
    def renew(self) -> bool:
        self._restarted.clear()
        self._under_way.clear()
        return super().renew()

    def _some(self, lanes: Sequence[int]) -> _Target:
        """The target of some lanes; marks them in the block."""
        rows = list(lanes)
        workers = sorted({self._worker_of[lane] for lane in rows})
        for index in workers:
            share = self._shares[index]
            self.block.chosen[share.start : share.stop] = False
        self.block.chosen[rows] = True
        return _Target(lanes, rows, workers)

    def reset(self, lanes: Sequence[int], seeds: Sequence[int | None], options: Sequence[Any] | None = None, /) -> None:
        """Start an episode in these lanes: by an order, or by calls with `options`, which the block cannot hold."""
        if options is not None:
            calls: dict[int, Applied] = {}
            for worker in sorted({self._worker_of[lane] for lane in lanes}):
                start = self._shares[worker].start
                places = [i for i, lane in enumerate(lanes) if self._worker_of[lane] == worker]
                with sending("options", "the worker processes", "pass plain data"):
                    packed = cloudpickle.dumps(([seeds[i] for i in places], [options[i] for i in places]))
                calls[worker] = [lanes[i] - start for i in places], packed
            self._call_in(calls, "reset")
            return
        asked = dict(zip(lanes, LaneBlock.encoded(seeds), strict=True))
        if self._restarted:
            begun = [lane for lane, seed in asked.items() if self._restarted.pop(lane, NO_RESTART) == seed]
            self._swap_rows(begun)
            for lane in begun:
                del asked[lane]
        if asked:
            if not self._under_way:
                self._checked = time.monotonic()
            target = self._some([*asked])
            self.block.seeds[target.rows] = [*asked.values()]
            self.order(RESET, target.workers)
            self._await_some(target.workers, lambda done: len(done) == len(target.workers))

    def announce(self, lanes: Sequence[int], seeds: Sequence[int | None] | None, /) -> None:
        """Let workers restart these lanes, with these seeds, as soon as their episodes end; stop that for None."""
        self.block.next_seeds[list(lanes)] = NO_RESTART if seeds is None else LaneBlock.encoded(seeds)

    def _swap_rows(self, lanes: list[int]) -> None:
        """Swap the first observations of these lanes' next episodes with the last ones of those that ended."""
        for path, rows in self.observation.items():
            ends = self.block.ends[path]
            rows[lanes], ends[lanes] = ends[lanes], rows[lanes]

    def send(self, lanes: Sequence[int], action: Any, /) -> None:
        """Write the actions into the block, and let the workers step."""
        values = action.numpy() if isinstance(action, Tensor) else np.asarray(action)
        if lanes == self._all.lanes:
            target, order = self._all, STEP
            np.copyto(self.block.action, values, casting="unsafe")
        else:
            target, order = self._some(lanes), STEP_CHOSEN
            self.block.action[target.rows] = values
        self.order(order, target.workers)
        self._target = target

    def receive(self) -> tuple[Sequence[int], Outcome]:
        """Wait for the workers of the last `send`."""
        self.await_answers(self._target.workers)
        return self._outcome(self._target, restarts=self._target is self._all)

    def send_some(self, lanes: Sequence[int], action: Any, /) -> None:
        """Let the workers of these lanes step them; others may be under way."""
        if not self._under_way:
            self._checked = time.monotonic()
        target = self._some(lanes)
        self.block.action[target.rows] = action
        self._under_way.update(target.workers)
        self.order(STEP_APART, target.workers)

    def receive_some(self, least: int, /) -> tuple[Sequence[int], Outcome]:
        """Wait until workers have stepped at least so many of the lanes that are under way; return their outcome."""

        def stepped(workers: Sequence[int]) -> list[int]:
            return [lane for worker in workers for lane in self._shares[worker] if self.block.chosen[lane]]

        workers = self._await_some(sorted(self._under_way), lambda done: len(stepped(done)) >= least)
        self._under_way.difference_update(workers)
        lanes = stepped(workers)
        return self._outcome(_Target(lanes, lanes, workers), restarts=True)

    def _outcome(self, target: _Target, *, restarts: bool) -> tuple[Sequence[int], Outcome]:
        """The target's lanes and the outcome of their step; with `restarts`, workers may have restarted some."""
        block, rows = self.block, target.rows
        terminated, truncated = block.terminated[rows].tolist(), block.truncated[rows].tolist()
        infos = self._infos(target) if self._info_keys else ()
        if restarts and (any(terminated) or any(truncated)):
            ended = itertools.compress(target.lanes, map(operator.or_, terminated, truncated))
            restarted = {lane: seed for lane in ended if (seed := int(block.next_seeds[lane])) != NO_RESTART}
            if restarted:  # until `reset`, their rows are the last observations of the episodes that have ended
                self._restarted |= restarted
                self._swap_rows([*restarted])
        return target.lanes, (block.reward[rows].copy(), terminated, truncated, infos)

    def _infos(self, target: _Target) -> list[Array]:
        """The infos of a target's step, an array [k, ...] for each key."""
        sizes = {index: int(self.block.info_size[index]) for index in target.workers}
        packed = {index: self.block.info[index, :size].tobytes() for index, size in sizes.items() if size >= 0}
        if large := {index: () for index, size in sizes.items() if size < 0}:
            packed |= zip(large, self._call_in(large, "infos"), strict=True)
        by_worker = [pickle.loads(packed[index]) for index in target.workers]
        infos = []
        for key, parts in zip(self._info_keys, zip(*by_worker, strict=True), strict=True):
            try:
                infos.append(np.concatenate(parts))
            except ValueError as error:
                raise bad_info(key, parts[0], error) from error
        if isinstance(target.rows, slice) or target.rows == sorted(target.rows):
            return infos
        ranks = np.argsort(np.argsort(target.rows))  # the infos are in the order of lanes: back to that of the target
        return [values[ranks] for values in infos]

    def apply(self, lanes: Sequence[int], function: Callable[..., Any], args: tuple[Any, ...], /) -> list[Any]:
        """Call a function with the environments of these lanes."""
        mend = "pass a function of a module, and plain arguments"
        with sending("function or its arguments", "the worker processes", mend):
            packed = cloudpickle.dumps((function, args))
        calls: dict[int, Applied] = {}
        for lane in lanes:
            worker = self._worker_of[lane]
            calls.setdefault(worker, ([], packed))[0].append(lane - self._shares[worker].start)
        answers = dict(zip(calls, map(iter, self._call_in(calls, "apply")), strict=True))
        return [next(answers[self._worker_of[lane]]) for lane in lanes]

    def snapshot(self) -> list[Snapshot]:
        """The snapshots of all workers."""
        return self._call_in(dict.fromkeys(self._all.workers, ()), "snapshot")

    def restore(self, snapshot: Sequence[Snapshot]) -> None:
        """Restore a snapshot."""
        self._call_in(dict(enumerate(snapshot)), "restore")

    def snapshot_data(self, snapshot: Sequence[Snapshot]) -> list[Any]:
        """The snapshots of all lanes as plain data; TypeError if their simulators cannot convert them."""
        if refusal := next(filter(None, (share.refusal for share in snapshot)), ""):
            raise TypeError(refusal)
        return [lane for share in snapshot for lane in share.lanes]

    def snapshot_from(self, data: list[Any]) -> list[Snapshot]:
        """The inverse of `snapshot_data`."""
        return [Snapshot(data[share.start : share.stop]) for share in self._shares]

    def camera(self, lane: int) -> Camera:
        """The camera of one lane; each picture is a call of its worker."""
        arguments = {(index := self._worker_of[lane]): [lane - self._shares[index].start]}
        mode, fps = self._call_in(arguments, "camera")[0]
        return Camera(mode, fps, lambda: self._call_in(arguments, "picture")[0])
