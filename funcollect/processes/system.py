"""What the operating system offers. Where it is not Linux, processes use only what all POSIX systems have."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import sys
import tempfile
from collections.abc import Callable

PORTABLE = sys.platform != "linux" or os.environ.get("FUNCOLLECT_PORTABLE") == "1"  # on Linux, to try it there
COUNT_BYTES = 16
PLACE: list[int] = []  # of this process among those of its run; empty if it was not set
_STARTED = itertools.count()  # children of this process that have a processor


class SignsOfLife:
    """Shows whoever awaits this process that it steps: a long call is no hang then, and a sign costs a write to memory.

    The first of the two int64 of `count` grows by one at each step, reset, and environment that is made. The second is
    the lane that is being stepped, which is faster to write than to count.
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


def check_platform(mend: str) -> None:
    """Raise OSError, which ends with `mend`, unless the system has processes as POSIX defines them."""
    if os.name != "posix":
        raise OSError(f"worker processes need Linux or macOS, this is {sys.platform}: {mend}")


def anonymous_file(name: str) -> int:
    """The descriptor of a new file, which is in no folder and ends with its last descriptor. Linux shows its `name`."""
    if not PORTABLE:
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def place() -> int:
    """The place of this process among those of its run; its process id if nobody has told it."""
    return PLACE[0] if PLACE else os.getpid()


def spread(count: int) -> list[int]:
    """A processor for each of `count` children of this process. Those of several processes of a run are spread."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]
    return [cpus[(place() * count + next(_STARTED)) % len(cpus)] for _ in range(count)]


# Returns the number of the processor that the calling thread runs on; negative if nothing tells it.
current_cpu: Callable[[], int] = getattr(ctypes.CDLL(None) if os.name == "posix" else None, "sched_getcpu", lambda: -1)


def run_on(cpu: int) -> None:
    """Keep this process on one processor, which it takes as soon as it is woken, if the system can and may do that."""
    if not PORTABLE:
        with contextlib.suppress(OSError):
            if os.sched_getscheduler(0) == os.SCHED_BATCH:  # which would wait there for as long as others may run
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
            os.sched_setaffinity(0, {cpu})


def run_as_batch_work(*, idle: bool, pid: int | None = None) -> None:
    """Let a process wait for all others if it is `idle`, which may need a privilege to end, else as it is woken."""
    with contextlib.suppress(OSError):  # it may not be allowed
        if not PORTABLE:
            # Later threads are like the one that starts them.
            for thread in os.listdir(f"/proc/{'self' if pid is None else pid}/task"):
                os.sched_setscheduler(int(thread), os.SCHED_IDLE if idle else os.SCHED_BATCH, os.sched_param(0))
        elif idle and pid is None:
            os.nice(19)
