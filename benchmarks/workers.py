"""Collectors with workers: frames per second, what a hand-over costs the reader, and how long they take to start.

The limit, `alone`, is as many processes, each of which runs a `SyncDataCollector` and delivers to nobody, in the same
rounds. A batch is at least 50 ms of work. What workers have ready as a block begins is read before it. Networks are
2x64 tanh, for games a small convolutional one; `sb3` has its own. `gymnasium` is a loop by hand over `AsyncVectorEnv`.

A hand-over is `next()` for a batch that is ready, while the reader works otherwise: ours with `prefetch` and async,
TorchRL's async. A start is the time from nothing to the first batch of 2 workers, in a process that has imported
the library; the second collector is another one after the first was shut down.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.collect import quiet_mujoco
from benchmarks.report import compare, quartiles, table
from benchmarks.runner import Cell, Contestant, Measured, Options, Result, one_thread
from benchmarks.worker_envs import PAYLOAD_STEPS
from benchmarks.worker_peers import AbsentError, Independent, Patient, ours, peers, torchrl

OURS, OURS_ASYNC = "funcollect sync", "funcollect async"
LENGTHS = {"CartPole-v1": 1_000, "HalfCheetah-v5": 500, "ale/Pong": 128, "sleep/0.001": 64}  # of a worker's batch
WORKERS = (1, 2, 4)
PAYLOADS = (1 << 18, 1 << 20, 1 << 24)  # bytes
BLOCK, REST, WORK = 2.0, 0.5, 0.03  # seconds: measured at once; that begun batches may take; of the reader, between two
AHEAD = 3  # batches of a worker that may be ready


def results(options: Options) -> Iterator[Result]:
    quiet_mujoco()
    one_thread()
    for name, length in LENGTHS.items():
        for workers in WORKERS:
            cell = _cell(name, workers, length, BLOCK * options.scale)
            if options.only in cell.name:
                yield _with_shares(compare(cell, measure(cell, workers, options), OURS))
    for size in PAYLOADS:
        name = f"hand-over {size >> 10} KiB"
        if options.only in name:
            yield in_ms(name, hand_overs(size, options.rounds))
    if options.only in "start":
        yield in_ms("start", starts(options.rounds))


def _cell(name: str, workers: int, length: int, seconds: float) -> Cell:
    contestants: dict[str, Callable[[], Contestant]] = {
        OURS: partial(ours, "MultiSyncDataCollector", name, workers, length),
        OURS_ASYNC: partial(ours, "MultiaSyncDataCollector", name, workers, length),
        "alone": partial(Independent, name, workers, length, seconds),
        **dict(peers(name, workers, length)),
    }
    note = f"{length:,} frames of each worker per batch"
    return Cell(name=f"{name} {workers}", note=note, contestants=contestants, block=seconds)


def measure(cell: Cell, workers: int, options: Options) -> Measured:
    """One block of each contestant per round, in a new order each round; those that fail are absent."""
    made, absent = built(cell.contestants)
    rates: dict[str, list[float]] = {name: [] for name in made}
    order = random.Random(0)
    try:
        for each in range(-1, options.rounds):  # the first one warms up
            for name in order.sample(list(made), len(made)):
                try:
                    rate = _block(made[name], cell.block, stale=AHEAD * workers if "async" in name else 0)
                except AbsentError as error:
                    absent[name] = f"{name} {error}"
                    del made[name], rates[name]
                    continue
                if each >= 0:
                    rates[name].append(rate)
    finally:
        for contestant in made.values():
            contestant.close()
    return Measured(rates=rates, absent=absent)


def built(makers: Mapping[str, Callable[[], Contestant]]) -> tuple[dict[str, Contestant], dict[str, str]]:
    """The contestants, and why others are absent."""
    made, absent = {}, {}
    for name, make in makers.items():
        try:
            made[name] = make()
        except AbsentError as error:
            absent[name] = f"{name} {error}"
    return made, absent


def _block(contestant: Contestant, seconds: float, *, stale: int) -> float:
    with awake(contestant):
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


def awake(contestant: Contestant) -> AbstractContextManager[None]:
    return contestant.awake() if isinstance(contestant, Patient) else nullcontext()


def _with_shares(result: Result) -> Result:
    """How near ours come to the limit, round by round."""
    rates = result.data["frames_per_second"]
    shares = {
        name: [own / limit for own, limit in zip(rates[name], rates["alone"], strict=True)]
        for name in (OURS, OURS_ASYNC)
    }
    medians = {name: statistics.median(each) for name, each in shares.items()}
    line = "; ".join(f"{name} / alone {share:.3f}" for name, share in medians.items())
    return Result(name=result.name, table=f"{result.table}\n  {line}", data={**result.data, "of_limit": medians})


def hand_overs(size: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds that each reader spent in `run`, with its next batch ready."""
    work = (f"payload/{size}", 1, PAYLOAD_STEPS)
    made, absent = built(
        {
            "funcollect sync, prefetch": partial(ours, "MultiSyncDataCollector", *work, prefetch=True),
            OURS_ASYNC: partial(ours, "MultiaSyncDataCollector", *work),
            "torchrl async": partial(torchrl, "MultiAsyncCollector", *work),
        }
    )
    seconds: dict[str, list[float]] = {name: [] for name in made}
    try:
        for each in range(-10, 10 * rounds):
            for name, contestant in made.items():
                with awake(contestant):
                    _work(WORK)
                    start = time.perf_counter()
                    contestant.run()
                    if each >= 0:
                        seconds[name].append(time.perf_counter() - start)
    finally:
        for contestant in made.values():
            contestant.close()
    return seconds, absent


