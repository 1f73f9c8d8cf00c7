"""Peak memory above the batch itself, for 200 MB batches (`--scale 1`) of 84x84x4 frames; one fresh process per round.

Two batches are collected, the first one let go before the second. Peak and resident memory are what Linux
counts; the batch
counts with the memory that its leaves really have.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from benchmarks.harness.report import child, quartiles, table
from benchmarks.harness.runner import Options, Result

FRAME = (84, 84, 4)
BATCH = 200_000_000  # bytes of observation and next.observation together
EPISODE = 300  # steps
SIZES = (1, 8)
ROUNDS_PER_PROCESS = 5  # a process is slow to start and its peak varies little


class Pixels(gymnasium.Env[Any, Any]):
    """Frames of noise in turn, fresh memory each, as a renderer gives them."""

    observation_space = gymnasium.spaces.Box(0, 255, FRAME, np.uint8)
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self) -> None:
        self._frames = np.random.default_rng(0).integers(0, 256, (16, *FRAME), np.uint8)
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._step = 0
        return self._frames[0].copy(), {}

    def step(self, action: Any) -> Any:
        self._step += 1
        return self._frames[self._step % 16].copy(), 1.0, self._step == EPISODE, False, {}


def results(options: Options) -> Iterator[Result]:
    for how in SOURCES:
        for num_envs in SIZES:
            name = f"{how} {num_envs}"
            if options.only in name:
                length = int(BATCH * options.scale / (2 * np.prod(FRAME) * num_envs))
                rounds = max(1, options.rounds // ROUNDS_PER_PROCESS)
                yield _result(name, [child(__name__, how, num_envs, length) for _ in range(rounds)])


def _result(name: str, measured: list[dict[str, int]]) -> Result:
    shares = [(m["peak"] - m["before"] - m["batch"]) / m["batch"] for m in measured]
    low, middle, high = quartiles(shares)
    megabytes = [f"{quartiles([m[key] for m in measured])[1] / 1e6:,.0f}" for key in ("batch", "before", "peak")]
    row = (name, *megabytes, f"{middle:.1%}", f"{low:.1%}-{high:.1%}")
    columns = ("", "batch MB", "before MB", "peak MB", "above the batch", "quartiles")
    return Result(name=name, table=table(columns, [row]), data={"bytes": measured, "share": shares, "median": middle})


def measure_here(how: str, num_envs: int, length: int) -> dict[str, int]:
    """Collect two batches in a fresh process and return their peak memory."""
    next_batch = SOURCES[how](num_envs, length)
    gc.collect()
    before = kernel("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    for _ in range(2):
        size = _bytes(next_batch())
    return {"before": before, "peak": kernel("VmHWM"), "batch": size}


def _rollouts(num_envs: int, length: int) -> Callable[[], Any]:
    """Successive rollouts, after a short one in which everything is imported and compiled."""
    import funcollect as fc

    env = fc.make_env(Pixels, num_envs=None if num_envs == 1 else num_envs)
    policy = fc.random_policy(env)
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), 2)

    def next_batch() -> Any:
        nonlocal state
        state, batch = fc.rollout(env, policy, state, length)
        return batch

    return next_batch


def _collector(num_envs: int, length: int) -> Callable[[], Any]:
    import funcollect as fc

    _rollouts(num_envs, length)
    env = fc.make_env(Pixels, num_envs=None if num_envs == 1 else num_envs)
    collector = fc.SyncDataCollector(
        env, fc.random_policy(env), frames_per_batch=length * num_envs, total_frames=-1, seed=0
    )
    return iter(collector).__next__


SOURCES = {"rollout": _rollouts, "collector": _collector}


def kernel(field: str) -> int:
    """Bytes that the kernel counts for this process: ``VmRSS``, or ``VmHWM``, the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _bytes(batch: Any) -> int:
    storages = [leaf.untyped_storage() for leaf in batch.values(include_nested=True, leaves_only=True)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


if __name__ == "__main__":
    print(json.dumps(measure_here(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
