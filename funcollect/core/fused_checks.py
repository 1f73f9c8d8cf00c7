"""What is checked of JAX environments: that their two functions agree, and that a state is whole and its policy's."""

from __future__ import annotations

from typing import Any

import numpy as np

from funcollect.core.state import CollectorState
from funcollect.envs.jax_env import JaxEnv, Transition
from funcollect.errors import EnvError, PolicyError
from funcollect.interop.jax_setup import import_jax
from funcollect.specs import disassemble


def check_functions(env: JaxEnv) -> tuple[int, ...]:
    """The shape of a reward, once `begin` and `advance` are seen to agree with one another and with the spaces.

    Raises:
        EnvError: where they do not.
    """
    jax = import_jax()
    key = jax.ShapeDtypeStruct((2,), np.uint32)
    dtype = jax.dtypes.canonicalize_dtype(np.int64 if env.action_spec.one_hot else env.action_space.dtype)
    physics, root = jax.eval_shape(env.begin, key)
    moved = jax.eval_shape(env.advance, key, physics, jax.ShapeDtypeStruct(env.action_spec.shape, dtype))
    if not isinstance(moved, Transition):
        raise EnvError(f"advance of {env!r} returned {type(moved).__name__}, expected a Transition: return one")
    if differing := _differing(physics, moved.physics):
        raise EnvError(
            f"the physics of {env!r} change between begin and advance: {differing}; a compiled loop wants the same "
            "structure, shapes and dtypes at every step: cast or pad them"
        )
    _check_observation(env, "begin", root)
    _check_observation(env, "advance", moved.observation)
    for name in ("terminated", "truncated"):
        _check_leaf(f"{name} that advance of {env!r} returned", getattr(moved, name), "bool []", (), "b")
    reward: tuple[int, ...] = tuple(getattr(moved.reward, "shape", ()))
    _check_leaf(
        f"reward that advance of {env!r} returned", moved.reward, "a number [] or [players]", reward[:1], "biuf"
    )
    return reward


def _differing(one: Any, other: Any) -> str:
    """How two pytrees of arrays differ, in words; empty where they do not."""
    jax = import_jax()
    ones, others = _described(one), _described(other)
    for path in sorted(ones.keys() | others.keys()):
        if ones.get(path) != others.get(path):
            return f"{path or 'it'} is {ones.get(path, 'not there')} first, then {others.get(path, 'not there')}"
    same = jax.tree.structure(one) == jax.tree.structure(other)
    return "" if same else f"they are {jax.tree.structure(one)} first, then {jax.tree.structure(other)}"


def _described(tree: Any) -> dict[str, str]:
    tree_util = import_jax().tree_util
    return {tree_util.keystr(path): _words(leaf) for path, leaf in tree_util.tree_leaves_with_path(tree)}


def _words(leaf: Any) -> str:
    return f"{leaf.dtype} {list(leaf.shape)}" if hasattr(leaf, "dtype") else type(leaf).__name__


def _check_observation(env: JaxEnv, function: str, observation: Any) -> None:
    try:
        leaves = list(zip(env.observation_leaves, disassemble(env.observation_space, observation), strict=True))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EnvError(
            f"the observation that {function} of {env!r} returned is {type(observation).__name__} and lacks the "
            f"structure of its space {env.observation_space} ({error!r}): correct {function} or the space"
        ) from error
    for leaf, value in leaves:
        kinds = {"f": "fV", "b": "b"}.get(leaf.dtype.kind, "biu")  # bfloat16 is of kind V
        what = f"observation {leaf.name!r} that {function} of {env!r} returned"
        _check_leaf(what, value, f"{leaf.dtype} {list(leaf.shape)}, as its space has it", leaf.shape, kinds)


def _check_leaf(what: str, value: Any, expected: str, shape: tuple[int, ...], kinds: str) -> None:
    fits = hasattr(value, "dtype") and tuple(value.shape) == shape and np.dtype(value.dtype).kind in kinds
    if not fits:
        raise EnvError(f"the {what} is {_words(value)}, expected {expected}: correct the function or the space")


def check_one_run(state: CollectorState) -> None:
    """Raise ValueError for a state whose arrays have dimensions of a `vmap` in front."""
    if state.key.ndim > 1:
        raise ValueError(
            f"the state is of {list(state.key.shape[:-1])} runs, expected one: call funcollect.traced.rollout under "
            "the jax.vmap that goes over them"
        )


def check_live(state: CollectorState) -> None:
    """Raise ValueError for a state whose memory a compiled function was given."""
    if any(leaf.is_deleted() for leaf in import_jax().tree.leaves(state.env_state.physics)):
        raise ValueError(
            "the state was donated or deleted, expected a live one: go on with the state that the function which took "
            "it returned, or leave the state out of its donate_argnums"
        )


def check_policy_state(wanted: Any, given: Any) -> None:
    """Raise ValueError for a policy state that is of another policy."""
    if differing := _differing(wanted, given):
        raise ValueError(
            f"the state holds the policy state of another policy: {differing}: pass the policy that the state was made "
            "with, or go on with state.replace(policy_state=policy.init(state.key, state.num_lanes))"
        )


def check_next_state(before: Any, after: Any) -> None:
    """Raise PolicyError for a policy state that changes its structure, shapes or dtypes in a step."""
    if differing := _differing(before, after):
        raise PolicyError(
            f"the policy's state changes in a step: {differing}; a compiled loop wants the same structure, shapes and "
            "dtypes at every step: cast it, or give initial_state as the steps return it"
        )
