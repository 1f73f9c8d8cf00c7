"""Environments written in JAX: pure functions of one lane, from which the fused loop makes P."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from funcollect.specs import ActionSpec, Leaf, Seeding, Space

Begin = Callable[[Any], tuple[Any, Any]]  # uint32[2] key -> (physics, observation)


class Transition(NamedTuple):
    """What one step of one lane gives, before any reset."""

    physics: Any  # a pytree: what the environment is at
    observation: Any  # in the structure of the observation space
    reward: Any  # [] float32, or [players]
    terminated: Any  # [] bool
    truncated: Any  # [] bool
    info: Mapping[str, Any]  # per info key


Reset = Literal["fresh", "cached"]
Advance = Callable[[Any, Any, Any], Transition]  # (uint32[2] key, physics, action) -> Transition


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
    advance: Advance
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
    spare: tuple[Any, Any]  # physics and observation [P, ...] at the start of each lane's next episode
    spent: Any  # [P] bool: the spare start has been used
