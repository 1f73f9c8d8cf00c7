"""Check the parameters that a user gives for the lanes of a JAX environment, and combine them with a state's own."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from funcollect.core.traced_step.lane_params import LaneParams, Varying, is_varying
from funcollect.envs.jax_envs.jax_env import JaxEnvState, default_params
from funcollect.interop.jax_setup import import_jax, without_weak_types
from funcollect.messages import clipped, shown
from funcollect.protocols import Env


class GivenParams(NamedTuple):
    """Parameters for P lanes, leaf by leaf."""

    treedef: Any
    own: list[Any]  # the environment's own leaves
    given: list[Any]  # the user's
    by_lane: list[bool]  # whether a leaf has a first dimension P more than the environment's own

    @property
    def arrays(self) -> list[Any]:
        """The user's leaves as arrays, in the dtypes of the environment's own."""
        return [as_leaf(leaf, like) for leaf, like in zip(self.given, self.own, strict=True)]


def given_params(env: Env, state: Any, params: Any) -> GivenParams:
    """Check `params` for a state of `env`.

    Raises:
        TypeError: for an environment without parameters, or in another framework.
        ValueError: for a pytree of another structure, or leaves of other shapes.
    """
    if not isinstance(state.env_state, JaxEnvState) or (own := default_params(env)) is None:
        raise TypeError(
            f"{env!r} has no parameters that can be set here, expected an environment in JAX that has some: over Torch "
            "pass state.replace(env_params=...), over simulators use funcollect.apply"
        )
    jax = import_jax()
    wanted, treedef = jax.tree.flatten(own)
    given, structure = jax.tree.flatten(params)
    if structure != treedef:
        raise wrong_structure(params, len(wanted), f"is {clipped(str(structure))}", clipped(str(treedef)))
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(own)]
    for name, leaf, like in zip(names, given, wanted, strict=True):
        _check_kind(name, leaf, like)
    each = zip(names, given, wanted, strict=True)
    by_lane = [is_by_lane(name, leaf, np.shape(like), state.num_lanes) for name, leaf, like in each]
    return GivenParams(treedef, wanted, given, by_lane)


def wrong_structure(params: Any, leaves: int, found: str, wanted: str) -> ValueError:
    """The error for parameters of another structure than an environment's own, which have so many leaves."""
    if isinstance(params, tuple) and len(params) == 2 and len(import_jax().tree.leaves(params[0])) == leaves:
        return ValueError(
            "params is a pair, expected a pytree like env.default_params: pass the first part, which is the model if a "
            "function for domain randomisation returned it with in_axes"
        )
    return ValueError(f"params {found}, expected {wanted}: change leaves of env.default_params")


def is_by_lane(name: str, leaf: Any, own: tuple[int, ...], lanes: int) -> bool:
    """Whether a leaf has a value for each lane; ValueError for another shape than `own` and ``[lanes, *own]``."""
    shape = tuple(np.shape(leaf))
    if shape not in (own, (lanes, *own)):
        raise ValueError(
            f"params{name} has the shape {list(shape)}, expected {list(own)}, or {[lanes, *own]} for one in each lane: "
            "change it"
        )
    return shape != own


def _check_kind(name: str, leaf: Any, like: Any) -> None:
    """Raise ValueError for floating numbers instead of integers, since they would be cut off."""
    jnp = import_jax().numpy
    if jnp.issubdtype(jnp.result_type(like), jnp.integer) and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
        raise ValueError(
            f"params{name} is {shown(leaf)}, expected an integer: convert it, such as by int or astype(int)"
        )


def as_leaf(leaf: Any, like: Any) -> Any:
    """A leaf as a JAX array with the dtype of another one."""
    jnp = import_jax().numpy
    return jnp.asarray(leaf, jnp.asarray(like).dtype)


def combined(new: GivenParams, varies: list[bool], lanes: int, shared: Any, current: Any, coming: Any) -> LaneParams:
    """The parameters of lanes: of the leaves that vary those of their episodes, of the others the `shared` nodes."""

    def of_lanes(leaves: Any) -> tuple[Any, ...]:
        each = zip(leaves, new.own, varies, strict=True)
        as_rows = import_jax().numpy.broadcast_to
        return tuple(as_rows(as_leaf(leaf, own), (lanes, *np.shape(own))) for leaf, own, varying in each if varying)

    nodes = [Varying() if varying else node for node, varying in zip(shared, varies, strict=True)]
    made = LaneParams(new.treedef.unflatten(nodes), of_lanes(current), of_lanes(coming))
    params: LaneParams = without_weak_types(made)
    return params


def taken_apart(params: Any) -> tuple[list[Any], list[bool]]:
    """The leaves of a state's parameters, those of current episodes, and which of them differ between lanes."""
    jax = import_jax()
    if not isinstance(params, LaneParams):
        leaves = jax.tree.leaves(params)
        return leaves, [False] * len(leaves)
    return jax.tree.leaves(params.filled(params.current)), [is_varying(node) for node in params.nodes]
