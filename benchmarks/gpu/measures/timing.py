"""Interleaved rounds within a time limit: compile time, memory and rates of every contestant."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.gpu.built import Built, Notes
from benchmarks.gpu.pairs import BY_HAND
from benchmarks.harness.report import quartiles, spread, table
from benchmarks.harness.runner import Contestant, Result, block

LEAST_ROUNDS = 3  # also after the deadline: they are short, unlike building
COLUMNS = ("frames/s", "spread", "/ by hand", "quartiles", "set-up", "compile")


@dataclass
class Timings:
    """The measurements of the contestants of one cell, by name."""

    rates: dict[str, list[float]] = field(default_factory=dict)  # frames per second, one per round
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)  # see `Built`
    memory: dict[str, Any] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)


def measure(
    builds: Mapping[str, Callable[[], Built]], *, rounds: int, block_seconds: float, deadline: float
) -> Iterator[Timings]:
    """Build the contestants until `deadline` (monotonic), then give each a block per round.

    Yields:
        The same timings, after each contestant and after each round. One block follows the building, so that a run
        that is stopped has a rate of each; the first round supersedes it.
    """
    timings, contestants = Timings(), dict[str, Contestant]()
    for name, build in builds.items():
        built: Built | None = timings.notes.attempt(name, build, deadline)
        if built is not None:
            contestants[name] = built.contestant
            timings.seconds[name], timings.memory[name], timings.rates[name] = built.seconds, built.memory, []
            _measure_block(timings, name, built.contestant, block_seconds)
        yield timings
    order = random.Random(0)
    gc.collect()
    for done in range(rounds):
        if done >= LEAST_ROUNDS and time.monotonic() > deadline:
            return
        for name in order.sample(list(contestants), len(contestants)):
            if name not in timings.notes.errors:
                timings.rates[name] = timings.rates[name] if done else []
                _measure_block(timings, name, contestants[name], block_seconds)
        yield timings


def _measure_block(timings: Timings, name: str, contestant: Contestant, seconds: float) -> None:
    rate = timings.notes.attempt(name, partial(block, contestant, seconds))
    timings.rates[name] += [] if rate is None else [rate]


def result(name: str, note: str, timings: Timings) -> Result:
    """A table with ratios to the loop by hand, round by round, and the numbers."""
    limit = timings.rates.get(BY_HAND, [])
    notes = timings.notes
    rows, ratios = [], {}
    for each, rates in timings.rates.items():
        ratios[each] = [own / other for own, other in zip(rates, limit, strict=False)]
        rows.append((each, *_cells(rates, ratios[each] if each != BY_HAND else [], timings.seconds[each])))
    rows += [(each, "failed", *[""] * 5) for each in notes.errors if not timings.rates.get(each)]
    text = "\n".join([table((name, *COLUMNS), rows), f"  {note}", *notes.lines()])
    data = {
        "note": note,
        "frames_per_second": timings.rates,
        "median": {each: statistics.median(rates) for each, rates in timings.rates.items() if rates},
        "ratio_to_by_hand": {each: statistics.median(values) for each, values in ratios.items() if values},
        "seconds": timings.seconds,
        "memory_bytes": timings.memory,
        "errors": notes.errors,
        "gaps": notes.gaps,
    }
    return Result(name=name, table=text, data=data)


def _cells(rates: list[float], ratios: list[float], seconds: Mapping[str, float]) -> tuple[str, ...]:
    times = f"{seconds['set_up']:.1f} s", f"{seconds['compile']:.1f} s"
    if not rates:
        return ("no round", "", "", "", *times)
    rate = f"{statistics.median(rates):,.0f}", f"{spread(rates):.1%}"
    if not ratios:
        return (*rate, "", "", *times)
    low, middle, high = quartiles(ratios)
    return (*rate, f"{middle:.3f}", f"{low:.3f}-{high:.3f}", *times)
