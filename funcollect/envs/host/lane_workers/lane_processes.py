"""All worker processes of an environment: orders, answers, and what happens when a worker is lost."""

from __future__ import annotations

import itertools
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from typing_extensions import override

from funcollect.envs.host.host_env import ONWARD, SimulatedEnv
from funcollect.envs.host.lane_workers.block import NO_RESTART, Bell, block_layout, block_over
from funcollect.envs.host.lane_workers.worker_process import Applied, LaneJob
from funcollect.errors import ClosedError, EnvError, NotCalledError
from funcollect.processes.failures import Failure, UnsentResultError
from funcollect.processes.pool import Call, FailurePolicy, Loss, WorkerPool, WorkerRecord
from funcollect.processes.serving import ProcessHandle, ProcessTransport
from funcollect.processes.shared_memory import shared_memory
from funcollect.processes.system import current_cpu, place, usable_cpus

SLICE = 0.5  # seconds of one wait for answers to orders
_TO_START = 300.0  # seconds without a sign of life
_TO_CLOSE = 1.0  # seconds until a worker that is at work is no longer asked to close: Ctrl-C should end a script soon
_TO_COME_BACK = 1.0  # seconds to finish what was broken off
_PAUSE = 1e-3  # seconds between two looks at workers that nobody may ring for
_STARTED = itertools.count()  # workers of this process


