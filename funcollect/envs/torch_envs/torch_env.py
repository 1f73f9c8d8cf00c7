"""Batched environments written in Torch: all lanes in one step, state in and state out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from funcollect.arguments import check_num_envs
from funcollect.devices import checked_device
from funcollect.keys import Key, lane_uniforms
from funcollect.specs import ActionSpec, Leaf, Seeding, Space, observation_leaves


class TorchEnvState(NamedTuple):
    """What a Torch environment is at: a value, which no step changes."""

    physics: Any  # a pytree of tensors [P, ...]
    elapsed: Tensor  # [P] int64, steps since the episode began


class TorchStep(NamedTuple):
    """What one step of all lanes gives."""

    state: TorchEnvState
    observation: Any  # [P, ...], in the structure of the observation space
    reward: Tensor  # [P]
    terminated: Tensor  # [P] bool
    truncated: Tensor  # [P] bool


class TorchEnv(ABC):
    """Subclass this with `start`, `observe` and `advance`, all three pure functions over batches of lanes.

    Attributes:
        observation_space, action_space: Gymnasium spaces of one environment.
        draws: how many uniform numbers the start of an episode takes.
        max_episode_steps: steps after which an episode is truncated; None for no limit.

    Args:
        num_envs: P, or None for a single environment without a batch dimension.
        device: where the state lives; the CPU unless given.

    Raises:
        ValueError: for a `num_envs` below 1, or a device that is not there.
        TypeError: for a subclass without the attributes above.

    >>> import torch, gymnasium
    >>> class Walk(TorchEnv):
    ...     observation_space = gymnasium.spaces.Box(-9, 9, (1,))
    ...     action_space = gymnasium.spaces.Discrete(2)
    ...     draws = 1
    ...     def start(self, uniforms):
    ...         return uniforms.round()
    ...     def observe(self, physics):
    ...         return physics.float()
    ...     def advance(self, physics, action):
    ...         moved = physics + 2 * action[:, None] - 1
    ...         return moved, moved[:, 0], moved[:, 0].abs() > 8
    >>> Walk(num_envs=3)
    Walk(num_envs=3)
    """

    backend: ClassVar[Literal["torch"]] = "torch"
    seeding: ClassVar[Seeding] = "episode"
    observation_space: Space
    action_space: Space
    draws: int
    max_episode_steps: int | None = None

    def __init__(self, num_envs: int | None = None, *, device: torch.device | str | None = None) -> None:
        check_num_envs(num_envs)
        if missing := [name for name in ("observation_space", "action_space", "draws") if not hasattr(self, name)]:
            raise TypeError(f"{type(self).__name__} lacks {missing}, expected as attributes of the class: set them")
        self.num_envs = num_envs
        self.device = checked_device(device) or torch.device("cpu")

    @abstractmethod
    def start(self, uniforms: Tensor) -> Any:
        """The physics at the start of an episode, from [P, draws] float64 numbers in (0, 1)."""

    @abstractmethod
    def observe(self, physics: Any) -> Any:
        """The observation of each lane, [P, ...]."""

    @abstractmethod
    def advance(self, physics: Any, action: Tensor) -> tuple[Any, Tensor, Tensor]:
        """One step of physics: the next physics, reward [P] and terminated [P] bool; nothing is written in place."""

    @cached_property
    def observation_leaves(self) -> tuple[Leaf, ...]:
        """The leaves that an observation has in a batch."""
        return observation_leaves(self.observation_space)

    @cached_property
    def action_spec(self) -> ActionSpec:
        """How an action looks in a batch."""
        return ActionSpec(self.action_space)

    def reset(self, key: Key, lanes: Tensor, episodes: Tensor) -> TorchEnvState:
        """The start of episode ``episodes[i]`` of lane ``lanes[i]``, a function of these and the key alone."""
        uniforms = lane_uniforms(key, lanes.to(self.device), episodes.to(self.device), self.draws)
        return TorchEnvState(self.start(uniforms), torch.zeros(len(lanes), dtype=torch.int64, device=self.device))

    def step(self, state: TorchEnvState, action: Tensor) -> TorchStep:
        """One step of every lane, truncated at `max_episode_steps`; no lane is reset."""
        physics, reward, terminated = self.advance(state.physics, action)
        elapsed = state.elapsed + 1
        limit = self.max_episode_steps
        truncated = torch.zeros_like(elapsed, dtype=torch.bool) if limit is None else elapsed >= limit
        return TorchStep(TorchEnvState(physics, elapsed), self.observe(physics), reward, terminated, truncated)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'' if self.num_envs is None else f'num_envs={self.num_envs}'})"
