"""What a frame, a worker and a batch cost as their numbers grow. Each round has a process of its own.

`host` (CartPole, 64 environments), `jax` (gymnax CartPole, 500) and `buffer` (`extend` by 10,000 frames) collect a
million frames in batches of that size, or one batch of ten million, and keep all of them; memory is the peak above what
the process had before. `workers` is the CPU time of all processes for a batch of 20 steps of each worker, whose
environment sleeps for a millisecond at each step. `batches of one step` is measured in one process,
after 10,000, 100,000 and a million of them.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from benchmarks.harness.report import child, quartiles, table
from benchmarks.harness.runner import Options, Result, one_thread
from benchmarks.memory import kernel

FRAMES = (10_000, 100_000, 1_000_000, 10_000_000)  # of a batch, or of a buffer
KEPT = 1_000_000  # frames that a process collects at least
CHUNK = 10_000  # frames of an `extend`
WORKERS = (2, 8, 64)
STEPS = 20  # of each worker in a batch
MARKS = (10_000, 100_000, 1_000_000)  # batches of one step after which is measured


class Instant(gymnasium.Env[Any, Any]):
    """Returns the same at every step of its episodes of 1,000 steps; a collector keeps the actions of a running one."""

    steps = 0

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.zeros(4, np.float32), 1.0, False, self.steps == 1_000, {}


class Asleep(Instant):
    """Sleeps for a millisecond at every step."""

    def step(self, action: Any) -> Any:
        time.sleep(1e-3)
        return super().step(action)


def results(options: Options) -> Iterator[Result]:
    frames = [int(each * options.scale) for each in FRAMES]
    for what in ("host", "jax", "buffer"):
        if options.only in what:
            yield _result(what, {f"{what} {each:,}": _children(options, what, each) for each in frames})
    if options.only in "workers":
        yield _result("workers", {f"{each} workers": _children(options, "workers", each) for each in WORKERS})
    if options.only in "batches of one step":
        marks = [int(each * options.scale) for each in MARKS]
        rows = {
            f"{mark:,} batches": [each] for mark, each in zip(marks, child(__name__, "batches", *marks), strict=True)
        }
        yield _result("batches of one step", rows)


def _children(options: Options, what: str, size: int) -> list[dict[str, float]]:
    return [child(__name__, what, size) for _ in range(options.rounds)]


def _result(name: str, rows: dict[str, list[dict[str, float]]]) -> Result:
    """The median and the quartiles of each quantity, round by round."""
    quantities = [*next(iter(rows.values()))[0]]
    lines = []
    for label, rounds in rows.items():
        found = [quartiles([each[quantity] for each in rounds]) for quantity in quantities]
        lines.append(
            (label, *(text for low, middle, high in found for text in (f"{middle:,.1f}", f"{low:,.1f}-{high:,.1f}")))
        )
    columns = ("", *(text for quantity in quantities for text in (quantity, "quartiles")))
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
    return {"ns/frame": seconds / total * 1e9, "bytes/frame": (kernel("VmHWM") - before) / total}


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
    return {"us/batch and worker": used * share, "us of it in the reader": reader * share}


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
            found.append({"us/batch": each, "MB resident": kernel("VmRSS") / 1e6, "descriptors": descriptors})
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
