"""Environments written in JAX: pure functions of one lane, from which the fused loop makes P."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from funcollect.arguments import check_choice, check_keys, check_num_envs, check_optional_positive
from funcollect.envs.jax_envs.spaces import as_delivered
from funcollect.interop.jax_setup import import_jax
from funcollect.specs import ActionSpec, Leaf, Seeding, Space, observation_leaves

_NO_INFO: Mapping[str, Any] = {}


class Transition(NamedTuple):
    """What one step of one lane gives, before any reset."""

    physics: Any  # a pytree: what the environment is at
    observation: Any  # in the structure of the observation space
    reward: Any  # [] float32, or [players]
    terminated: Any  # [] bool
    truncated: Any  # [] bool
    info: Mapping[str, Any] = _NO_INFO  # arrays


Begin = Callable[[Any], tuple[Any, Any]]  # uint32[2] key -> (physics, observation)
Advance = Callable[[Any, Any, Any], Any]  # (uint32[2] key, physics, action) -> Transition, or a tuple of its fields
Reset = Literal["fresh", "cached"]


@dataclass(frozen=True, eq=False, kw_only=True)
class JaxEnv:
    """A JAX environment (see `funcollect.Env`): a description, all of whose state is a value.

    Attributes:
        label: how it is called in messages.
        begin: the start of an episode, from a key of its own.
        advance: one step of the raw environment, which does not reset itself.
        info_keys: the keys of `info` that a batch records under ``next.info``.
        reset: ``"fresh"``, or ``"cached"``: every episode of a lane starts as its first one did.
    """

    label: str
    num_envs: int | None
    observation_space: Space
    action_spec: ActionSpec
    observation_leaves: tuple[Leaf, ...]
    begin: Begin
    advance: Callable[[Any, Any, Any], Transition]
    info_keys: tuple[str, ...] = ()
    reset: Reset = "fresh"
    seeding: Seeding = "episode"
    backend: Literal["jax"] = field(default="jax", init=False)

    @property
    def action_space(self) -> Space:
        """The action space of one environment."""
        return self.action_spec.space

    def __repr__(self) -> str:
        lanes = "" if self.num_envs is None else f", num_envs={self.num_envs}"
        return f"JaxEnv({self.label!r}{lanes})"


class JaxEnvState(NamedTuple):
    """All lanes of a JAX environment.

    A reset can cost as much as many steps, so each lane keeps the start of its next episode at hand. Starts are made
    for all lanes at once, when a lane ends whose own has been used.
    """

    physics: Any  # a pytree [P, ...]
    next_start: tuple[Any, Any]  # physics and observation [P, ...] at the start of each lane's next episode
    next_start_used: Any  # [P] bool: the next start has been used


def jax_env(
    label: str,
    begin: Begin,
    advance: Advance,
    *,
    observation_space: Space,
    action_space: Space,
    num_envs: int | None = None,
    one_hot: bool = False,
    info_keys: Sequence[str] = (),
    reset: Reset = "fresh",
    max_episode_steps: int | None = None,
) -> JaxEnv:
    """What every adapter ends with: its two functions, as the fused loop wants them.

    Args:
        label: how the environment is called in messages.
        begin: the start of an episode.
        advance: one step, with an action as `action_space` has it.
        observation_space: of one environment, with dtypes of 64 bits or those that JAX has.
        action_space: of one environment.
        num_envs: P; None for a single environment without a batch dimension.
        one_hot: discrete actions as one-hot rows, TorchRL's encoding.
        info_keys: what of `info` a batch records.
        reset: ``"fresh"`` or ``"cached"``.
        max_episode_steps: steps after which an episode is truncated, beside what `advance` says.

    Raises:
        ValueError: for a `num_envs`, `reset`, `max_episode_steps` or key of an observation that cannot be.
        TypeError: for a space that has no fixed-size arrays.
    """
    check_num_envs(num_envs)
    check_optional_positive("max_episode_steps", max_episode_steps)
    check_keys("info_keys", info_keys, "discount")
    check_choice("reset", reset, get_args(Reset))
    observed = as_delivered(observation_space)
    spec = ActionSpec(action_space, one_hot)
    if max_episode_steps is not None:
        begin, advance = _limited(begin, advance, max_episode_steps)
    keys = tuple(info_keys)
    return JaxEnv(
        label=label,
        num_envs=num_envs,
        observation_space=observed,
        action_spec=spec,
        observation_leaves=observation_leaves(observed),
        begin=begin,
        advance=_recorded(label, advance, spec, keys),
        info_keys=keys,
        reset=reset,
    )


def _limited(begin: Begin, advance: Advance, max_episode_steps: int) -> tuple[Begin, Advance]:
    """With the steps of the episode counted beside the physics."""

    def started(key: Any) -> tuple[Any, Any]:
        physics, observation = begin(key)
        return (physics, import_jax().numpy.int32(0)), observation

    def counted(key: Any, physics: Any, action: Any) -> Transition:
        inner, elapsed = physics
        moved = Transition(*advance(key, inner, action))
        truncated = moved.truncated | (elapsed + 1 >= max_episode_steps)
        return moved._replace(physics=(moved.physics, elapsed + 1), truncated=truncated)

    return started, counted


def _recorded(
    label: str, advance: Advance, spec: ActionSpec, info_keys: tuple[str, ...]
) -> Callable[[Any, Any, Any], Transition]:
    """With actions as the space has them, flags as bool, and the part of `info` that is recorded."""

    def recorded(key: Any, physics: Any, action: Any) -> Transition:
        jnp = import_jax().numpy
        moved = Transition(*advance(key, physics, _from_one_hot(spec, action) if spec.one_hot else action))
        if missing := [name for name in info_keys if name not in moved.info]:
            raise ValueError(f"{label} has no info {missing}, expected some of {sorted(moved.info)}: mend info_keys")
        return moved._replace(
            reward=jnp.asarray(moved.reward, jnp.float32),
            terminated=jnp.asarray(moved.terminated, bool),
            truncated=jnp.asarray(moved.truncated, bool),
            info={name: moved.info[name] for name in info_keys},
        )

    return recorded


def _from_one_hot(spec: ActionSpec, action: Any) -> Any:
    jnp = import_jax().numpy
    parts = jnp.split(action, np.cumsum(spec.categories)[:-1], -1)
    chosen = jnp.stack([part.argmax(-1) for part in parts], -1).reshape(spec.space.shape or ())
    return (chosen + spec.start).astype(jnp.int32)
