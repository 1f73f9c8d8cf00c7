"""Speed of two revisions of the package, contestant by contestant, in interleaved rounds.

In each round, each revision has a new process, which is stopped while the other one is measured. Both run the
benchmark files of this tree, so the work is the same. Times are per frame: wall time, and the CPU time of the process
and its workers. A speed ratio is the speed after over the speed before. The verdict is "no slower" if the 95 % interval
of the ratio by wall time holds 1 or lies above it, from 9 rounds on. Of cells that have not changed, 2 % look slower by
chance: measure them again with --only. The exit status is 1 if anything is slower or broken.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.compare.comparison import AFTER, CLOCKS, ENOUGH, SIDES, Comparison, Name, Ratio, compared
from benchmarks.compare.revisions import Tree, trees
from benchmarks.compare.served import Work
from benchmarks.compare.side import Side
from benchmarks.harness.report import heading, save, setting, spread, table
from benchmarks.harness.runner import Options

NAMES = ("collect", "fused", "policies", "workers", "replay")
COMPARED = (*NAMES, "step", "vector", "imports", "ray", "suites")  # those that declare `cells()`
REPOSITORY = Path(__file__).parents[2]
BAD = ("slower", "broken")
LOSS = 0.05  # of speed; the summary counts the comparisons that could not have shown one


@dataclass(frozen=True, kw_only=True)
class CompareOptions(Options):
    """What the command line says; `after` is None for the working tree."""

    before: str
    after: str | None
    names: Sequence[str]


def main(arguments: Sequence[str], results: Path) -> int:
    """The exit status of ``python -m benchmarks compare ARGUMENTS``."""
    parsed = _parser(results).parse_args(arguments)
    options = CompareOptions(
        rounds=parsed.rounds,
        scale=parsed.scale,
        only=parsed.only,
        before=parsed.before,
        after=parsed.after,
        names=parsed.names or NAMES,
    )
    verdicts = {each.verdict for each in run(options, REPOSITORY, parsed.out).values()}
    return int(not verdicts.isdisjoint(BAD))


def _parser(results: Path) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", type=_benchmark, metavar="NAME", help=f"benchmarks (default: {' '.join(NAMES)})"
    )
    parser.add_argument("--before", required=True, metavar="REVISION")
    parser.add_argument("--after", metavar="REVISION", help="default: the working tree as it is")
    parser.add_argument("--rounds", type=_positive, default=ENOUGH, help=f"rounds of each cell (default: {ENOUGH})")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the length of a block (default: 1)")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="only the cells whose name holds this")
    parser.add_argument("--out", type=Path, default=results, metavar="DIR", help="where the JSON goes")
    return parser


def _benchmark(text: str) -> str:
    if text not in COMPARED:
        raise argparse.ArgumentTypeError(f"{text!r} is not compared: name some of {', '.join(COMPARED)}")
    return text


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} rounds: give at least 1, or {ENOUGH} for a verdict")
    return number


def run(options: CompareOptions, repository: Path, out: Path) -> dict[Name, Comparison]:
    """Compare, print the tables and save the numbers as they come.

    Args:
        options: of the command line.
        repository: root of a git repository with the package and the benchmarks.
        out: folder for the JSON.
    """
    with trees(repository, options.before, options.after) as pair:
        sides = dict(zip(SIDES, pair, strict=True))
        facts = {**setting(options), **{side: _facts(tree) for side, tree in sides.items()}}
        print(heading(__doc__, facts), *(f"{side}: {tree}" for side, tree in sides.items()), sep="\n", flush=True)
        found: dict[Name, Comparison] = {}
        data: dict[str, dict[str, Any]] = {}
        for some in _groups({side: tree.path for side, tree in sides.items()}, options):
            found |= some
            for work in dict.fromkeys(name.work for name in some):
                each = {name.contestant: comparison for name, comparison in some.items() if name.work == work}
                tqdm.write(f"\n{cell_table(work, each)}")
                data.setdefault(work.benchmark, {})[work.cell] = cell_data(work, each)
            save(out, "compare", facts, data)
    print(f"\n{summary(found)}", flush=True)
    return found


def _groups(paths: Mapping[str, Path], options: CompareOptions) -> Iterator[dict[Name, Comparison]]:
    works = _cells(paths[AFTER], options)
    with tqdm(total=options.rounds * sum(len(work.ours) for work in works), unit="pair", disable=None) as bar:
        yield from compared(paths, works, options.rounds, options.scale, bar.update)


def _cells(tree: Path, options: CompareOptions) -> list[Work]:
    with Side(tree) as side:
        works = [work for name in options.names for work in side.ask("cells", name, options.only)]
    if not works:
        raise SystemExit(f"no cell of {', '.join(options.names)} holds {options.only!r} in its name")
    return works


def _facts(tree: Tree) -> dict[str, Any]:
    return {"commit": tree.commit, "uncommitted": tree.changed}


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
