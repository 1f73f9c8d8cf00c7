"""Parameters of a JAX environment that change during a run: each leaf is shared, or has a row for each lane.

A state holds a pytree in the environment's own structure, with the nodes below in place of some leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from funcollect.arguments import check_flags
from funcollect.core.request import check_state, check_traced_state
from funcollect.core.state import Array, CollectorState
from funcollect.envs.jax_envs.jax_env import JaxEnvState, default_params, param_keys, param_of
from funcollect.interop.jax_setup import import_jax, without_weak_types
from funcollect.messages import clipped, shown
from funcollect.policies.numerics import jax_numerics
from funcollect.protocols import Env, JaxEnv
from funcollect.tree import Path


class LaneRows(NamedTuple):
    """A leaf that has a row for each lane."""

    current: Any  # [P, ...], for the episodes that the lanes are in
    coming: Any  # [P, ...], for the episodes after these


class Unchanged(NamedTuple):
    """Marks a shared leaf as the environment's own, for traced code, which cannot compare values."""

    leaf: Any


def _is_node(node: Any) -> bool:
    return isinstance(node, LaneRows | Unchanged)


def _nodes(params: Any) -> Any:
    """A list with a leaf, a `LaneRows` or an `Unchanged` for each of the environment's leaves."""
    return import_jax().tree.leaves(params, is_leaf=_is_node)


def map_rows(function: Callable[[LaneRows], Any], params: Any, other: Callable[[Any], Any] = lambda node: node) -> Any:
    """The parameters with the result of a function in place of each `LaneRows`, and of `other` in place of the rest."""
    tree = import_jax().tree
    return tree.map(lambda node: (function if isinstance(node, LaneRows) else other)(node), params, is_leaf=_is_node)


def _as_env(params: Any, pick: Callable[[LaneRows], Any] = lambda rows: rows.current) -> Any:
    """The parameters, or one node, in the environment's structure, with the result of `pick` for each `LaneRows`."""
    return map_rows(pick, params, lambda node: node.leaf if isinstance(node, Unchanged) else node)


def set_env_params(
    env: Env, state: CollectorState[Array], params: Any, *, at_once: bool = False
) -> CollectorState[Array]:
    """Return a state with other parameters of a JAX environment: for domain randomisation and curricula.

    `params` is a pytree like ``env.default_params`` (brax's system, MuJoCo Playground's model). Its leaves may have one
    more dimension, a first one of size P, with a value per lane. With `at_once`, they also act in the current episodes,
    else from each lane's next one on. `evaluate` runs the environment with its own parameters.

    The first change compiles the loop, and so does each change after which another leaf has a value for each lane:
    because it was passed by lane or, unless `at_once`, because its value changed.

    Raises:
        TypeError: for an environment without parameters, or in another framework.
        ValueError: for a pytree of another structure, or leaves of other shapes.

    >>> import jax.numpy as jnp, funcollect as fc
    >>> env = fc.make_env("gymnax/CartPole-v1", num_envs=2, param_keys=["gravity"])
    >>> policy = fc.random_policy(env)
    >>> params = env.default_params.replace(gravity=jnp.array([3.7, 24.8]))  # on Mars, and on Jupiter
    >>> state = fc.set_env_params(env, fc.init(env, policy, seed=0), params, at_once=True)
    >>> fc.rollout(env, policy, state, 3)[1]["env_params", "gravity"]
    tensor([[ 3.7000,  3.7000,  3.7000],
            [24.8000, 24.8000, 24.8000]])
    """
    check_state(env, state, "set_env_params")
    return state.replace(env_params=_changed(env, state, params, at_once, traced=False))


