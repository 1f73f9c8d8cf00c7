"""The kernel of workers: it calls them over any transport, notices deaths and hangs, and replaces or ends workers.

A worker is an object in this process, in another one or in a Ray actor. Its first call, ``"describe"``, builds it from
a packed job; its methods answer all calls, in the order they were sent (`funcollect.processes.serving`).
"""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from funcollect.files import Uninterrupted
from funcollect.interop.jax_setup import send_main_by_value
from funcollect.processes.failures import Failure
from funcollect.processes.system import SIGNS

OnFailure = Literal["raise", "restart"]  # what happens when a worker is lost: an error, or another worker

_SLICE = 0.05  # seconds of one wait, at most: another thread may read the answer meanwhile
_LATE = 0.5  # seconds of waiting after which signs of life are read
_FAILURES_IN_A_ROW = 5  # of one worker, without a finished task in between
_BACKOFF = 0.1  # seconds before the second restart in a row, doubled at each
_RESTARTS = itertools.count(1)  # of workers, by this process


@dataclass(eq=False)
class Call:
    """A call to a worker, and its result."""

    worker: int  # its index
    name: str  # of the method
    args: tuple[Any, ...] = ()
    fds: tuple[int, ...] = ()  # file descriptors: further arguments, which only processes can get
    plain: bool = False  # whether arguments and result hold no functions or classes of a script: see `Channel.send`
    number: int = field(default_factory=itertools.count().__next__)  # identifies the call
    done: bool = False  # whether `value` or `error` is set
    value: Any = None
    error: BaseException | None = None

    def resolve(self, value: Any = None, error: BaseException | None = None) -> None:
        """Mark the call as finished, with a value or an error. Its arguments, weights for example, are freed."""
        self.done, self.value, self.error, self.args = True, value, error, ()


class Loss(NamedTuple):
    """Why a worker was lost: it ended, hangs, or raised an exception that its pool does not allow."""

    what: str  # in words that follow the worker's name
    lane: int | None = None  # the lane that raised, counted over all workers
    traceback: str = ""  # of the exception, or the Python stack of a worker that hangs
    cause: BaseException | None = None
    silent: float = 0.0  # if it hangs: the timeout in seconds


class WorkerHandle(Protocol):
    """Sends calls to one worker, and receives its answers."""

    @property
    def label(self) -> str:
        """Its kind and place, for error messages; empty if its index is enough."""
        return ""

    def send(self, call: Call) -> None:
        """Queue a call after earlier ones. It neither waits for the worker, nor raises if that has died."""

    def receive(self) -> tuple[int, Any] | Loss | None:
        """The number of a call with its result or `Failure`, or the loss of the worker; None for neither yet."""

    def signs(self) -> int:
        """A number that changes whenever the worker shows a sign of life; always 0 if it cannot."""
        return 0

    def where(self) -> str:
        """The Python stack of a worker that hangs; empty if it is not available."""
        return ""

    def kill(self) -> None:
        """End the worker at once. Does nothing the second time."""


class Transport(Protocol):
    """Starts workers, and reports which of them have answered."""

    patient: bool = True  # whether waiting for a worker takes time; if so, one that takes too long counts as hung

    def start(self, job: Any) -> WorkerHandle:
        """A handle to a new worker for this job."""

    def check_room(self, jobs: Sequence[Any], first: int, present: Sequence[Any]) -> None:
        """Raise WorkerError if new workers, with indices from `first`, have no room beside the `present` ones."""
        return

    def ready(self, handles: Mapping[int, Any], timeout: float) -> Iterable[int]:
        """The keys of the handles that may have an answer; waits for the first one, at most `timeout` seconds."""
        return handles

    def close(self, handles: Sequence[Any]) -> None:
        """Let the workers close what they hold, then end them."""
        for handle in handles:
            handle.kill()

    def leave(self) -> None:
        """Release the workers' resources, once all of them have ended."""
        return


@dataclass(frozen=True)
class FailurePolicy:
    """How long a worker may be silent, and what happens if it is silent for longer, or fails."""

    timeout: float  # seconds that the reader waits for an answer or a step of an environment
    start_timeout: float  # the same for a worker's start and its first task, which may include compilation
    on_failure: OnFailure = "raise"


@dataclass
class WorkerRecord:
    """What a pool knows about a worker."""

    job: Any
    handle: Any  # a `WorkerHandle` of the transport
    calls: deque[Call] = field(default_factory=deque)  # unanswered, oldest first
    first: Sequence[Call] = ()  # the calls that a replacement got first
    progress: Any = None  # where a replacement continues; None at the beginning
    tasks: int = 0  # such as rollouts, finished by this handle's worker
    failures: int = 0  # in a row
    silence: float = 0.0  # seconds of waiting since the last answer or sign of life
    signs: int = 0  # of life, when they were last read
    newcomer: bool = False  # started beside workers at work, and not admitted yet
    retired: bool = False


