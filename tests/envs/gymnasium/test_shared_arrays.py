"""Lanes whose environments return one array, which each of them writes."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import funcollect as fc
from tests.support.compare import assert_same


class Shared(gymnasium.Env):
    """Writes its step and a number of its own into an array of the class, or into a new one."""

    action_space, out = spaces.Discrete(2), np.zeros(2, np.float32)

    def __init__(self, *, shared: bool, nested: bool) -> None:
        box = spaces.Box(0, 99, (2,))
        self.observation_space = spaces.Dict({"part": box}) if nested else box
        self.shared, self.nested = shared, nested

    def seen(self) -> Any:
        array = self.out if self.shared else np.zeros(2, np.float32)
        array[:] = self.steps, self.number
        return {"part": array} if self.nested else array

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps, self.number = 0, self.np_random.random()
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.seen(), 1.0, self.steps == 7 + action, False, {}


@pytest.mark.parametrize("nested", [False, True])
def test_each_lane_has_its_own_observations(nested: bool) -> None:
    batches = []
    for shared, workers in ((False, 0), (True, 0), (True, 2)):
        env = fc.make_env(lambda shared=shared: Shared(shared=shared, nested=nested), num_envs=4, num_workers=workers)
        state, batch = fc.rollout(env, fc.random_policy(env), fc.init(env, fc.random_policy(env), seed=0), 20)
        batches.append(batch)
        fc.close(state)
    for batch in batches[1:]:
        assert_same(batches[0], batch)
    numbers = batches[0]["part" if nested else "observation"][..., 1]
    assert len(torch.unique(numbers[:, 1])) == 4
