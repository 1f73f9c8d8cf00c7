"""`RayCollector` and its peers: frames per second, and how long they take to start.

The limit, `processes`, is our `MultiSyncDataCollector` with as many processes, in the same rounds. Batches are 100 ms
of work of each actor, or more: 3,000 frames of CartPole (2x64 tanh), or 32 steps that sleep and have so many
KiB, which show what the way through the object store costs where there are cores enough. `rllib` has a network of the
same size, and a value network beside it. What was begun before a block, and one batch more, is read before it.

Each contestant has a cluster of its own and stands still with it, daemons and actors, while others are measured. Ray
takes no harm, since its health checks stand still as well. All actors have the nice value 0, as processes have; Ray's
default is 15. With ``--rounds 4`` all takes some twenty minutes on two cores.

A start is the time to the first batch of 2 actors, in a process that has imported the library and in which Ray runs
(`ray.init` is shown by itself); the second collector is another one after the first was shut down.

A rollout's cost is the CPU time of the driver's process, and that of the node's daemon `raylet`, for each rollout of 2
actors that do nothing but fill batches of so many KiB, so that they follow one another as fast as the machine can.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import psutil

from benchmarks.contestants.cluster_peers import RLlib, cluster, contestants, our_actors
from benchmarks.contestants.worker_envs import PAYLOAD_STEPS
from benchmarks.harness.isolated import Isolated, in_new_processes, interleaved, start_twice
from benchmarks.harness.report import compare
from benchmarks.harness.runner import AbsentError, Cell, Measured, Options, Result
from benchmarks.workers import OURS, OURS_ASYNC, frames_per_second, in_ms, with_shares

ENV, LENGTH = "CartPole-v1", 3_000  # frames of an actor's batch
ACTORS = (1, 2, 4)
PAYLOADS = (1 << 18, 1 << 24)  # bytes
PAYLOAD_WORK = 0.1  # seconds of a batch
COSTS = (1 << 14, 1 << 18, 1 << 24)  # bytes
COUNTED = 100  # rollouts: the kernel counts a daemon's time in hundredths of a second
BLOCK = 1.0  # seconds
LIMIT = "processes"
AHEAD = {OURS_ASYNC: 2, "torchrl async": 1}  # batches of an actor that may be ready or in progress
_STARTS = {OURS: "funcollect", LIMIT: "funcollect", "torchrl sync": "torchrl.collectors.distributed"}


def results(options: Options) -> Iterator[Result]:
    for cell in cells(options.scale):
        if options.only in cell.name:
            yield with_shares(compare(cell, measure(cell, options), OURS), (OURS, LIMIT), (OURS_ASYNC, LIMIT))
    if options.only in "cost of a rollout":
        yield in_ms("cost of a rollout", costs(options.rounds))
    if options.only in "start":
        yield in_ms("start", starts(options.rounds))


def cells(scale: float = 1.0) -> Iterator[Cell]:
    """Yield the cells of the benchmark, which are also those of `compare`."""
    for actors in ACTORS:
        note = f"{LENGTH:,} frames of each actor per batch"
        yield _cell(f"{ENV} {actors}", note, contestants(ENV, actors, LENGTH), actors, scale)
    for size in PAYLOADS:
        made = contestants(f"payload/{size}/{PAYLOAD_WORK / PAYLOAD_STEPS}", 2, PAYLOAD_STEPS)
        note = f"2 actors, {PAYLOAD_STEPS} frames of {PAYLOAD_WORK:g} s in {size >> 10:,} KiB per batch"
        yield _cell(f"payload {size >> 10} KiB", note, made, 2, scale)


def _cell(name: str, note: str, made: Mapping[str, Callable[[], Any]], actors: int, scale: float) -> Cell:
    stale = {each: 1 + AHEAD.get(each, 0) * actors for each in made}
    return Cell(name=name, note=note, contestants=made, block=BLOCK * scale, ours=(OURS, OURS_ASYNC), stale=stale)


def measure(cell: Cell, options: Options) -> Measured:
    """Measure frames per second in blocks. An absent contestant is an error if it is ours or the limit."""

    def block(name: str, contestant: Isolated) -> float:
        return float(contestant.ask(frames_per_second, cell.block, cell.stale[name]))

    rates, absent = interleaved(cell.contestants, block, options.rounds)
    for name in {OURS, OURS_ASYNC, LIMIT} & absent.keys():
        raise AbsentError(absent[name])
    return Measured(rates=rates, absent=absent)


def costs(rounds: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return the CPU seconds that a rollout costs on the driver's node, without those of the actor."""
    makers = {
        f"{size >> 10:,} KiB": partial(our_actors, f"payload/{size}", 2, PAYLOAD_STEPS, sync=False) for size in COSTS
    }
    found, absent = interleaved(makers, lambda _, contestant: contestant.ask(_cost, COUNTED), rounds)
    return {f"{who}, {name}": [one[who] for one in each] for name, each in found.items() for who in each[0]}, absent


def _cost(contestant: Any, count: int) -> dict[str, float]:
    processes = {"driver": (own := psutil.Process())}
    processes |= {each.name(): each for each in own.children(recursive=True) if each.name() == "raylet"}
    before = {who: sum(process.cpu_times()[:2]) for who, process in processes.items()}
    for _ in range(count):
        contestant.run()
    return {who: (sum(process.cpu_times()[:2]) - before[who]) / count for who, process in processes.items()}


def starts(rounds: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return the seconds that Ray and the collectors take to start."""
    makers: dict[str, tuple[Callable[[], Any], Callable[[Any], dict[str, float]]]] = {
        name: (partial(importlib.import_module, library), partial(_start, name=name))
        for name, library in _STARTS.items()
    }
    return in_new_processes(makers | {"rllib": (partial(RLlib, 2, 100), _start_of_rllib)}, rounds)


def _start(_: Any, name: str) -> dict[str, float]:
    took = {}
    if name != LIMIT:
        import ray

        began = time.perf_counter()
        ray.init(**cluster(2))
        took["ray.init"] = time.perf_counter() - began
    return took | start_twice(name, contestants(ENV, 2, 100)[name])


def _start_of_rllib(contestant: RLlib) -> dict[str, float]:
    return {"rllib, first": contestant.seconds}
