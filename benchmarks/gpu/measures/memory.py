"""The memory that both frameworks hold in one process, beside what each needs alone.

Each measurement has a process of its own, since JAX's peak cannot be reset. A need is the peak of a framework's arrays;
what it holds is the peak of its pool, which it does not give back.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu import machine
from benchmarks.gpu.built import NO_TIME, Builder
from benchmarks.gpu.cells import CELLS
from benchmarks.gpu.pairs import Ours, jax_pair, torch_pair
from benchmarks.harness.report import table
from benchmarks.harness.runner import Options, Result

RUNS = 3
PAIRS = {"jax": (jax_pair, "cartpole many"), "torch": (torch_pair, "cartpole torch")}
WHO = {"jax alone": ("jax",), "torch alone": ("torch",), "both": ("jax", "torch")}


def measure_here(who: str, platform: str) -> dict[str, Any]:
    """The memory of both frameworks after a few rollouts, in turn, of the pairs of `who`."""
    machine.choose(platform)
    made = [Ours(pair, *CELLS[cell].size(platform), platform) for pair, cell in map(PAIRS.__getitem__, WHO[who])]
    for _ in range(RUNS):
        for pair in made:
            pair.run()
    return machine.memory()


def result(_: Builder, options: Options, deadline: float) -> Iterator[Result]:
    """All three processes at once, since no time is measured."""
    command = [sys.executable, "-c", "from benchmarks.gpu.measures import memory; memory.main()"]
    running = {
        who: subprocess.Popen([*command, who, options.platform], stdout=subprocess.PIPE, text=True) for who in WHO
    }
    try:
        outputs = {
            who: each.communicate(timeout=max(deadline - time.monotonic(), 1))[0] for who, each in running.items()
        }
    except subprocess.TimeoutExpired:
        yield Result(name="memory", table=f"memory: {NO_TIME}", data={"gaps": {"memory": NO_TIME}})
        return
    finally:
        for each in running.values():
            each.kill()
            each.wait()
    held = {who: json.loads(output.splitlines()[-1]) for who, output in outputs.items()}
    yield Result(name="memory", **report(held))


def report(held: dict[str, Any]) -> dict[str, Any]:
    """The table and the numbers; without a GPU nothing is counted."""
    if held["both"]["torch"] is None or held["both"]["jax"] is None:
        return {"table": "memory: not counted on a CPU", "data": {"held": held}}
    needs = [held["jax alone"]["jax"]["peak_bytes_in_use"], held["torch alone"]["torch"]["max_allocated"]]
    pool = held["both"]["jax"]
    pools = [pool.get("peak_pool_bytes", pool["peak_bytes_in_use"]), held["both"]["torch"]["max_reserved"]]
    peaks = [held["both"]["jax"]["peak_bytes_in_use"], held["both"]["torch"]["max_allocated"]]
    ratio = sum(pools) / sum(needs)
    rows = [
        (who, *(f"{size / 2**20:,.0f}" for size in (*sizes, sum(sizes))))
        for who, sizes in (("needed alone", needs), ("needed together", peaks), ("held together", pools))
    ]
    line = f"  held together / needed alone: {ratio:.2f}"
    data = {"held": held, "needs": needs, "peaks_together": peaks, "pools_together": pools, "ratio": ratio}
    return {"table": f"{table(('memory, MiB', 'JAX', 'Torch', 'sum'), rows)}\n{line}", "data": data}


def main() -> None:
    """Measure here, and print the result as JSON."""
    print(json.dumps(measure_here(sys.argv[1], sys.argv[2])))