def _work(seconds: float) -> None:
    """What a reader does: matrices that fill the caches."""
    matrix = torch.randn(256, 256)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        (matrix @ matrix).tanh().sum().item()


def starts(rounds: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds until the first batch of the first and the second collector of a process."""
    seconds: dict[str, list[float]] = {}
    absent: dict[str, str] = {}
    for _ in range(max(rounds // 5, 1)):
        for name in (OURS, "torchrl sync", "sb3", "gymnasium"):
            try:
                took = _started(name)
            except AbsentError as error:
                absent[name] = f"{name} {error}"
                continue
            for which, each in zip(("first", "second"), took, strict=True):
                seconds.setdefault(f"{name}, {which}", []).append(each)
    return seconds, absent


def _started(name: str) -> tuple[float, float]:
    context = multiprocessing.get_context("spawn")
    own, theirs = context.Pipe()
    process = context.Process(target=_start_twice, args=(name, theirs))
    process.start()
    theirs.close()
    try:
        answer: tuple[float, float] | str = own.recv()
    except EOFError:
        answer = f"its process ended with exit code {process.exitcode}"
    process.join()
    if isinstance(answer, str):
        raise AbsentError(answer)
    return answer


def _start_twice(name: str, end: Connection) -> None:
    """In a process of its own."""
    one_thread()
    work = ("CartPole-v1", 2, 100)
    makers: dict[str, Callable[[], Any]] = {OURS: partial(ours, "MultiSyncDataCollector", *work), **dict(peers(*work))}
    __import__({OURS: "funcollect", "torchrl sync": "torchrl.collectors", "sb3": "stable_baselines3"}.get(name, name))
    took = []
    try:
        for _ in range(2):
            start = time.perf_counter()
            contestant = makers[name]()
            with awake(contestant):
                contestant.run()
            took.append(time.perf_counter() - start)
            contestant.close()
        end.send(tuple(took))
    except AbsentError as error:
        end.send(str(error))


def in_ms(name: str, measured: tuple[Mapping[str, list[float]], Mapping[str, str]]) -> Result:
    """Times of every contestant as a table."""
    seconds, absent = measured
    rows = []
    for who, values in seconds.items():
        low, middle, high = (1_000 * value for value in quartiles(values))
        rows.append((who, f"{middle:,.3f}", f"{low:,.3f}-{high:,.3f}"))
    rows += [(who, "absent", "") for who in absent]
    medians = {who: statistics.median(values) for who, values in seconds.items()}
    text = "\n".join([table((name, "ms", "quartiles"), rows), *(f"  {why}" for why in absent.values())])
    return Result(name=name, table=text, data={"seconds": dict(seconds), "median": medians, "absent": dict(absent)})
