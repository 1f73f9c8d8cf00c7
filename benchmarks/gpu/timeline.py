"""What the GPU does during one rollout: kernels per step, how long they take, and how long it idles between them.

From the timeline of JAX's profiler, which records the kernels of both frameworks. Recording slows the host down, so
that the idle time is an upper bound where the host launches each kernel.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

from benchmarks.gpu.pairs import GYMNAX_CARTPOLE, TORCH_CARTPOLE, contestants
from benchmarks.gpu.timing import with_errors
from benchmarks.gpu.waits import LENGTH, profiled
from benchmarks.harness.report import table
from benchmarks.harness.runner import Factory, Options, Result

LANES = {"cuda": (2**11, 2**16), "cpu": (32,)}


class Work(NamedTuple):
    """The work of a device in one run."""

    kernels: int
    copies: int  # within the device and to the host, and memory that is set
    span: float  # seconds from the beginning of the first to the end of the last
    busy: float  # seconds in which at least one was at work


def result(options: Options, deadline: float) -> Result:
    """The timelines of every route and every loop by hand over both CartPoles, as far as there is time."""
    device = options.platform
    measured: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for lanes in LANES[device]:
        for env_id in (GYMNAX_CARTPOLE, TORCH_CARTPOLE):
            for name, factory in contestants(env_id, lanes, LENGTH, device).items():
                label = f"{env_id}, {lanes:,} lanes: {name}"
                if time.monotonic() > deadline:
                    errors[label] = f"{label}: no time was left"
                elif (work := with_errors(errors, label, partial(_measured, factory))) is not None:
                    measured[label] = work._asdict()
    rows = [(label, *_cells(Work(**work))) for label, work in measured.items()]
    lines = [table((f"per step, of {LENGTH}", "kernels", "copies", "busy", "idle"), rows), *errors.values()]
    data = {"applicable": device == "cuda", "length": LENGTH, "work": measured, "errors": errors}
    return Result(name="timeline", table="\n".join(lines), data=data)


def _measured(factory: Factory) -> Work:
    contestant = factory()
    try:
        for _ in range(2):  # which compile
            contestant.run()
        return work_of(profiled(contestant))
    finally:
        contestant.close()


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


def _cells(work: Work) -> tuple[str, ...]:
    idle = work.span - work.busy
    counts = (f"{count / LENGTH:.1f}" for count in (work.kernels, work.copies))
    return (*counts, *(f"{seconds / LENGTH * 1e6:.1f} us" for seconds in (work.busy, idle)))
