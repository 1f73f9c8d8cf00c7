"""Hand-overs of batches from workers to the reader: cells and measurements of `workers`."""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.contestants.worker_envs import PAYLOAD_STEPS, make
from benchmarks.contestants.worker_peers import ours, torchrl
from benchmarks.harness.isolated import interleaved
from benchmarks.harness.runner import Cell, Contestant

ASYNC, WARM = "funcollect async", "funcollect async, warm"
PAYLOADS = (1 << 18, 1 << 20, 1 << 24)  # bytes
WORK = 0.03  # seconds that the reader works between two hand-overs
IN_A_ROW = 10


def cells() -> Iterator[Cell]:
    """Yield the cells that `compare` runs."""
    for size in PAYLOADS:
        makers = _makers(size)
        names = [name for name in makers if name.startswith("funcollect")]
        contestants = {name: partial(HandOver, makers[name], second=name == WARM) for name in names}
        note = "a frame is one hand-over; CPU times contain the reader's other work"
        yield Cell(name=name_of(size), note=note, contestants=contestants, ours=names)


def measure(size: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds that each reader spent in `run`, with its next batch ready."""
    makers = _makers(size)
    found, absent = interleaved(makers, lambda name, each: each.ask(_hand_over, IN_A_ROW, name == WARM), rounds)
    return {name: [seconds for several in each for seconds in several] for name, each in found.items()}, absent


def name_of(size: int) -> str:
    return f"hand-over {size >> 10} KiB"


def _makers(size: int) -> dict[str, Callable[[], Contestant]]:
    work = (f"payload/{size}", 1, PAYLOAD_STEPS)
    return {
        "funcollect sync, prefetch": partial(ours, "MultiSyncDataCollector", *work, prefetch=True),
        ASYNC: partial(ours, "MultiaSyncDataCollector", *work),
        WARM: partial(ours, "MultiaSyncDataCollector", *work),
        "torchrl async": partial(torchrl, "MultiAsyncCollector", *work),
        "by hand": partial(Message, f"payload/{size}"),
    }


class Message:
    """By hand: a message of another process, and a TensorDict like a batch's, of views of memory that is there."""

    def __init__(self, name: str) -> None:
        import funcollect as fc

        collector = fc.SyncDataCollector(partial(make, name), None, frames_per_batch=PAYLOAD_STEPS, total_frames=-1)
        batch = next(collector)
        self._leaves: list[tuple[tuple[str, ...], torch.dtype, torch.Size, int]] = []
        self._shape = batch.shape
        size = 0
        for path, leaf in batch.items(include_nested=True, leaves_only=True):
            self._leaves.append((path if isinstance(path, tuple) else (path,), leaf.dtype, leaf.shape, size))
            size += -(-leaf.nbytes // 64) * 64
        collector.shutdown()
        self._memory = bytearray(size)
        self._own, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=_answer, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._own.send(0)

    def run(self) -> int:
        number = self._own.recv()
        nested: dict[str, Any] = {}
        for path, dtype, shape, offset in self._leaves:
            *nodes, name = path
            node = nested
            for each in nodes:
                node = node.setdefault(each, {})
            flat = torch.frombuffer(self._memory, dtype=dtype, count=shape.numel(), offset=offset)
            node[name] = flat.view(shape)
        frames = TensorDict(nested, self._shape).numel()
        self._own.send(number + 1)
        return frames

    def close(self) -> None:
        self._own.close()
        self._process.join()


def _answer(end: Connection) -> None:
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            end.send(end.recv())


class HandOver:
    """A collector whose hand-overs alone are measured by `compare`.

    Args:
        second: whether it is the second of two batches that are ready.
    """

    def __init__(self, make: Callable[[], Contestant], *, second: bool) -> None:
        self._collector = make()
        self._second = second

    def run(self) -> int:
        return self._collector.run()

    def timed(self) -> tuple[int, float]:
        """Return the number of hand-overs, and their seconds if each took as long as the median one."""
        return IN_A_ROW, IN_A_ROW * statistics.median(_hand_over(self._collector, IN_A_ROW, self._second))

    def close(self) -> None:
        self._collector.close()


def _hand_over(contestant: Contestant, count: int, second: bool) -> list[float]:
    seconds = []
    for _ in range(count + 1):  # the processes were stopped before the first one
        _work(WORK)
        if second:
            contestant.run()
        start = time.perf_counter()
        contestant.run()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def _work(seconds: float) -> None:
    """Do a reader's work: multiply matrices that fill the caches."""
    matrix = torch.randn(256, 256)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        (matrix @ matrix).tanh().sum().item()
