"""Policies inside a traced loop."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium import spaces

from funcollect.errors import PolicyError
from funcollect.interop.jax_setup import import_jax
from funcollect.policies.actors.actor import split_answer
from funcollect.policies.actors.checks import check_action, check_rows
from funcollect.policies.jax_functions.function_policy import FunctionPolicy, jax_noise
from funcollect.policies.jax_functions.program import TracedCall
from funcollect.policies.numerics import encode_choices, jax_numerics
from funcollect.policies.random_policy import RandomPolicy, action_mask, draw_box
from funcollect.protocols import Exploration, Policy, is_policy
from funcollect.specs import ActionSpec, ExplorationType


def is_traceable(policy: Policy) -> bool:
    """Whether `traced_policy` takes this policy."""
    return isinstance(policy, RandomPolicy) or policy.backend == "jax"


def check_traceable(policy: Any) -> None:
    """Raise TypeError for a policy that is neither random nor one that JAX can trace."""
    if not is_policy(policy) or not is_traceable(policy):
        kind = f"a {policy.backend} policy" if is_policy(policy) else "no policy"
        raise TypeError(
            f"{type(policy).__name__} is {kind}, expected one that JAX can trace: pass "
            "funcollect.lower_policy(policy, env), or use funcollect.jax_policy or funcollect.random_policy"
        )


def traced_policy(policy: Policy, spec: ActionSpec, num_envs: int, exploration_type: ExplorationType) -> TracedCall:
    """The policy's step as a traced function that draws its noise from a key; TypeError if JAX cannot trace it."""
    check_traceable(policy)
    jax = import_jax()
    noise = policy.noise(spec)
    stochastic = exploration_type is ExplorationType.RANDOM

    def answer(params: Any, policy_state: Any, observation: Any, key: Any) -> tuple[Any, dict[str, Any]]:
        if isinstance(policy, RandomPolicy):
            return policy_state, {"action": traced_random(spec, key, observation, num_envs)[0]}
        drawn = key if noise is not None and noise.kind == "key" else jax_noise(noise, key, num_envs)
        if isinstance(policy, FunctionPolicy):
            policy_state, outputs = policy.answer(spec, stochastic, params, policy_state, observation, drawn)
        else:
            policy_state, given = policy(params, policy_state, observation, drawn, spec, Exploration(exploration_type))
            action, extras = split_answer(given, None)
            outputs = {"action": action, **extras}
        check_action(outputs["action"], spec, num_envs)
        for name, output in outputs.items():
            check_rows(name, output, num_envs)
            if jax.numpy.issubdtype(output.dtype, jax.dtypes.prng_key):
                raise PolicyError(
                    f"the policy's output {name!r} is typed PRNG keys, expected numbers: return jax.random.key_data of "
                    "them"
                )
        return policy_state, outputs

    return answer


def traced_random(spec: ActionSpec, key: Any, observation: Any, num_envs: int) -> tuple[Any, Any]:
    """Random actions [P, ...], distributed as those of `RandomPolicy`, and their log-probabilities [P]."""
    jax = import_jax()
    if spec.categories:
        return _choices(spec, key, action_mask(observation, spec), num_envs)
    shape = (num_envs, *spec.shape)
    if isinstance(spec.space, spaces.MultiBinary):
        action = jax.random.bernoulli(key, 0.5, shape).astype(jax.numpy.int32)
        return action, jax.numpy.full(num_envs, -math.prod(spec.shape) * math.log(2))
    space: Any = spec.space
    if space.dtype.kind in "iu":
        return _integers(space, key, shape)
    uniform = jax.random.uniform(key, shape, minval=np.finfo(np.float32).tiny)
    action, density = draw_box(jax.numpy, space, uniform, jax.random.normal(key, shape))
    return action, density.reshape(num_envs, -1).sum(-1)


def match_log_prob(log_prob: Any, like: Any) -> Any:
    """Log-probabilities [P] in the shape of a policy's own: [P], or [P, n] in shares that add up to them."""
    parts = like.shape[1:]
    shares = log_prob.reshape(-1, *[1] * len(parts)) / math.prod(parts)
    return import_jax().numpy.broadcast_to(shares, like.shape).astype(like.dtype)


def _choices(spec: ActionSpec, key: Any, mask: Any, num_envs: int) -> tuple[Any, Any]:
    """Uniform discrete actions among those that `mask` [P, n] allows, and their log-probabilities."""
    jax = import_jax()
    jnp = jax.numpy
    if mask is None:
        chosen = jax.random.randint(key, (num_envs, len(spec.categories)), 0, jnp.array(spec.categories))
        log_prob = jnp.full(num_envs, -sum(map(math.log, spec.categories)), jnp.float32)
    else:
        allowed = mask.astype(bool)
        chosen = jax.random.categorical(key, jnp.where(allowed, 0.0, -jnp.inf))[:, None]
        log_prob = -jnp.log(allowed.sum(-1).astype(jnp.float32))
    return encode_choices(jax_numerics(), list(chosen.T), spec), log_prob


def _integers(space: Any, key: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Both bounds are among the choices; a range beyond 32 bits is drawn from its lower part."""
    jax = import_jax()
    limits = np.iinfo(np.int32)
    low = np.clip(space.low.astype(np.int64), limits.min, limits.max - 1)
    high = np.clip(space.high.astype(np.int64) + 1, low + 1, limits.max)
    action = jax.random.randint(key, shape, low.astype(np.int32), high.astype(np.int32))
    return action, jax.numpy.full(shape[0], -np.log(high - low).sum(), np.float32)
