"""The workers of a collector, over any transport: their calls and answers, deaths and hangs, and replacement."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from funcollect.collectors.workers.transport import Call, Transport, WorkerExited, WorkerHandle
from funcollect.collectors.workers.worker import START, Job, Progress, RolloutReport, env_calls_of
from funcollect.envs.host.host_env import without_advice
from funcollect.errors import EnvError, ReplayError, WorkerError
from funcollect.interop.settings import send_main_by_value
from funcollect.processes.child import OnFailure
from funcollect.processes.failures import Failure, UnsentResultError, warn_of_restart
from funcollect.processes.life import SIGNS

_SLICE = 0.05  # seconds of one wait at most: another thread may have read the answer meanwhile
_LATE = 0.5  # seconds of waiting from which on signs of life are looked for
_FAILURES_IN_A_ROW = 5  # of one worker, without a rollout in between
_BACKOFF = 0.1  # seconds before the second restart in a row, doubled at each


@dataclass(frozen=True)
class FailurePolicy:
    """How long a worker may be silent, and what happens if it is so for longer or fails."""

    timeout: float  # seconds of the reader's waiting within which a call is answered, or an environment steps
    start_timeout: float  # the same for a worker's start and its first rollout, which may compile
    on_failure: OnFailure = "raise"


@dataclass
class WorkerRecord:
    """What the collector knows about a worker."""

    job: Job
    handle: WorkerHandle
    calls: deque[Call] = field(default_factory=deque)  # unanswered, oldest first
    first: Sequence[Call] = ()  # those that a replacement was sent first
    progress: Progress = START
    rollouts: int = 0  # of this process
    failures: int = 0  # in a row
    waited: float = 0.0  # seconds since its last answer or sign of life
    signs: int = 0  # of life, when they were last looked at
    newcomer: bool = False  # started beside workers that are at work, and not built yet
    retired: bool = False
    busy: float = 0.0  # seconds spent collecting
    idle: float = 0.0  # seconds between two rollouts


class WorkerPool:
    """Workers that answer calls, one for each of `jobs`.

    Every method that reads answers raises `WorkerError` if a worker failed. All workers are ended then. `prepare`
    returns the calls that the new process of a replaced worker needs first.
    """

    def __init__(
        self,
        transport: Transport,
        jobs: Sequence[Job],
        failure_policy: FailurePolicy,
        prepare: Callable[[int], Sequence[Call]],
    ) -> None:
        self._transport = transport
        self._failure_policy = failure_policy
        self.lock = threading.RLock()
        self.restarts = 0  # workers that were replaced, including workers of workers
        self.lost = 0  # frames of the rollouts that ended with their worker
        self.waited = 0.0  # seconds that the reader has waited for workers
        self._prepare = prepare
        self.closed = self._started = False
        self._checked = time.monotonic()
        send_main_by_value()
        self.records: list[WorkerRecord] = []
        try:
            self.add(jobs, newcomers=False)
        except BaseException:
            self.close()
            raise

    @property
    def workers(self) -> list[int]:
        """The indices of the workers at work."""
        return [worker for worker, record in enumerate(self.records) if not record.retired]

    def add(self, jobs: Sequence[Job], *, newcomers: bool = True) -> list[int]:
        """Start further workers; return their indices. Until newcomers are admitted, a failure ends their calls only.

        Raises:
            TypeError: for a job that cannot be sent, before any worker starts.
            WorkerError: if there is no room for all of them.
        """
        packed = [job.pack() for job in jobs]
        with self.lock:
            first = len(self.records)
            self._transport.check_room(jobs, first, [self.records[worker].job for worker in self.workers])
            for job, data in zip(jobs, packed, strict=True):
                self.records.append(WorkerRecord(job, self._transport.start(job, data), newcomer=newcomers))
        return [*range(first, len(self.records))]

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
        with self.lock:
            record = self.records[call.worker]
            if not record.calls:
                record.waited = 0.0
            record.calls.append(call)
            record.handle.send(call)
        return call

    def call_all(self, name: str, *args: Any) -> list[Any]:
        """Send every worker the same call; return their answers."""
        return self.finish([self.call(worker, name, *args) for worker in self.workers])

    def begin(self) -> None:
        """All workers have been built: from now on those that fail may be replaced, and waiting is counted."""
        self._started, self.waited = True, 0.0

    def admit(self, workers: Sequence[int]) -> None:
        """Let newcomers take part: they have been built."""
        for worker in workers:
            self.records[worker].newcomer = False

    def go_on_from(self, seed: int, all_progress: Sequence[Progress] | None = None) -> None:
        """Set what replacements continue from: the run's seed, and the progress of each worker."""
        with self.lock:
            records = [record for record in self.records if not record.retired]
            for record in records:
                record.job = replace(record.job, seed=seed)
            for record, progress in zip(records, all_progress or (), strict=all_progress is not None):
                record.progress = progress

    def have_loaded(self, saved: Sequence[Mapping[str, Any]], *, new_envs: bool) -> None:
        """Let replacements begin with the parameters of environments that the workers have loaded.

        With `new_envs`, these have also loaded new environments, to which no function has been applied.
        """
        with self.lock:
            records = [record for record in self.records if not record.retired]
            for record, loaded in zip(records, saved, strict=True):
                applied = () if new_envs else [call for call in record.job.applied if call[0] == "apply"]
                record.job = replace(record.job, applied=(*applied, *env_calls_of(loaded)))

    def finish(self, calls: Sequence[Call]) -> list[Any]:
        """Wait for the answers to these calls, and return them; raise the error of a call that failed."""
        while not all(call.done for call in calls):
            self.wait()
        for call in calls:
            if call.error is not None:
                raise call.error
        return [call.value for call in calls]

    def wait(self) -> None:
        """Read the answers that have arrived; if there is none, wait for one for a short time."""
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
        """Read the answers that have arrived, or those of the workers `ready`; return whether there was one."""
        with self.lock:
            try:
                workers = self._transport.ready(self._asked, 0) if ready is None else ready
                read = sum(map(self._read, workers))
                if self._transport.patient:
                    self._look_for_hangs()
                return read > 0
            except BaseException as error:
                self.close()  # an answer may have been read and not yet assigned to its call
                if isinstance(error, OSError):
                    raise WorkerError(
                        f"the connection to a worker broke ({error!r}): build another collector"
                    ) from error
                raise

    def _read(self, worker: int) -> bool:
        """Read one answer of a worker; return whether there was one. Only one, so that no worker gets ahead."""
        record = self.records[worker]
        if not record.calls or (answer := record.handle.receive()) is None:
            return False
        if isinstance(answer, WorkerExited):
            self._fail(worker, answer.reason)
            return True
        call = next(call for call in record.calls if call.number == answer.number)
        if not isinstance(failure := answer.value, Failure):
            self._count(record, answer.value)
            if call.name in ("apply", "set_env_params"):
                _note_applied(record, call)
            call.resolve(answer.value)
        elif isinstance(refusal := failure.error(), _REFUSALS.get(call.name, ())):
            if isinstance(refusal, UnsentResultError):
                _note_applied(record, call)
            call.resolve(error=refusal)
        else:
            self._fail(worker, f"raised {failure.message}", failure.lane, failure.traceback, failure.error())
            return True
        record.calls.remove(call)
        return True

    def _count(self, record: WorkerRecord, value: Any) -> None:
        """Add the figures of an answer to those of its worker."""
        record.waited = 0.0
        SIGNS.count[0] += 1  # for a process that awaits this one
        if isinstance(value, tuple) and isinstance(value[-1], RolloutReport):
            report: RolloutReport = value[-1]
            record.progress, record.failures = report.progress, 0
            record.rollouts += 1
            record.busy += report.seconds
            record.idle += report.idle
            self.restarts += report.restarts
            self.lost += report.lost

    def _look_for_hangs(self) -> None:
        """Fail each worker that has neither answered nor made a step in time."""
        now = time.monotonic()
        if (since := now - self._checked) < _SLICE:
            return
        self._checked = now
        for worker, record in enumerate(self.records):
            if not record.calls:
                continue
            limit = self._failure_policy.timeout if record.rollouts else self._failure_policy.start_timeout
            record.waited += min(since, limit / 2)  # if this process was suspended, its workers may also have been
            if record.waited > min(_LATE, limit / 2) and (signs := record.handle.signs()) != record.signs:
                record.signs, record.waited = signs, 0.0
                SIGNS.count[0] += 1
            elif record.waited > limit:
                where = record.handle.where()
                doing = f"has not answered {record.calls[0].name!r}, nor made a step, for {limit:g} seconds"
                name = "timeout" if record.rollouts else "start_timeout"
                self._fail(worker, f"{doing} ({name}={limit:g}); its Python stack is below", None, where)

    def _fail(
        self, worker: int, what: str, lane: int | None = None, traceback: str = "", cause: BaseException | None = None
    ) -> None:
        """Replace a worker that failed, or end all workers and raise."""
        record = self.records[worker]
        record.failures += 1
        record.handle.kill()
        restart = self._failure_policy.on_failure == "restart"
        may_return = self._started and not self.closed and not record.newcomer
        where = f"worker {worker}" if lane is None else f"worker {worker}, lane {lane} of the run"
        where += f" ({record.handle.label})" if record.handle.label else ""
        what = without_advice(what)
        if restart and may_return and record.failures <= _FAILURES_IN_A_ROW:
            warn_of_restart(f"{where}: {what}", traceback)
            self._replace(worker)
            return
        advice = "look at its traceback" if traceback else "look at what it wrote on standard error"
        again = f" {record.failures} times in a row" if restart and record.failures > 1 else ""
        rest = "the others continue" if record.newcomer else "all workers were ended, so build another collector"
        if not restart:
            rest += ", or pass on_failure='restart'"
        error = WorkerError(f"{where}: {what}{again}: {advice}; {rest}", worker, lane, traceback)
        error.__cause__ = cause
        if not record.newcomer:
            self.close()
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
        own = {call.number for call in record.first}
        pending = [call for call in record.calls if not call.done and call.number not in own]
        if any(call.name == "collect" for call in pending):
            self.lost += (
                record.progress.frames // max(record.progress.batches, 1) or record.job.options.frames_per_batch
            )
        job = replace(record.job, progress=record.progress)
        record.handle = self._transport.start(job, job.pack())
        record.calls.clear()
        record.rollouts, record.waited = 0, 0.0
        record.first = [Call(worker, "describe"), *self._prepare(worker)]
        for call in [*record.first, *pending]:
            if not call.done:
                self.submit(call)

    def close(self) -> None:
        """End every worker. Does nothing the second time."""
        with self.lock:
            if not self.closed:
                self.closed = True
                self._transport.close([self.records[worker].handle for worker in self.workers])
                self._transport.leave()


def _note_applied(record: WorkerRecord, call: Call) -> None:
    """Let a replacement of the worker repeat a call that has changed its environments."""
    kept = record.job.applied
    if call.name == "set_env_params":  # all of them at once, so earlier ones do not matter
        kept = tuple(each for each in kept if each[0] == "apply")
    record.job = replace(record.job, applied=(*kept, (call.name, *call.args)))


# The errors by which a worker refuses a call: it is as it was before, or begins new episodes by itself.
_REFUSALS: dict[str, tuple[type[Exception], ...]] = {
    **dict.fromkeys(
        ("reset", "set_seed", "set_env_params", "load_state_dict", "take_params", "saved_run"),
        (TypeError, ValueError, ReplayError),
    ),
    "continue_run": (TypeError, ValueError, ReplayError, EnvError),
    "apply": (TypeError, EnvError),
}
