"""An actor-critic in Flax nnx: ``funcollect.make_policy("nnx_actor_critic", env)``."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from gymnasium import spaces

import funcollect as fc
from nnx_actor_critic.network import ActorCritic

__all__ = ["actor_critic"]


def actor_critic(
    env: fc.Env, *, widths: Sequence[int] = (64, 64), seed: int = 0, weights: str | PathLike[str] | None = None
) -> fc.Policy:
    """A policy for any Box observation, with ``state_value`` [*B, T, 1] float32 in each batch.

    Args:
        env: the environment, for its spaces.
        widths: of the hidden layers of the actor, and of the critic.
        seed: of the untrained weights.
        weights: trained ones, as ``np.savez(path, **policy.state_dict())`` wrote them.

    Raises:
        ValueError: for spaces that the network does not suit, or weights of another network.
    """
    if not isinstance(env.observation_space, spaces.Box):
        raise ValueError(f"it needs a Box observation space, {env} has {env.observation_space}: flatten it")
    size = int(np.prod(env.observation_space.shape))
    head, outputs = _head(env)
    graph, params = nnx.split(ActorCritic(size, outputs, widths=widths, rngs=nnx.Rngs(seed)))

    def apply(params: Any, observation: Any) -> dict[str, Any]:
        answer, value = nnx.merge(graph, params)(observation)
        parts = {"logits": answer} if head is fc.heads.categorical else _spread(answer)
        return {**parts, "state_value": value}

    policy = fc.jax_policy(apply, params, head=head)
    if weights is not None:
        with np.load(weights) as trained:
            policy.load(dict(trained))
    return policy


def _head(env: fc.Env) -> tuple[fc.heads.Head, int]:
    """The head for the action space, and how many numbers it reads for one action."""
    spec = env.action_spec
    if spec.categories:
        return fc.heads.categorical, spec.choices
    if isinstance(spec.space, spaces.Box) and spec.dtype.is_floating_point and len(spec.shape) == 1:
        return fc.heads.tanh_normal if spec.space.is_bounded() else fc.heads.normal, 2 * spec.shape[0]
    raise ValueError(f"it needs a Discrete, MultiDiscrete or flat Box action space, {env} has {spec.space}")


def _spread(answer: Any) -> dict[str, Any]:
    """Location and scale of a normal distribution, each [P, n], from [P, 2n]."""
    loc, scale = jnp.split(answer, 2, -1)
    return {"loc": loc, "scale": nnx.softplus(scale)}
