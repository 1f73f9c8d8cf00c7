"""Calls that go one step at a time, or one episode: an evaluation, a film, an evaluator's process, a search."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import torch
from torch import Tensor

import funcollect as fc
from benchmarks.collect import our_policy
from benchmarks.contestants.steps import CALLS

_ENV, _EPISODES = "CartPole-v1", 8


def _policy() -> Any:
    return our_policy(gymnasium.make(_ENV), "torch")


class Uses:
    """Runs `call`, which returns the number of frames."""

    def __init__(self, call: Callable[[], int], close: Callable[[], object] = lambda: None) -> None:
        self.run, self.close = call, close


def evaluate() -> Uses:
    """Whole episodes, on as many new simulators."""
    env, policy = fc.make_env(_ENV, num_envs=_EPISODES), _policy()
    return Uses(lambda: int(fc.evaluate(env, policy, episodes=_EPISODES, seed=0).lengths.sum()))


def film() -> Uses:
    """A film of one episode, step by step."""
    env, policy = fc.make_env(_ENV, render_mode="rgb_array"), _policy()
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name) / "film.mp4"
    return Uses(lambda: int(fc.record(env, policy, path).lengths.sum()), folder.cleanup)


def evaluator() -> Uses:
    """Weights to another process, whole episodes there, and the wait for them."""
    made = fc.Evaluator(_ENV, _policy(), episodes=_EPISODES, seed=0, create_env_kwargs={"num_envs": _EPISODES})

    def call() -> int:
        made.submit()
        return sum(int(each.stats.lengths.sum()) for each in made.wait())

    return Uses(call, made.close)


def search() -> Uses:
    """A policy that tries both actions in its own model of CartPole at each step, and takes the better one."""
    env, model = fc.make_env(_ENV), fc.envs.CartPole(num_envs=2)
    actions = torch.arange(2)
    tried: Any = model  # of `Key` it reads nothing

    def upright(observation: Tensor) -> Tensor:
        moved = tried.step(None, observation.expand(2, -1), actions, None)
        return moved.observation[:, 2].abs().argmin()

    policy = fc.torch_policy(lambda observation: torch.stack([*map(upright, observation)]))
    states = [fc.init(env, policy, seed=0)]

    def call() -> int:
        for _ in range(CALLS):
            states[0], _ = fc.step(env, policy, states[0])
        return CALLS

    return Uses(call, lambda: fc.close(states[0]))
