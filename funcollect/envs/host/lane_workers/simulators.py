"""Simulators whose lanes live in worker processes: orders, answers, calls, and what happens when a worker is lost."""

from __future__ import annotations

import itertools
import operator
import os
import pickle
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from torch import Tensor
from typing_extensions import override

from funcollect.envs.host.host_env import ONWARD, Camera, SimulatedEnv, bad_info
from funcollect.envs.host.lane_workers.block import (
    NO_RESTART,
    RESET,
    STEP,
    STEP_APART,
    STEP_CHOSEN,
    Array,
    Bell,
    LaneBlock,
)
from funcollect.envs.host.lane_workers.worker_process import Applied, LaneJob, Snapshot
from funcollect.errors import ClosedError, EnvError, NotCalledError
from funcollect.processes.failures import Failure, UnsentResultError, sending
from funcollect.processes.memory import shared_memory
from funcollect.processes.pool import Call, FailurePolicy, Loss, WorkerPool, WorkerRecord
from funcollect.processes.serving import ProcessTransport
from funcollect.processes.system import current_cpu, spread
from funcollect.protocols import Outcome
from funcollect.tree import Path

SLICE = 0.5  # seconds of one wait for answers to orders
_TO_START = 300.0  # seconds without a sign of life
_TO_REST = 1.0  # seconds for orders under way before workers are replaced, or closed: Ctrl-C should end a script soon


class _Target(NamedTuple):
    """The lanes that an order is for, and their workers."""

    lanes: Sequence[int]
    rows: slice | list[int]  # of the lanes; a slice if they are all lanes
    workers: Sequence[int]  # a range if they are all workers


