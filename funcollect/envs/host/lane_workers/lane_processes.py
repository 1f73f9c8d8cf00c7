"""All worker processes of an environment: orders, answers, and what happens when a worker is lost."""

from __future__ import annotations

import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from funcollect.envs.host.host_env import SimulatedEnv
from funcollect.envs.host.lane_workers.bells import Bell
from funcollect.envs.host.lane_workers.block import CALL, CLOSE, NO_RESTART, BlockLayout
from funcollect.envs.host.lane_workers.lane_worker import SLICE, LaneWorker
from funcollect.envs.host.lane_workers.served import Applied
from funcollect.envs.host.lane_workers.worker_process import LaneJob
from funcollect.errors import ClosedError, EnvError, NotCalledError
from funcollect.interop.settings import send_main_by_value
from funcollect.processes.failures import Failure, UnsentResultError
from funcollect.processes.shared_memory import shared_memory
from funcollect.processes.system import current_cpu, place, usable_cpus

_TO_CLOSE = 1.0  # seconds until a worker that is at work is no longer asked to close: Ctrl-C should end a script soon
_TO_COME_BACK = 1.0  # seconds to finish a call that was broken off
_PAUSE = 1e-3  # seconds between two looks at workers that nobody may ring for
_STARTED = itertools.count()  # workers of this process


