"""Comparisons as tables, as plain data, and as a summary."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.compare.comparison import CLOCKS, SIDES, Comparison, Name
from benchmarks.compare.ratios import ENOUGH, Ratio
from benchmarks.compare.served import Work
from benchmarks.harness.report import spread, table

BAD = ("slower", "broken")
LOSS = 0.05  # of speed; the summary counts the comparisons that could not have shown one


def cell_table(work: Work, comparisons: Mapping[str, Comparison]) -> str:
    """Two lines per contestant: wall time, which decides the verdict, and CPU time."""
    columns = (work.cell, "before us/frame", "spread", "after us/frame", "spread", "speed ratio", "95 %", "verdict")
    rows = [row for name, each in comparisons.items() for row in _rows(name, each)]
    reasons = [f"{name}, {side}: {error}" for name, each in comparisons.items() for side, error in each.errors.items()]
    return "\n".join([table(columns, rows), *(f"  {line}" for line in (work.note, *reasons))])


def _rows(name: str, each: Comparison) -> Iterator[tuple[str, ...]]:
    if each.errors:
        yield (name, *[""] * 6, each.verdict)
        return
    for clock in CLOCKS:
        times = [cell for side in SIDES for cell in _time(each.seconds(side, clock))]
        yield (f"{name}, {clock}", *times, *_ratio(each.ratio(clock)), each.verdict if clock == "wall" else "")


def _time(seconds: Sequence[float]) -> tuple[str, str]:
    return f"{1e6 * statistics.median(seconds):,.3f}", f"{spread(seconds):.1%}"


def _ratio(ratio: Ratio) -> tuple[str, str]:
    return f"{ratio.estimate:.3f}", f"{ratio.low:.3f}-{ratio.high:.3f}" if math.isfinite(ratio.high) else "none"


def cell_data(work: Work, comparisons: Mapping[str, Comparison]) -> dict[str, Any]:
    """Seconds per frame of every round, the ratios and the verdicts."""
    return {"note": work.note, "contestants": {name: _data(each) for name, each in comparisons.items()}}


def _data(each: Comparison) -> dict[str, Any]:
    if each.errors:
        return {"verdict": each.verdict, "errors": {side: str(error) for side, error in each.errors.items()}}
    return {
        "verdict": each.verdict,
        "speed_ratio": {clock: _finite(asdict(each.ratio(clock))) for clock in CLOCKS},
        "seconds_per_frame": {clock: {side: each.seconds(side, clock) for side in SIDES} for clock in CLOCKS},
    }


def _finite(numbers: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no infinity."""
    return {name: number if math.isfinite(number) else None for name, number in numbers.items()}


def summary(comparisons: Mapping[Name, Comparison]) -> str:
    """Count the comparisons by verdict, count the inconclusive ones, and list those that need attention."""
    counts = Counter(each.verdict for each in comparisons.values())
    blind = sum(_blind(each) for each in comparisons.values())
    lines = [f"{len(comparisons)} compared: " + ", ".join(f"{count} {name}" for name, count in counts.most_common())]
    if blind:
        lines.append(f"{blind} of them are too noisy to show a loss of {LOSS:.0%}: repeat them on idle cores")
    columns = ("benchmark, cell, contestant", "speed ratio", "95 %", "by CPU", "95 %", "verdict")
    rows = [_line(name, each) for name, each in comparisons.items() if each.verdict not in ("no slower", "unclear")]
    return "\n".join([*lines, *([table(columns, rows)] if rows else [])])


def _blind(each: Comparison) -> bool:
    """Whether the interval is so wide that it could hide a loss."""
    if each.errors or len(each.blocks[SIDES[0]]) < ENOUGH:
        return False
    ratio = each.ratio("wall")
    return ratio.high / ratio.estimate > 1 / (1 - LOSS)


def _line(name: Name, each: Comparison) -> tuple[str, ...]:
    cells = [""] * 4 if each.errors else [cell for clock in CLOCKS for cell in _ratio(each.ratio(clock))]
    return (f"{name.work.benchmark}, {name.work.cell}, {name.contestant}", *cells, each.verdict)
