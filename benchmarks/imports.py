"""Import time in fresh interpreters: the required packages, and what `import funcollect` adds to them.

`names` resolves every public name besides, which `import funcollect` puts off until first use.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.harness.report import quartiles, table
from benchmarks.harness.runner import Options, Result

_CHILD = """
import json, sys, time
start = time.perf_counter()
import torch, tensordict, gymnasium, optree
base = time.perf_counter()
{statement}
end = time.perf_counter()
heavy = [name for name in ("jax", "ray") if name in sys.modules]
print(json.dumps(dict(base=base - start, added=end - base, total=end - start, heavy=heavy)))
"""
STATEMENTS = {
    "base": "pass",
    "funcollect": "import funcollect",
    "names": "import funcollect; [getattr(funcollect, name) for name in funcollect.__all__]",
}


def results(options: Options) -> Iterator[Result]:
    if options.only not in "imports":
        return
    for statement in STATEMENTS.values():
        _child(statement)  # compiles and reads files once, before anything is measured
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in STATEMENTS}
    order = random.Random(0)
    for _ in range(options.rounds):
        for name in order.sample(list(STATEMENTS), len(STATEMENTS)):
            measured[name].append(_child(STATEMENTS[name]))
    yield _result(measured)


def _child(statement: str) -> dict[str, Any]:
    code = _CHILD.format(statement=statement)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def _result(measured: dict[str, list[dict[str, Any]]]) -> Result:
    rows = [_row(name, rounds, measured["base"]) for name, rounds in measured.items()]
    columns = (
        "imports",
        "total ms",
        "quartiles",
        "total / base",
        "added ms",
        "added / its own base",
        "jax, ray loaded",
    )
    heavy = sorted({module for one in measured["funcollect"] for module in one["heavy"]})
    return Result(name="imports", table=table(columns, rows), data={"seconds": measured, "loaded": heavy})


def _row(name: str, rounds: list[dict[str, Any]], base: list[dict[str, Any]]) -> tuple[str, ...]:
    low, middle, high = quartiles([one["total"] * 1e3 for one in rounds])
    ratio = quartiles([one["total"] / other["total"] for one, other in zip(rounds, base, strict=True)])[1]
    added = quartiles([one["added"] * 1e3 for one in rounds])[1]
    share = quartiles([one["added"] / one["base"] for one in rounds])[1]
    loaded = ", ".join(sorted({module for one in rounds for module in one["heavy"]})) or "none"
    return name, f"{middle:.0f}", f"{low:.0f}-{high:.0f}", f"{ratio:.3f}", f"{added:.1f}", f"{share:.2%}", loaded