class LaneProcesses:
    """The workers, the memory that they share, and the bells by which orders and answers are announced.

    A worker has at most one order at a time. Workers are named by their indices.

    Attributes:
        shares: the lanes of each worker.
        block: the shared memory.
        applied: by worker, the functions that its lanes were called with (the arguments of `served.apply`).
    """

    def __init__(self, env: SimulatedEnv) -> None:
        assert env.workers is not None
        assert env.open_group is not None
        send_main_by_value()
        self._env = env
        self._timeout = env.workers.timeout
        self._open_group = env.open_group
        num_envs = env.num_envs or 1
        self.shares = env.workers.shares(num_envs)
        leaves, action = env.observation_leaves, env.action_spec
        self._informs = bool(env.info_keys)
        self._layout = BlockLayout(leaves, action, num_envs, len(self.shares), infos=self._informs)
        self._owner = os.getpid()
        self._memory, (whole,) = shared_memory(1, self._layout.size)
        self.block = self._layout.over(whole)
        self.block.next_seeds[:] = NO_RESTART
        self._heard = 0  # answers that no call has taken yet
        self._open = 0  # workers with an order whose answer no call has taken, more if a call was broken off
        self._calling = False  # whether `call` has begun, and has not ended or was broken off
        self._unread = False  # whether workers may have sent infos that nobody has read
        self._closed = False
        self.applied: list[list[Applied]] = [[] for _ in self.shares]
        self._workers: list[LaneWorker] = []
        self._answers = Bell()
        cpus = usable_cpus()
        first = place() * len(self.shares)  # so that the workers of several processes are spread
        try:
            for index, lanes in enumerate(self.shares):
                cpu = cpus[(first + next(_STARTED)) % len(cpus)]
                self._workers.append(LaneWorker(index, lanes, cpu))
            self._start(self._workers)
        except BaseException:
            self._free()
            raise

    def order(self, order: int, workers: Sequence[int]) -> None:
        """Let these workers begin."""
        if self._calling and order not in (CALL, CLOSE):
            self._end_call()
        self._open += len(workers)  # first of all, since Ctrl-C may come at any moment
        rows = _rows(workers)
        self.block.order[rows] = order
        self.block.asked[rows] += 1
        here, beside = current_cpu(), []
        for index in workers:
            worker = self._workers[index]
            if worker.cpu == here:
                beside.append(worker)
            else:
                worker.bell.ring()
        # A worker takes its processor as soon as it is woken: one on this processor would keep the others waiting.
        for worker in beside:
            worker.bell.ring()

    def check_owner(self) -> None:
        """Raise ClosedError in a process that was forked from the one that has started the workers."""
        if os.getpid() != self._owner:
            raise ClosedError(
                f"the workers of {self._env} belong to the process that forked this one: make a state of your own here"
            )

    def wait(self, workers: Sequence[int]) -> None:
        """Wait until these workers have answered.

        Raises what one has raised, and EnvError if one is lost. A worker counts as hung after `timeout` seconds without
        a sign of life.
        """
        count, last = len(workers), time.monotonic()
        while self._heard < count:
            if rings := self._answers.wait(SLICE):
                self._heard += rings
                continue
            now = time.monotonic()
            waited, last = min(now - last, SLICE), now
            self._look(workers, waited)
        self._heard -= count
        if any(self.block.failed[_rows(workers)].tolist()):
            self._fail(workers)
        self._unread = self._informs  # before the next line, since Ctrl-C may come at any moment
        self._open -= count

    def infos_read(self) -> None:
        """Note that the infos of the workers that were awaited last have been read."""
        self._unread = False

    def message(self, index: int) -> Any:
        """The message that a worker has sent with its answer."""
        return self._workers[index].message()

    def _unanswered(self, workers: Iterable[int]) -> list[LaneWorker]:
        """Those of the workers that have an order, and have not rung after it."""
        return [self._workers[index] for index in workers if self.block.asked[index] != self.block.answered[index]]

    def _look(self, workers: Sequence[int] = (), waited: float = 0.0) -> None:
        """Raise EnvError if a worker has ended, or hangs over an order to one of these.

        `waited` is how many seconds were waited for them since the last look.
        """
        for worker in self._workers:
            if worker.has_ended():
                raise worker.ended()
        for worker in self._unanswered(workers):
            if worker.silent_for(waited) > self._timeout:
                raise worker.hung(self._timeout)

    def _fail(self, workers: Sequence[int]) -> None:
        """Raise what the first of these workers that has failed has raised."""
        failed = [self._workers[index] for index in workers if self.block.failed[index]]
        errors = [worker.raised(worker.message()) for worker in failed]  # every message is read, so that none is left
        raise errors[0]

    def call(self, function: Callable[..., Any], arguments: Mapping[int, Sequence[Any]]) -> list[Any]:
        """Call a function with the simulators of each of these workers, and their arguments, in all of them at once.

        Raises what it has raised, `UnsentResultError` only if it has returned everywhere; the workers continue. If one
        of them has ended, the function is called in none.
        """
        workers = [*arguments]
        try:
            self._look()
        except EnvError as error:
            raise NotCalledError(str(error)) from error
        if self._calling:
            self._end_call()
        self._calling = True
        for index in workers:
            self._workers[index].send((int(self.block.asked[index]) + 1, function, arguments[index]))
        self.order(CALL, workers)
        self.wait(workers)
        answers = [self._workers[index].message() for index in workers]
        self._calling = False
        errors = [
            self._workers[index].raised(answer)
            for index, answer in zip(workers, answers, strict=True)
            if isinstance(answer, Failure)
        ]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, UnsentResultError))
        return answers

    def _end_call(self) -> None:
        """Let the workers finish a call that was broken off; EnvError for one that hangs in it."""
        self._take_answers(SLICE)
        while self._calling:
            self._look(range(len(self.shares)), SLICE)
            self._take_answers(SLICE)

    def _take_answers(self, patience: float) -> None:
        """Wait, at most so many seconds, until all living workers have finished; drop their answers."""
        if not self._wait_until_answered(range(len(self.shares)), patience):
            return
        for worker in self._workers:
            worker.forget_messages()
        self._answers.heard()
        self._heard = self._open = 0
        self._calling = self._unread = False

    def settle(self) -> bool:
        """Bring all workers back to where they wait for orders, also after a call that was broken off.

        Others take the places of those that are lost or do not come back, and repeat the calls of functions. Returns
        whether there are such, which need seeds.
        """
        ended = any(worker.has_ended() for worker in self._workers)
        if not (self._open or self._unread or self._calling or ended):
            return False
        self._take_answers(_TO_COME_BACK)
        stuck = self._unanswered(range(len(self.shares)))
        gone = [worker for worker in self._workers if worker in stuck or worker.has_ended()]
        self._start(gone)
        self.block.answered[:] = self.block.asked
        self.block.failed[:] = False
        self._take_answers(0)
        return bool(gone)

    def _start(self, workers: Sequence[LaneWorker]) -> None:
        """Start these workers, and wait until they have opened their simulators."""
        env = replace(self._env, opener=_not_here, open_group=None, workers=None)
        for worker in workers:
            opener = self._open_group(worker.lanes.start, worker.lanes.stop)
            applied = list(self.applied[worker.index])
            job = LaneJob(env, self._layout, worker.index, worker.lanes, opener, worker.cpu, applied)
            worker.start(job, self._memory, self._answers)
        for worker in workers:
            worker.join(self._answers)

    def close(self) -> None:
        """Close all environments and end the processes; then raise the first error of a lane that could not be."""
        if self._closed:
            return
        try:
            errors = self._say_close() if os.getpid() == self._owner else []
        finally:
            self._free()
        for error in errors:
            raise error

    def _say_close(self) -> list[Exception]:
        """Ask the workers to close; return what some have raised. Those that do not answer in time are left alone."""
        self._take_answers(_TO_CLOSE)
        busy = self._unanswered(range(len(self.shares)))
        asked = [worker.index for worker in self._workers if worker.may_answer() and worker not in busy]
        if asked:
            self.order(CLOSE, asked)
        while not self._wait_until_answered(asked, SLICE):
            silence = [worker.silent_for(SLICE) for worker in self._unanswered(asked)]
            if min(silence, default=0.0) > self._timeout:
                break
        for worker in self._unanswered(asked):
            if not worker.has_ended():
                warnings.warn(
                    f"{worker}: close() has not returned in {self._timeout:g} s (timeout={self._timeout:g}), and its "
                    "process is ended: find out what it waits for",
                    RuntimeWarning,
                    stacklevel=2,
                )
        failed = [self._workers[index] for index in asked if self.block.failed[index]]
        return [worker.raised(worker.message()) for worker in failed]

    def _wait_until_answered(self, workers: Iterable[int], patience: float) -> bool:
        """Wait, so many seconds at most, until those of these workers that live have no order to do."""
        until = time.monotonic() + patience
        while any(not worker.has_ended() for worker in self._unanswered(workers)):
            if time.monotonic() > until:
                return False
            time.sleep(_PAUSE)
        return True

    def _free(self) -> None:
        """End the processes at once, and free their shared memory."""
        self._closed = True
        for worker in self._workers:
            worker.kill(self._answers)
            worker.bell.close()
        self._answers.close()
        os.close(self._memory)


def _rows(workers: Sequence[int]) -> slice | Sequence[int]:
    """An index of arrays by worker: a slice, which NumPy reads sooner, for a range of workers."""
    return slice(workers.start, workers.stop) if isinstance(workers, range) else workers


def _not_here(env: SimulatedEnv) -> NoReturn:
    raise AssertionError("each worker has an opener of its own")
