"""The base class of environments written in Torch: pure functions over all lanes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
from torch import Tensor

from funcollect.arguments import checked_device
from funcollect.envs.base import EnvBase, check_pure_functions
from funcollect.keys import LaneKeys
from funcollect.protocols import Transition


class TorchEnvBase(EnvBase, ABC):
    """Subclass this with `reset` and `step`, both pure functions over all P lanes.

    Attributes:
        observation_space, action_space: Gymnasium spaces of one environment.
        max_episode_steps: the loop truncates an episode after this many steps; None for no limit.
        params: the last argument of `reset` and `step`: a pytree of tensors, or None.

    Args:
        num_envs: P, or None for a single environment without a batch dimension.
        device: the device of the state; the CPU by default.

    Raises:
        ValueError: for a `num_envs` below 1, or an unknown device.
        TypeError: for a subclass without spaces, or with other parameters of `reset` or `step`.

    >>> import gymnasium
    >>> import funcollect as fc
    >>> class Walk(fc.envs.TorchEnvBase):
    ...     observation_space = gymnasium.spaces.Box(-9, 9, (1,))
    ...     action_space = gymnasium.spaces.Discrete(2)
    ...     def reset(self, key, params):
    ...         position = key.uniform(1).round().float()
    ...         return position, position
    ...     def step(self, key, position, action, params):
    ...         moved = position + 2 * action[:, None] - 1
    ...         lost = moved[:, 0].abs() > 8
    ...         return fc.envs.Transition(moved, moved, moved[:, 0], terminated=lost, truncated=lost & False)
    >>> Walk(num_envs=3)
    Walk(num_envs=3)
    """

    backend: Literal["torch"] = "torch"
    max_episode_steps: int | None = None
    params: Any = None

    def __init__(self, num_envs: int | None = None, *, device: torch.device | str | None = None) -> None:
        """Check and set `num_envs` and `device`."""
        super().__init__(num_envs)
        check_pure_functions(f"{type(self).__name__}.", self.reset, self.step)
        self.device = checked_device(device) or torch.device("cpu")

    @abstractmethod
    def reset(self, key: LaneKeys, params: Any, /) -> tuple[Any, Any]:
        """The state, a pytree of tensors [P, ...], and the observation [P, ...] at the start of an episode.

        Args:
            key: ``len(key)`` is P. ``key.uniform(n)`` returns float64 numbers [P, n], uniform in (0, 1).
            params: `params`, or the parameters of the state.
        """

    @abstractmethod
    def step(self, key: LaneKeys, env_state: Any, action: Tensor, params: Any, /) -> Transition:
        """One step of all lanes with the action [P, ...]: it resets no lane, and writes nothing in place."""