class WorkerLanes(WorkerPool):
    """P lanes over worker processes that share memory: bells announce orders and answers, all else is calls."""

    def __init__(self, env: SimulatedEnv) -> None:
        assert env.workers is not None
        assert env.open_group is not None
        self._env, self._owner = env, os.getpid()
        num_envs, self._info_keys = env.num_envs or 1, env.info_keys
        self._shares = shares = env.workers.shares(num_envs)  # the lanes of each worker
        self._worker_of = [index for index, lanes in enumerate(shares) for _ in lanes]
        self._every = _Target(range(num_envs), slice(num_envs), range(len(shares)))
        self._restarted: dict[int, int] = {}  # by lane that has begun its next episode already: the seed
        self._target = self._every  # of the last `send`
        self._under_way: set[int] = set()  # workers of `send_some`
        self.least_ready, self.most_ahead, self.busy = env.workers.least_ready, 0, frozenset[int]()
        self._heard = 0  # answers to orders that nobody has taken yet
        self._open = 0  # workers with an order whose answer nobody has taken, more if one was broken off
        self._lost: set[int] = set()  # workers that `renew` has to replace
        self._lenient = False  # whether a loss is only noted
        self.cpus = spread(len(shares))
        layout = LaneBlock.layout(env, len(shares))
        bare = replace(env, open_group=None, workers=None)  # each worker has its own opener
        jobs = [
            LaneJob(bare, layout, index, lanes, env.open_group(lanes.start, lanes.stop), cpu)
            for index, (lanes, cpu) in enumerate(zip(shares, self.cpus, strict=True))
        ]
        transport = ProcessTransport(LaneJob.__module__, "leave num_workers and parallel out")
        self._memory, (whole,) = shared_memory(1, layout.size)
        self.block = LaneBlock.over(whole, layout)
        self.block.next_seeds[:] = NO_RESTART
        self.observation: Mapping[Path, Array] = self.block.observation  # which workers write in place
        self.bells, self._answers = [Bell() for _ in shares], Bell()
        try:
            super().__init__(transport, jobs, FailurePolicy(env.workers.timeout, _TO_START))
            self.takes_options = all(self.described)  # whether resets do
            self._watch(self.workers)
        except BaseException:
            self._free()
            raise

    @override
    def _descriptors(self, worker: int) -> tuple[int, ...]:
        return (self._memory, *self.bells[worker].fds, *self._answers.fds)

    def _watch(self, workers: Sequence[int]) -> None:
        """Let waits for answers end with the processes of these workers, which have been built."""
        for worker in workers:
            record = self.records[worker]
            record.tasks = 1
            if record.handle.pid:  # which is reported before the end of the process, that ends a wait
                self._answers.watch(record.handle.filenos()[1])

    @property
    def _ended(self) -> set[int]:
        return {worker for worker in self.workers if self.records[worker].handle.ended_by(0)}

    @override
    def _owes(self, worker: int) -> bool:
        noted = self._lenient and worker in self._lost
        return not noted and (super()._owes(worker) or bool(self.block.asked[worker] != self.block.answered[worker]))

    @override
    def _refusal(self, record: WorkerRecord, call: Call, failure: Failure) -> Exception:
        error = failure.error()
        if not isinstance(error, Exception):  # it would end a program
            error = EnvError(f"{record.job.label}: its process raised {failure.message}: {ONWARD}")
        error.add_note(f"The traceback in {record.job.label}:\n{failure.traceback}")
        return error

    @override
    def _error(self, worker: int, loss: Loss) -> EnvError:
        what, rest = loss.what, ONWARD
        if loss.silent:
            what = f"has not answered for {loss.silent:g} s (timeout={loss.silent:g})"
        elif not self.records[worker].tasks:
            what, rest = f"{what} as it made its environments", "read its output"
        error = EnvError(f"{self.records[worker].job.label}: its process {what}: {rest}")
        if loss.silent:
            error.add_note(f"The Python stack of that process:\n{loss.traceback}")
        return error

    @override
    def _lose(self, worker: int, loss: Loss) -> None:
        self._lost.add(worker)
        if not self._lenient:
            raise self._error(worker, loss)

    @override
    def _broken_off(self) -> None:
        """Leave the workers: `renew` replaces those that are lost, or whose answer is."""

    def check_owner(self) -> None:
        """Raise ClosedError in a process that was forked from the one that has started the workers."""
        if os.getpid() != self._owner:
            raise ClosedError(f"the workers of {self._env} belong to the parent process: make a state of your own here")

    def order(self, order: int, workers: Sequence[int]) -> None:
        """Let these workers begin."""
        self._open += len(workers)  # first of all, since Ctrl-C may come at any moment
        rows = self.block.rows(workers)
        self.block.order[rows] = order
        self.block.asked[rows] += 1
        here, beside = current_cpu(), []
        for worker in workers:
            if self.cpus[worker] == here:
                beside.append(worker)
            else:
                self.bells[worker].ring()
        # A worker takes its processor as soon as it is woken: one on this processor would keep the others waiting.
        for worker in beside:
            self.bells[worker].ring()

    def await_answers(self, workers: Sequence[int]) -> None:
        """Wait until these workers have carried out their orders; raise an exception of one, or EnvError for a loss."""
        self._checked = time.monotonic()
        while self._heard < len(workers):
            self._listen()
        self._take(workers)

    def _await_some(self, workers: Sequence[int], done: Callable[[list[int]], bool]) -> list[int]:
        """Wait, with others under way, until those of these workers that have carried out their orders are enough."""
        block, rows = self.block, list(workers)
        while not done(found := [*itertools.compress(rows, block.carried_out[rows] == block.asked[rows])]):
            self._listen()
            self._look_for_hangs()
        self._take(found)
        return found

    def _listen(self) -> None:
        """Wait for rings of workers, not for long; raise EnvError for one that has ended or hangs."""
        if rings := self._answers.wait(SLICE):
            self._heard += rings
            return
        for worker in sorted(self._ended):
            self._lose(worker, Loss(self.records[worker].handle.how()))
        self._look_for_hangs()

    def _take(self, workers: Sequence[int]) -> None:
        """Take the answers of these workers; raise an exception of one. A ring may be heard later than its answer."""
        self._heard -= len(workers)
        if any(self.block.failed[self.block.rows(workers)].tolist()):
            self.finish([self.call(worker, "raised") for worker in workers if self.block.failed[worker]])
        self._open -= len(workers)

    def _call_in(self, arguments: Mapping[int, Sequence[Any]], name: str) -> list[Any]:
        """Call a method of `ServedLanes` in these workers, in none if one has ended; raise what it has raised."""
        if ended := sorted(self._ended):
            raise NotCalledError(str(self._error(ended[0], Loss(self.records[ended[0]].handle.how()))))
        self._checked = time.monotonic()
        calls = [self.call(worker, name, *args) for worker, args in arguments.items()]
        self.await_all(calls)
        errors = [call.error for call in calls if call.error is not None]
        if name == "apply" and all(isinstance(error, UnsentResultError) for error in errors):
            for worker, applied in arguments.items():  # so that a replacement is called like this, too
                record = self.records[worker]
                record.job = replace(record.job, applied=(*record.job.applied, applied))
        if errors:
            raise min(errors, key=lambda error: isinstance(error, UnsentResultError))  # if it has returned everywhere
        return [call.value for call in calls]

    def renew(self) -> bool:
        """Make all workers ready for a reset of all lanes; return whether others replaced some, which need seeds."""
        self._restarted.clear()
        if not (self._open or self._lost or self._asked or self._ended):
            return False
        gone = sorted(self._come_to_rest())
        self._lost.update(gone)
        for worker in gone:
            record = self.records[worker]
            if record.handle.open:
                self._answers.unwatch(record.handle.filenos()[1])
            record.handle.kill()
            self.bells[worker].heard()
            record.calls.clear()
            self._replace(worker)
        self.finish([call for worker in gone for call in self.records[worker].calls])
        self._watch(gone)
        self.block.answered[:] = self.block.carried_out[:] = self.block.asked
        self.block.failed[:] = False
        self._answers.heard()
        self._heard = self._open = 0
        self._under_way.clear()
        self._lost.clear()
        return bool(gone)

    def _come_to_rest(self) -> set[int]:
        """Wait, not for long, until the workers that live have nothing to do; return those that do not come back."""
        until = time.monotonic() + _TO_REST
        self._lenient = True
        for worker in filter(self._owes, self.workers):  # Ctrl-C may have come before the bell
            self.bells[worker].ring()
        try:
            while (busy := {*filter(self._owes, self.workers)}) - self._ended and time.monotonic() < until:
                self.poll()
                time.sleep(1e-3)
        finally:
            self._lenient = False
        return self._lost | self._ended | busy

    def close(self) -> None:
        """Close all environments and end the processes; then raise the first error of a lane that could not be."""
        if self.closed:
            return
        try:
            errors = self._shut() if os.getpid() == self._owner else []
        finally:
            self._free()
        for error in errors:
            raise error

    def _shut(self) -> list[BaseException]:
        """Ask the workers to close; return what some have raised. Those that do not answer in time are left alone."""
        gone = self._come_to_rest()
        self._checked, self._lenient = time.monotonic(), True
        calls = [self.call(worker, "shut") for worker in self.workers if worker not in gone]
        while any(not call.done and call.worker not in self._lost for call in calls):
            self.wait()
        for call in calls:
            if not call.done and call.worker not in self._ended:
                label, timeout = self.records[call.worker].job.label, self._failure_policy.timeout
                slow = f"{label}: close() has not returned in {timeout:g} s (timeout={timeout:g}), and its process is "
                warnings.warn(f"{slow}ended: find out what it waits for", RuntimeWarning, stacklevel=2)
        return [call.error for call in calls if call.error is not None]

    def _free(self) -> None:
        self.stop()
        for bell in (*self.bells, self._answers):
            bell.close()
        os.close(self._memory)

    def _some(self, lanes: Sequence[int]) -> _Target:
        """The target of some lanes, which are marked in the block."""
        rows = list(lanes)
        workers = sorted({self._worker_of[lane] for lane in rows})
        for index in workers:
            share = self._shares[index]
            self.block.chosen[share.start : share.stop] = False
        self.block.chosen[rows] = True
        return _Target(lanes, rows, workers)

    def reset(self, lanes: Sequence[int], seeds: Sequence[int | None], options: Sequence[Any] | None = None, /) -> None:
        """Start an episode in these lanes; with `options`, which no order can hold, by calls."""
        if options is not None:
            calls: dict[int, Applied] = {}
            for worker in sorted({self._worker_of[lane] for lane in lanes}):
                start = self._shares[worker].start
                own = [i for i, lane in enumerate(lanes) if self._worker_of[lane] == worker]
                with sending("options", "the worker processes", "pass plain data"):
                    packed = cloudpickle.dumps(([seeds[i] for i in own], [options[i] for i in own]))
                calls[worker] = [lanes[i] - start for i in own], packed
            self._call_in(calls, "reset")
            return
        asked = dict(zip(lanes, LaneBlock.numbers(seeds), strict=True))
        if self._restarted:
            begun = [lane for lane, seed in asked.items() if self._restarted.pop(lane, NO_RESTART) == seed]
            self._show(begun)
            for lane in begun:
                del asked[lane]
        if asked:
            if not self._under_way:
                self._checked = time.monotonic()
            target = self._some([*asked])
            self.block.seeds[target.rows] = [*asked.values()]
            self.order(RESET, target.workers)
            self._await_some(target.workers, lambda found: len(found) == len(target.workers))

    def announce(self, lanes: Sequence[int], seeds: Sequence[int | None] | None, /) -> None:
        """Let workers restart these lanes with these seeds as soon as their episodes end; for None, not any more."""
        self.block.next_seeds[list(lanes)] = NO_RESTART if seeds is None else LaneBlock.numbers(seeds)

    def _show(self, lanes: list[int]) -> None:
        """Exchange the rows of these lanes: the last observations of their episodes, and the first ones of the next."""
        for path, rows in self.observation.items():
            ends = self.block.ends[path]
            rows[lanes], ends[lanes] = ends[lanes], rows[lanes]

    def send(self, lanes: Sequence[int], action: Any, /) -> None:
        """Write the actions into the block, and let the workers step."""
        values = action.numpy() if isinstance(action, Tensor) else np.asarray(action)
        if lanes == self._every.lanes:
            target, order = self._every, STEP
            np.copyto(self.block.action, values, casting="unsafe")
        else:
            target, order = self._some(lanes), STEP_CHOSEN
            self.block.action[target.rows] = values
        self.order(order, target.workers)
        self._target = target

    def receive(self) -> tuple[Sequence[int], Outcome]:
        """Wait for the workers of the last `send`."""
        self.await_answers(self._target.workers)
        return self._outcome(self._target, restarts=self._target is self._every)

    def send_some(self, lanes: Sequence[int], action: Any, /) -> None:
        """Let the workers of these lanes step them; others may be under way."""
        if not self._under_way:
            self._checked = time.monotonic()
        target = self._some(lanes)
        self.block.action[target.rows] = action
        self._under_way.update(target.workers)
        self.order(STEP_APART, target.workers)

    def receive_some(self, least: int, /) -> tuple[Sequence[int], Outcome]:
        """Wait for the workers of at least so many lanes out of those that are under way."""

        def marked(workers: Sequence[int]) -> list[int]:
            return [lane for worker in workers for lane in self._shares[worker] if self.block.chosen[lane]]

        workers = self._await_some(sorted(self._under_way), lambda found: len(marked(found)) >= least)
        self._under_way.difference_update(workers)
        lanes = marked(workers)
        return self._outcome(_Target(lanes, lanes, workers), restarts=True)

    def _outcome(self, target: _Target, *, restarts: bool) -> tuple[Sequence[int], Outcome]:
        """The lanes of a target and the outcome of their step, after which workers may have restarted some."""
        block, rows = self.block, target.rows
        terminated, truncated = block.terminated[rows].tolist(), block.truncated[rows].tolist()
        infos = self._infos(target) if self._info_keys else ()
        if restarts and (any(terminated) or any(truncated)):
            ended = itertools.compress(target.lanes, map(operator.or_, terminated, truncated))
            restarted = {lane: seed for lane in ended if (seed := int(block.next_seeds[lane])) != NO_RESTART}
            if restarted:  # until `reset`, their rows are the last observations of the episodes that have ended
                self._restarted |= restarted
                self._show([*restarted])
        return target.lanes, (block.reward[rows].copy(), terminated, truncated, infos)

    def _infos(self, target: _Target) -> list[Array]:
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
        places = np.argsort(np.argsort(target.rows))  # workers answer in the order of their lanes
        return [values[places] for values in infos]

    def apply(self, lanes: Sequence[int], function: Callable[..., Any], args: tuple[Any, ...], /) -> list[Any]:
        """Call a function with the environments of these lanes."""
        mend = "pass a function of a module, and plain arguments"
        with sending("function or its arguments", "the worker processes", mend):
            packed = cloudpickle.dumps((function, args))
        own: dict[int, list[int]] = {}
        for lane in lanes:
            own.setdefault(self._worker_of[lane], []).append(lane)
        starts = [share.start for share in self._shares]  # each worker counts from its first lane
        calls: dict[int, Applied] = {i: ([lane - starts[i] for lane in some], packed) for i, some in own.items()}
        answers = self._call_in(calls, "apply")
        results = dict(zip(itertools.chain(*own.values()), itertools.chain(*answers), strict=True))
        return [results[lane] for lane in lanes]

    def snapshot(self) -> list[Snapshot]:
        """The snapshots of all workers."""
        return self._call_in(dict.fromkeys(self._every.workers, ()), "snapshot")

    def restore(self, snapshot: Sequence[Snapshot]) -> None:
        """Restore a snapshot."""
        self._call_in(dict(enumerate(snapshot)), "restore")

    def snapshot_data(self, snapshot: Sequence[Snapshot]) -> list[Any]:
        """The snapshots of all lanes as plain data; TypeError if their simulators cannot tell them so."""
        if refusal := next(filter(None, (each.refusal for each in snapshot)), ""):
            raise TypeError(refusal)
        return [lane for each in snapshot for lane in each.lanes]

    def snapshot_from(self, data: list[Any]) -> list[Snapshot]:
        """The snapshots from `snapshot_data`."""
        return [Snapshot(data[share.start : share.stop]) for share in self._shares]

    def camera(self, lane: int) -> Camera:
        """The camera of one lane, which is asked for each picture."""
        own = {(index := self._worker_of[lane]): [lane - self._shares[index].start]}
        mode, fps = self._call_in(own, "camera")[0]
        return Camera(mode, fps, lambda: self._call_in(own, "picture")[0])