def traced_set_env_params(env: JaxEnv, state: CollectorState, params: Any, *, at_once: bool = False) -> CollectorState:
    """Do what `funcollect.set_env_params` does, inside `jit`, with the same errors; `params` may be traced.

    Before a `scan`, call it once with the same kind of parameters, so that the carry has a fixed structure. Without
    `at_once`, each leaf gets a dimension P, unless it is the very object in ``env.default_params``.

    >>> import jax, jax.numpy as jnp, funcollect as fc
    >>> env = fc.make_env("gymnax/CartPole-v1", num_envs=4, param_keys=["gravity"])
    >>> policy = fc.random_policy(env)
    >>> def update(state, gravity):
    ...     params = env.default_params.replace(gravity=gravity)
    ...     state = fc.traced.set_env_params(env, state, params, at_once=True)
    ...     state, batch = fc.traced.rollout(env, policy, None, state, 8)
    ...     return state, batch["env_params"]["gravity"].mean()
    >>> @jax.jit
    ... def run(key, gravities):
    ...     state, _ = update(fc.traced.init(env, policy, None, key=key), gravities[0])
    ...     return jax.lax.scan(update, state, gravities)[1]
    >>> run(jax.random.PRNGKey(0), jnp.array([2.0, 4.0, 8.0]))
    Array([2., 4., 8.], dtype=float32)
    """
    check_traced_state(env, state)
    changed = _changed(env, state, params, at_once, traced=True)
    lane, select = state.lane, jax_numerics().select  # so that rows vary over a mesh, as in later states
    return state.replace(env_params=map_rows(lambda rows: select(lane == lane, rows, rows), changed))


def _rows(num_lanes: int, like: Any, *leaves: Any) -> LaneRows:
    return LaneRows(*(import_jax().numpy.broadcast_to(leaf, (num_lanes, *np.shape(like))) for leaf in leaves))


def _changed(env: Env, state: CollectorState, params: Any, at_once: bool, *, traced: bool) -> Any:
    """The parameters after a change. A leaf has rows if it is given or held so, or changes from the next episodes on.

    Traced values cannot be compared: a traced leaf is unchanged only if it is the very object that the state holds.
    """
    check_flags(at_once=at_once)
    if not isinstance(state.env_state, JaxEnvState) or (defaults := default_params(env)) is None:
        mend = "over Torch pass state.replace(env_params=...), over simulators use funcollect.apply"
        raise TypeError(f"{env!r} has no parameters that can be set here, as environments in JAX may have: {mend}")
    jax, jnp = import_jax(), import_jax().numpy
    named, treedef = jax.tree_util.tree_flatten_with_path(defaults)
    leaves, structure = jax.tree.flatten(params)
    if structure != treedef:
        raise _wrong_structure(params, len(named), f"is {clipped(str(structure))}", clipped(str(treedef)))
    nodes = [Unchanged(leaf) for _, leaf in named] if state.env_params is None else _nodes(state.env_params)
    changed = []
    for (path, like), leaf, node in zip(named, leaves, nodes, strict=True):
        name, dtype = jax.tree_util.keystr(path), jnp.asarray(like).dtype
        if jnp.issubdtype(dtype, np.integer) and jnp.issubdtype(jnp.result_type(leaf), np.inexact):  # it would be cut
            raise ValueError(f"params{name} is {shown(leaf)}, expected an integer: convert it, such as by int")
        by_lane = _is_by_lane(name, leaf, np.shape(like), state.num_lanes)
        old, new = jnp.asarray(_as_env(node), dtype), jnp.asarray(leaf, dtype)
        if traced:
            # so that XLA rounds as for the eager function, whose parameters are arguments rather than constants
            old, new = map(jax.lax.optimization_barrier, (old, new))
            same = leaf is node or (leaf is like and isinstance(node, Unchanged))
            new = old if same else new
        else:
            same = np.array_equal(np.asarray(new), np.asarray(old), equal_nan=np.dtype(dtype).kind == "f")
        shared = Unchanged(new) if traced and leaf is like else new
        in_rows = by_lane or isinstance(node, LaneRows) or not (at_once or same)
        changed.append(_rows(state.num_lanes, like, new if at_once else old, new) if in_rows else shared)
    return without_weak_types(treedef.unflatten(changed))


def _wrong_structure(params: Any, leaves: int, found: str, wanted: str) -> ValueError:
    if isinstance(params, tuple) and len(params) == 2 and len(import_jax().tree.leaves(params[0])) == leaves:
        mend = "pass the first part, the model if a function for domain randomisation returned it with in_axes"
        return ValueError(f"params is a pair, expected a pytree like env.default_params: {mend}")
    return ValueError(f"params {found}, expected {wanted}: change leaves of env.default_params")


