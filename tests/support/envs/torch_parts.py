"""A Torch environment in three parts, so that a test can break one of them: start, observe and move."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from funcollect.envs import TorchEnvBase, Transition
from funcollect.keys import LaneKeys


class InParts(TorchEnvBase):
    """`draws` uniform numbers per lane make a start; `move` returns the next place, reward and termination."""

    draws = 1

    @abstractmethod
    def start(self, uniforms: Tensor) -> Any: ...

    @abstractmethod
    def observe(self, place: Any) -> Any: ...

    @abstractmethod
    def move(self, place: Any, action: Tensor) -> tuple[Any, Any, Any]: ...

    def reset(self, key: LaneKeys, params: Any, /) -> tuple[Any, Any]:
        place = self.start(key.uniform(self.draws))
        return place, self.observe(place)

    def step(self, key: LaneKeys, env_state: Any, action: Tensor, params: Any, /) -> Transition:
        place, reward, terminated = self.move(env_state, action)
        return Transition(place, self.observe(place), reward, terminated, torch.zeros(len(key), dtype=torch.bool))
