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
PICTURES = ("collect", "fused", "policies", "vector", "vector-GPU", "workers", "replay", "replay-stacks", "ray")
COSTS = ("imports", "scale")
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


def costs(benchmark: str) -> str:
    """The medians, in Markdown, of results that are no rates: a table for each, with a column for each quantity."""
    tables = []
    for name, result in results(benchmark)["results"].items():
        rows = result.get("rounds", {})
        quantities = [*next(iter(rows.values()))[0]] if rows else []
        lines = [f"| {' | '.join([name, *quantities])} |", f"|---|{'---|' * len(quantities)}"]
        for label, rounds in rows.items():
            medians = [f"{median(each[quantity] for each in rounds):,.4g}" for quantity in quantities]
            lines.append(f"| {' | '.join([label, *medians])} |")
        tables += ["\n".join(lines)] if rows else []
    return "\n\n".join(tables)


def page(benchmark: str) -> str:
    """The section of a benchmark: what it measures, its picture and table, machine and versions."""
    name, _, only = benchmark.partition("-")
    facts = results(benchmark)
    described = ast.get_docstring(ast.parse(file_of(name).read_text())) or ""
    options = f"{f' --only {only}' if only else ''} --rounds {facts['options']['rounds']}"
    versions = ", ".join(f"{each} {number}" for each, number in facts["versions"].items() if number != "not installed")
    measured = f"Medians.\n\n{costs(benchmark)}"
    if benchmark in PICTURES:
        rule = (
            "The column frames/s is ours; the others are how many times faster that is. Medians of interleaved rounds."
        )
        measured = f"![{benchmark}]({benchmark}.svg)\n\n{rule}\n\n{table(benchmark)}"
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

    folder.mkdir(exist_ok=True)
    for benchmark in PICTURES:
        picture(benchmark, folder / f"{benchmark}.svg")
    sections = [*map(page, (*PICTURES, *COSTS)), gpu.section(RESULTS / "gpu.json", folder)]
    (folder / "index.md").write_text("\n".join([INTRODUCTION, *sections]))


def main(arguments: Sequence[str]) -> None:
    """Write the README's picture, and the site's pages."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks plot", description=__doc__)
    parser.add_argument("--out", type=Path, default=DOCS, metavar="DIR", help="the folder of the documentation")
    out = parser.parse_args(arguments).out
    speed_picture(out / "pictures" / "speed.svg")
    write_pages(out / "benchmarks")
