"""Workers in separate processes, forked from a process that has imported everything."""

from __future__ import annotations

import select
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from typing_extensions import override

from funcollect.processes.child import TO_DIE, ChildProcess, ChildSetup
from funcollect.processes.pool import Answer, Call, Transport, WorkerExited, WorkerHandle, WorkerJob
from funcollect.processes.system import check_platform

_TO_CLOSE = 1.0  # seconds that workers have to close their environments: Ctrl-C should end a script within two


class ProcessHandle(WorkerHandle):
    """The connection to one worker process, which a module's `main` runs (see `ChildProcess`)."""

    def __init__(self, module: str, setup: ChildSetup, urgent: Collection[str]) -> None:
        self.child = ChildProcess(module)
        self.child.send((setup, urgent))

    @property
    def pid(self) -> int:
        """The process id; 0 if none has begun."""
        return self.child.pid

    @override
    def send(self, call: Call) -> None:
        self.child.send((call.number, call.name, call.args, call.plain), call.fds, plain=call.plain)

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
            return Answer(*message[0])
        return WorkerExited(child.how()) if child.ended_by(0) else None

    @override
    def signs(self) -> int:
        return self.child.signs()

    @override
    def where(self) -> str:
        return self.child.where()

    @override
    def kill(self) -> None:
        self.child.kill()


class ProcessTransport(Transport):
    """Starts workers as processes.

    Args:
        module: has a function ``main(fds)``, which calls `serve`. The server of forks imports it once for all.
        num_threads: of each worker.
        accelerators: whether JAX may see them.
        urgent: the names of the calls that go before earlier ones.
        instead: what to do where there are no such processes, for the error.
    """

    def __init__(
        self,
        module: str,
        *,
        num_threads: int = 1,
        accelerators: bool = False,
        urgent: Collection[str] = (),
        instead: str,
    ) -> None:
        check_platform(instead)
        self._module, self._urgent = module, urgent
        self._num_threads, self._accelerators = num_threads, accelerators

    @override
    def start(self, job: WorkerJob) -> ProcessHandle:
        setup = ChildSetup.like_this(num_threads=self._num_threads, accelerators=self._accelerators, index=job.place)
        return ProcessHandle(self._module, setup, self._urgent)

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
        children = [handle.child for handle in handles if isinstance(handle, ProcessHandle)]
        for child in children:
            if child.open and child.owned:
                child.send((-1, "close", (), False))
        until = time.monotonic() + _TO_CLOSE
        for child in children:
            child.ended_by(until)
        for child in children:
            child.kill()
