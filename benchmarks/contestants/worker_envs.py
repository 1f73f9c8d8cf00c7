"""The work of every contestant's workers: environments by name, and their networks."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from torch import nn

from benchmarks.contestants.networks import torch_module
from benchmarks.suites import convolutional, game

PAYLOAD_STEPS = 32
Observation = npt.NDArray[np.float32]


class Light(gymnasium.Env[Observation, int]):
    """An environment with one constant observation, whose episodes do not end.

    Args:
        size: numbers in the observation.
        seconds: that a step sleeps, like one that waits for a device or another program.
        busy: whether it computes as long instead.
    """

    action_space = spaces.Discrete(2)

    def __init__(self, size: int, seconds: float = 0.0, *, busy: bool = False) -> None:
        self.observation_space = spaces.Box(-1, 1, (size,), np.float32)
        self._row = np.zeros(size, np.float32)
        self._seconds = seconds
        self._busy = busy

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Any]:
        super().reset(seed=seed)
        return self._row, {}

    def step(self, action: int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if self._busy:
            until = time.perf_counter() + self._seconds
            while time.perf_counter() < until:
                pass
        elif self._seconds:
            time.sleep(self._seconds)
        return self._row, 0.0, False, False, {}


def make(name: str) -> gymnasium.Env[Any, Any]:
    """A Gymnasium environment: an id, a game, one that sleeps or works, or one of 32 steps of so many bytes (sleep)."""
    kind, _, detail = name.partition("/")
    match kind:
        case "ale":
            made: gymnasium.Env[Any, Any] = game(detail)
        case "sleep":
            made = Light(4, float(detail))
        case "work":
            made = Light(4, float(detail), busy=True)
        case "payload":
            size, _, seconds = detail.partition("/")
            made = Light(int(size) // (2 * 4 * PAYLOAD_STEPS), float(seconds or 0))  # observation and next, float32
        case _:
            made = gymnasium.make(name, disable_env_checker=True)
    return made


def network(name: str) -> nn.Module:
    """The network of `make(name)`: a convolutional one for games, 2x64 tanh for the others."""
    if name.startswith("ale/"):
        return convolutional(6)
    env = make(name)
    module = torch_module(env)
    env.close()
    return module


def continuous(name: str) -> bool:
    """Whether actions are vectors."""
    return name == "HalfCheetah-v5"
