"""Signs of life: a process counts its steps, and whoever awaits it sees whether the count moves.

A long call is no hang as long as environments step. A step costs one addition in memory that both processes share, and
no message; see `ChildProcess.signs`.
"""

from __future__ import annotations

import mmap

COUNT_BYTES = 8


class SignsOfLife:
    """The count of the current process.

    Attributes:
        count: its only element grows by one at every sign: a step, a reset, an environment that was made.
    """

    def __init__(self) -> None:
        self.count = memoryview(bytearray(COUNT_BYTES)).cast("q")

    def show(self, fd: int) -> None:
        """Count at the beginning of this file from now on."""
        self.count = memoryview(mmap.mmap(fd, COUNT_BYTES)).cast("q")


SIGNS = SignsOfLife()
