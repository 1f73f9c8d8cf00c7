"""Signs of life: a process counts its steps, and whoever awaits it sees whether the count moves.

A long call is no hang as long as environments step. A step costs one write to memory that both processes share, and no
message; see `ChildProcess.signs`.
"""

from __future__ import annotations

import mmap
import sys

COUNT_BYTES = 16


class SignsOfLife:
    """The `count` of the current process, two int64.

    The first grows by one at every sign: a step, a reset, an environment that was made. The second is the lane that is
    being stepped, which is faster to write than to count.
    """

    def __init__(self) -> None:
        self.count = memoryview(bytearray(COUNT_BYTES)).cast("q")

    @property
    def shown(self) -> int:
        """Both numbers as one."""
        return int.from_bytes(self.count.tobytes(), sys.byteorder)

    def show(self, fd: int) -> None:
        """Count at the beginning of this file from now on."""
        self.count = memoryview(mmap.mmap(fd, COUNT_BYTES)).cast("q")


SIGNS = SignsOfLife()
