"""The workers of lanes: orders and answers through shared memory, calls, and the replacement of lost workers."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import override

from funcollect.envs.host.host_env import ONWARD, SimulatedEnv
from funcollect.envs.host.lane_workers.block import NO_RESTART, Array, Bell, LaneBlock
from funcollect.envs.host.lane_workers.worker_process import LaneJob
from funcollect.errors import ClosedError, EnvError, NotCalledError
from funcollect.processes.failures import Failure, UnsentResultError
from funcollect.processes.memory import shared_memory
from funcollect.processes.pool import Call, FailurePolicy, Loss, WorkerPool, WorkerRecord
from funcollect.processes.serving import ProcessTransport
from funcollect.processes.system import current_cpu, spread
from funcollect.tree import Path

SLICE = 0.5  # seconds of one wait for answers to orders
_TO_START = 300.0  # seconds that a start may take without a sign of life
_TO_REST = 1.0  # seconds for orders under way before workers are replaced, or closed: Ctrl-C should end a script soon


class LanePool(WorkerPool):
    """The workers of an environment's lanes, and the memory that they share.

    Bells announce orders, one at a time for each worker, and answers; everything else is a call of `WorkerPool`. The
    loss of a worker raises at once, and `renew` replaces it.
    """

    def __init__(self, env: SimulatedEnv) -> None:
        assert env.workers is not None
        assert env.open_group is not None
        self._env, self._owner = env, os.getpid()
        self._shares = shares = env.workers.shares(env.num_envs or 1)  # the lanes of each worker
        self._heard = 0  # rings for answers that `_take` has not taken yet
        self._lost: set[int] = set()  # workers that `renew` has to replace
        self._lenient = False  # whether a loss is recorded in `_lost` only, instead of raised
        self.cpus = spread(len(shares))
        layout = LaneBlock.layout(env, len(shares))
        bare = replace(env, open_group=None, workers=None)  # a job has the opener of its lanes instead
        places = enumerate(zip(shares, self.cpus, strict=True))
        jobs = [LaneJob(bare, layout, i, each, env.open_group(each.start, each.stop), cpu) for i, (each, cpu) in places]
        transport = ProcessTransport(LaneJob.__module__, "leave num_workers and parallel out")
        self._memory, (whole,) = shared_memory(1, layout.size)
        self.block = LaneBlock.over(whole, layout)
        self.block.next_seeds[:] = NO_RESTART
        self.observation: Mapping[Path, Array] = self.block.observation  # which workers write in place
        self.bells, self._answers = [Bell() for _ in shares], Bell()
        try:
            super().__init__(transport, jobs, FailurePolicy(env.workers.timeout, _TO_START))
            self.takes_options = all(self.described)  # of resets
            self._watch(self.workers)
        except BaseException:
            self._free()
            raise

    @override
    def _describe(self, worker: int, packed: bytes) -> Call:
        return Call(worker, "describe", (packed,), (self._memory, *self.bells[worker].fds, *self._answers.fds))

    def _watch(self, workers: Sequence[int]) -> None:
        """Count these workers as started, and let the end of their processes end waits for answers."""
        for worker in workers:
            record = self.records[worker]
            record.tasks = 1
            if record.handle.pid:  # read first, so that the next report is the end of the process
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
        """Keep the workers: `renew` replaces those that were lost, or whose answer was."""

    def check_owner(self) -> None:
        """Raise ClosedError in a process that was forked from the one that has started the workers."""
        if os.getpid() != self._owner:
            raise ClosedError(f"the workers of {self._env} belong to the parent process: make a state of your own here")

    def order(self, order: int, workers: Sequence[int]) -> None:
        """Give these workers an order."""
        rows = self.block.rows(workers)
        self.block.order[rows] = order
        self.block.asked[rows] += 1
        here, last = current_cpu(), []
        for worker in workers:
            if self.cpus[worker] == here:
                last.append(worker)
            else:
                self.bells[worker].ring()
        # A worker takes its processor as soon as it is woken: one on this processor would keep the others waiting.
        for worker in last:
            self.bells[worker].ring()

    def await_answers(self, workers: Sequence[int]) -> None:
        """Wait until these workers have carried out their orders; raise one's exception, or EnvError for a loss."""
        self._checked = time.monotonic()
        while self._heard < len(workers):
            self._listen()
        self._take(workers)

    def _await_some(self, workers: Sequence[int], enough: Callable[[list[int]], bool]) -> list[int]:
        """Wait until enough of these workers have carried out their orders, whatever others do; return those."""
        block = self.block
        while True:
            idle = (block.carried_out == block.asked).tolist()
            if enough(done := [worker for worker in workers if idle[worker]]):
                self._take(done)
                return done
            self._listen()
            self._look_for_hangs()

    def _listen(self) -> None:
        """Wait for rings for a short time; raise EnvError for a worker that has ended or hangs."""
        if rings := self._answers.wait(SLICE):
            self._heard += rings
            return
        for worker in sorted(self._ended):
            self._lose(worker, Loss(self.records[worker].handle.how()))
        self._look_for_hangs()

    def _take(self, workers: Sequence[int]) -> None:
        """Take the answers of these workers, even before their rings are heard; raise the exception of a failed one."""
        self._heard -= len(workers)
        if any(self.block.failed[self.block.rows(workers)].tolist()):
            self.finish([self.call(worker, "raised") for worker in workers if self.block.failed[worker]])

    def _call_in(self, arguments: Mapping[int, Sequence[Any]], name: str) -> list[Any]:
        """Call a method of `ServedLanes` in these workers; raise its exception, or NotCalledError if one has ended."""
        if ended := sorted(self._ended):
            raise NotCalledError(str(self._error(ended[0], Loss(self.records[ended[0]].handle.how()))))
        self._checked = time.monotonic()
        calls = [self.call(worker, name, *args) for worker, args in arguments.items()]
        self.await_all(calls)
        errors = [call.error for call in calls if call.error is not None]
        if name == "apply" and all(isinstance(error, UnsentResultError) for error in errors):
            for worker, applied in arguments.items():  # a replacement repeats the calls
                record = self.records[worker]
                record.job = replace(record.job, applied=(*record.job.applied, applied))
        if errors:
            raise min(errors, key=lambda error: isinstance(error, UnsentResultError))  # other exceptions first
        return [call.value for call in calls]

    def renew(self) -> bool:
        """Make all workers ready for a reset of all lanes; return whether some are new, whose lanes need seeds."""
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
        self._heard = 0
        self._lost.clear()
        return bool(gone)

    def _come_to_rest(self) -> set[int]:
        """Wait a short time for the workers to finish; return those that were lost, have ended, or are still busy."""
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
        """Close all environments and end the processes; then raise the first error of an environment's `close`."""
        if self.closed:
            return
        try:
            errors = self._shut() if os.getpid() == self._owner else []
        finally:
            self._free()
        for error in errors:
            raise error

    def _shut(self) -> list[BaseException]:
        """Ask the workers to close; return their exceptions. Those that do not answer in time get a warning."""
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
