"""What a frame, a worker and a batch cost as their numbers grow. Each round has a process of its own.

`host` (CartPole, 64 environments), `jax` (gymnax CartPole, 500) and `buffer` (`extend` by 10,000 frames) collect a
million frames in batches of that size, or one batch of ten million, and keep all of them; memory is the peak above what
the process had before. `workers` is the CPU time of all processes for a batch of 20 steps of each worker, whose
environment sleeps for a millisecond at each step. `batches of one step` counts on in one process.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from benchmarks.harness.report import quartiles, table
from benchmarks.harness.runner import Options, Result, one_thread
from benchmarks.memory import kernel

FRAMES = (10_000, 100_000, 1_000_000, 10_000_000)  # of a batch, or of a buffer
KEPT = 1_000_000  # frames that a process collects at least
CHUNK = 10_000  # frames of an `extend`
WORKERS = (2, 8, 64)
STEPS = 20  # of each worker in a batch
MARKS = (10_000, 100_000, 1_000_000)  # batches of one step after which is measured


class Instant(gymnasium.Env[Any, Any]):
    """Returns the same at every step."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(4, np.float32), 1.0, False, False, {}


class Asleep(Instant):
    """Sleeps for a millisecond at every step."""

    def step(self, action: Any) -> Any:
        time.sleep(1e-3)
        return super().step(action)


def results(options: Options) -> Iterator[Result]:
    frames = [int(each * options.scale) for each in FRAMES]
    for what in ("host", "jax", "buffer"):
        if options.only in what:
            rows = {f"{what} {each:,}": _children(options, what, each) for each in frames}
            columns = ("", "ns/frame", "quartiles", "bytes/frame", "quartiles")
            yield _result(what, columns, rows, ("nanoseconds", "bytes"))
    if options.only in "workers":
        rows = {f"{each} workers": _children(options, "workers", each) for each in WORKERS}
        columns = ("", "us/batch and worker", "quartiles", "of which reader", "quartiles")
        yield _result("workers", columns, rows, ("microseconds", "reader"))
    if options.only in "batches of one step":
        marks = [int(each * options.scale) for each in MARKS]
        found = _child("batches", *marks)
        lines = [tuple(f"{each[name]:,.1f}" for name in each) for each in found]
        columns = ("batches", "us/batch", "MB resident", "descriptors")
        yield Result(name="batches of one step", table=table(columns, lines), data={"marks": found})


def _children(options: Options, what: str, size: int) -> list[dict[str, float]]:
    return [_child(what, size) for _ in range(options.rounds)]


def _child(what: str, *sizes: int) -> Any:
    command = [sys.executable, "-m", "benchmarks.scale", what, *map(str, sizes)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _result(name: str, columns: tuple[str, ...], rows: dict[str, list[dict[str, float]]], keys: Any) -> Result:
    lines = []
    for label, rounds in rows.items():
        cells = [label]
        for key in keys:
            low, middle, high = quartiles([each[key] for each in rounds])
            cells += [f"{middle:,.1f}", f"{low:,.1f}-{high:,.1f}"]
        lines.append(tuple(cells))
    return Result(name=name, table=table(columns, lines), data={"rounds": rows})


def _frames(make: Callable[[int], Callable[[], Any]], frames: int) -> dict[str, float]:
    """Time and peak memory of `frames` frames a call, for as many calls as give `KEPT` frames, all kept."""
    call = make(frames)
    call()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, calls = kernel("VmRSS"), max(1, KEPT // frames)
    started = time.perf_counter()
    kept = [call() for _ in range(calls)]
    seconds = time.perf_counter() - started
    total = len(kept) * frames
    return {"nanoseconds": seconds / total * 1e9, "bytes": (kernel("VmHWM") - before) / total}


def _rollouts(env_id: str, num_envs: int, frames: int) -> Callable[[], Any]:
    import funcollect as fc

    env = fc.make_env(env_id, num_envs=num_envs)
    policy = fc.random_policy(env)
    state = fc.init(env, policy, seed=0)
    lengths = itertools.chain([10] if env.backend != "jax" else [], itertools.repeat(frames // num_envs))

    def call() -> Any:
        nonlocal state
        state, batch = fc.rollout(env, policy, state, next(lengths))
        return batch

    return call


def _extends(frames: int) -> Callable[[], Any]:
    import funcollect as fc

    call = _rollouts("gymnax/CartPole-v1", 500, CHUNK)
    call()
    chunk = call()

    def fill() -> Any:
        buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(frames, ndim=2), batch_size=256)
        for _ in range(frames // CHUNK):
            buffer.extend(chunk)
        return buffer

    return fill


def _workers(count: int) -> dict[str, float]:
    import funcollect as fc

    batches = 100
    with fc.MultiSyncDataCollector(
        [Asleep] * count, None, frames_per_batch=STEPS * count, total_frames=-1, seed=0
    ) as collector:
        for _ in range(5):
            next(collector)
        before, own = _cpu_seconds(os.getpid()), time.process_time()
        for _ in range(batches):
            next(collector)
        used, reader = _cpu_seconds(os.getpid()) - before, time.process_time() - own
    share = 1e6 / (batches * count)
    return {"microseconds": used * share, "reader": reader * share}


def _cpu_seconds(process: int) -> float:
    """The CPU time of a process and of all that it has started."""
    nanoseconds = sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{process}/task").glob("*/schedstat"))
    listed = [path.read_text() for path in Path(f"/proc/{process}/task").glob("*/children")]
    return nanoseconds / 1e9 + sum(_cpu_seconds(int(child)) for child in " ".join(listed).split())


def _batches(*marks: int) -> list[dict[str, float]]:
    import funcollect as fc

    found = []
    with fc.SyncDataCollector(Instant, None, frames_per_batch=1, total_frames=-1, seed=0) as collector:
        done, started = 0, time.perf_counter()
        for mark in marks:
            for _ in range(mark - done):
                next(collector)
            each = (time.perf_counter() - started) / (mark - done) * 1e6
            descriptors = len(os.listdir("/proc/self/fd"))
            found.append({"batches": mark, "us": each, "megabytes": kernel("VmRSS") / 1e6, "descriptors": descriptors})
            done, started = mark, time.perf_counter()
    return found


def measure_here(what: str, *sizes: int) -> Any:
    """What a child measures."""
    one_thread()
    match what:
        case "host":
            return _frames(lambda frames: _rollouts("CartPole-v1", 64, frames), *sizes)
        case "jax":
            return _frames(lambda frames: _rollouts("gymnax/CartPole-v1", 500, frames), *sizes)
        case "buffer":
            return _frames(_extends, *sizes)
        case "workers":
            return _workers(*sizes)
        case _:
            return _batches(*sizes)


if __name__ == "__main__":
    print(json.dumps(measure_here(sys.argv[1], *map(int, sys.argv[2:]))))
