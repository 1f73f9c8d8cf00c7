"""Interleaved rounds within a time limit: compile time, memory and rates of every contestant, and errors as text."""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.machine import memory
from benchmarks.gpu.pairs import BY_HAND
from benchmarks.harness.report import quartiles, spread, table
from benchmarks.harness.runner import Contestant, Factory, Result, block

COLUMNS = ("frames/s", "spread", "/ by hand", "quartiles", "set-up", "compile")


@dataclass
class Timings:
    """The measurements of the contestants of one cell, by name."""

    rates: dict[str, list[float]] = field(default_factory=dict)  # frames per second, one per round
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)  # of the set-up and of the first two runs
    memory: dict[str, Any] = field(default_factory=dict)  # after the second run, with those before it still there
    errors: dict[str, str] = field(default_factory=dict)


def measure(factories: Mapping[str, Factory], *, rounds: int, block_seconds: float, deadline: float) -> Timings:
    """Build every contestant, run each twice, then give each a block per round, until `deadline` (monotonic)."""
    timings, contestants = Timings(), {}
    try:
        for name, factory in factories.items():
            if time.monotonic() > deadline:
                timings.errors[name] = "no time was left to begin with it"
                continue
            with_errors(timings.errors, name, partial(_begin, name, factory, timings, contestants))
        _rounds(contestants, timings, rounds, block_seconds, deadline)
    finally:
        for contestant in contestants.values():
            contestant.close()
    return timings


def with_errors(errors: dict[str, str], name: str, work: Callable[[], Any]) -> Any:
    """The result of `work`; an exception is noted under `name` and gives None, so that the others still run."""
    try:
        return work()
    except Exception:
        errors[name] = traceback.format_exc(limit=-6)
        return None


def _begin(name: str, factory: Factory, timings: Timings, contestants: dict[str, Contestant]) -> None:
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    moments = [time.perf_counter()]
    contestant = factory()
    moments.append(time.perf_counter())
    for _ in range(2):
        contestant.run()
        moments.append(time.perf_counter())
    set_up, first, second = (after - before for before, after in itertools.pairwise(moments))
    timings.seconds[name] = {"set_up": set_up, "first": first, "second": second, "compile": max(first - second, 0.0)}
    timings.memory[name] = memory()
    timings.rates[name] = []
    contestants[name] = contestant


def _rounds(
    contestants: dict[str, Contestant], timings: Timings, rounds: int, block_seconds: float, deadline: float
) -> None:
    order = random.Random(0)
    gc.collect()
    for done in range(rounds):
        if done and time.monotonic() > deadline:
            return
        for name in order.sample(list(contestants), len(contestants)):
            if name not in timings.errors:
                rate = with_errors(timings.errors, name, partial(block, contestants[name], block_seconds))
                timings.rates[name] += [] if rate is None else [rate]


def result(name: str, note: str, timings: Timings) -> Result:
    """A table with ratios to the loop by hand, round by round, and the numbers."""
    limit = timings.rates.get(BY_HAND, [])
    rows, ratios = [], {}
    for each, rates in timings.rates.items():
        ratios[each] = [own / other for own, other in zip(rates, limit, strict=False)]
        rows.append((each, *_cells(rates, ratios[each] if each != BY_HAND else [], timings.seconds[each])))
    rows += [(each, "failed", *[""] * 5) for each in timings.errors if not timings.rates.get(each)]
    text = "\n".join([table((name, *COLUMNS), rows), f"  {note}", *timings.errors.values()])
    data = {
        "note": note,
        "frames_per_second": timings.rates,
        "median": {each: statistics.median(rates) for each, rates in timings.rates.items() if rates},
        "ratio_to_by_hand": {each: statistics.median(values) for each, values in ratios.items() if values},
        "seconds": timings.seconds,
        "memory_bytes": timings.memory,
        "errors": timings.errors,
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
