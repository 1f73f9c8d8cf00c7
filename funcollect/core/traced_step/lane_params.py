"""Parameters of a JAX environment that differ between lanes, or change from the next episode on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from funcollect.envs.jax_envs.jax_env import default_params, param_of
from funcollect.interop.jax_setup import import_jax
from funcollect.protocols import JaxEnv
from funcollect.tree import Path


class Varying(NamedTuple):
    """Stands for a leaf that differs between lanes; a node without leaves."""


class Unchanged(NamedTuple):
    """Holds a leaf that is the environment's own: traced code cannot compare values, but sees this."""

    leaf: Any


class LaneParams(NamedTuple):
    """The parameters of P lanes.

    Attributes:
        shared: the pytree that the environment takes, with `Varying` or `Unchanged` in place of some leaves.
        current: those leaves, each [P, ...], of the episodes that the lanes are in.
        coming: the same for the episodes after these.
    """

    shared: Any
    current: tuple[Any, ...]
    coming: tuple[Any, ...]

    def filled(self, leaves: Sequence[Any]) -> Any:
        """The whole pytree, with these leaves in place of `Varying`."""
        rest, treedef = iter(leaves), import_jax().tree.structure(self.shared, is_leaf=_is_node)
        return treedef.unflatten([_leaf_of(node, rest) for node in self.nodes])

    @property
    def nodes(self) -> list[Any]:
        """What `shared` has instead of each leaf: the leaf itself, `Varying` or `Unchanged`."""
        nodes: list[Any] = import_jax().tree.leaves(self.shared, is_leaf=_is_node)
        return nodes


def _is_node(node: Any) -> bool:
    return isinstance(node, Varying | Unchanged)


def _leaf_of(node: Any, rest: Iterator[Any]) -> Any:
    """The leaf that a node stands for; one that differs between lanes is the next of the `rest`."""
    if is_varying(node):
        return next(rest)
    return node.leaf if isinstance(node, Unchanged) else node


def is_varying(node: Any) -> bool:
    """Whether a node stands for a leaf."""
    return isinstance(node, Varying)


def call_in_lanes(function: Callable[..., Any], params: Any, moment: str, *arguments: Any) -> Any:
    """Call ``function(*arguments, params)`` for every lane, with the `arguments` [P, ...] of each.

    `moment` is ``"current"`` or ``"coming"``: the episodes whose parameters are meant.
    """
    jax = import_jax()
    if not isinstance(params, LaneParams):
        return jax.vmap(function, (*[0] * len(arguments), None))(*arguments, params)

    def call(leaves: Any, *own: Any) -> Any:
        return function(*own, params.filled(leaves))

    return jax.vmap(call)(getattr(params, moment), *arguments)


def of_one_lane(params: Any) -> Any:
    """The parameters as the environment's functions take them, those of the first lane if lanes differ."""
    return params.filled([leaf[0] for leaf in params.current]) if isinstance(params, LaneParams) else params


def of_begun(params: Any) -> Any:
    """The parameters after all lanes have begun another episode."""
    return params._replace(current=params.coming) if isinstance(params, LaneParams) else params


def of_restarted(params: Any, mask: Any) -> Any:
    """The parameters after the lanes of `mask` [P] have begun another episode."""
    if not isinstance(params, LaneParams):
        return params
    where = import_jax().numpy.where
    pairs = zip(params.coming, params.current, strict=True)
    chosen = tuple(where(mask.reshape(-1, *[1] * (new.ndim - 1)), new, old) for new, old in pairs)
    return params._replace(current=chosen)


def recorded_params(env: JaxEnv, params: Any, num_lanes: int) -> dict[Path, Any]:
    """The parameters that batches record, [P, ...], those of the episodes that lanes are in."""
    names = getattr(env, "param_keys", ())
    if not names:
        return {}
    jnp = import_jax().numpy
    lanes = isinstance(params, LaneParams)
    whole = params.filled(params.current) if lanes else default_params(env) if params is None else params
    one = of_one_lane(params) if lanes else whole
    row: dict[Path, Any] = {}
    for name in names:
        value, own = jnp.asarray(param_of(whole, name)), jnp.shape(param_of(one, name))
        row["env_params", *name.split(".")] = jnp.broadcast_to(value, (num_lanes, *own))
    return row
