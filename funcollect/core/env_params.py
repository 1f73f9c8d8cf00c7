"""`set_env_params`: other parameters for a JAX environment during a run."""

from __future__ import annotations

from typing import Any

import numpy as np

from funcollect.arguments import check_flags
from funcollect.core.api import check_state
from funcollect.core.state import Array, CollectorState
from funcollect.core.traced_step.lane_params import LaneParams, Varying, is_varying
from funcollect.envs.jax_envs.jax_env import JaxEnvState, default_params
from funcollect.interop.jax_setup import import_jax, without_weak_types
from funcollect.protocols import Env


def set_env_params(
    env: Env, state: CollectorState[Array], params: Any, *, at_once: bool = False
) -> CollectorState[Array]:
    """Return a state with other parameters of a JAX environment: for domain randomisation and curricula.

    Starts of episodes that were made ahead with the old parameters are not used. The first change compiles the loop for
    parameters that are arguments; later ones, of the same leaves, compile nothing. `evaluate` runs the environment with
    its own parameters.

    Args:
        env: the environment with which `state` was made: gymnax's, brax's (its system), MuJoCo Playground's (its
            model), or functions of your own with `params`.
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
    if not isinstance(state.env_state, JaxEnvState) or (own := default_params(env)) is None:
        raise TypeError(
            f"{env!r} has no parameters that can be set here, expected an environment in JAX that has some: over Torch "
            "pass state.replace(env_params=...), over simulators use funcollect.apply"
        )
    jax = import_jax()
    wanted, treedef = jax.tree.flatten(own)
    given, structure = jax.tree.flatten(params)
    if structure != treedef:
        raise ValueError(f"params is {structure}, expected {treedef}: change leaves of env.default_params")
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(own)]
    lanes = state.num_lanes
    varies = [_varies(name, leaf, like, lanes) for name, leaf, like in zip(names, given, wanted, strict=True)]
    leaves = [_array(leaf, like) for leaf, like in zip(given, wanted, strict=True)]
    before = own if state.env_params is None else state.env_params
    old, varied = _taken_apart(before)
    old = [_array(leaf, like) for leaf, like in zip(old, wanted, strict=True)]
    changed = [not at_once and not _equal(*both) for both in zip(leaves, old, strict=True)]
    varies = [any(each) for each in zip(varies, varied, changed, strict=True)]
    shapes = [(lanes, *np.shape(like)) for like in wanted]
    return state.replace(env_params=_combined(treedef, varies, shapes, leaves if at_once else old, leaves))


def _combined(treedef: Any, varies: list[bool], shapes: list[tuple[int, ...]], current: Any, coming: Any) -> Any:
    """Parameters from the leaves of current and of coming episodes; those that vary get the `shapes` [P, ...]."""
    if not any(varies):
        return treedef.unflatten(coming)

    def of_lanes(leaves: Any) -> tuple[Any, ...]:
        broadcast_to = import_jax().numpy.broadcast_to
        each = zip(leaves, shapes, varies, strict=True)
        return tuple(broadcast_to(leaf, shape) for leaf, shape, own in each if own)

    shared = treedef.unflatten([Varying() if own else leaf for leaf, own in zip(coming, varies, strict=True)])
    return without_weak_types(LaneParams(shared, of_lanes(current), of_lanes(coming)))


def _equal(one: Any, other: Any) -> bool:
    one, other = np.asarray(one), np.asarray(other)
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))


def _array(leaf: Any, like: Any) -> Any:
    jnp = import_jax().numpy
    return jnp.asarray(leaf, jnp.asarray(like).dtype)


def _varies(name: str, leaf: Any, like: Any, lanes: int) -> bool:
    """Whether a leaf has a value for each lane; ValueError for another shape than these two."""
    shape, own = tuple(np.shape(leaf)), tuple(np.shape(like))
    if shape not in (own, (lanes, *own)):
        raise ValueError(
            f"params{name} has the shape {list(shape)}, expected {list(own)}, or {[lanes, *own]} for one in each lane: "
            "change it"
        )
    return shape != own


def _taken_apart(params: Any) -> tuple[list[Any], list[bool]]:
    """The leaves of a state's parameters, those of current episodes, and which lanes have of their own."""
    jax = import_jax()
    if not isinstance(params, LaneParams):
        leaves = jax.tree.leaves(params)
        return leaves, [False] * len(leaves)
    nodes = jax.tree.leaves(params.shared, is_leaf=is_varying)
    return jax.tree.leaves(params.filled(params.current)), [is_varying(node) for node in nodes]


def described(params: Any) -> list[bool] | None:
    """Which leaves of a state's parameters lanes have of their own, as plain data; None for parameters never set."""
    return None if params is None else _taken_apart(params)[1]


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
    arrays = [_array(leaf, leaf) for leaf in leaves]
    shapes = [(state.num_lanes, *leaf.shape) for leaf in arrays]
    return state.replace(env_params=_combined(treedef, varies, shapes, arrays, arrays))


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
        raise ValueError(f"params has {len(leaves)} leaves, expected {len(shapes)}: change leaves of default_params")
    own = []
    for name, leaf, shape in zip(names, leaves, shapes, strict=True):
        array = np.asarray(leaf)
        own.append(array[part] if _varies(name, array, np.broadcast_to(0, shape), lanes) else array)
    return treedef.unflatten(own)