class WorkerPool(ABC):
    """Workers that answer calls, one for each of `jobs`: each has a `place` in the run, and ``pack() -> bytes``.

    Every method that reads answers ends all workers and raises an error if one was lost. A derived class defines what
    answers mean, which exceptions refuse a call without a loss of the worker, and how a replacement begins.
    """

    def __init__(self, transport: Transport, jobs: Sequence[Any], failure_policy: FailurePolicy) -> None:
        self._transport, self._failure_policy = transport, failure_policy
        self.lock = threading.RLock()
        self.restarts = 0  # workers that were replaced
        self.waited = 0.0  # seconds that the reader has waited for workers, since all were built
        self.closed = self._started = False
        self._checked = time.monotonic()
        send_main_by_value()
        self.records: list[WorkerRecord] = []
        try:
            self.described = self.finish(self.start(jobs))  # the answers to the first call
        except BaseException:
            self.stop()
            raise
        self._started, self.waited = True, 0.0  # from now on those that fail may be replaced

    def _answered(self, record: WorkerRecord, call: Call, value: Any) -> Any:
        """Process an answer; return the value that the caller gets."""
        return value

    def _refusal(self, record: WorkerRecord, call: Call, failure: Failure) -> BaseException | None:
        """The error of a call that failed without harm to the worker; None if the worker is lost."""
        return None

    def _words(self, worker: int, loss: Loss) -> str:
        """The loss of a worker in words, with its name."""
        where = f"worker {worker}" if loss.lane is None else f"worker {worker}, lane {loss.lane} of the run"
        label = self.records[worker].handle.label
        return f"{where} ({label}): {loss.what}" if label else f"{where}: {loss.what}"

    @abstractmethod
    def _error(self, worker: int, loss: Loss) -> Exception:
        """The error for a worker that was lost and is not replaced."""

    def _continued(self, worker: int, pending: Sequence[Call]) -> tuple[Any, Sequence[Call]]:
        """The job of a replacement, and the calls that it needs before the `pending` ones."""
        return self.records[worker].job, ()

    @property
    def workers(self) -> list[int]:
        """The indices of the workers at work."""
        return [worker for worker, record in enumerate(self.records) if not record.retired]

    def start(self, jobs: Sequence[Any], *, newcomers: bool = False) -> list[Call]:
        """Start workers; return the calls that build them. Until newcomers are admitted, their failures end only them.

        TypeError for a job that cannot be sent, before any worker starts; WorkerError if there is no room for all.
        """
        packed = [job.pack() for job in jobs]
        with self.lock:
            first = len(self.records)
            self._transport.check_room(jobs, first, [self.records[worker].job for worker in self.workers])
            for job in jobs:
                self.records.append(WorkerRecord(job, self._transport.start(job), newcomer=newcomers))
            return [self.submit(self._describe(worker, data)) for worker, data in enumerate(packed, first)]

    def _describe(self, worker: int, packed: bytes) -> Call:
        """The call that builds a worker."""
        return Call(worker, "describe", (packed,))

    def retire(self, worker: int) -> None:
        """End a worker without replacing it; its unanswered calls are dropped."""
        with self.lock:
            record = self.records[worker]
            record.retired = True
            record.calls.clear()
            self._transport.close([record.handle])

    def call(self, worker: int, name: str, *args: Any) -> Call:
        """Send a worker a call."""
        return self.submit(Call(worker, name, args))

    def submit(self, call: Call) -> Call:
        """Send a call."""
        with self.lock, Uninterrupted():
            record = self.records[call.worker]
            if not record.calls:
                record.silence = 0.0
            record.calls.append(call)
            record.handle.send(call)
        return call

    def call_all(self, name: str, *args: Any) -> list[Any]:
        """Send every worker the same call; return their answers."""
        return self.finish([self.call(worker, name, *args) for worker in self.workers])

    def call_each(self, name: str, arguments: Sequence[Any], *others: Any) -> list[Any]:
        """Send every worker a call with its own first argument; return their answers."""
        pairs = zip(self.workers, arguments, strict=True)
        return self.finish([self.call(worker, name, argument, *others) for worker, argument in pairs])

    def await_all(self, calls: Sequence[Call]) -> None:
        """Wait for the answers to these calls."""
        while not all(call.done for call in calls):
            self.wait()

    def finish(self, calls: Sequence[Call]) -> list[Any]:
        """Wait for the answers to these calls, and return them; raise the error of a call that failed."""
        self.await_all(calls)
        for call in calls:
            if call.error is not None:
                raise call.error
        return [call.value for call in calls]

    def wait(self) -> None:
        """Read the answers that have arrived; if there are none, wait for some for a short time."""
        if self.poll():
            return
        began = time.monotonic()
        ready = self._transport.ready(self._asked, _SLICE)
        self.waited += time.monotonic() - began
        self.poll(ready)

    @property
    def _asked(self) -> dict[int, WorkerHandle]:
        """The handles of the workers that have unanswered calls."""
        return {worker: record.handle for worker, record in enumerate(self.records) if record.calls}

    def poll(self, ready: Iterable[int] | None = None) -> bool:
        """Read the answers that have arrived, or those of the workers `ready`; return whether there were any."""
        elsewhere = self._transport.patient
        with self.lock, Uninterrupted() if elsewhere else nullcontext():  # in this process it may take long
            try:
                read = sum(map(self._read, self._transport.ready(self._asked, 0) if ready is None else ready))
                if elsewhere:
                    self._look_for_hangs()
                return read > 0
            except BaseException as error:
                if elsewhere or isinstance(error, Exception):  # else Ctrl-C, after which the call is made again
                    self._broken_off()
                raise

    def _broken_off(self) -> None:
        """End all workers after an exception in `poll`: an answer may have been read and not given to its call."""
        self.stop()

    def _read(self, worker: int) -> bool:
        """Read one answer of a worker, so that none gets ahead of others; return whether there was one."""
        record = self.records[worker]
        if not record.calls or (answer := record.handle.receive()) is None:
            return False
        if isinstance(answer, Loss):
            self._lose(worker, answer)
            return True
        number, value = answer
        call = next(call for call in record.calls if call.number == number)
        if not isinstance(value, Failure):
            record.silence = 0.0
            SIGNS.count[0] += 1  # for a process that awaits this one
            call.resolve(self._answered(record, call, value))
        elif (refusal := self._refusal(record, call, value)) is not None:
            call.resolve(error=refusal)
        else:
            self._lose(worker, Loss(f"raised {value.message}", value.lane, value.traceback, value.error()))
            return True
        record.calls.remove(call)
        return True

    def _owes(self, worker: int) -> bool:
        """Whether an answer of this worker is due."""
        return bool(self.records[worker].calls)

    def _look_for_hangs(self) -> None:
        """Declare each worker lost that has neither answered nor made a step in time."""
        now = time.monotonic()
        if (since := now - self._checked) < _SLICE:
            return
        self._checked = now
        policy = self._failure_policy
        for worker, record in enumerate(self.records):
            if not self._owes(worker):
                continue
            name, limit = ("timeout", policy.timeout) if record.tasks else ("start_timeout", policy.start_timeout)
            record.silence += min(since, limit / 2)  # if this process was suspended, its workers may also have been
            if record.silence >= min(_LATE, limit / 2) and (signs := record.handle.signs()) != record.signs:
                record.signs, record.silence = signs, 0.0
                SIGNS.count[0] += 1  # for a process that awaits this one
            if record.silence > limit:
                doing = f"{record.calls[0].name!r}" if record.calls else "an order"
                what = f"has not answered {doing}, nor made a step, for {limit:g} seconds ({name}={limit:g})"
                stack = record.handle.where()
                self._lose(worker, Loss(f"{what}; its Python stack is below", traceback=stack, silent=limit))

    def _lose(self, worker: int, loss: Loss) -> None:
        """Replace a lost worker, or raise its error, so that `poll` ends all; a newcomer's calls end with the error."""
        record = self.records[worker]
        record.failures += 1
        record.handle.kill()
        may_return = self._started and not self.closed and not record.newcomer
        if self._failure_policy.on_failure == "restart" and may_return and record.failures <= _FAILURES_IN_A_ROW:
            # The number makes each text different, since Python shows a warning of the same text only once.
            restart = f"and its lanes begin new episodes (restart {next(_RESTARTS)} by this process)"
            reason = f"{self._words(worker, loss)}; another takes its place, {restart}"
            warnings.warn(f"{reason}\n{loss.traceback}".rstrip(), RuntimeWarning, stacklevel=2)
            self._replace(worker)
            return
        error = self._error(worker, loss)
        error.__cause__ = loss.cause
        if not record.newcomer:
            raise error
        for call in [*record.calls]:
            call.resolve(error=error)
        self.retire(worker)

    def _replace(self, worker: int) -> None:
        """Start another worker, which continues after the lost one's last answer, and send it the unanswered calls."""
        record = self.records[worker]
        if record.failures > 1:
            time.sleep(_BACKOFF * 2 ** (record.failures - 2))
        self.restarts += 1
        first_calls = {call.number for call in record.first}
        pending = [call for call in record.calls if not call.done and call.number not in first_calls]
        job, first = self._continued(worker, pending)
        record.first = [self._describe(worker, job.pack()), *first]
        record.handle = self._transport.start(job)
        record.calls.clear()
        record.tasks, record.silence = 0, 0.0
        for call in [*record.first, *pending]:
            if not call.done:
                self.submit(call)

    def stop(self) -> None:
        """End every worker. Does nothing the second time."""
        with self.lock:
            if not self.closed:
                self.closed = True
                self._transport.close([self.records[worker].handle for worker in self.workers])
                self._transport.leave()
