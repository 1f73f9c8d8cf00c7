"""A process and all its descendants: their ids, signals to them, and their CPU time."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path


def family(root: int) -> list[int]:
    """The ids of a process, of its session, and of all their descendants.

    Both are needed: workers of ours lead sessions of their own, and Ray's processes outlive their parents.
    """
    members, children = [root], dict[int, list[int]]()
    for pid, parent, session in _table():
        children.setdefault(parent, []).append(pid)
        if session == root and pid != root:
            members.append(pid)
    for pid in members:  # grows in the loop
        members += [child for child in children.get(pid, []) if child not in members]
    return members


def _table() -> Iterable[tuple[int, int, int]]:
    """The id, the parent and the session of every process."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            fields = path.read_text().rpartition(")")[2].split()  # the name before it may hold spaces
            yield int(path.parent.name), int(fields[1]), int(fields[3])


def signal_family(root: int, number: signal.Signals) -> None:
    """Send a signal to every process of a family."""
    for pid in family(root):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def cpu_times(pids: Iterable[int]) -> dict[int, float]:
    """User and system seconds of each process so far, with its threads; processes that have ended are omitted.

    The clocks count nanoseconds. ``/proc/PID/stat`` counts hundredths of a second, too few for a short block.
    """
    clock_of, found = ctypes.CDLL(None).clock_getcpuclockid, dict[int, float]()
    for pid in pids:
        clock = ctypes.c_int()
        if clock_of(pid, ctypes.byref(clock)) == 0:
            with contextlib.suppress(OSError):  # it has just ended
                found[pid] = time.clock_gettime(clock.value)
    return found


def cpu_seconds(earlier: Mapping[int, float], later: Mapping[int, float]) -> float:
    """CPU seconds between two readings; a process that is new in the second one counts from its start."""
    return sum(seconds - earlier.get(pid, 0.0) for pid, seconds in later.items())
