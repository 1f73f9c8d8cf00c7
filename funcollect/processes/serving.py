"""A worker's own side: it is built by the first call, and answers the others with its methods."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from funcollect.processes.channel import Channel
from funcollect.processes.child import enter_child
from funcollect.processes.failures import Failure


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
        """Close the object, if it was built."""
        if self.served is not None:
            self.served.close()


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
