"""Discrete actions reach an environment as its space's `sample` returns them, and as Gymnasium's vectors pass them."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import funcollect as fc
from tests.support.compare import collect


class Strict(gymnasium.Env):
    """Returns the action that it got, and refuses other types than its space has."""

    observation_space = spaces.Box(-99, 99, (), np.int64)

    def __init__(self, start: int, dtype: Any) -> None:
        self.action_space = spaces.Discrete(3, start=start, dtype=dtype)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.int64(0), {}

    def step(self, action: Any) -> Any:
        assert type(action) is type(self.action_space.sample())
        assert (action.dtype, action.shape) == (self.action_space.dtype, ())
        return np.int64(action.item()), 0.0, False, False, {}


@pytest.mark.parametrize(("num_envs", "workers"), [(None, 0), (3, 0), (3, 2)])
@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize(("start", "dtype"), [(0, np.int64), (-1, np.int64), (5, np.int32)])
def test_a_discrete_action_is_a_number_of_numpy(
    num_envs: int | None, workers: int, one_hot: bool, start: int, dtype: Any
) -> None:
    env = fc.make_env(lambda: Strict(start, dtype), num_envs=num_envs, num_workers=workers, one_hot=one_hot)
    batch = collect(env, fc.random_policy(env), 10, seed=0)
    action = batch["action"].argmax(-1) + start if one_hot else batch["action"]
    assert batch["next", "observation"].tolist() == action.tolist()
    assert len(action.unique()) > 1
