"""`python -m benchmarks NAME`: run one benchmark, print its tables, keep its numbers as JSON.

`python -m benchmarks compare --before REVISION [NAME ...]` compares two revisions of the package, `python -m benchmarks
plot` draws the results.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.harness.report import compared, heading, save, setting
from benchmarks.harness.runner import Options, module_of

NAMES = (
    "collect",
    "step",
    "daily",
    "suites",
    "agents",
    "vector",
    "uneven",
    "torchrl",
    "fused",
    "policies",
    "gpu",
    "replay",
    "offline",
    "workers",
    "ray",
    "overhead",
    "memory",
    "imports",
    "scale",
)
RESULTS = Path(__file__).parent / "results"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds of each cell (default: 15)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the length of a block (default: 1)")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="only the cells whose name holds this")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where the JSON goes")
    gpu = parser.add_argument_group("only for gpu")
    gpu.add_argument("--platform", choices=("cuda", "cpu"), help="where both frameworks run (default: cuda)")
    gpu.add_argument("--seconds", type=float, help="how long it may take (default: 300)")
    arguments = parser.parse_args()
    if arguments.name != "gpu" and (arguments.platform or arguments.seconds):
        parser.error(f"--platform and --seconds are for gpu, {arguments.name} has neither")
    return arguments


def options_of(arguments: argparse.Namespace) -> Options:
    chosen = Options(rounds=arguments.rounds, scale=arguments.scale, only=arguments.only)
    if arguments.name != "gpu":
        return chosen
    return replace(chosen, platform=arguments.platform or "cuda", seconds=arguments.seconds or 300.0)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # stopped contestants would otherwise outlive the command
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")  # read when JAX makes its client
    if sys.argv[1:2] == ["compare"]:
        raise SystemExit(importlib.import_module("benchmarks.compare").main(sys.argv[2:], RESULTS))
    if sys.argv[1:2] == ["plot"]:
        raise SystemExit(importlib.import_module("benchmarks.harness.plot").main(sys.argv[2:]))
    arguments = parse()
    benchmark = module_of(arguments.name)
    options = options_of(arguments)
    facts = setting(options)
    print(heading(benchmark.__doc__, facts), flush=True)
    results = {}
    measured = benchmark.results if hasattr(benchmark, "results") else partial(compared, benchmark.cells())
    for result in measured(options):
        if result.table:  # otherwise a part of the final result
            print(f"\n{result.table}", flush=True)
        results[result.name] = result.data
        save(arguments.out, arguments.name, facts, results)
    if not results:
        raise SystemExit(f"no cell of {arguments.name} holds {options.only!r} in its name")


if __name__ == "__main__":
    main()
