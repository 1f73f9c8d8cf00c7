"""Counters by which processes wake each other: a short wait keeps the processor, a long one gives it up."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence

from funcollect.processes.system import PORTABLE

_SPIN = 50e-6  # seconds; waking a process that sleeps takes about as long
_MOST_RINGS = 1 << 12  # that are read from a pipe at once


class Bell:
    """A counter that one process waits for. What others add arrives as a sum; all they wrote before is visible then.

    It is an eventfd. Where the system has none, a pipe takes a byte for each ring.
    """

    def __init__(self, fds: Sequence[int] = ()) -> None:
        """Make a counter, or use the descriptors `fds` of one."""
        self.fds = tuple(fds) or _new_counter()
        self._poll = select.poll()
        self._poll.register(self.fds[0], select.POLLIN)

    def ring(self) -> None:
        """Count one ring."""
        if PORTABLE:
            os.write(self.fds[1], b"\0")
        else:
            os.eventfd_write(self.fds[0], 1)

    def watch(self, fd: int) -> None:
        """Let `wait` also end when this descriptor becomes readable."""
        self._poll.register(fd, select.POLLIN)

    def unwatch(self, fd: int) -> None:
        """Undo `watch`."""
        self._poll.unregister(fd)

    def heard(self) -> int:
        """The rings since the last call."""
        try:
            return len(os.read(self.fds[0], _MOST_RINGS)) if PORTABLE else os.eventfd_read(self.fds[0])
        except BlockingIOError:
            return 0

    def wait(self, timeout: float | None = None) -> int:
        """Wait for rings; 0 if `timeout` seconds have passed, or another watched descriptor is readable."""
        until = time.perf_counter() + _SPIN
        while not (rings := self.heard()) and time.perf_counter() < until:
            os.sched_yield()
        if not rings:
            self._poll.poll(None if timeout is None else timeout * 1000)
            rings = self.heard()
        return rings

    def close(self) -> None:
        """Free the descriptors."""
        for fd in self.fds:
            os.close(fd)


def _new_counter() -> tuple[int, ...]:
    """The descriptors of a new counter, which do not block."""
    if not PORTABLE:
        return (os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC),)
    fds = os.pipe()
    for fd in fds:
        os.set_blocking(fd, False)
    return fds
