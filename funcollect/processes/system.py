"""What the operating system offers. Where it is not Linux, processes use only what all POSIX systems have."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable

PORTABLE = sys.platform != "linux" or os.environ.get("FUNCOLLECT_PORTABLE") == "1"  # on Linux, to try it there
_place: int | None = None  # of this process among those of its run; None if nobody has told it


def check_platform(mend: str) -> None:
    """Raise OSError, which ends with `mend`, unless the system has processes as POSIX defines them."""
    if os.name != "posix":
        raise OSError(f"worker processes need Linux or macOS, this is {sys.platform}: {mend}")


def usable_cpus() -> list[int]:
    """The numbers of the processors that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]


def take_place(number: int) -> None:
    """Note the place of this process among those of a run, whose children are spread over the processors."""
    global _place
    _place = number


def place() -> int:
    """The place of this process among those of its run; its process id if nobody has told it."""
    return os.getpid() if _place is None else _place


def _cpu_reader() -> Callable[[], int]:
    with contextlib.suppress(OSError, AttributeError):
        reader: Callable[[], int] = ctypes.CDLL(None).sched_getcpu
        return reader
    return lambda: -1


current_cpu = _cpu_reader()  # the number of the processor that the calling thread runs on; negative if nothing tells it


def run_on(cpu: int) -> None:
    """Keep this process on one processor, which it takes as soon as it is woken, if the system can and may do that."""
    if not PORTABLE:
        with contextlib.suppress(OSError):
            if os.sched_getscheduler(0) == os.SCHED_BATCH:  # which would wait there for as long as others may run
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
            os.sched_setaffinity(0, {cpu})


def run_as_batch_work(*, idle: bool, pid: int | None = None) -> None:
    """Let a process wait for others: with `idle` whenever there is other work, else only when it is woken.

    `pid` is None for the current process. Leaving idle priority needs a privilege.
    """
    with contextlib.suppress(OSError):  # it may not be allowed
        if not PORTABLE:
            # Later threads are like the one that starts them.
            for thread in os.listdir(f"/proc/{'self' if pid is None else pid}/task"):
                os.sched_setscheduler(int(thread), os.SCHED_IDLE if idle else os.SCHED_BATCH, os.sched_param(0))
        elif idle and pid is None:
            os.nice(19)
