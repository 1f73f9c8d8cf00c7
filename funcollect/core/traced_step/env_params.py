"""`set_env_params` for traced code: which leaves differ between lanes depends on no value."""

from __future__ import annotations

from typing import Any

from funcollect.arguments import check_flags
from funcollect.core.state import CollectorState
from funcollect.core.traced_step.checks import check_traced_state
from funcollect.core.traced_step.given_params import GivenParams, as_leaf, combined, given_params, taken_apart
from funcollect.core.traced_step.lane_params import LaneParams, Unchanged
from funcollect.core.traced_step.starts import varying
from funcollect.interop.jax_setup import import_jax
from funcollect.protocols import JaxEnv


def set_env_params(env: JaxEnv, state: CollectorState, params: Any, *, at_once: bool = False) -> CollectorState:
    """Return a state with other parameters of the environment: for domain randomisation and curricula inside `jit`.

    Episodes change as with `funcollect.set_env_params`. In a `scan`, call it once before with the same kind of
    parameters, so that the carry has a fixed structure. Without `at_once`, each leaf gets a dimension P, one value per
    lane, except those that are the very objects in ``env.default_params`` (``env.default_params.replace(gravity=g)``
    leaves all but one as they are).

    Args:
        env: a JAX environment that has parameters.
        state: the state to continue from.
        params: a pytree like ``env.default_params``, which may be traced. Each leaf has the same shape as there, or a
            first dimension P more: then each lane has its own.
        at_once: also in the episodes that lanes are in, instead of from each lane's next episode on.

    Raises:
        TypeError: for an environment without parameters, or in another framework.
        ValueError: for a pytree of another structure, or leaves of other shapes.

    >>> import jax, jax.numpy as jnp, funcollect as fc
    >>> env = fc.make_env("gymnax/CartPole-v1", num_envs=4, param_keys=["gravity"])
    >>> policy = fc.random_policy(env)
    >>> @jax.jit
    ... def run(key, gravities):
    ...     state = fc.traced.init(env, policy, None, key=key)
    ...     state = set_env_params(env, state, env.default_params.replace(gravity=gravities[0]), at_once=True)
    ...     def update(state, gravity):
    ...         state = set_env_params(env, state, env.default_params.replace(gravity=gravity), at_once=True)
    ...         state, batch = fc.traced.rollout(env, policy, None, state, 8)
    ...         return state, batch["env_params"]["gravity"].mean()
    ...     return jax.lax.scan(update, state, gravities)[1]
    >>> run(jax.random.PRNGKey(0), jnp.array([2.0, 4.0, 8.0]))
    Array([2., 4., 8.], dtype=float32)
    """
    check_traced_state(env, state)
    check_flags(at_once=at_once)
    new = given_params(env, state, params)
    own = [leaf is like for leaf, like in zip(new.given, new.own, strict=True)]
    nodes, old, varied = _before(new, state.env_params)
    # XLA would compute with constants otherwise than with arguments, which parameters of the eager function are.
    barrier = import_jax().lax.optimization_barrier
    old, arrays = [barrier(leaf) for leaf in old], [barrier(leaf) for leaf in new.arrays]
    unchanged = [
        leaf is node or (same and isinstance(node, Unchanged))
        for leaf, node, same in zip(new.given, nodes, own, strict=True)
    ]
    varies = [
        lanes or already or not (at_once or same)
        for lanes, already, same in zip(new.by_lane, varied, unchanged, strict=True)
    ]
    leaves = [before if same else leaf for before, leaf, same in zip(old, arrays, unchanged, strict=True)]
    shared = [Unchanged(leaf) if same else leaf for leaf, same in zip(leaves, own, strict=True)]
    made = combined(new, varies, state.num_lanes, shared, leaves if at_once else old, leaves)
    rows = varying(state.lane, (made.current, made.coming))  # over a mesh, as those of later states
    return state.replace(env_params=LaneParams(made.shared, *rows))


def _before(new: GivenParams, params: Any) -> tuple[list[Any], list[Any], list[bool]]:
    """What a state's parameters have instead of each leaf, the leaves, and which of them differ between lanes.

    The leaves belong to the episodes that lanes are in.
    """
    if params is None:
        leaves = [as_leaf(leaf, leaf) for leaf in new.own]
        return [Unchanged(leaf) for leaf in leaves], leaves, [False] * len(leaves)
    leaves, varied = taken_apart(params)
    return params.nodes if isinstance(params, LaneParams) else leaves, leaves, varied
