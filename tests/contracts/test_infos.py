"""Infos are recorded as they were at each step, also those of environments that write the next ones over them."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import funcollect as fc


class SameArrays(gymnasium.Env[Any, Any]):
    """Puts the same two arrays into every info; the observation is a copy of the first."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self._position = np.zeros(2, np.float32)
        self._time = np.zeros((), np.float32)

    def _answer(self) -> tuple[Any, dict[str, Any]]:
        return self._position.copy(), {"position": self._position, "time": self._time}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._position[:], self._time[()] = self.np_random.random(2), 0
        return self._answer()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._position += 1
        self._time += 1
        observation, info = self._answer()
        return observation, 0.0, bool(self._time == 7), False, info


class ShowsQpos(gymnasium.Wrapper[Any, Any, Any, Any]):
    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated, truncated, {**info, "position": self.unwrapped.data.qpos}  # type: ignore[attr-defined]


def collected(create_env_fn: Any, kind: Any = fc.SyncDataCollector, **kwargs: Any) -> Any:
    kwargs = {"info_keys": ["position", "time"]} | kwargs
    return kind(create_env_fn, frames_per_batch=60, total_frames=120, create_env_kwargs=kwargs)


WAYS: dict[str, Any] = {
    "one": lambda: collected(SameArrays),
    "lanes": lambda: collected(SameArrays, num_envs=3),
    "a list": lambda: collected([SameArrays(), SameArrays()]),
    "a vector environment": lambda: collected(SyncVectorEnv([SameArrays] * 3, autoreset_mode=AutoresetMode.DISABLED)),
    "processes of lanes": lambda: collected(SameArrays, num_envs=2, parallel=True),
    "workers, async": lambda: collected([SameArrays] * 2, fc.MultiaSyncDataCollector, num_envs=2),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_step_keeps_its_own_infos(way: str) -> None:
    with WAYS[way]() as collector:
        for batch in collector:
            assert torch.equal(batch["next", "info", "position"], batch["next", "observation"])
            assert torch.equal(batch["next", "info", "time"].long(), batch["collector", "step"] + 1)


def test_the_positions_of_mujoco() -> None:
    made = [lambda: ShowsQpos(gymnasium.make("InvertedPendulum-v5"))] * 2
    with collected(made, info_keys=["position"]) as collector:
        batch = next(collector)
    torch.testing.assert_close(batch["next", "info", "position"], batch["next", "observation"][..., :2])