def _is_by_lane(name: str, leaf: Any, shared: tuple[int, ...], lanes: int) -> bool:
    """Whether a leaf has a value for each lane; ValueError unless its shape is `shared` or ``[lanes, *shared]``."""
    shape = tuple(np.shape(leaf))
    if shape not in (shared, (lanes, *shared)):
        wanted = f"{list(shared)}, or {[lanes, *shared]} for one in each lane"
        raise ValueError(f"params{name} has the shape {list(shape)}, expected {wanted}: change it")
    return shape != shared


def has_rows(env: JaxEnv, params: Any) -> bool:
    """Whether shapes or structure differ from the environment's own: by lane, or wrong, as `set_env_params` reports."""
    defaults = default_params(env)
    if defaults is None or any(map(_is_node, _nodes(params))):
        return False
    (leaves, structure), (shared, own_structure) = map(import_jax().tree.flatten, (params, defaults))
    return bool(structure != own_structure or [*map(np.shape, leaves)] != [*map(np.shape, shared)])


def call_in_lanes(function: Callable[..., Any], params: Any, *arguments: Any, coming: bool = False) -> Any:
    """Call ``function(*arguments, params)`` in all lanes; `arguments` are [P, ...], episodes current or `coming`."""
    rows = [node.coming if coming else node.current for node in _nodes(params) if isinstance(node, LaneRows)]

    def of_lane(leaves: list[Any], *arguments: Any) -> Any:
        rest = iter(leaves)
        return function(*arguments, _as_env(params, lambda _: next(rest)))

    return import_jax().vmap(of_lane)(rows, *arguments)


def of_one_lane(params: Any) -> Any:
    """The parameters as the environment's functions take them; where lanes differ, those of the first lane."""
    return _as_env(params, lambda rows: rows.current[0])


def recorded_params(env: JaxEnv, params: Any, num_lanes: int) -> dict[Path, Any]:
    """The parameters that batches record, each [P, ...], by path: those of the current episodes."""
    jnp, row = import_jax().numpy, dict[Path, Any]()
    for name in param_keys(env):
        held = default_params(env) if params is None else params
        value, one = (param_of(own, name) for own in (_as_env(held), of_one_lane(held)))
        row["env_params", *name.split(".")] = jnp.broadcast_to(jnp.asarray(value), (num_lanes, *jnp.shape(one)))
    return row


def described(params: Any) -> list[bool] | None:
    """Which leaves of a state's parameters have rows; None for parameters never set."""
    return None if params is None else [isinstance(node, LaneRows) for node in _nodes(params)]


def like_described(env: Env, state: CollectorState, rows: list[bool] | None) -> CollectorState:
    """The state with parameters of the structure that `described` has returned as `rows`."""
    if not isinstance(state.env_state, JaxEnvState):
        return state
    if rows is None:
        return state.replace(env_params=None)
    leaves, treedef = import_jax().tree.flatten(default_params(env))
    if len(leaves) != len(rows):
        own = f"{env!r} has {len(leaves)}"
        raise ValueError(f"the saved environment has {len(rows)} parameters, {own}: build it with the same environment")
    arrays = zip(map(import_jax().numpy.asarray, leaves), rows, strict=True)
    nodes = [_rows(state.num_lanes, leaf, leaf, leaf) if own_rows else leaf for leaf, own_rows in arrays]
    return state.replace(env_params=without_weak_types(treedef.unflatten(nodes)))


def param_shapes(env: Env) -> list[tuple[int, ...]] | None:
    """The shapes of the parameters that can be set; None for an environment without any."""
    defaults = default_params(env) if env.backend == "jax" else None
    return None if defaults is None else [tuple(np.shape(leaf)) for leaf in import_jax().tree.leaves(defaults)]


def part_of_lanes(params: Any, shapes: list[tuple[int, ...]], lanes: int, part: slice) -> Any:
    """The parameters, as NumPy arrays, of a part of `lanes` lanes; ValueError for a leaf of another shape."""
    tree_util, shared = import_jax().tree_util, iter(shapes)
    if (count := len(import_jax().tree.leaves(params))) != len(shapes):
        raise _wrong_structure(params, len(shapes), f"has {count} leaves", str(len(shapes)))

    def cut(path: Any, leaf: Any) -> Any:
        array = np.asarray(leaf)
        return array[part] if _is_by_lane(tree_util.keystr(path), array, next(shared), lanes) else array

    return tree_util.tree_map_with_path(cut, params)
