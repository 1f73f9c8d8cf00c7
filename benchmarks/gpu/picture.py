"""A picture and tables for the docs from what `benchmarks gpu` wrote.

``python -m benchmarks.gpu.picture gpu-goals.json gpu-rest.json`` prints the tables of all files in Markdown, and writes
``gpu-goals.png`` beside the first one.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import benchmarks.gpu
from benchmarks.gpu import goals
from benchmarks.gpu.arms import SAME_SIZE
from benchmarks.gpu.measures.profiles import COLUMNS
from benchmarks.gpu.measures.profiles import cells as profile_cells
from benchmarks.gpu.pairs import BY_HAND

LANES = re.compile(r": ([\d,]+) lanes")  # in a cell's note


def main(paths: Sequence[Path]) -> None:
    """Draw, and print the tables."""
    results: dict[str, Any] = {}
    for path in paths:
        results |= json.loads(path.read_text())["results"]
    cells = {name: cell for name, cell in results.items() if cell.get("median")}
    print(*tables(results), sep="\n")
    draw(cells, paths[0].with_suffix(".png"))


def section(path: Path, folder: Path) -> str:
    """The section of the site's page of benchmarks, from a file of results; its picture is written into a folder."""
    facts = json.loads(path.read_text())
    cells = {name: cell for name, cell in facts["results"].items() if cell.get("median")}
    draw(cells, folder / "gpu.png")
    options = facts["options"]
    flags = f"--platform {options['platform']} --rounds {options['rounds']} --seconds {options['seconds']:.0f}"
    versions = ", ".join(f"{each} {facts['versions'][each]}" for each in ("python", "torch", "jax", "torchrl"))
    return f"""## gpu

{benchmarks.gpu.__doc__}

```bash
python -m benchmarks gpu {flags} --only "{options["only"]}"
```

`make gpu` runs the tests and all parts. ![gpu](gpu.png)

The loops by hand are a `lax.scan` and a loop in Torch with the same network, dynamics and columns.

{chr(10).join(tables(facts["results"]))}

Measured on {facts["date"]}, {facts["results"]["machine"]["devices"]["torch"]}: {versions}.
"""


def tables(results: Mapping[str, Any]) -> list[str]:
    """The lines of the tables of goals, rates and profiles."""
    cells = {name: cell for name, cell in results.items() if cell.get("median")}
    profiles = results.get("profiles", {}).get("profiles")
    return [*goals.lines(results), "", *rate_table(cells), *(["", *profile_table(profiles)] if profiles else [])]


def rate_table(cells: Mapping[str, Any]) -> list[str]:
    """The lines of a table of all cells: frames per second, and the ratio to the loop by hand."""
    lines = ["| cell | what runs | frames/s | by hand = 1 |", "|---|---|---|---|"]
    for cell in cells.values():
        for name, rate in cell["median"].items():
            ratio = cell["ratio_to_by_hand"].get(name)
            lines.append(f"| {cell['note']} | {name} | {rate:,.0f} | {'' if ratio is None else f'{ratio:.2f}'} |")
    return lines


def profile_table(profiles: Mapping[str, Any]) -> list[str]:
    """The lines of a table of waits in one rollout, and of kernels and idle time per step."""
    head, line = " | ".join(("in one rollout (and per step)", *COLUMNS)), "---|" * (1 + len(COLUMNS))
    rows = (" | ".join((label, *profile_cells(facts))) for label, facts in profiles.items())
    return [f"| {head} |", f"|{line}", *(f"| {row} |" for row in rows)]


def draw(cells: Mapping[str, Any], path: Path) -> None:
    """Ratios to the loops by hand, and frames per second over the number of lanes of gymnax's CartPole."""
    from matplotlib.figure import Figure

    shown = {name: cell for name, cell in cells.items() if name not in SAME_SIZE and "2^" not in name}
    bars = [
        (f"{cell_name}: {name}", ratio)
        for cell_name, cell in shown.items()
        for name, ratio in cell["ratio_to_by_hand"].items()
        if name != BY_HAND
    ]
    figure = Figure(figsize=(13, 1.5 + 0.28 * len(bars)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    left.barh([label for label, _ in reversed(bars)], [ratio for _, ratio in reversed(bars)], color="tab:blue")
    left.axvline(1.0, color="black", linewidth=0.8)
    left.set_xlabel("frames per second, loop by hand = 1")
    for name, rates in over_lanes(cells).items():
        right.loglog(*zip(*sorted(rates.items()), strict=True), marker="o", label=name)
    right.set_xlabel("lanes of gymnax/CartPole-v1")
    right.set_ylabel("frames per second")
    if right.lines:
        right.legend()
    figure.savefig(path, dpi=120)


def over_lanes(cells: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """Frames per second by contestant and lanes."""
    rates: dict[str, dict[int, float]] = {}
    for cell_name, cell in cells.items():
        if cell["note"].startswith("gymnax/CartPole-v1") and cell_name not in SAME_SIZE:
            found = LANES.search(cell["note"])
            assert found is not None
            for name, rate in cell["median"].items():
                rates.setdefault(name, {})[int(found[1].replace(",", ""))] = rate
    return rates


if __name__ == "__main__":
    main([*map(Path, sys.argv[1:])])
