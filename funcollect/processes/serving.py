"""Answers calls to a worker, wherever it lives, and starts workers in this process or as processes."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from typing_extensions import override

from funcollect.processes.channel import Channel
from funcollect.processes.child import TO_DIE, ChildProcess, ChildSetup, enter_child
from funcollect.processes.failures import Failure
from funcollect.processes.pool import Answer, Call, Loss, Transport, WorkerHandle, WorkerJob
from funcollect.processes.system import check_platform

_TO_CLOSE = 1.0  # seconds that workers have to close their environments: Ctrl-C should end a script within two


class Served(Protocol):
    """What answers the calls: each names a method, and has its arguments."""

    def describe(self) -> Any:
        """What its owner needs to know about it."""

    def failure(self, error: BaseException) -> Failure:
        """The `Failure` to send for an exception that one of its methods has raised."""

    def close(self) -> None:
        """Free what it holds."""


class Answering:
    """Answers calls. The first one, ``"describe"``, builds the object whose methods answer the others.

    Args:
        build: makes the object from a packed job.
        catches: the exceptions that answer a call; others end the worker, or its user's program if both are one.

    Attributes:
        served: that object, once it is built.
    """

    def __init__(self, build: Callable[[bytes], Served], catches: type[BaseException] = BaseException) -> None:
        self._build = build
        self._catches = catches
        self.served: Any = None

    def answer(self, name: str, args: Sequence[Any]) -> Any:
        """The result of a call, or a `Failure` if it has raised an exception."""
        try:
            if name == "describe":
                self.served = self._build(*args)
                args = ()
            return getattr(self.served, name)(*args)
        except self._catches as error:
            return Failure.of(error) if self.served is None else self.served.failure(error)

    def close(self) -> None:
        """Close the object, if it was built. Does nothing the second time."""
        served, self.served = self.served, None
        if served is not None:
            served.close()


def serve(fds: Sequence[int], build: Callable[[bytes], Served]) -> None:
    """Serve the process that has started this one, until that asks to close or has ended.

    Args:
        fds: the descriptors that this process was given.
        build: as for `Answering`.
    """
    channel = enter_child(fds)
    first = channel.receive()
    assert first is not None
    setup, urgent = first[0]
    setup.apply()
    calls = _Calls(channel, Answering(build), urgent)
    with contextlib.suppress(EOFError, OSError):  # that process has ended
        while calls.answer_next():
            pass
    sys.stdout.flush()
    sys.stderr.flush()


class _Calls:
    """The calls that wait. Those whose names are `urgent` go before the others, once the worker is built."""

    def __init__(self, channel: Channel, answering: Answering, urgent: Collection[str]) -> None:
        self._channel = channel
        self._answering = answering
        self._urgent = urgent
        self._waiting: deque[tuple[int, str, tuple[Any, ...], bool, list[int]]] = deque()

    def answer_next(self) -> bool:
        """Answer the next call; False if it was to close."""
        number, name, args, plain, fds = self._next()
        if name == "close":
            self._answering.close()
            return False
        try:
            value = self._answering.answer(name, (*args, *fds))
        finally:
            for fd in fds:
                os.close(fd)
        self._channel.send((number, value), plain=plain)
        return True

    def _next(self) -> tuple[int, str, tuple[Any, ...], bool, list[int]]:
        """The next call: one to close, else an urgent one, else the oldest."""
        waiting = self._waiting
        while (message := self._channel.receive(wait=not waiting)) is not None:
            waiting.append((*message[0], message[1]))
        urgent = self._urgent if self._answering.served is not None else ()
        for call in list(waiting):
            if call[1] == "close" or call[1] in urgent:
                waiting.remove(call)
                return call
        return waiting.popleft()


class InProcessHandle(WorkerHandle):
    """A worker in this process, which runs a call when its answer is asked for."""

    def __init__(self, build: Callable[[bytes], Served]) -> None:
        self._calls: deque[Call] = deque()
        self._answering = Answering(build, catches=Exception)

    @override
    def send(self, call: Call) -> None:
        self._calls.append(call)

    @override
    def receive(self) -> Answer | Loss | None:
        if not self._calls:
            return None
        call = self._calls.popleft()
        return Answer(call.number, self._answering.answer(call.name, call.args))

    @override
    def kill(self) -> None:
        self._calls.clear()
        self._answering.close()


class InProcessTransport(Transport):
    """Workers in this process, one after another: for debuggers, and as a reference. `build` is as for `Answering`."""

    patient = False

    def __init__(self, build: Callable[[bytes], Served]) -> None:
        self._build = build

    @override
    def start(self, job: WorkerJob) -> InProcessHandle:
        return InProcessHandle(self._build)

    @override
    def ready(self, handles: Mapping[int, WorkerHandle], timeout: float) -> Iterable[int]:
        return handles  # a worker answers as soon as it is asked

    @override
    def close(self, handles: Sequence[WorkerHandle]) -> None:
        for handle in handles:
            handle.kill()


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
    def receive(self) -> Answer | Loss | None:
        child = self.child
        if not child.open:
            return Loss("was ended")
        try:
            message = child.channel.receive(wait=False)
            if message is None and child.ended_by(0):
                message = child.channel.receive(wait=False)  # now the channel holds all that it will ever hold
        except (EOFError, OSError):
            child.ended_by(time.monotonic() + TO_DIE)
            return Loss(child.how())
        if message is not None:
            return Answer(*message[0])
        return Loss(child.how()) if child.ended_by(0) else None

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
