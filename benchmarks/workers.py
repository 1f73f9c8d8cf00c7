"""Collectors with workers: frames per second, what a hand-over costs the reader, and how long they take to start.

The limit, `alone`, is as many processes, each of which runs a `SyncDataCollector` and delivers to nobody, in the same
rounds. What is synchronous has a lower one, `in step`: there each begins its next batch when all have ended their last
one, so that each batch takes as long as the slowest of them. A batch is at least 50 ms of work. What workers have
ready as a block begins is read before it. Networks are 2x64 tanh, for games a small convolutional one; `sb3` has its
own. `gymnasium` is a loop by hand over `AsyncVectorEnv`. Each contestant's reader is a process of its own, which stands
still with its workers while others are measured; one that fails or hangs is absent. With ``--rounds 5`` all of it takes
some 25 minutes.

A hand-over is `next()` for a batch that is ready, while the reader works otherwise: ours with `prefetch` and async,
TorchRL's async; `by hand` reads a pipe's message and makes a TensorDict of the batch's keys. The reader's work leaves
code and tables in no cache, which makes a hand-over some four times as long: `warm` is ours for a second batch that is
ready, right after a first one. A start is the time from nothing to the first batch of 2 workers, in a process that has
imported the library; the second collector is another one after the first was shut down.
"""

from __future__ import annotations

import importlib
import operator
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from benchmarks.contestants import hand_overs
from benchmarks.contestants.worker_peers import Independent, ours, peers
from benchmarks.harness.isolated import Isolated, in_new_processes, interleaved, start_twice
from benchmarks.harness.report import compare, quartile_row, table
from benchmarks.harness.runner import AbsentError, Cell, Contestant, Measured, Options, Result

OURS, OURS_ASYNC = "funcollect sync", "funcollect async"
ALONE, IN_STEP = "alone", "in step"
SHARES = ((OURS, ALONE), (OURS, IN_STEP), (OURS_ASYNC, ALONE))
LENGTHS = {"CartPole-v1": 2_000, "HalfCheetah-v5": 1_000, "ale/Pong": 128, "sleep/0.001": 64}  # of a worker's batch
WORKERS = (1, 2, 4)
BLOCK, REST = 0.4, 0.1  # seconds: measured at once; that begun batches may take
AHEAD = 3  # batches of a worker that may be ready
_LIBRARIES = {
    OURS: "funcollect",
    "torchrl sync": "torchrl.collectors",
    "sb3": "stable_baselines3",
    "gymnasium": "gymnasium",
}


def results(options: Options) -> Iterator[Result]:
    for cell in _collectors(options.scale):
        if options.only in cell.name:
            yield with_shares(compare(cell, measure(cell, options), OURS), *SHARES)
    for size in hand_overs.PAYLOADS:
        name = hand_overs.name_of(size)
        if options.only in name:
            yield in_ms(name, hand_overs.measure(size, options.rounds))
    if options.only in "start":
        yield in_ms("start", starts(options.rounds))


def cells() -> Iterator[Cell]:
    """What `compare` runs: the collectors and the hand-overs."""
    yield from _collectors(scale=1.0)
    yield from hand_overs.cells()


def _collectors(scale: float) -> Iterator[Cell]:
    for name, length in LENGTHS.items():
        for workers in WORKERS:
            yield _cell(name, workers, length, BLOCK * scale)


def _cell(name: str, workers: int, length: int, seconds: float) -> Cell:
    contestants: dict[str, Callable[[], Contestant]] = {
        OURS: partial(ours, "MultiSyncDataCollector", name, workers, length),
        OURS_ASYNC: partial(ours, "MultiaSyncDataCollector", name, workers, length),
        ALONE: partial(Independent, name, workers, length, seconds),
        IN_STEP: partial(Independent, name, workers, length, seconds, in_step=True),
        **peers(name, workers, length),
    }
    note = f"{length:,} frames of each worker per batch"
    return Cell(
        name=f"{name} {workers}",
        note=note,
        contestants=contestants,
        block=seconds,
        ours=(OURS, OURS_ASYNC),
        stale={each: AHEAD * workers for each in contestants if "async" in each},
    )


def measure(cell: Cell, options: Options) -> Measured:
    """Blocks of frames per second; our own contestants, and the limit, cannot be absent."""

    def block(name: str, contestant: Isolated) -> float:
        return float(contestant.ask(frames_per_second, cell.block, cell.stale.get(name, 0)))

    rates, absent = interleaved(cell.contestants, block, options.rounds)
    for name in {OURS, OURS_ASYNC, ALONE, IN_STEP} & absent.keys():
        raise AbsentError(absent[name])
    return Measured(rates=rates, absent=absent)


def frames_per_second(contestant: Contestant, seconds: float, stale: int) -> float:
    """Return the frames per second of a block, after reading as many batches as may be ready before it."""
    time.sleep(REST)
    for _ in range(stale):
        contestant.run()
    if isinstance(contestant, Independent):
        return contestant.rate()
    frames = 0
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds or not frames:
        frames += contestant.run()
    return frames / elapsed


def with_shares(result: Result, *pairs: tuple[str, str]) -> Result:
    """Report the speeds of pairs of a contestant and its limit as shares, round by round."""
    rates = result.data["frames_per_second"]
    medians = {
        f"{own} / {limit}": statistics.median(map(operator.truediv, rates[own], rates[limit])) for own, limit in pairs
    }
    line = "; ".join(f"{name} {share:.3f}" for name, share in medians.items())
    return Result(name=result.name, table=f"{result.table}\n  {line}", data={**result.data, "of_limit": medians})


def starts(rounds: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return the seconds until the first batch of the first and the second collector of a process."""
    makers = {
        name: (partial(importlib.import_module, library), partial(_start, name=name))
        for name, library in _LIBRARIES.items()
    }
    return in_new_processes(makers, rounds)


def _start(_: Any, name: str) -> dict[str, float]:
    work = ("CartPole-v1", 2, 100)
    return start_twice(name, {OURS: partial(ours, "MultiSyncDataCollector", *work), **peers(*work)}[name])


def in_ms(name: str, measured: tuple[Mapping[str, list[float]], Mapping[str, str]]) -> Result:
    """Return a table of every contestant's times."""
    seconds, absent = measured
    rows = [quartile_row(who, [1_000 * value for value in values], 3) for who, values in seconds.items()]
    rows += [(who, "absent", "") for who in absent]
    medians = {who: statistics.median(values) for who, values in seconds.items()}
    text = "\n".join([table((name, "ms", "quartiles"), rows), *(f"  {why}" for why in absent.values())])
    return Result(name=name, table=text, data={"seconds": dict(seconds), "median": medians, "absent": dict(absent)})
