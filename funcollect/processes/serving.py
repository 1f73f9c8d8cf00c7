"""Answers calls inside a worker, and transports to workers in this process or in processes of their own."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from typing_extensions import override

from funcollect.processes.channel import Channel
from funcollect.processes.child import ChildSetup, ProcessHandle, enter_child
from funcollect.processes.failures import Failure
from funcollect.processes.pool import Call, Loss, Transport, WorkerHandle
from funcollect.processes.system import check_platform

_TO_CLOSE = 1.0  # seconds that workers have to close their environments: Ctrl-C should end a script within two


class Served:
    """Base class of objects whose methods answer calls."""

    first_lane: int | None = None  # counted over all workers; None if its exceptions name no lanes

    def describe(self) -> Any:
        """The facts about the object that its owner needs."""

    def close(self) -> None:
        """Free what it holds."""


class Answering:
    """Answers calls. The first, ``"describe"``, has a job and descriptors, from which `build` makes a `Served` object.

    Exceptions of other classes than `catches` end the worker, or the user's program if the worker is in it.
    """

    def __init__(self, build: Callable[..., Any], catches: type[BaseException] = BaseException) -> None:
        self._build, self._catches = build, catches
        self.served: Any = None

    def answer(self, name: str, args: Sequence[Any]) -> Any:
        """The result of a call, or a `Failure` if it raised."""
        try:
            if name == "describe":
                self.served = self._build(*args)
                args = ()
            return getattr(self.served, name)(*args)
        except self._catches as error:
            return Failure.of(error, None if self.served is None else self.served.first_lane)

    def close(self) -> None:
        """Close the object, if it was built. Does nothing the second time."""
        served, self.served = self.served, None
        if served is not None:
            served.close()


def serve(fds: Sequence[int], build: Callable[..., Any], attend: Callable[[Any, Channel], None] | None = None) -> None:
    """Serve the process that started this one with these descriptors, until it asks to close, or ends.

    While no call waits, `attend` is called with the built object; it returns once the channel is readable.
    """
    channel = enter_child(fds)
    first = channel.receive()
    assert first is not None
    setup, urgent = first[0]
    setup.apply()
    answering = Answering(build)
    waiting: list[tuple[int, str, tuple[Any, ...], bool, list[int]]] = []  # number, name, args, plain, descriptors
    with contextlib.suppress(EOFError, OSError):  # that process has ended
        while True:
            built = answering.served is not None
            if attend is not None and built and not waiting:
                attend(answering.served, channel)
            wait = attend is None or not built
            while (message := channel.receive(wait=wait and not waiting)) is not None:
                waiting.append((*message[0], message[1]))
            if not waiting:
                continue
            first_names = ("close", *urgent) if built else ("close",)
            index = next((index for index, call in enumerate(waiting) if call[1] in first_names), 0)
            number, name, args, plain, call_fds = waiting.pop(index)
            if name == "close":
                answering.close()
                break
            try:
                value = answering.answer(name, (*args, *call_fds))
            finally:
                for fd in call_fds:
                    os.close(fd)
            channel.send((number, value), plain=plain)
    sys.stdout.flush()
    sys.stderr.flush()


class InProcessHandle(WorkerHandle):
    """A worker in this process, which runs a call when its answer is received."""

    def __init__(self, build: Callable[..., Any]) -> None:
        self._calls: deque[Call] = deque()
        self._answering = Answering(build, catches=Exception)

    @override
    def send(self, call: Call) -> None:
        self._calls.append(call)

    @override
    def receive(self) -> tuple[int, Any] | Loss | None:
        if not self._calls:
            return None
        call = self._calls[0]
        answer = self._answering.answer(call.name, call.args)  # Ctrl-C leaves the call first in the queue
        self._calls.popleft()
        return call.number, answer

    @override
    def kill(self) -> None:
        self._calls.clear()
        self._answering.close()


class InProcessTransport(Transport):
    """Workers in this process, one after another: for debuggers, and as a reference. `build` is as for `Answering`."""

    patient = False

    def __init__(self, build: Callable[..., Any]) -> None:
        self._build = build

    @override
    def start(self, job: Any) -> InProcessHandle:
        return InProcessHandle(self._build)


class ProcessTransport(Transport):
    """Starts workers as processes that run the function ``main(fds)`` of a module, which calls `serve`.

    `instead` is the fix in the error for systems without such processes. Calls with `urgent` names overtake others.
    """

    def __init__(
        self, module: str, instead: str, *, num_threads: int = 1, accelerators: bool = False, urgent: Sequence[str] = ()
    ) -> None:
        check_platform(instead)
        self._module, self._urgent = module, urgent
        self._num_threads, self._accelerators = num_threads, accelerators

    @override
    def start(self, job: Any) -> ProcessHandle:
        setup = ChildSetup.like_this(num_threads=self._num_threads, accelerators=self._accelerators, index=job.place)
        return ProcessHandle(self._module, setup, self._urgent)

    @override
    def ready(self, handles: Mapping[int, Any], timeout: float) -> Iterable[int]:
        if timeout:
            readable = select.poll()
            for handle in handles.values():
                for fd in handle.filenos():
                    readable.register(fd, select.POLLIN)
            readable.poll(timeout * 1000)
        return handles  # all of them, since trying each is as cheap as finding out which is readable

    @override
    def close(self, handles: Sequence[Any]) -> None:
        for child in handles:
            if child.open and child.owned:
                child.post((-1, "close", (), False))
        until = time.monotonic() + _TO_CLOSE
        for child in handles:
            child.ended_by(until)
        super().close(handles)
