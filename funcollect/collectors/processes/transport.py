"""Workers in separate processes, forked from a process that has imported everything."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from typing_extensions import override

from funcollect.collectors.processes.slots import SharedWeightStore, SlotAssembler
from funcollect.collectors.workers.transport import Answer, Call, Transport, WorkerExited, WorkerGroup, WorkerHandle
from funcollect.collectors.workers.worker import Job, RolloutReport
from funcollect.processes.child import TO_DIE, ChildProcess, ChildSetup
from funcollect.processes.system import check_platform

_TO_CLOSE = 1.0  # seconds that workers have to close their environments: Ctrl-C should end a script within two


class ProcessHandle(WorkerHandle):
    """The connection to one worker process."""

    def __init__(self, setup: ChildSetup, eager: bool, job: bytes) -> None:
        self._job = job
        self.child = ChildProcess("funcollect.collectors.processes.worker_process")
        self.child.send((setup, eager))

    @property
    def pid(self) -> int:
        """The process id; 0 if none has begun."""
        return self.child.pid

    @override
    def send(self, call: Call) -> None:
        args = (self._job,) if call.name == "describe" else call.args
        self.child.send((call.number, call.name, args), call.fds, plain=call.name == "collect")

    @override
    def receive(self) -> Answer | WorkerExited | None:
        child = self.child
        if not child.open:
            return WorkerExited("was ended")
        try:
            message = child.channel.receive(wait=False)
            if message is None and child.ended_by(0):
                message = child.channel.receive(wait=False)  # now the channel holds all that it will ever hold
        except (EOFError, OSError):
            child.ended_by(time.monotonic() + TO_DIE)
            return WorkerExited(child.how())
        if message is not None:
            number, value, *packed = message[0]
            return Answer(number, (None, RolloutReport.unpacked(*packed)) if packed else value)
        return WorkerExited(child.how()) if child.ended_by(0) else None

    @override
    def signs(self) -> int:
        return self.child.signs()

    @override
    def where(self) -> str:
        return self.child.where()

    def say_close(self) -> None:
        """Ask it to close its environment and end."""
        if self.child.open and self.child.owned:
            self.child.send((-1, "close", ()))

    @override
    def kill(self) -> None:
        self.child.kill()


class ProcessTransport(Transport):
    """Starts workers as processes, whose rollouts lie in shared memory.

    `ChildSetup` describes the first two arguments; with `eager`, calls with new weights go before earlier calls.
    """

    def __init__(self, *, num_threads: int, accelerators: bool, eager: bool) -> None:
        check_platform("use SyncDataCollector, or in_process=True")
        self._eager = eager
        self._num_threads, self._accelerators = num_threads, accelerators

    @override
    def start(self, job: Job, packed: bytes) -> ProcessHandle:
        setup = ChildSetup.like_this(
            num_threads=self._num_threads, accelerators=self._accelerators, index=job.options.shard.index
        )
        return ProcessHandle(setup, self._eager, packed)

    @override
    def ready(self, handles: Mapping[int, WorkerHandle], timeout: float) -> Iterable[int]:
        if timeout:
            readable = select.poll()
            for handle in handles.values():
                assert isinstance(handle, ProcessHandle)
                for fd in handle.child.filenos():
                    readable.register(fd, select.POLLIN)
            readable.poll(timeout * 1000)
        return handles  # all of them: looking at each is as cheap as asking which of them has an answer

    @override
    def close(self, handles: Sequence[WorkerHandle]) -> None:
        own = [handle for handle in handles if isinstance(handle, ProcessHandle)]
        for handle in own:
            handle.say_close()
        until = time.monotonic() + _TO_CLOSE
        for handle in own:
            handle.child.ended_by(until)
        for handle in own:
            handle.kill()

    @override
    def assembler(self, submit: Callable[[Call], Call], group: WorkerGroup) -> SlotAssembler:
        return SlotAssembler(submit, group)

    @override
    def weight_store(self, workers: int) -> SharedWeightStore:
        return SharedWeightStore(workers)
