"""Waits of the host and work of the GPU in one rollout of each contestant; see `waits` and `timeline`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.gpu.built import Builder, Built, Notes
from benchmarks.gpu.cells import CELLS, PROFILED
from benchmarks.gpu.measures.timeline import Work, work_of
from benchmarks.gpu.measures.waits import COPY, WAIT, chosen, cuda_calls, guarded, profiled, torch_waits
from benchmarks.harness.report import table
from benchmarks.harness.runner import Contestant, Options, Result

COLUMNS = ("Torch warns", "driver waits", "copies to host", "kernels", "copies", "busy", "idle")
NO_CALLS = "the profiler recorded no call of the CUDA driver: CUPTI may be missing or in use"


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
