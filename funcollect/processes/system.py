"""Services of the operating system: Linux's own where there are any, else those of all POSIX systems."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import sys
import tempfile
from collections.abc import Callable

PORTABLE = sys.platform != "linux" or os.environ.get("FUNCOLLECT_PORTABLE") == "1"  # for tests on Linux
COUNT_BYTES = 16
PLACE: list[int] = []  # at most one number, see `place`
_STARTED = itertools.count()  # counts the children of this process that `spread` has given a processor


class SignsOfLife:
    """Shows that this process makes steps, so that its parent does not take a long call for a hang.

    A sign is a write to `count`, two int64: the first grows by one at each step, reset, and environment that is made.
    The second is the lane that is being stepped, which is faster to write than to count.
    """

    def __init__(self) -> None:
        self.count = memoryview(bytearray(COUNT_BYTES)).cast("q")

    def show(self, fd: int) -> None:
        """From now on, count at the beginning of this file, which the parent reads."""
        self.count = memoryview(mmap.mmap(fd, COUNT_BYTES)).cast("q")


SIGNS = SignsOfLife()


def check_platform(mend: str) -> None:
    """Raise OSError, with the fix `mend`, unless this is a POSIX system."""
    if os.name != "posix":
        raise OSError(f"worker processes need Linux or macOS, this is {sys.platform}: {mend}")


def anonymous_file(name: str) -> int:
    """The descriptor of a new file without a path, which ends with its last descriptor. Linux shows its `name`."""
    if not PORTABLE:
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def place() -> int:
    """The number of this process among those of its run; its process id if `PLACE` was not set."""
    return PLACE[0] if PLACE else os.getpid()


def spread(count: int) -> list[int]:
    """Choose a processor for each of `count` children, different ones for the children of a run's other processes."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]
    return [cpus[(place() * count + next(_STARTED)) % len(cpus)] for _ in range(count)]


# Returns the number of the processor that the calling thread runs on; negative if it is unknown.
current_cpu: Callable[[], int] = getattr(ctypes.CDLL(None) if os.name == "posix" else None, "sched_getcpu", lambda: -1)


def run_on(cpu: int) -> None:
    """Pin this process to a processor, and let it run there as soon as it is woken, if the system allows that."""
    if not PORTABLE:
        with contextlib.suppress(OSError):
            if os.sched_getscheduler(0) == os.SCHED_BATCH:  # with it, a woken process waits until others have run
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
            os.sched_setaffinity(0, {cpu})


def run_as_batch_work(*, idle: bool, pid: int | None = None) -> None:
    """Keep a process from preempting others as it is woken; if it is `idle`, it runs only when no other does."""
    with contextlib.suppress(OSError):  # it may not be allowed
        if not PORTABLE:
            # All threads that exist; later ones inherit the scheduler of the thread that starts them.
            for thread in os.listdir(f"/proc/{'self' if pid is None else pid}/task"):
                os.sched_setscheduler(int(thread), os.SCHED_IDLE if idle else os.SCHED_BATCH, os.sched_param(0))
        elif idle and pid is None:
            os.nice(19)
