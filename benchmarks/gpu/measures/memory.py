"""The memory that both frameworks hold in one process, beside what each needs alone.

Each measurement has a process of its own, since JAX's peak cannot be reset. A need is the peak of a framework's arrays;
what it holds is the peak of its pool, which it does not give back. With `SETTINGS`, JAX's pool is CUDA's, which tells
no size: what both hold is then what the device lacks at most, beside what it lacked before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import torch

from benchmarks.gpu import machine
from benchmarks.gpu.built import NO_TIME, Builder
from benchmarks.gpu.cells import CELLS
from benchmarks.gpu.pairs import Ours, jax_pair, torch_pair
from benchmarks.harness.report import table
from benchmarks.harness.runner import Options, Result

RUNS = 3
PAIRS = {"jax": (jax_pair, "cartpole many"), "torch": (torch_pair, "cartpole torch")}
WHO = {"jax alone": ("jax",), "torch alone": ("torch",), "both": ("jax", "torch")}
SETTINGS = {"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"}


def measure_here(who: str, platform: str) -> dict[str, Any]:
    """The memory of both frameworks after a few rollouts, in turn, of the pairs of `who`."""
    machine.choose(platform)
    jax.numpy.zeros(1).block_until_ready()  # both frameworks have their contexts now
    lacks = Lacks(platform)
    made = [Ours(pair, *CELLS[cell].size(platform), platform) for pair, cell in map(PAIRS.__getitem__, WHO[who])]
    for _ in range(RUNS):
        for pair in made:
            pair.run()
    return machine.memory() | {"device": lacks.most()}


class Lacks:
    """Watches how much memory the device lacks beside what it lacks now, of all processes."""

    def __init__(self, platform: str) -> None:
        self._seen = [] if platform == "cpu" else [torch.cuda.mem_get_info()[0]]  # what is free
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def most(self) -> int | None:
        """The bytes so far at most; None on a CPU."""
        self._over.set()
        self._thread.join()
        return self._seen[0] - min(self._seen) if self._seen else None

    def _watch(self) -> None:
        while self._seen and not self._over.wait(0.001):
            self._seen.append(torch.cuda.mem_get_info()[0])


def result(_: Builder, options: Options, deadline: float) -> Iterator[Result]:
    """Three processes at once, since no time is measured, then one alone on the device, with `SETTINGS`."""
    try:
        held = _measured(WHO, options.platform, deadline, {})
        yield Result(name="memory", **report(held))
        held["settings"] = _measured(["both"], options.platform, deadline, SETTINGS)["both"]
    except subprocess.TimeoutExpired:
        yield Result(name="memory", table=f"memory: {NO_TIME}", data={"gaps": {"memory": NO_TIME}})
        return
    yield Result(name="memory", **report(held))


def _measured(who: Iterable[str], platform: str, deadline: float, settings: dict[str, str]) -> dict[str, Any]:
    """What `measure_here` returns in processes of their own, which run at once."""
    command = [sys.executable, "-c", "from benchmarks.gpu.measures import memory; memory.main()"]
    running = {
        each: subprocess.Popen(
            [*command, each, platform], stdout=subprocess.PIPE, text=True, env={**os.environ, **settings}
        )
        for each in who
    }
    try:
        outputs = {
            each: process.communicate(timeout=max(deadline - time.monotonic(), 1))[0]
            for each, process in running.items()
        }
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    return {each: json.loads(output.splitlines()[-1]) for each, output in outputs.items()}


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
    if most := held.get("settings", {}).get("device"):
        data["ratio_with_settings"] = most / sum(needs)
        line += f"; with {SETTINGS} {data['ratio_with_settings']:.2f}"
    return {"table": f"{table(('memory, MiB', 'JAX', 'Torch', 'sum'), rows)}\n{line}", "data": data}


def main() -> None:
    """Measure here, and print the result as JSON."""
    print(json.dumps(measure_here(sys.argv[1], sys.argv[2])))
