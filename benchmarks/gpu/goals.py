"""The goals for one GPU, each beside what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.gpu.pairs import BY_GRAPH, BY_HAND, CAPTURED

FUSED, LOWERED, EAGER = "JAX policy, fused", "Torch policy, lowered", "Torch policy"


class Goal(NamedTuple):
    """At least this rate, in frames per second, or this ratio to the rate of another contestant of the cell."""

    cell: str
    name: str
    least: float
    other: str | None = None


GOALS = [
    Goal("cartpole few", FUSED, 50e6),
    Goal("cartpole many", FUSED, 500e6),
    *(Goal(cell, FUSED, 0.95, BY_HAND) for cell in ("cartpole few", "cartpole many")),
    *(Goal(cell, LOWERED, 0.95, FUSED) for cell in ("cartpole few", "cartpole many")),
    *(Goal(cell, CAPTURED, 0.95, BY_GRAPH) for cell in ("cartpole torch", "pendulum torch")),
    *(Goal(cell, CAPTURED, 3.0, EAGER) for cell in ("cartpole torch", "pendulum torch")),
    Goal("ant", FUSED, 0.98, BY_HAND),
]
MEMORY = 1.2  # times the sum of both frameworks' needs, at most


def lines(results: Mapping[str, Any]) -> list[str]:
    """The lines of a table in Markdown; a goal that was not measured has a dash."""
    rows = [_row(goal, measured(goal, results)) for goal in GOALS]
    ratio = results.get("memory", {}).get("ratio")
    rows.append(_cells("memory of both / needs of each alone", f"at most {MEMORY}", ratio, ratio and ratio <= MEMORY))
    return ["| goal | wanted | measured | reached |", "|---|---|---|---|", *rows]


def measured(goal: Goal, results: Mapping[str, Any]) -> float | None:
    """The median over the rounds, or None."""
    rates = results.get(goal.cell, {}).get("frames_per_second", {})
    own, other = rates.get(goal.name), rates.get(goal.other)
    if not own or (goal.other and not other):
        return None
    return float(statistics.median([one / two for one, two in zip(own, other, strict=False)] if goal.other else own))


def _row(goal: Goal, value: float | None) -> str:
    label = f"{goal.cell}: {goal.name}" + (f" / {goal.other}" if goal.other else ", frames/s")
    return _cells(label, f"at least {goal.least:,g}", value, value is not None and value >= goal.least)


def _cells(label: str, wanted: str, value: float | None, reached: Any) -> str:
    shown = "-" if value is None else f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"
    return f"| {label} | {wanted} | {shown} | {'-' if value is None else 'yes' if reached else 'no'} |"
