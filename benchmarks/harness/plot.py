"""`python -m benchmarks plot`: pictures and tables of the recorded results, for the README and the site."""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.harness.report import quartiles
from benchmarks.harness.runner import file_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = Path(__file__).parents[1] / "results"
LIMITS = Path(__file__).parents[1] / "limits.md"  # a section of the page
PICTURES = (
    "collect", "step", "daily", "fused", "policies", "vector", "vector-GPU", "workers", "replay", "offline", "ray",
)  # fmt: skip
COSTS = ("imports", "memory", "overhead", "scale")  # which have no peers
INTRODUCTION = """# Benchmarks

Each benchmark measures this library, its peers and the limit in interleaved rounds of one run, so that their ratios
hold on a noisy machine. `benchmarks/results/` has the numbers of every round; these pictures and tables are made
from it.
"""


class Bar(NamedTuple):
    """A line of the picture for the README: a cell of a benchmark, and the peer it is compared with."""

    label: str
    benchmark: str
    cell: str
    peer: str


SPEED = (
    Bar("CartPole, 64 environments vs TorchRL", "collect", "CartPole-v1 torch 64", "torchrl"),
    Bar("CartPole, 64 environments vs Stable-Baselines3", "collect", "CartPole-v1 torch 64", "sb3"),
    Bar("CartPole, 64 environments vs a loop written by hand", "collect", "CartPole-v1 torch 64", "loop"),
    Bar("two workers, CartPole vs TorchRL", "workers", "CartPole-v1 2", "torchrl sync"),
    Bar("two Ray actors, CartPole vs TorchRL", "ray", "CartPole-v1 2", "torchrl sync"),
    Bar("two Ray actors, CartPole vs RLlib", "ray", "CartPole-v1 2", "rllib"),
    Bar("gymnax CartPole, 1,024 environments vs a scan by hand", "fused", "gymnax/CartPole-v1 1024", "scan"),
    Bar("256 of 1,000,000 frames from a buffer vs TorchRL", "replay", "sample cartpole 1000000", "torchrl"),
    Bar("32 slices of 8 frames from a buffer vs TorchRL with its cache", "replay", "slices cartpole 1000000", "cached"),
)


def results(benchmark: str) -> dict[str, Any]:
    """The recorded results of a benchmark."""
    loaded: dict[str, Any] = json.loads((RESULTS / f"{benchmark}.json").read_text())
    return loaded


