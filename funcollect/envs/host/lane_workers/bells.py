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

    It counts the rings of two parts separately: an eventfd, each part in half of its bits. Where the system has none, a
    pipe takes a byte for each ring.
    """

    _HALF = 32
    _BYTES = (b"\0", b"\1")  # of a ring, by part

    def __init__(self, fds: Sequence[int] = ()) -> None:
        """Make a counter, or use the descriptors `fds` of one."""
        self.fds = tuple(fds) or _new_counter()
        self._poll = select.poll()
        self._poll.register(self.fds[0], select.POLLIN)

    def ring(self, part: int) -> None:
        """Count one ring of a part."""
        if PORTABLE:
            os.write(self.fds[1], self._BYTES[part])
        else:
            os.eventfd_write(self.fds[0], 1 << (part * self._HALF))

    def watch(self, fd: int) -> None:
        """Let `wait` also end when this descriptor becomes readable."""
        self._poll.register(fd, select.POLLIN)

    def unwatch(self, fd: int) -> None:
        """Undo `watch`."""
        self._poll.unregister(fd)

    def heard(self) -> tuple[int, int] | None:
        """The rings of both parts since the last call, or None without any."""
        try:
            if PORTABLE:
                rung = os.read(self.fds[0], _MOST_RINGS)
                return rung.count(0), rung.count(1)
            count = os.eventfd_read(self.fds[0])
        except BlockingIOError:
            return None
        return count & ((1 << self._HALF) - 1), count >> self._HALF

    def wait(self, timeout: float | None = None) -> tuple[int, int] | None:
        """Wait for rings; None if `timeout` seconds have passed, or another watched descriptor is readable."""
        until = time.perf_counter() + _SPIN
        while (rings := self.heard()) is None and time.perf_counter() < until:
            os.sched_yield()
        if rings is None:
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
