"""Policies inside a traced loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from funcollect.interop.jax_setup import import_jax
from funcollect.keys import Noise
from funcollect.policies.checks import check_action
from funcollect.policies.jax_policy import JaxPolicy, jax_noise
from funcollect.policies.random_policy import MASK_KEY, RandomPolicy
from funcollect.specs import ActionSpec, ExplorationType, Policy

Answer = Callable[[Any, Any, Any, Any], tuple[Any, dict[str, Any]]]  # params, policy_state, observation, key


def is_traceable(policy: Policy) -> bool:
    """Whether `traced_policy` takes it."""
    return policy.backend == "jax" or isinstance(policy, RandomPolicy)


def traced_policy(policy: Policy, spec: ActionSpec, num_envs: int, exploration_type: ExplorationType) -> Answer:
    """The policy's step as a traced function that draws its noise from a key.

    Raises:
        TypeError: for a policy that cannot be traced.
    """
    if isinstance(policy, RandomPolicy):
        return lambda params, state, observation, key: (state, traced_random(spec, key, observation, num_envs))
    if not is_traceable(policy):
        raise TypeError(f"{type(policy).__name__} is a {policy.backend} policy, expected a JAX one: use jax_policy")
    noise = policy.noise(spec)
    stochastic = exploration_type is ExplorationType.RANDOM

    def answer(params: Any, policy_state: Any, observation: Any, key: Any) -> tuple[Any, dict[str, Any]]:
        drawn = _draw(noise, key, num_envs)
        if isinstance(policy, JaxPolicy):
            policy_state, outputs = policy.answer(spec, stochastic, params, policy_state, observation, drawn)
        else:
            policy_state, given = policy(params, policy_state, observation, drawn, exploration_type)
            outputs = dict(given)
        check_action(outputs["action"], spec, num_envs)
        return policy_state, outputs

    return answer


def _draw(noise: Noise | None, key: Any, num_envs: int) -> Any:
    return key if noise is not None and noise.kind == "key" else jax_noise(noise, key, num_envs)


def traced_random(spec: ActionSpec, key: Any, observation: Any, num_envs: int) -> dict[str, Any]:
    """Random actions [P, ...] and their log-probabilities [P], as `RandomPolicy` draws them."""
    jax = import_jax()
    jnp = jax.numpy
    if spec.categories:
        return _choices(spec, key, observation, num_envs)
    if isinstance(spec.space, spaces.MultiBinary):
        action = jax.random.bernoulli(key, 0.5, (num_envs, *spec.shape)).astype(jnp.int32)
        return {"action": action, "action_log_prob": jnp.full(num_envs, -math.prod(spec.shape) * math.log(2))}
    return _box(spec.space, key, num_envs)


def _choices(spec: ActionSpec, key: Any, observation: Any, num_envs: int) -> dict[str, Any]:
    jax = import_jax()
    jnp = jax.numpy
    mask = _mask(observation, spec)
    if mask is not None:
        action = jax.random.categorical(key, jnp.where(mask, 0.0, -jnp.inf))
        return {"action": action + int(spec.start), "action_log_prob": -jnp.log(mask.sum(-1).astype(jnp.float32))}
    counts = jnp.array(spec.categories)
    chosen = jax.random.randint(key, (num_envs, len(spec.categories)), 0, counts)
    log_prob = jnp.full(num_envs, -sum(map(math.log, spec.categories)), jnp.float32)
    if spec.one_hot:
        hot = [jax.nn.one_hot(chosen[:, i], n, dtype=jnp.int32) for i, n in enumerate(spec.categories)]
        return {"action": jnp.concatenate(hot, -1), "action_log_prob": log_prob}
    return {"action": chosen.reshape(num_envs, *spec.shape) + jnp.asarray(spec.start), "action_log_prob": log_prob}


def _mask(observation: Any, spec: ActionSpec) -> Any:
    if not isinstance(observation, Mapping) or not isinstance(spec.space, spaces.Discrete):
        return None
    mask = observation.get(MASK_KEY)
    return None if mask is None or mask.shape[1:] != (int(spec.space.n),) else mask.astype(bool)


def _box(space: Any, key: Any, num_envs: int) -> dict[str, Any]:
    """Bounded components uniform; others normal, or exponential from the side that is bounded."""
    jax = import_jax()
    jnp = jax.numpy
    low, high = space.low.astype(np.float32), space.high.astype(np.float32)
    below, above = np.isfinite(low), np.isfinite(high)
    shape = (num_envs, *space.shape)
    uniform = jax.random.uniform(key, shape, minval=np.finfo(np.float32).tiny)
    tail, normal = -jnp.log(uniform), jax.random.normal(key, shape)
    width = np.where(below & above, high - low, 1)
    inside = np.where(below & above, low, 0) + uniform * width
    unbounded = jnp.where(below, low + tail, jnp.where(above, high - tail, normal))
    action = jnp.where(below & above, inside, unbounded)
    one_sided = jnp.where(below | above, -tail, -0.5 * normal**2 - 0.5 * math.log(2 * math.pi))
    density = jnp.where(below & above, -np.log(width), one_sided)
    return {"action": action, "action_log_prob": density.reshape(num_envs, -1).sum(-1)}
