"""Signs of life: a process counts its steps, and whoever awaits it sees whether the count moves.

A long call is no hang as long as environments step. A step costs one write to memory that both processes share, and no
message; see `ChildProcess.signs`.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable

COUNT_BYTES = 16


class SignsOfLife:
    """The count of the current process.

    Attributes:
        count: two int64. The first grows by one at every sign: a step, a reset, an environment that was made. The
            second is the lane that is being stepped, which is faster to write than to count.
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


class Silence:
    """For how long another process, which this one awaits, has shown no sign of life.

    Attributes:
        seconds: of waiting, without any sign.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._signs = 0  # when they were last looked at

    def grows(self, seconds: float, signs: Callable[[], int], *, after: float = 0.0) -> float:
        """Add seconds of waiting; return for how long there was no sign, which is 0 if there is one now.

        Args:
            seconds: waited since the last call.
            signs: returns a number that has changed if the process has shown a sign.
            after: the seconds of silence from which on signs are looked for.
        """
        self.seconds += seconds
        if self.seconds > after and (now := signs()) != self._signs:
            self._signs, self.seconds = now, 0.0
            SIGNS.count[0] += 1  # for a process that awaits this one
        return self.seconds
