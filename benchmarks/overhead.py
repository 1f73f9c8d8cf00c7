"""Our own cost of a step: a rollout's time less the time of the bare `env.step` calls and of the bare policy call.

The environment answers with a constant. The policy is a 2x64 tanh network sampled by noise drawn before (`mlp`), or a
function that returns a constant (`constant`, which leaves less to subtract). Noise, log-probabilities, checks, and
turning actions into what the environment takes count as ours; only drawing noise and
choosing the action with it are part of the bare policy call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from benchmarks.collect import LENGTHS
from benchmarks.contestants.networks import torch_module
from benchmarks.contestants.peers import Rollouts
from benchmarks.harness.report import quartile_row, quartiles, table
from benchmarks.harness.runner import Cell, Measured, Options, Result, measure

SIZES = (1, 64)


class Still(gymnasium.Env[Any, Any]):
    """An environment whose steps return the same objects; no episode ends."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self._observation = np.zeros(4, np.float32)
        self._answer = (self._observation, 1.0, False, False, {})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._observation, {}

    def step(self, action: Any) -> Any:
        return self._answer


class Steps:
    """A piece of work of `length` steps; a frame is one step of all lanes."""

    def __init__(self, length: int, work: Callable[[], None]) -> None:
        self._length = length
        self._work = work

    def run(self) -> int:
        with torch.inference_mode():
            self._work()
        return self._length

    def close(self) -> None:
        pass


class OurSteps(Rollouts):
    """Our rollouts; a frame is one step of all lanes."""

    def __init__(self, num_envs: int, length: int, make_policy: Callable[[int], tuple[Any, Any]]) -> None:
        import funcollect as fc

        module, head = make_policy(num_envs)
        env = fc.make_env(Still, num_envs=None if num_envs == 1 else num_envs)
        super().__init__(env, fc.torch_policy(module, head=getattr(fc.heads, head) if head else None), length)

    def run(self) -> int:
        super().run()
        return self._length


def mlp(num_envs: int) -> tuple[Any, str | None]:
    return torch_module(Still()), "categorical"


def constant(num_envs: int) -> tuple[Any, str | None]:
    action = torch.zeros(num_envs, dtype=torch.int64)
    return lambda observation: action, None


def bare_env(num_envs: int, length: int) -> Steps:
    steps = [Still().step for _ in range(num_envs)]

    def work() -> None:
        for _ in range(length):
            for step in steps:
                step(0)

    return Steps(length, work)


def bare_policy(num_envs: int, length: int, make_policy: Callable[[int], tuple[Any, Any]]) -> Steps:
    module, head = make_policy(num_envs)
    observation = torch.zeros(num_envs, 4)
    noise = torch.rand(length, num_envs, 2).unbind(0)

    def sampled(row: Tensor) -> Tensor:
        return (module(observation) + row).argmax(-1)

    def work() -> None:
        for row in noise:
            sampled(row)

    def plain() -> None:
        for _ in noise:
            module(observation)

    return Steps(length, work if head else plain)


def cells() -> Iterator[tuple[Cell, int]]:
    for make_policy in (mlp, constant):
        for num_envs in SIZES:
            work = (num_envs, LENGTHS[num_envs])
            cell = Cell(
                name=f"{make_policy.__name__} {num_envs}",
                note=f"rollouts of {LENGTHS[num_envs]:,} steps of {num_envs} environments",
                contestants={
                    "rollout": partial(OurSteps, *work, make_policy),
                    "env.step": partial(bare_env, *work),
                    "policy": partial(bare_policy, *work, make_policy),
                },
                block=0.1,
            )
            yield cell, num_envs


def results(options: Options) -> Iterator[Result]:
    for cell, num_envs in cells():
        if options.only in cell.name:
            yield _result(cell, num_envs, measure(cell, options))


def _result(cell: Cell, num_envs: int, measured: Measured) -> Result:
    times = {name: [1e6 / rate for rate in rates] for name, rates in measured.rates.items()}
    times["ours"] = [
        whole - env - policy
        for whole, env, policy in zip(times["rollout"], times["env.step"], times["policy"], strict=True)
    ]
    times["ours per lane"] = [time / num_envs for time in times["ours"]]
    rows = [quartile_row(name, values) for name, values in times.items()]
    data = {"note": cell.note, "microseconds": times, "median": {name: quartiles(times[name])[1] for name in times}}
    return Result(name=cell.name, table=f"{table((cell.name, 'µs/step', 'quartiles'), rows)}\n  {cell.note}", data=data)
