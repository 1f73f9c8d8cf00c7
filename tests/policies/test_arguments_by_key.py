"""Modules over a Dict space with an argument for each key, as in TorchRL."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from torch import nn

import funcollect as fc


class TwoKeys(gymnasium.Env[Any, Any]):
    """Halves under `b`, zeros under `a`."""

    observation_space = spaces.Dict(a=spaces.Box(-1, 1, (2,)), b=spaces.Box(-1, 1, (2,)))
    action_space = spaces.Box(-1, 1, (2,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return {"a": np.zeros(2, np.float32), "b": np.full(2, 0.5, np.float32)}, {}

    def step(self, action: Any) -> Any:
        return self.reset()[0], 0.0, False, False, {}


class Optional(nn.Module):
    def forward(self, a: Any, b: Any = None) -> Any:
        return a if b is None else b


class BothOptional(nn.Module):
    def forward(self, b: Any = None, a: Any = None) -> Any:
        return a if b is None else b


class Swapped(nn.Module):
    def forward(self, b: Any, a: Any) -> Any:
        return b + 0 * a


class Further(nn.Module):
    def forward(self, b: Any, a: Any, scale: float = 1.0) -> Any:
        return scale * b + 0 * a


class KeywordOnly(nn.Module):
    def forward(self, a: Any, *, b: Any) -> Any:
        return b


class Behind(nn.Module):
    def forward(self, a: Any, scale: float = 1.0, b: Any = None) -> Any:
        return b


@pytest.mark.parametrize("make", [Optional, BothOptional, Swapped, Further])
@pytest.mark.parametrize("num_envs", [None, 3])
def test_keys_are_passed_by_name(make: Any, num_envs: int | None) -> None:
    kwargs = {} if num_envs is None else {"num_envs": num_envs}
    with fc.SyncDataCollector(TwoKeys, make(), frames_per_batch=12, create_env_kwargs=kwargs) as collector:
        assert (next(collector)["action"] == 0.5).all()


@pytest.mark.parametrize("make", [KeywordOnly, Behind])
def test_what_cannot_be_passed_by_position_is_refused(make: Any) -> None:
    with pytest.raises(TypeError, match=r"\['a', 'b'\] are keys of the observation.*reorder its arguments"):
        fc.SyncDataCollector(TwoKeys, make(), frames_per_batch=12)
