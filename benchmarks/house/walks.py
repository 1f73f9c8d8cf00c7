"""The files and functions of the library that a call passes, counted by a trace of the real call.

`python -m benchmarks.house.walks` prints a table; `--out FILE` also writes JSON.

A walk counts the functions of the package that are entered in this process, each once, and the files in which they
are. Every call is made once before, so that what is prepared at the first call is not counted. The walk up to the first
step is the exception: it belongs to a first call.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import gymnasium
import torch
from torch import nn

import funcollect as fc

PACKAGE = str(Path(fc.__file__).parent)


class Walk:
    """The functions that were entered while it was running."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()
        self.calls = 0

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            self.calls += 1
            self.functions.add((code.co_filename, code.co_qualname))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)

    @property
    def files(self) -> list[str]:
        return sorted({name.removeprefix(PACKAGE).lstrip("/") for name, _ in self.functions})

    def counts(self) -> dict[str, int]:
        return {"files": len(self.files), "functions": len(self.functions), "calls": self.calls}


class FirstStepError(Exception):
    """Raised by an environment at its first step."""


class Stops(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Ends the walk at the first step."""

    def step(self, action: Any) -> Any:
        sys.setprofile(None)
        return self.env.step(action)


def network() -> Any:
    return fc.torch_policy(nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2)), head=fc.heads.categorical)


def to_the_first_step() -> Walk:
    """`fc.rollout` with a Torch module on Gymnasium, from the call to the first `env.step`."""
    env, policy, walk = fc.make_env(lambda: Stops(gymnasium.make("CartPole-v1"))), network(), Walk()
    state = fc.init(env, policy, seed=0)
    with walk.running():
        fc.rollout(env, policy, state, 8)
    return walk


def fused() -> Walk:
    """`fc.rollout` with a lowered Torch module on a JAX environment."""
    env, policy, walk = fc.make_env("gymnax/CartPole-v1", num_envs=4), network(), Walk()
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), 8)
    with walk.running():
        fc.rollout(env, policy, state, 8)
    return walk


def from_workers() -> Walk:
    """``next(collector)`` over two processes, as far as the reader's process goes."""
    walk = Walk()
    env = fc.make_env("CartPole-v1", num_envs=2)
    with fc.MultiSyncDataCollector([env] * 2, network(), frames_per_batch=64, total_frames=-1, seed=0) as collector:
        batches = iter(collector)
        next(batches)
        with walk.running():
            next(batches)
    return walk


def in_a_worker() -> Walk:
    """The same with workers in this process: the reader's way and the worker's."""
    walk = Walk()
    env, keywords = fc.make_env("CartPole-v1", num_envs=2), {"frames_per_batch": 64, "total_frames": -1, "seed": 0}
    with fc.MultiSyncDataCollector([env] * 2, network(), in_process=True, **keywords) as collector:
        batches = iter(collector)
        next(batches)
        with walk.running():
            next(batches)
    return walk


def _buffer(call: Callable[[Any, Any], Any]) -> Walk:
    walk = Walk()
    env, policy = fc.make_env("CartPole-v1", num_envs=2), network()
    _, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 64)
    sampler = fc.SliceSampler(slice_len=4)
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(1_000, ndim=2), sampler=sampler, batch_size=32)
    buffer.extend(batch)
    buffer.sample()
    with walk.running():
        call(buffer, batch)
    return walk


WALKS: dict[str, Callable[[], Walk]] = {
    "rollout, to the first step": to_the_first_step,
    "fused rollout": fused,
    "a worker's batch, reader": from_workers,
    "a worker's batch, both": in_a_worker,
    "extend": lambda: _buffer(lambda buffer, batch: buffer.extend(batch)),
    "sample": lambda: _buffer(lambda buffer, _: buffer.sample()),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where the counts go as JSON")
    parser.add_argument("--files", action="store_true", help="also list the files")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    counts: dict[str, dict[str, int]] = {}
    for name, measure in WALKS.items():
        walk = measure()
        counts[name] = walk.counts()
        print(f"{name:28}" + "".join(f"{number:7} {what}" for what, number in counts[name].items()))
        if arguments.files:
            print("\n".join(f"    {file}" for file in walk.files))
    if arguments.out:
        arguments.out.write_text(json.dumps(counts, indent=1) + "\n")


if __name__ == "__main__":
    main()