def rates(benchmark: str) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """The frames per second of each cell, round by round, by contestant; ours is the first."""
    for name, cell in results(benchmark)["results"].items():
        if isinstance(cell, dict) and "frames_per_second" in cell:
            yield name, cell["frames_per_second"]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """How many times faster ours was, in each round."""
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def speed_picture(path: Path) -> None:
    """Draw how many times faster than its peers the library is, for some cells."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    axes: Axes = figure.add_subplot()
    for place, bar in enumerate(reversed(SPEED)):
        cell = dict(rates(bar.benchmark))[bar.cell]
        low, middle, high = quartiles(ratios(next(iter(cell.values())), cell[bar.peer]))
        axes.barh(place, middle - 1, left=1, xerr=[[middle - low], [high - middle]], color="tab:blue", ecolor="0.5")
        axes.annotate(f" {middle:.2g}", (max(high, 1), place), va="center")
    axes.set_yticks(range(len(SPEED)), [bar.label for bar in reversed(SPEED)])
    axes.set(xscale="log", xlim=(0.7, 60), xlabel="speed, funcollect / the other (lines: quartiles)")
    axes.set_title("How many times as fast funcollect is", loc="left")
    axes.set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    axes.axvline(1, color="black", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def picture(benchmark: str, path: Path) -> None:
    """Draw how many times faster than each peer the library is, a row for each cell."""
    from matplotlib.figure import Figure

    cells = [(name, cell) for name, cell in rates(benchmark) if len(cell) > 1]
    peers = list(dict.fromkeys(peer for _, cell in cells for peer in list(cell)[1:]))
    figure = Figure(figsize=(8, 1.2 + 0.32 * len(cells)), layout="constrained")
    axes: Axes = figure.add_subplot()
    for number, peer in enumerate(peers):
        points = []
        for place, (_, cell) in enumerate(reversed(cells)):
            if peer in cell:
                points.append((place, *quartiles(ratios(next(iter(cell.values())), cell[peer]))))
        places, low, middle, high = zip(*points, strict=True)
        spread = [
            [m - each for m, each in zip(middle, low, strict=True)],
            [each - m for m, each in zip(middle, high, strict=True)],
        ]
        axes.errorbar(middle, places, xerr=spread, fmt="o", markersize=4, color=f"C{number}", label=peer)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(cells)), [name for name, _ in reversed(cells)])
    axes.set(xscale="log", xlabel="times as many frames per second (lines: quartiles)")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    import matplotlib as mpl

    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.hashsalt": "funcollect", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


def table(benchmark: str) -> str:
    """The medians of all cells in Markdown: frames per second of ours, and how many times faster that is."""
    cells = list(rates(benchmark))
    peers = list(dict.fromkeys(peer for _, cell in cells for peer in list(cell)[1:]))
    lines = [f"| cell | frames/s | {' | '.join(peers)} |", f"|---|{'---|' * (1 + len(peers))}"]
    for name, cell in cells:
        ours = next(iter(cell.values()))
        columns = [f"{median(ratios(ours, cell[peer])):.2f}" if peer in cell else "" for peer in peers]
        lines.append(f"| {name} | {median(ours):,.0f} | {' | '.join(columns)} |")
    return "\n".join(lines)


class Costs(NamedTuple):
    """Results that are no rates: the numbers of every round by what was measured, such as milliseconds by program."""

    title: str
    quantity: str
    rounds: dict[str, list[float]]


def costs(benchmark: str) -> list[Costs]:
    """The results of a benchmark that are no rates, one entry for each quantity."""
    found: list[Costs] = []
    shares: dict[str, list[float]] = {}
    for name, result in results(benchmark)["results"].items():
        rows = result.get("rounds", {})
        for quantity in next(iter(rows.values()))[0] if rows else ():
            rounds = {label: [each[quantity] for each in row] for label, row in rows.items()}
            found.append(Costs(name, quantity, rounds))
        if "share" in result:
            shares[name] = [100 * share for share in result["share"]]
        for unit, quantity, scale in (("seconds", "ms", 1e3), ("microseconds", "µs", 1.0)):
            if isinstance(rows := result.get(unit), dict):
                rounds = {label: [scale * _total(each) for each in row] for label, row in rows.items()}
                found.append(Costs(name, quantity, rounds))
    return found + ([Costs("peak memory above the batch", "% of the batch", shares)] if shares else [])


def _total(measured: Any) -> float:
    """A number, or the total of one that has parts."""
    return float(measured["total"] if isinstance(measured, dict) else measured)


def costs_picture(benchmark: str, path: Path) -> None:
    """Draw the medians of results that are no rates, a row of bars for each quantity."""
    from matplotlib.figure import Figure

    groups = costs(benchmark)
    heights = [1.2 + 0.3 * len(group.rounds) for group in groups]
    figure = Figure(figsize=(8, sum(heights)), layout="constrained")
    for axes, group in zip(
        figure.subplots(len(groups), squeeze=False, height_ratios=heights)[:, 0], groups, strict=True
    ):
        for place, rounds in enumerate(reversed(group.rounds.values())):
            low, middle, high = quartiles(rounds)
            axes.barh(place, middle, xerr=[[middle - low], [high - middle]], color="tab:blue", ecolor="0.5")
        axes.set_yticks(range(len(group.rounds)), [*reversed(group.rounds)])
        axes.set(xlabel=f"{group.quantity} (lines: quartiles)")
        axes.set_title(group.title, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def costs_tables(groups: Sequence[Costs]) -> str:
    """The medians of results that are no rates in Markdown: a table for each title, with a column for each quantity."""
    tables = []
    for title in dict.fromkeys(group.title for group in groups):
        columns = [group for group in groups if group.title == title]
        lines = [f"| {' | '.join([title, *(group.quantity for group in columns)])} |", f"|---|{'---|' * len(columns)}"]
        for label in columns[0].rounds:
            medians = [f"{median(group.rounds[label]):,.4g}" for group in columns]
            lines.append(f"| {' | '.join([label, *medians])} |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def page(benchmark: str) -> str:
    """The section of a benchmark: what it measures, its picture and table, machine and versions."""
    name, _, only = benchmark.partition("-")
    facts = results(benchmark)
    described = ast.get_docstring(ast.parse(file_of(name).read_text())) or ""
    options = f"{f' --only {only}' if only else ''} --rounds {facts['options']['rounds']}"
    versions = ", ".join(f"{each} {number}" for each, number in facts["versions"].items() if number != "not installed")
    measured = f"![{benchmark}]({benchmark}.svg)\n\nMedians.\n\n{costs_tables(costs(benchmark))}"
    if benchmark in PICTURES:
        rule = (
            "The column frames/s is this library's speed, the others are that speed over the other's: above 1, this "
            "library is faster. Medians of interleaved rounds."
        )
        parts = [f"![{benchmark}]({benchmark}.svg)", rule, table(benchmark), costs_tables(costs(benchmark))]
        measured = "\n\n".join(filter(None, parts))
    return f"""## {benchmark}

{described}

```bash
python -m benchmarks {name}{options}
```

{measured}

Measured on {facts["date"]}, {facts["cpu"]}, {facts["cores"]} cores: {versions}.
"""


def write_pages(folder: Path) -> None:
    """Write the site's page of benchmarks, with its pictures, into a folder."""
    from benchmarks.gpu import picture as gpu  # imports both frameworks

    for benchmark in PICTURES:
        picture(benchmark, folder / f"{benchmark}.svg")
    for benchmark in COSTS:
        costs_picture(benchmark, folder / f"{benchmark}.svg")
    sections = [*map(page, (*PICTURES, *COSTS)), gpu.section(RESULTS / "gpu.json", folder), LIMITS.read_text()]
    (folder / "index.md").write_text("\n".join([INTRODUCTION, *sections]))


def main(arguments: Sequence[str]) -> None:
    """Write the README's picture, and the site's pages."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks plot", description=__doc__)
    parser.add_argument("--out", type=Path, default=DOCS, metavar="DIR", help="the folder of the documentation")
    out = parser.parse_args(arguments).out
    speed_picture(out / "pictures" / "speed.svg")
    write_pages(out / "benchmarks")
