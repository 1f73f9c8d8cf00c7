"""`set_env_params`: other parameters for a JAX environment during a run."""

from __future__ import annotations

from typing import Any

import numpy as np

from funcollect.arguments import check_flags
from funcollect.core.api import check_state
from funcollect.core.state import Array, CollectorState
from funcollect.core.traced_step.given_params import (
    GivenParams,
    as_leaf,
    combined,
    given_params,
    is_by_lane,
    taken_apart,
    wrong_structure,
)
from funcollect.envs.jax_envs.jax_env import JaxEnvState, default_params
from funcollect.interop.jax_setup import import_jax
from funcollect.protocols import Env


def set_env_params(
    env: Env, state: CollectorState[Array], params: Any, *, at_once: bool = False
) -> CollectorState[Array]:
    """Return a state with other parameters of a JAX environment: for domain randomisation and curricula.

    Starts of episodes that were made ahead with the old parameters are not used. The first change compiles the loop.
    So does each one after which another leaf has a value for each lane: one given by lane or, unless `at_once`, one
    whose value changes. Other changes compile nothing. `evaluate` runs the environment with its own parameters.

    Args:
        env: the environment of `state`: gymnax's, brax's (its system), MuJoCo Playground's (its
            model), jumanji's with `params`, or functions of your own with `params`.
        state: the state to continue from.
        params: a pytree like ``env.default_params``. Each leaf has the same shape as there, or a first dimension P
            more: then each lane has its own.
        at_once: also in the episodes that lanes are in, instead of from each lane's next episode on.

    Returns:
        The next state.

    Raises:
        TypeError: for an environment without parameters, or in another framework.
        ValueError: for a pytree of another structure, or leaves of other shapes.

    >>> import jax.numpy as jnp, funcollect as fc
    >>> env = fc.make_env("gymnax/CartPole-v1", num_envs=2, param_keys=["gravity"])
    >>> policy = fc.random_policy(env)
    >>> state = fc.init(env, policy, seed=0)
    >>> params = env.default_params.replace(gravity=jnp.array([3.7, 24.8]))  # on Mars, and on Jupiter
    >>> state = fc.set_env_params(env, state, params, at_once=True)
    >>> state, batch = fc.rollout(env, policy, state, 3)
    >>> batch["env_params", "gravity"]
    tensor([[ 3.7000,  3.7000,  3.7000],
            [24.8000, 24.8000, 24.8000]])
    """
    check_state(env, state, "set_env_params")
    check_flags(at_once=at_once)
    new = given_params(env, state, params)
    arrays = new.arrays
    old, varied = taken_apart(default_params(env) if state.env_params is None else state.env_params)
    old = [as_leaf(leaf, like) for leaf, like in zip(old, new.own, strict=True)]
    changed = [not at_once and not _equal(*both) for both in zip(arrays, old, strict=True)]
    varies = [any(each) for each in zip(new.by_lane, varied, changed, strict=True)]
    if not any(varies):
        return state.replace(env_params=new.treedef.unflatten(arrays))
    current = arrays if at_once else old
    return state.replace(env_params=combined(new, varies, state.num_lanes, arrays, current, arrays))


def _equal(one: Any, other: Any) -> bool:
    one, other = np.asarray(one), np.asarray(other)
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))


def described(params: Any) -> list[bool] | None:
    """Which leaves of a state's parameters differ between lanes, as plain data; None for parameters never set."""
    return None if params is None else taken_apart(params)[1]


def like_described(env: Env, state: CollectorState, varies: list[bool] | None) -> CollectorState:
    """The state with parameters in the structure of those that `described` returned `varies` for."""
    if not isinstance(state.env_state, JaxEnvState):
        return state
    if varies is None:
        return state.replace(env_params=None)
    jax = import_jax()
    leaves, treedef = jax.tree.flatten(default_params(env))
    if len(leaves) != len(varies):
        raise ValueError(
            f"the saved environment has {len(varies)} parameters, {env!r} has {len(leaves)}: build it with the same "
            "environment"
        )
    arrays = [as_leaf(leaf, leaf) for leaf in leaves]
    if not any(varies):
        return state.replace(env_params=treedef.unflatten(arrays))
    own = GivenParams(treedef, leaves, leaves, varies)
    return state.replace(env_params=combined(own, varies, state.num_lanes, arrays, arrays, arrays))


def param_shapes(env: Env) -> list[tuple[int, ...]] | None:
    """The shapes of the parameters that can be set; None for an environment without any."""
    own = default_params(env) if env.backend == "jax" else None
    return None if own is None else [tuple(np.shape(leaf)) for leaf in import_jax().tree.leaves(own)]


def part_of_lanes(params: Any, shapes: list[tuple[int, ...]], lanes: int, part: slice) -> Any:
    """The parameters, as NumPy arrays, of a part of `lanes` lanes; ValueError for a leaf of another shape."""
    jax = import_jax()
    leaves, treedef = jax.tree.flatten(params)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    if len(leaves) != len(shapes):
        raise wrong_structure(params, len(shapes), f"has {len(leaves)} leaves", str(len(shapes)))
    own = []
    for name, leaf, shape in zip(names, leaves, shapes, strict=True):
        array = np.asarray(leaf)
        own.append(array[part] if is_by_lane(name, array, shape, lanes) else array)
    return treedef.unflatten(own)
