"""What the GPU does during one rollout: how many kernels, how long they take, and how long it idles between them.

From the timeline of JAX's profiler, which records the kernels of both frameworks. Recording slows the host down, so
that the idle time is an upper bound where the host launches each kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple


class Work(NamedTuple):
    """The work of a device in one run."""

    kernels: int
    copies: int  # within the device and to the host, and memory that is set
    span: float  # seconds from the beginning of the first to the end of the last
    busy: float  # seconds in which at least one was at work


def work_of(planes: Iterable[Any]) -> Work:
    """The work of all devices' streams."""
    lines = [line for plane in planes if plane.name.startswith("/device:GPU") for line in plane.lines]
    events = [event for line in lines if line.name.startswith("Stream") for event in line.events]
    copies = sum(event.name.startswith("Mem") for event in events)
    spans = sorted((event.start_ns, event.start_ns + event.duration_ns) for event in events)
    busy, until = 0, spans[0][0] if spans else 0
    for start, end in spans:
        busy += max(end - max(start, until), 0)
        until = max(until, end)
    return Work(len(events) - copies, copies, (until - spans[0][0]) / 1e9 if spans else 0.0, busy / 1e9)
