"""Print tables, write JSON, and record versions, machine and options."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.harness.runner import Cell, Measured, Options, Result, measure

PACKAGES = (
    "funcollect",
    "torch",
    "jax",
    "numpy",
    "tensordict",
    "gymnasium",
    "mujoco",
    "envpool",
    "ale-py",
    "optree",
    "torchrl",
    "ray",
    "stable_baselines3",
    "gymnax",
    "brax",
    "jumanji",
    "pgx",
    "flashbax",
    "pettingzoo",
    "mpe2",
)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def spread(values: Sequence[float]) -> float:
    """The interquartile range as a share of the median."""
    low, middle, high = quartiles(values)
    return (high - low) / middle


def setting(options: Options) -> dict[str, Any]:
    """Versions, machine and options."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": 1,
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "options": asdict(options),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def heading(title: str | None, facts: Mapping[str, Any]) -> str:
    """The first lines of a run."""
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    options = facts["options"]
    return "\n".join(
        [
            (title or "").strip(),
            "",
            f"{facts['date']}, {facts['cpu']}, {facts['cores']} cores, {facts['threads']} thread per contestant",
            versions,
            f"{options['rounds']} interleaved rounds; spread is the interquartile range",
        ]
    )


def save(directory: Path, name: str, facts: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Write what is known so far to the file of `file_name`, whole at every moment."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / file_name(name, facts["options"]["only"])
    new = path.with_suffix(".new")
    new.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")
    new.replace(path)


def file_name(name: str, only: str) -> str:
    """``NAME.json``, or ``NAME-ONLY.json`` for a part of the cells, all but letters, digits, dots and dashes as "_"."""
    part = f"-{only}" if only else ""
    return f"{name}{re.sub('[^A-Za-z0-9.-]', '_', part)}.json"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned text: the first column to the left, the others to the right."""
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if i else text.ljust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def compare(cell: Cell, measured: Measured, ours: str) -> Result:
    """Rates of every contestant, and how many times faster ours was, round by round."""
    rates = measured.rates
    ratios = {
        name: [own / other for own, other in zip(rates[ours], rates[name], strict=True)]
        for name in rates
        if name != ours
    }
    rows = [_row(name, rates[name], ratios.get(name)) for name in rates]
    rows += [(name, "absent", "", "", "") for name in measured.absent]
    notes = "; ".join([cell.note, *measured.absent.values()])
    columns = (cell.name, "frames/s", "spread", f"{ours} / it", "quartiles")
    data = {
        "note": cell.note,
        "frames_per_second": rates,
        "median": {name: statistics.median(values) for name, values in rates.items()},
        "ratio": {name: statistics.median(values) for name, values in ratios.items()},
        "absent": measured.absent,
    }
    return Result(name=cell.name, table=f"{table(columns, rows)}\n  {notes}", data=data)


def compared(cells: Iterable[Cell], options: Options, ours: str = "funcollect") -> Iterator[Result]:
    """Measure the cells whose names hold what `options` ask for; the results of a module that has none of its own."""
    for cell in cells:
        if options.only in cell.name:
            yield compare(cell, measure(cell, options), ours)


def quartile_row(name: str, values: Sequence[float], digits: int = 2) -> tuple[str, str, str]:
    """A name, the median, and the quartiles as text."""
    low, middle, high = quartiles(values)
    return name, f"{middle:,.{digits}f}", f"{low:,.{digits}f}-{high:,.{digits}f}"


def child(module: str, *arguments: object) -> Any:
    """What a module of the benchmarks prints last, as JSON, as a program in a process of its own."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _row(name: str, rates: Sequence[float], ratios: Sequence[float] | None) -> tuple[str, ...]:
    rate = f"{statistics.median(rates):,.0f}"
    if ratios is None:
        return name, rate, f"{spread(rates):.1%}", "", ""
    low, middle, high = quartiles(ratios)
    return name, rate, f"{spread(rates):.1%}", f"{middle:.3f}", f"{low:.3f}-{high:.3f}"
