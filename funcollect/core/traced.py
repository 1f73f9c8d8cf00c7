"""The functional core on JAX arrays, for use inside the user's own `jit`, `vmap`, `grad` and `shard_map`.

Environments are JAX ones, policies JAX ones or `random_policy`. `params` is an argument, since a value closed over
would be baked into the compiled code. Batches are plain nested dicts, time-major ``[T, P, ...]``, rewards and flags
without a trailing dimension; `funcollect.deliver` makes a TensorDict of one.
"""

from __future__ import annotations

from typing import Any

from funcollect.core.fused_step import Setting, begin, by_path, restart
from funcollect.core.fused_step import step as fused_step
from funcollect.core.state import CollectorState
from funcollect.envs.jax_env import JaxEnv, JaxEnvState
from funcollect.interop.jax_setup import import_jax
from funcollect.policies.traced_policy import traced_policy
from funcollect.specs import ExplorationType, Policy
from funcollect.tree import nest

__all__ = ["init", "reset", "rollout", "step"]


def init(
    env: JaxEnv, policy: Policy, params: Any, *, key: Any, first_lane: Any = 0, total_lanes: int | None = None
) -> CollectorState:
    """The first state, of lanes ``first_lane … first_lane + P - 1`` of `total_lanes`.

    Args:
        env: a JAX environment.
        policy: a JAX policy, or `random_policy`.
        params: the policy's parameters; not read yet.
        key: uint32[2], or a typed key: all randomness follows from it.
        first_lane: the id of the first lane, an int or an array []; parts of one run begin at different lanes.
        total_lanes: how many lanes the run has; P unless given.
    """
    jax = import_jax()
    jnp = jax.numpy
    count = env.num_envs or 1
    key = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    lane = jnp.arange(count, dtype=jnp.int32) + first_lane
    episode = jnp.zeros(count, jnp.int32)
    physics, observation = begin(env, key, lane, episode)
    observation = by_path(env, observation)
    flags = jnp.zeros(count, bool)
    return CollectorState(
        env_state=JaxEnvState(physics, begin(env, key, lane, episode + 1), flags),
        observation=observation,
        policy_state=policy.init(key, count),
        key=key,
        lane=lane,
        episode=episode,
        step=jnp.zeros(count, jnp.int32),
        returns=jnp.zeros((count, *_players(env)), jnp.float32),
        terminated=flags,
        truncated=flags,
        total_lanes=total_lanes or count,
        steps=jnp.zeros(2, jnp.uint32),
        policy_version=jnp.zeros((), jnp.int32),
    )


def _players(env: JaxEnv) -> tuple[int, ...]:
    jax = import_jax()
    jnp = jax.numpy

    def reward(key: Any) -> Any:
        physics, _ = env.begin(key)
        action = jax.numpy.zeros(env.action_spec.shape, jax.dtypes.canonicalize_dtype(env.action_space.dtype))
        return env.advance(key, physics, action).reward

    return tuple(jax.eval_shape(reward, jnp.zeros(2, jnp.uint32)).shape)


def reset(env: JaxEnv, state: CollectorState, mask: Any = None) -> CollectorState:
    """The lanes of `mask` [P] bool, or all, begin another episode under a new trajectory id."""
    jnp = import_jax().numpy
    after: CollectorState = restart(env, state, jnp.ones_like(state.terminated) if mask is None else mask)
    return after


def step(
    env: JaxEnv,
    policy: Policy,
    params: Any,
    state: CollectorState,
    *,
    exploration_type: ExplorationType = ExplorationType.RANDOM,
    max_frames_per_traj: int | None = None,
) -> tuple[CollectorState, dict[str, Any]]:
    """One step of every lane: the next state, and the transition [P, ...]."""
    setting = Setting(
        env=env,
        answer=traced_policy(policy, env.action_spec, state.num_lanes, exploration_type),
        max_frames_per_traj=max_frames_per_traj,
    )
    state, row = fused_step(setting, params, state)
    return state, nest(row)


def rollout(
    env: JaxEnv,
    policy: Policy,
    params: Any,
    state: CollectorState,
    length: int,
    *,
    exploration_type: ExplorationType = ExplorationType.RANDOM,
    max_frames_per_traj: int | None = None,
) -> tuple[CollectorState, dict[str, Any]]:
    """`length` steps of every lane, a static number: the next state, and the batch [T, P, ...]."""

    def body(carry: CollectorState, _: None) -> tuple[CollectorState, dict[str, Any]]:
        return step(
            env,
            policy,
            params,
            carry,
            exploration_type=exploration_type,
            max_frames_per_traj=max_frames_per_traj,
        )

    after: tuple[CollectorState, dict[str, Any]] = import_jax().lax.scan(body, state, None, length=length)
    return after
