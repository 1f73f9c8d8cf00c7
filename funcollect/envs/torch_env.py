"""Environments written in Torch, pure functions over all lanes: their base class, and classic control.

The latter has the dynamics of Gymnasium's `CartPole-v1` and `Pendulum-v1`, in float64 like those. The equations come
from Barto, Sutton and Anderson (1983) and from Gymnasium's sources.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from funcollect.arguments import checked_device
from funcollect.envs.by_agents import PureEnvBase
from funcollect.keys import LaneKeys
from funcollect.protocols import Transition


class TorchEnvBase(PureEnvBase):
    """Subclass this with `reset` and `step`, both pure functions over all P lanes.

    A subclass has an `observation_space` and an `action_space`, Gymnasium's of one environment. It may have `params`,
    the last argument of both functions, a pytree of tensors; `max_episode_steps`, after which the loop truncates an
    episode; and a function ``observation_of(env_state, params)`` that returns the observation of a state, for
    `funcollect.reset` to states alone. `num_envs` is P, or None for a single environment without a batch dimension;
    `device` is that of the state, the CPU by default. Instead of spaces, it may have `groups` of agents and a
    `state_space`, as `envs.from_functions` takes them, with observations, actions, rewards and flags [P, n, ...].

    Raises ValueError for a `num_envs` below 1 or an unknown device, TypeError for a subclass without spaces, or with
    other parameters of `reset` or `step`.

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

    def __init__(self, num_envs: int | None = None, *, device: torch.device | str | None = None) -> None:
        super().__init__(num_envs)
        self.device = checked_device(device) or torch.device("cpu")

    @abstractmethod
    def reset(self, key: LaneKeys, params: Any, /) -> tuple[Any, Any]:
        """The state, a pytree of tensors [P, ...], and the observation [P, ...] at the start of an episode.

        ``len(key)`` is P, and ``key.uniform(n)`` returns float64 numbers [P, n], uniform in (0, 1).
        """

    @abstractmethod
    def step(self, key: LaneKeys, env_state: Any, action: Any, params: Any, /) -> Transition:
        """One step of all lanes with the action [P, ...]: it resets no lane, and writes nothing in place."""


class CartPole(TorchEnvBase):
    """Balance a pole on a cart: `CartPole-v1`, all lanes at once.

    The observation [P, 4] float32 is position, velocity, angle (radians) and angular velocity; action 1 pushes right.
    The reward is 1 per step; an episode terminates beyond 2.4 units or 12 degrees and is truncated after 500 steps.
    Arguments and errors are those of `envs.TorchEnvBase`.

    >>> CartPole(num_envs=3)
    CartPole(num_envs=3)
    """

    max_position = 2.4
    max_angle = 12 * 2 * math.pi / 360  # radians
    max_episode_steps = 500
    action_space = spaces.Discrete(2)
    _high = np.array([max_position * 2, np.inf, max_angle * 2, np.inf], np.float32)
    observation_space = spaces.Box(-_high, _high)

    gravity = 9.8
    pole_mass = 0.1
    total_mass = 1.1
    half_length = 0.5
    force = 10.0
    time_step = 0.02  # seconds

    def reset(self, key: LaneKeys, params: Any, /) -> tuple[Tensor, Tensor]:
        """Every coordinate uniform in (-0.05, 0.05): [P, 4] float64."""
        coordinates = key.uniform(4) * 0.1 - 0.05
        return coordinates, coordinates.float()

    def observation_of(self, env_state: Tensor, params: Any, /) -> Tensor:
        """The same in float32."""
        return env_state.float()

    def step(self, key: LaneKeys, env_state: Tensor, action: Tensor, params: Any, /) -> Transition:
        """One Euler step of `time_step` seconds."""
        position, velocity, angle, spin = env_state.unbind(-1)
        force = torch.where(action == 1, self.force, -self.force).double()
        cosine, sine = angle.cos(), angle.sin()
        moment = self.pole_mass * self.half_length
        push = (force + moment * spin.square() * sine) / self.total_mass
        spin_rate = (self.gravity * sine - cosine * push) / (
            self.half_length * (4.0 / 3.0 - self.pole_mass * cosine.square() / self.total_mass)
        )
        acceleration = push - moment * spin_rate * cosine / self.total_mass
        rates = torch.stack((velocity, acceleration, spin, spin_rate), -1)
        moved = env_state + self.time_step * rates
        fallen = (moved[:, 0].abs() > self.max_position) | (moved[:, 2].abs() > self.max_angle)
        reward = torch.ones_like(position, dtype=torch.float32)
        return Transition(moved, moved.float(), reward, terminated=fallen, truncated=torch.zeros_like(fallen))


class Pendulum(TorchEnvBase):
    """Swing a pendulum up: `Pendulum-v1`, all lanes at once.

    The observation [P, 3] float32 is the cosine and sine of the angle and the angular velocity; the action [P, 1] is a
    torque, clipped to [-2, 2]. Episodes are truncated after 200 steps and never terminate. Arguments and errors are
    those of `envs.TorchEnvBase`.

    >>> Pendulum(num_envs=3)
    Pendulum(num_envs=3)
    """

    max_speed = 8.0
    max_torque = 2.0
    max_episode_steps = 200
    action_space = spaces.Box(-max_torque, max_torque, (1,))
    _high = np.array([1.0, 1.0, max_speed], np.float32)
    observation_space = spaces.Box(-_high, _high)

    gravity = 10.0
    time_step = 0.05  # seconds

    def reset(self, key: LaneKeys, params: Any, /) -> tuple[Tensor, Tensor]:
        """The angle uniform in (-pi, pi), the angular velocity in (-1, 1): [P, 2] float64."""
        angle, speed = (2 * key.uniform(2) - 1).unbind(-1)
        swing = torch.stack((angle * math.pi, speed), -1)
        return swing, self.observation_of(swing, params)

    def step(self, key: LaneKeys, env_state: Tensor, action: Tensor, params: Any, /) -> Transition:
        """One semi-implicit Euler step. The terms of the torque are float32, as in Gymnasium."""
        angle, speed = env_state.unbind(-1)
        torque = action[:, 0].clamp(-self.max_torque, self.max_torque)
        upright = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        cost = upright.square() + 0.1 * speed.square() + (0.001 * torque.square()).double()
        rate = 3 * self.gravity / 2 * angle.sin() + (3.0 * torque).double()
        faster = (speed + rate * self.time_step).clamp(-self.max_speed, self.max_speed)
        moved = torch.stack((angle + faster * self.time_step, faster), -1)
        never = torch.zeros_like(angle, dtype=torch.bool)
        return Transition(moved, self.observation_of(moved, params), (-cost).float(), terminated=never, truncated=never)

    def observation_of(self, env_state: Tensor, params: Any, /) -> Tensor:
        """The observation [P, 3] float32 of a state [P, 2], which is the angle in radians and the angular velocity."""
        angle, speed = env_state.unbind(-1)
        return torch.stack((angle.cos(), angle.sin(), speed), -1).float()


TORCH_ENVS: dict[str, Callable[..., TorchEnvBase]] = {"CartPole-v1": CartPole, "Pendulum-v1": Pendulum}
