"""Lines, files, functions and imports of the package and its tests: `python -m benchmarks.house.sizes [--out FILE]`.

The parts are those that ARCHITECTURE.md budgets. Lines include docstrings, comments and empty lines.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST = 31_700  # lines of the package
_PLAIN = ("jax_setup", "memo", "memory", "words")
PARTS: dict[str, tuple[int, tuple[str, ...]]] = {  # the most lines, and the paths, the longest that fits counts
    "keys, specs, protocols, checks, files, plain data": (
        2_400,
        (
            "", "protocols",
            *(f"interop/{name}.py" for name in _PLAIN),
        ),
    ),
    "bridge: DLPack, lowering, Torch in JAX": (3_100, ("interop", "policies/torch_in_jax.py")),
    "policies": (3_800, ("policies",)),
    "envs, without lane workers": (3_900, ("envs",)),
    "core": (4_800, ("core",)),
    "workers: kernel, processes, lanes, Ray, evaluator": (
        4_100,
        (
            "processes", "collectors/workers", "collectors/cluster", "envs/host/lane_workers",
            "evaluation.py", "workers",
        ),
    ),
    "collectors": (1_800, ("collectors",)),
    "buffers": (3_300, ("buffers",)),
    "trajectories, statistics": (1_600, ("trajectories", "running_statistics.py")),
    "tools: testing, plots, progress, profile, cli, checkpoint": (
        2_900,
        (
            "testing", "plots", "progress.py", "profiling.py", "cli", "checkpoint.py", "__main__.py",
        ),
    ),
}  # fmt: skip


def part_of(path: Path) -> str:
    """The part to which a file of the package belongs."""
    name = path.relative_to(ROOT / "funcollect").as_posix()
    fits = [
        (len(prefix), part)
        for part, (_, prefixes) in PARTS.items()
        for prefix in prefixes
        if not prefix or name == prefix or name.startswith(f"{prefix}/")
    ]
    return max(fits)[1]


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def counts(folder: str) -> Counter[str]:
    """Lines, files, functions, classes and imported names of a folder's modules."""
    found: Counter[str] = Counter()
    for path in (ROOT / folder).rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        found["lines"] += lines(path)
        found["files"] += 1
        found["functions"] += sum(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) for node in nodes)
        found["classes"] += sum(isinstance(node, ast.ClassDef) for node in nodes)
        found["imports"] += sum(isinstance(node, (ast.Import, ast.ImportFrom)) for node in nodes)
    return found


def parts() -> dict[str, int]:
    """The lines of each part of the package."""
    found = dict.fromkeys(PARTS, 0)
    for path in (ROOT / "funcollect").rglob("*.py"):
        found[part_of(path)] += lines(path)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where the numbers go as JSON")
    arguments = parser.parse_args()
    of_parts, of_folders = parts(), {folder: counts(folder) for folder in ("funcollect", "tests", "benchmarks")}
    for name, number in of_parts.items():
        print(f"{name:60} {number:7,} of {PARTS[name][0]:,}")
    print(f"{'sum':60} {sum(of_parts.values()):7,} of {MOST:,}")
    for folder, found in of_folders.items():
        print(f"{folder:12}" + "".join(f"{number:8,} {what}" for what, number in found.items()))
    makefile = lines(ROOT / "Makefile")
    print(f"Makefile     {makefile:8,} lines")
    if arguments.out:
        numbers = {"parts": of_parts, **{folder: dict(found) for folder, found in of_folders.items()}}
        arguments.out.write_text(json.dumps(numbers | {"Makefile": makefile}, indent=1) + "\n")


if __name__ == "__main__":
    main()
