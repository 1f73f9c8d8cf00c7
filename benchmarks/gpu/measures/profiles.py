"""Waits of the host and work of the GPU in one rollout of each contestant; see `waits`.

The work is that of the timeline of JAX's profiler, which records the kernels of both frameworks. Recording slows the
host down, so that the idle time is an upper bound where the host launches each kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from benchmarks.gpu.built import Builder, Built, Notes
from benchmarks.gpu.cells import CELLS, PROFILED
from benchmarks.gpu.measures.waits import COPY, WAIT, chosen, cuda_calls, guarded, profiled, torch_waits
from benchmarks.harness.report import table
from benchmarks.harness.runner import Contestant, Options, Result

COLUMNS = ("Torch warns", "driver waits", "copies to host", "kernels", "copies", "busy", "idle")
NO_CALLS = "the profiler recorded no call of the CUDA driver: CUPTI may be missing or in use"


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


def result(builder: Builder, options: Options, deadline: float) -> Iterator[Result]:
    """The profile of every route and every loop by hand over both CartPoles, one after the other."""
    platform = options.platform
    notes, found = Notes(), dict[str, Any]()
    for name in PROFILED:
        size = CELLS[name].size(platform)
        for contestant, build in CELLS[name].builds(builder, platform).items():
            label = f"{size.env_id}, {size.lanes:,} lanes, {size.length} steps: {contestant}"
            if label in found:  # the loop by hand belongs to several cells
                continue
            built: Built | None = notes.attempt(label, build, deadline)
            if built is not None:
                found[label] = _profile(label, built.contestant, platform, notes) | {"length": size.length}
            yield _result(found, notes, platform)


def _profile(label: str, contestant: Contestant, platform: str, notes: Notes) -> dict[str, Any]:
    """What could be recorded; where a part of it fails, the others are kept."""
    on_gpu = platform == "cuda"
    warned = notes.attempt(f"{label}, Torch's waits", partial(torch_waits, contestant)) if on_gpu else None
    planes = notes.attempt(f"{label}, the profiler", partial(profiled, contestant))
    guard = notes.attempt(f"{label}, the guard", partial(guarded, contestant))
    calls = cuda_calls(planes or [])
    if on_gpu and planes is not None and not calls:
        notes.gaps[f"{label}, the profiler"] = NO_CALLS
    work = work_of(planes)._asdict() if calls else None
    waits = {"waited": chosen(calls, WAIT), "copied": chosen(calls, COPY), "calls": calls} if calls else {}
    return {"warned": warned, "guarded": guard, "work": work, **waits}


def _result(found: dict[str, Any], notes: Notes, platform: str) -> Result:
    rows = [(label, *cells(facts)) for label, facts in found.items()]
    guards = [f"{label}: {facts['guarded']}" for label, facts in found.items() if facts["guarded"]]
    lines = [table(("in one rollout (and per step)", *COLUMNS), rows), *guards, *notes.lines()]
    if platform == "cpu":
        lines.append("  not applicable on a CPU")
    data = {"applicable": platform == "cuda", "profiles": found, "errors": notes.errors, "gaps": notes.gaps}
    return Result(name="profiles", table="\n".join(lines), data=data)


def cells(facts: dict[str, Any]) -> tuple[str, ...]:
    """The row of a table from a profile; what is unknown stays empty."""
    length = facts["length"]
    counts = [facts.get(kind) for kind in ("warned", "waited", "copied")]
    totals = ["" if each is None else f"{sum(each.values())} ({sum(each.values()) / length:.2f})" for each in counts]
    if facts["work"] is None:
        return (*totals, "", "", "", "")
    work = Work(**facts["work"])
    launched = [f"{count / length:.1f}" for count in (work.kernels, work.copies)]
    times = [f"{seconds / length * 1e6:.1f} us" for seconds in (work.busy, work.span - work.busy)]
    return (*totals, *launched, *times)
