"""Frames per second over EnvPool and Atari games: ours, and loops written by hand as the limit.

CartPole runs the 2x64 tanh network, Pong a small convolutional one, the same for all. `loop` steps EnvPool as it is,
which spends a step of every episode on the reset; `loop-reset` resets lanes that are done by their indices, as ours
does. Each computes action and log-probability at every step and stores nothing but the observation; EnvPool has one
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.contestants.networks import tanh_mlp
from benchmarks.contestants.peers import Batches
from benchmarks.harness.runner import Cell

OURS = "funcollect"
WORK = {  # id: environments, steps of each per batch, inputs (None for screens), choices
    "envpool/CartPole-v1": (64, 200, 4, 2),
    "envpool/Pong-v5": (64, 32, None, 6),
    "ale/Pong": (4, 128, None, 6),
}


def cells() -> Iterator[Cell]:
    for name, (num_envs, length, inputs, choices) in WORK.items():
        network = partial(tanh_mlp, inputs, choices) if inputs else partial(convolutional, choices)
        work = (name, num_envs, length, network)
        contestants: dict[str, Any] = {OURS: partial(ours, *work)}
        if name.startswith("envpool/"):
            contestants["loop"] = partial(PoolLoop, *work, reset=False)
            contestants["loop-reset"] = partial(PoolLoop, *work, reset=True)
        else:
            contestants["loop"] = partial(GameLoop, *work)
        note = f"{length} steps of each environment per batch"
        yield Cell(name=f"{name} {num_envs}", note=note, contestants=contestants)


class Scaled(nn.Module):
    """Screens to numbers in [0, 1]."""

    def forward(self, screens: Tensor) -> Tensor:
        return screens.float().div_(255)


def convolutional(choices: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        Scaled(),
        nn.Conv2d(4, 16, 8, 4),
        nn.ReLU(),
        nn.Conv2d(16, 16, 4, 2),
        nn.ReLU(),
        nn.Flatten(-3),  # of one environment without a batch dimension, too
        nn.Linear(16 * 81, choices),
    )


def ours(name: str, num_envs: int, length: int, network: Callable[[], nn.Module]) -> Batches:
    import funcollect as fc

    policy = fc.torch_policy(network(), head=fc.heads.categorical)
    return Batches(
        fc.SyncDataCollector(
            fc.make_env(name, num_envs=num_envs), policy, frames_per_batch=length * num_envs, total_frames=-1, seed=0
        )
    )


def chosen(module: nn.Module, rows: Tensor) -> Tensor:
    """Actions [P], sampled with Torch's own functions; their log-probability is computed besides."""
    logits = module(rows)
    action = torch.multinomial(torch.softmax(logits, -1), 1)
    torch.log_softmax(logits, -1).gather(-1, action)
    return action.squeeze(-1)


class PoolLoop:
    """`length` steps of EnvPool's P environments per run."""

    def __init__(self, name: str, num_envs: int, length: int, network: Callable[[], nn.Module], *, reset: bool) -> None:
        import envpool

        self._pool = envpool.make_gymnasium(name.removeprefix("envpool/"), num_envs=num_envs, num_threads=1, seed=0)
        self._module = network()
        self._frames, self._length = length * num_envs, length
        self._reset = reset
        self._observation, _ = self._pool.reset()

    def run(self) -> int:
        pool, module, observation = self._pool, self._module, self._observation
        with torch.inference_mode():
            for _ in range(self._length):
                action = chosen(module, torch.from_numpy(observation)).numpy()
                observation, _, terminated, truncated, _ = pool.step(action)
                if self._reset and (done := np.flatnonzero(terminated | truncated)).size:
                    observation[done], _ = pool.reset(done.astype(np.int32))
        self._observation = observation
        return self._frames

    def close(self) -> None:
        self._pool.close()


class GameLoop:
    """`length` steps of P Atari games per run, each reset without a seed."""

    def __init__(self, name: str, num_envs: int, length: int, network: Callable[[], nn.Module]) -> None:
        self._envs: Sequence[Any] = [game(name.removeprefix("ale/")) for _ in range(num_envs)]
        self._observation = np.zeros((num_envs, *self._envs[0].observation_space.shape), np.uint8)
        self._module = network()
        self._length = length
        for lane, env in enumerate(self._envs):
            self._observation[lane], _ = env.reset(seed=lane)

    def run(self) -> int:
        observation, rows = self._observation, torch.from_numpy(self._observation)
        with torch.inference_mode():
            for _ in range(self._length):
                for lane, action in enumerate(chosen(self._module, rows).tolist()):
                    row, _, terminated, truncated, _ = self._envs[lane].step(action)
                    if terminated or truncated:
                        row, _ = self._envs[lane].reset()
                    observation[lane] = row
        return self._length * len(self._envs)

    def close(self) -> None:
        for env in self._envs:
            env.close()


def game(name: str) -> Any:
    import ale_py
    import gymnasium
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    gymnasium.register_envs(ale_py)
    game = gymnasium.make(f"ALE/{name}-v5", frameskip=1, disable_env_checker=True)
    return FrameStackObservation(AtariPreprocessing(game), 4)
