"""Frames per second of simulators whose steps or resets take unequal time: ours, in step and at their own pace.

Each lane has a worker process, and a step sleeps. Every contestant runs one Torch policy, which samples actions. The
peer is TorchRL's collector without barriers. The limit is what lanes could do if none ever waited for the policy or
for another lane: their number, divided by the mean time of a step, a share of a reset included. At a batch's end lanes
wait for the slowest: the bound is the limit with that wait.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from benchmarks.contestants.networks import tanh_mlp
from benchmarks.contestants.peers import Batches
from benchmarks.harness.report import compare
from benchmarks.harness.runner import Cell, Options, Result, measure

ANY, ALL, LANES = "wait='any'", "wait='all'", 16
TRIALS = 2_000  # batches of which the mean of the slowest lane is taken


@dataclass(frozen=True)
class Work:
    """Seconds of a step, uniform between two bounds; of a reset; steps of an episode; T."""

    step: tuple[float, float]
    reset: float
    episode: int
    length: int

    @property
    def mean(self) -> float:
        """Seconds of a step, a reset's share included."""
        return sum(self.step) / 2 + self.reset / self.episode

    def slowest(self) -> float:
        """The mean seconds of a batch's slowest lane."""
        drawn = np.random.default_rng(0)
        steps = drawn.uniform(*self.step, (TRIALS, LANES, self.length)).sum(-1)
        ends = (drawn.integers(self.episode, size=(TRIALS, LANES)) + self.length) // self.episode
        return float((steps + ends * self.reset).max(-1).mean())


WORK = {
    "steps of 1 to 10 ms": Work((1e-3, 1e-2), 0.0, 200, 256),
    "steps of 2 ms, resets of 200 ms": Work((2e-3, 2e-3), 0.2, 100, 128),
    "steps of 2 ms": Work((2e-3, 2e-3), 0.0, 200, 256),
}


class Sleeper(gymnasium.Env[Any, Any]):
    """A lane of the work, which begins at any step of its first episode."""

    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, work: Work, place: int = 0) -> None:
        self._work, self._left = work, 0
        self._first = 1 + place * work.episode // LANES
        self._times, self._row = np.random.default_rng(place), np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._left, self._first = self._first or self._work.episode, 0
        time.sleep(self._work.reset)
        return self._row, {}

    def step(self, action: Any) -> Any:
        time.sleep(self._times.uniform(*self._work.step))
        self._left -= 1
        return self._row, 0.0, self._left == 0, False, {}


def ours(work: Work, **wait: Any) -> Batches:
    import funcollect as fc

    env = fc.make_env([partial(Sleeper, work, place) for place in range(LANES)], parallel=True, **wait)
    policy, frames = fc.torch_policy(tanh_mlp(4, 2), head=fc.heads.categorical), LANES * work.length
    return Batches(fc.SyncDataCollector(env, policy, frames_per_batch=frames, total_frames=-1, seed=0))


def torchrl(work: Work) -> Batches:
    """TorchRL's collector without barriers, over processes, with the policy in a thread of this one."""
    from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
    from torch.distributions import Categorical
    from torchrl.collectors import AsyncBatchedCollector
    from torchrl.envs import GymWrapper

    network = TensorDictModule(tanh_mlp(4, 2), ["observation"], ["logits"])
    head = ProbabilisticTensorDictModule(
        ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True, default_interaction_type="random"
    )
    return Batches(
        AsyncBatchedCollector(
            [partial(_wrapped, GymWrapper, work, place) for place in range(LANES)],
            policy=ProbabilisticTensorDictSequential(network, head),
            frames_per_batch=LANES * work.length,
            total_frames=-1,
            env_backend="multiprocessing",
        )
    )


def _wrapped(wrapper: Any, work: Work, place: int) -> Any:
    return wrapper(Sleeper(work, place), categorical_action_encoding=True)


def cells() -> Iterator[Cell]:
    for name, work in WORK.items():
        contestants = {
            ANY: partial(ours, work, wait="any"),
            "wait='any', min_ready=1": partial(ours, work, wait="any", min_ready=1),
            ALL: partial(ours, work),
            "TorchRL": partial(torchrl, work),
        }
        note = f"{LANES} lanes, {work.length} steps per batch"
        yield Cell(name=name, note=note, contestants=contestants, ours=tuple(key for key in contestants if "=" in key))


def results(options: Options) -> Iterator[Result]:
    for cell in cells():
        if options.only not in cell.name:
            continue
        work = WORK[cell.name]
        result = compare(cell, measure(cell, options), ANY)
        limit, bound = LANES / work.mean, LANES * work.length / work.slowest()
        median: Any = result.data["median"]
        note = f"limit {limit:,.0f} frames/s, with the end of a batch {bound:,.0f}; {ANY}: "
        note += f"{median[ANY] / limit:.2f} and {median[ANY] / bound:.2f} of them"
        yield replace(result, table=f"{result.table}\n  {note}", data={**result.data, "limit": limit, "bound": bound})
