"""Counters by which processes wake each other: a short wait keeps the processor, a long one gives it up."""

from __future__ import annotations

import os
import select
import time

_SPIN = 50e-6  # seconds; waking a process that sleeps takes about as long


class Bell:
    """An eventfd that one process waits for. What others add arrives as a sum; all they wrote before is visible then.

    It counts the rings of two parts separately, each in half of its bits.
    """

    _HALF = 32

    def __init__(self, fd: int | None = None) -> None:
        """Make a counter, or use the descriptor of one."""
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if fd is None else fd
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)

    def ring(self, part: int) -> None:
        """Count one ring of a part."""
        os.eventfd_write(self.fd, 1 << (part * self._HALF))

    def watch(self, fd: int) -> None:
        """Let `wait` end, too, when this descriptor becomes readable."""
        self._poll.register(fd, select.POLLIN)

    def unwatch(self, fd: int) -> None:
        """Undo `watch`."""
        self._poll.unregister(fd)

    def heard(self) -> tuple[int, int] | None:
        """The rings of both parts since the last call, or None without any."""
        try:
            count = os.eventfd_read(self.fd)
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
        """Free the descriptor."""
        os.close(self.fd)