class LaneProcesses(WorkerPool):
    """The workers, the memory that they share, and the bells by which orders and answers are announced.

    A worker has at most one order at a time. What is not done at each step is a call. A lost worker is reported at
    once, and replaced by `settle`.
    """

    def __init__(self, env: SimulatedEnv) -> None:
        assert env.workers is not None
        assert env.open_group is not None
        self._env = env
        num_envs = env.num_envs or 1
        self.shares = env.workers.shares(num_envs)  # the lanes of each worker
        count = len(self.shares)
        layout = block_layout(env.observation_leaves, env.action_spec, num_envs, count, infos=bool(env.info_keys))
        self._owner = os.getpid()
        self._heard = 0  # answers to orders that nobody has taken yet
        self._open = 0  # workers with an order whose answer nobody has taken, more if one was broken off
        self._lost: set[int] = set()  # workers that `settle` has to replace
        self._lenient = False  # whether a loss is only noted
        self.applied: list[list[Applied]] = [[] for _ in self.shares]  # by worker, what its lanes were called with
        cpus, first = usable_cpus(), place() * count  # so that the workers of several processes are spread
        self.cpus = [cpus[(first + next(_STARTED)) % len(cpus)] for _ in self.shares]
        bare = replace(env, opener=_not_here, open_group=None, workers=None)
        jobs = [
            LaneJob(bare, layout, index, lanes, env.open_group(lanes.start, lanes.stop), cpu, [])
            for index, (lanes, cpu) in enumerate(zip(self.shares, self.cpus, strict=True))
        ]
        transport = ProcessTransport(LaneJob.__module__, "leave num_workers and parallel out")
        self._memory, (whole,) = shared_memory(1, layout.size)
        self.block = block_over(whole, layout)
        self.block.next_seeds[:] = NO_RESTART
        self.bells, self._answers = [Bell() for _ in self.shares], Bell()
        try:
            super().__init__(transport, jobs, FailurePolicy(env.workers.timeout, _TO_START))
            self._await_built(self.workers)
        except BaseException:
            self._free()
            raise

    @override
    def _descriptors(self, worker: int) -> tuple[int, ...]:
        return (self._memory, *self.bells[worker].fds, *self._answers.fds)

    @override
    def _continued(self, record: WorkerRecord, pending: Sequence[Call]) -> LaneJob:
        job: LaneJob = record.job
        return replace(job, applied=[*self.applied[job.index]])

    def _await_built(self, workers: Sequence[int]) -> None:
        """Wait until these workers have opened their simulators; raise the exception of one that cannot."""
        self.finish([call for worker in workers for call in self.records[worker].calls])
        for worker in workers:
            self.records[worker].tasks = 1
            if self._child(worker).pid:  # which is reported before the end of the process, that ends a wait
                self._answers.watch(self._child(worker).filenos()[1])

    def _child(self, worker: int) -> ProcessHandle:
        handle = self.records[worker].handle
        assert isinstance(handle, ProcessHandle)
        return handle

    def has_ended(self, worker: int) -> bool:
        """Whether the process of a worker has ended."""
        return self._child(worker).ended_by(0)

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
            rest = "read its output"
            what += " as it made its environments"
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
        """Leave the workers: `settle` replaces those that are lost, or whose answer is."""

    def check_owner(self) -> None:
        """Raise ClosedError in a process that was forked from the one that has started the workers."""
        if os.getpid() != self._owner:
            raise ClosedError(
                f"the workers of {self._env} belong to the process that forked this one: make a state of your own here"
            )

    def order(self, order: int, workers: Sequence[int]) -> None:
        """Let these workers begin."""
        self._open += len(workers)  # first of all, since Ctrl-C may come at any moment
        rows = _rows(workers)
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
        """Wait until these workers have carried out their orders.

        Raises what one has raised, and EnvError if one is lost. A worker counts as hung after `timeout` seconds without
        a sign of life.
        """
        count, self._checked = len(workers), time.monotonic()
        while self._heard < count:
            if rings := self._answers.wait(SLICE):
                self._heard += rings
                continue
            for worker in self.workers:
                if self.has_ended(worker):
                    self._lose(worker, Loss(self._child(worker).how()))
            self._look_for_hangs()
        self._heard -= count
        if any(self.block.failed[_rows(workers)].tolist()):
            self.finish([self.call(worker, "raised") for worker in workers if self.block.failed[worker]])
        self._open -= count

    def call_in(self, arguments: Mapping[int, Sequence[Any]], name: str) -> list[Any]:
        """Call a method of `ServedLanes` in each of these workers, with their arguments, in all of them at once.

        Raises what it has raised, `UnsentResultError` only if it has returned everywhere; the workers continue. If one
        of them has ended, it is called in none.
        """
        for worker in self.workers:
            if self.has_ended(worker):
                raise NotCalledError(str(self._error(worker, Loss(self._child(worker).how()))))
        self._checked = time.monotonic()
        calls = [self.call(worker, name, *args) for worker, args in arguments.items()]
        while not all(call.done for call in calls):
            self.wait()
        if errors := [call.error for call in calls if call.error is not None]:
            raise min(errors, key=lambda error: isinstance(error, UnsentResultError))
        return [call.value for call in calls]

    def settle(self) -> bool:
        """Bring all workers back to where they wait for orders, also after a call that was broken off.

        Others take the places of those that are lost or do not come back, and repeat the calls of functions. Returns
        whether there are such, which need seeds.
        """
        ended = any(map(self.has_ended, self.workers))
        if not (self._open or self._lost or ended or self._asked):
            return False
        self._come_to_rest(_TO_COME_BACK)
        self._lost.update(worker for worker in self.workers if self._owes(worker) or self.has_ended(worker))
        gone = sorted(self._lost)
        for worker in gone:
            self._kill(worker)
            self._replace(worker)
        self._await_built(gone)
        self.block.answered[:] = self.block.asked
        self.block.failed[:] = False
        self._answers.heard()
        self._heard = self._open = 0
        self._lost.clear()
        return bool(gone)

    def _kill(self, worker: int) -> None:
        """End the process of a worker, and drop what it was asked for."""
        record, child = self.records[worker], self._child(worker)
        if child.open:
            self._answers.unwatch(child.filenos()[1])
        child.kill()
        self.bells[worker].heard()
        record.calls.clear()
        record.tasks = 0

    def _come_to_rest(self, patience: float) -> None:
        """Wait, at most so many seconds, until the workers that live have nothing to do; note those that are lost."""
        until = time.monotonic() + patience
        self._lenient = True
        try:
            while time.monotonic() < until and any(self._owes(w) and not self.has_ended(w) for w in self.workers):
                self.poll()
                time.sleep(_PAUSE)
        finally:
            self._lenient = False

    def end(self) -> None:
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
        self._come_to_rest(_TO_CLOSE)
        idle = [w for w in self.workers if not (self._owes(w) or w in self._lost or self.has_ended(w))]
        self._checked, self._lenient = time.monotonic(), True
        calls = [self.call(worker, "shut") for worker in idle]
        while any(not call.done and call.worker not in self._lost for call in calls):
            self.wait()
        for call in calls:
            if not call.done and not self.has_ended(call.worker):
                timeout = self._failure_policy.timeout
                warnings.warn(
                    f"{self.records[call.worker].job.label}: close() has not returned in {timeout:g} s "
                    f"(timeout={timeout:g}), and its process is ended: find out what it waits for",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return [call.error for call in calls if call.error is not None]

    def _free(self) -> None:
        """End the processes, and free their shared memory."""
        self.close()
        for bell in (*self.bells, self._answers):
            bell.close()
        os.close(self._memory)


def _rows(workers: Sequence[int]) -> slice | Sequence[int]:
    """An index of arrays by worker: a slice, which NumPy reads sooner, for a range of workers."""
    return slice(workers.start, workers.stop) if isinstance(workers, range) else workers


def _not_here(env: SimulatedEnv) -> NoReturn:
    raise AssertionError("each worker has an opener of its own")
