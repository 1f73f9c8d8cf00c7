"""The workers of a collector: their calls, their deaths and hangs, over any transport."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle

from funcollect.collectors.options import OnFailure
from funcollect.collectors.workers.transport import Call, Gone, Link, Transport
from funcollect.collectors.workers.worker import START, Failure, Job, Report, Stand
from funcollect.errors import WorkerError

_SLICE = 0.05  # seconds that one wait lasts at most: another thread may have read the answer
_FAILURES_IN_A_ROW = 5  # of one worker, without a rollout in between
_BACKOFF = 0.1  # seconds before the second restart in a row, doubled at each


@dataclass(frozen=True)
class Patience:
    """How long a worker may take, and what then.

    Attributes:
        timeout: seconds of the reader's waiting within which a call has to be answered.
        start_timeout: the same for a worker's start and its first rollout, which may compile.
        on_failure: whether a worker that fails ends the run, or is replaced.
    """

    timeout: float
    start_timeout: float
    on_failure: OnFailure = "raise"


@dataclass
class Member:
    """A worker as the collector sees it."""

    job: Job
    link: Link
    calls: deque[Call] = field(default_factory=deque)  # not answered yet, oldest first
    first: Sequence[Call] = ()  # those with which it took another's place
    stand: Stand = START
    rollouts: int = 0  # of this process
    failures: int = 0  # in a row
    waited: float = 0.0  # seconds since its last answer
    newcomer: bool = False  # not built yet, while the others are at work
    retired: bool = False
    busy: float = 0.0  # seconds spent collecting
    idle: float = 0.0  # seconds between two rollouts


class Crew:
    """Workers that answer calls.

    Args:
        jobs: one per worker.
        patience: with those that fail.

    Attributes:
        restarts: workers that were replaced, those of workers included.
        lost: frames of rollouts that were broken off with their worker.
        waited: seconds that the reader has waited for workers.

    Raises:
        WorkerError: from every method that reads answers, for a worker that failed; all of them are gone then.
    """

    def __init__(self, transport: Transport, jobs: Sequence[Job], patience: Patience) -> None:
        self._transport = transport
        self._patience = patience
        self.lock = threading.RLock()
        self.restarts = self.lost = 0
        self.waited = 0.0
        self.prepare: Callable[[int], Sequence[Call]] = lambda worker: ()  # for a worker that has been replaced
        self.closed = self._started = False
        self._checked = time.monotonic()
        packed = [job.pack() for job in jobs]
        self.members: list[Member] = []
        try:
            for worker, (job, data) in enumerate(zip(jobs, packed, strict=True)):
                self.members.append(Member(job, transport.start(worker, data)))
        except BaseException:
            self.close()
            raise

    @property
    def workers(self) -> list[int]:
        """The indices of those at work."""
        return [worker for worker, member in enumerate(self.members) if not member.retired]

    def add(self, job: Job) -> int:
        """Start another worker; its index. Until it is admitted, its failure is only its own calls' error."""
        with self.lock:
            worker = len(self.members)
            self.members.append(Member(job, self._transport.start(worker, job.pack()), newcomer=True))
        return worker

    def retire(self, worker: int) -> None:
        """End a worker for good; what it has not answered is dropped."""
        with self.lock:
            member = self.members[worker]
            member.retired = True
            member.calls.clear()
            self._transport.close([member.link])

    def call(self, worker: int, name: str, *args: Any) -> Call:
        """Have a worker do something."""
        return self.submit(Call(worker, name, args))

    def submit(self, call: Call) -> Call:
        """Send a call on its way."""
        with self.lock:
            member = self.members[call.worker]
            if not member.calls:
                member.waited = 0.0
            member.calls.append(call)
            member.link.send(call)
        return call

    def ask(self, name: str, *args: Any) -> list[Any]:
        """Have every worker do the same; their answers."""
        return self.finish([self.call(worker, name, *args) for worker in self.workers])

    def begin(self) -> None:
        """From here on workers that fail may be replaced, and waiting counts: all of them have been built."""
        self._started, self.waited = True, 0.0
        self.admit(self.workers)

    def admit(self, workers: Sequence[int]) -> None:
        """These have been built."""
        for worker in workers:
            self.members[worker].newcomer = False

    def go_on_from(self, seed: int, stands: Sequence[Stand] | None = None) -> None:
        """Where a worker begins that takes another's place: the run's seed, and how far each worker has come."""
        with self.lock:
            members = [member for member in self.members if not member.retired]
            for member in members:
                member.job = replace(member.job, seed=seed)
            for member, stand in zip(members, stands or (), strict=stands is not None):
                member.stand = stand

    def finish(self, calls: Sequence[Call]) -> list[Any]:
        """Wait for the answers to these calls; an error that one of them met is raised."""
        while not all(call.done for call in calls):
            self.pump()
        for call in calls:
            if call.error is not None:
                raise call.error
        return [call.value for call in calls]

    def pump(self) -> None:
        """Read the answers that are there; wait a little where there is none."""
        if self.drain():
            return
        began = time.monotonic()
        ready = self._transport.ready(self._asked, _SLICE)
        self.waited += time.monotonic() - began
        self.drain(ready)

    @property
    def _asked(self) -> dict[int, Link]:
        return {worker: member.link for worker, member in enumerate(self.members) if member.calls}

    def drain(self, ready: Iterable[int] | None = None) -> bool:
        """Read the answers that are there, or of those among them who are `ready`: whether there was one."""
        with self.lock:
            try:
                workers = self._transport.ready(self._asked, 0) if ready is None else ready
                read = sum(map(self._read, workers))
                if self._transport.patient:
                    self._look_for_hangs()
                return read > 0
            except BaseException as error:
                self.close()  # an answer may be lost between its reading and its call
                if isinstance(error, OSError):
                    raise WorkerError(f"a worker's link broke ({error!r}): build another collector") from error
                raise

    def _read(self, worker: int) -> bool:
        """Read one answer of a worker: whether there was one. One at a time, so that none gets ahead of the others."""
        member = self.members[worker]
        if not member.calls or (answer := member.link.receive()) is None:
            return False
        if isinstance(answer, Gone):
            self._fail(worker, answer.reason)
            return True
        call = next(call for call in member.calls if call.number == answer.number)
        if not isinstance(failure := answer.value, Failure):
            self._count(member, answer.value)
            call.resolve(answer.value)
        elif call.name in _CHECKED and isinstance(refusal := _loaded(failure.cause), (TypeError, ValueError)):
            call.resolve(error=refusal)
        else:
            self._fail(worker, f"raised {failure.message}", failure.lane, failure.traceback, failure.cause)
            return True
        member.calls.remove(call)
        return True

    def _count(self, member: Member, value: Any) -> None:
        member.waited = 0.0
        if isinstance(value, tuple) and isinstance(value[-1], Report):
            report: Report = value[-1]
            member.stand, member.failures = report.stand, 0
            member.rollouts += 1
            member.busy += report.seconds
            member.idle += report.idle
            self.restarts += report.restarts
            self.lost += report.lost

    def _look_for_hangs(self) -> None:
        now = time.monotonic()
        if (since := now - self._checked) < _SLICE:
            return
        self._checked = now
        for worker, member in enumerate(self.members):
            if not member.calls:
                continue
            limit = self._patience.timeout if member.rollouts else self._patience.start_timeout
            member.waited += min(since, limit / 2)  # while the reader was away, a worker may have been, too
            if member.waited > limit:
                where = member.link.where()
                doing = f"has not answered {member.calls[0].name!r} for {limit:g} seconds"
                name = "timeout" if member.rollouts else "start_timeout"
                self._fail(worker, f"{doing} ({name}={limit:g}); its Python stack is below", None, where)

    def _fail(
        self, worker: int, what: str, lane: int | None = None, traceback: str = "", cause: bytes | None = None
    ) -> None:
        """Replace a worker, or end them all and raise."""
        member = self.members[worker]
        member.failures += 1
        member.link.kill()
        restart = self._patience.on_failure == "restart"
        may_return = self._started and not self.closed and not member.newcomer
        if restart and may_return and member.failures <= _FAILURES_IN_A_ROW:
            self._replace(worker)
            return
        where = f"worker {worker}" if lane is None else f"worker {worker}, lane {lane}"
        where += f" ({member.link.label})" if member.link.label else ""
        mend = "look at its traceback" if traceback else "look at what it wrote on standard error"
        again = f" {member.failures} times in a row" if restart and member.failures > 1 else ""
        rest = "the others go on" if member.newcomer else "all workers are gone, so build another collector"
        error = WorkerError(f"{where}: {what}{again}: {mend}; {rest}", worker, lane, traceback)
        error.__cause__ = _loaded(cause)
        if not member.newcomer:
            self.close()
            raise error
        for call in [*member.calls]:
            call.resolve(error=error)
        self.retire(worker)

    def _replace(self, worker: int) -> None:
        """Another process that goes on from where the lost one's answers end, with all that it did not answer."""
        member = self.members[worker]
        if member.failures > 1:
            time.sleep(_BACKOFF * 2 ** (member.failures - 2))
        self.restarts += 1
        own = {call.number for call in member.first}
        pending = [call for call in member.calls if not call.done and call.number not in own]
        if any(call.name == "collect" for call in pending):
            self.lost += member.stand.frames // max(member.stand.batches, 1) or member.job.options.frames_per_batch
        job = replace(member.job, stand=member.stand)
        member.link = self._transport.start(worker, job.pack())
        member.calls.clear()
        member.rollouts, member.waited = 0, 0.0
        member.first = [Call(worker, "hello"), *self.prepare(worker)]
        for call in [*member.first, *pending]:
            if not call.done:
                self.submit(call)

    def close(self) -> None:
        """End every worker. Does nothing the second time."""
        with self.lock:
            if not self.closed:
                self.closed = True
                self._transport.close([self.members[worker].link for worker in self.workers])
                self._transport.leave()


_CHECKED = ("reset", "set_seed", "load_state_dict", "take_params")


def _loaded(cause: bytes | None) -> BaseException | None:
    if cause is None:
        return None
    try:
        error = cloudpickle.loads(cause)
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None
