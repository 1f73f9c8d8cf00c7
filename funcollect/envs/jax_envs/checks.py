"""Check that the two functions of a JAX environment fit its spaces, without running them."""

from __future__ import annotations

import inspect
import itertools
from functools import partial
from typing import Any

import numpy as np

from funcollect.envs.jax_envs.jax_env import JaxEnvBase, reset_lane, step_lane
from funcollect.errors import EnvError
from funcollect.interop.jax_setup import import_jax
from funcollect.interop.memo import Variable, memo_of, set_since_use, variables_of
from funcollect.protocols import JaxEnv
from funcollect.specs import disassemble


def check_functions(env: JaxEnv, params: Any) -> tuple[int, ...]:
    """Raise EnvError unless `reset` and `step` fit each other and the spaces; return the shape of a reward."""
    jax = import_jax()
    key = jax.ShapeDtypeStruct((2,), np.uint32)
    dtype = jax.dtypes.canonicalize_dtype(np.int64 if env.action_spec.one_hot else env.action_space.dtype)
    begun = jax.eval_shape(partial(reset_lane, env), key, params)
    action = jax.ShapeDtypeStruct(env.action_spec.shape, dtype)
    moved = jax.eval_shape(partial(step_lane, env), key, begun[0], action, params)
    if difference := differing(begun[0], moved.env_state):
        raise EnvError(
            f"the state of {env!r} changes between reset and step: {difference}; a compiled loop wants the same "
            "structure, shapes and dtypes at every step: cast or pad it"
        )
    _check_observation(env, "reset", begun[1])
    _check_observation(env, "step", moved.observation)
    reward: tuple[int, ...] = tuple(moved.reward.shape)
    flag, number = ("bool []", (), np.dtype(bool)), ("a number [] or [players]", reward[:1], np.dtype(np.float64))
    for name, wanted in (("terminated", flag), ("truncated", flag), ("reward", number)):
        _check_leaf(f"{name} that step of {env!r} returned", getattr(moved, name), *wanted)
    return reward


def check_unchanged(env: JaxEnv) -> None:
    """Raise EnvError if something that the compiled functions of the environment read has been set since they are."""
    memo = memo_of(env)
    if "read" not in memo:
        functions = inspect.unwrap(env.reset), inspect.unwrap(env.step)
        memo["read"] = [*_attributes_of(env), *itertools.chain.from_iterable(map(variables_of, functions))]
    if names := set_since_use(env, memo["read"]):
        raise EnvError(
            f"{env!r} reads {', '.join(names)}, set since it was compiled, which has no effect: pass changing values "
            "in params (funcollect.set_env_params), or make another environment"
        )


def _attributes_of(env: JaxEnv) -> list[Variable]:
    """The attributes of an instance of a class of the user's.

    `params` may be set, and what is None, which may be a cache that a function fills while it is traced.
    """
    if not isinstance(env, JaxEnvBase):
        return []
    own = itertools.takewhile(lambda each: each is not JaxEnvBase, type(env).__mro__)
    members = itertools.chain.from_iterable(vars(each).items() for each in own)
    plain = [name for name, value in members if not (callable(value) or hasattr(value, "__get__") or name[:2] == "__")]
    names = {*vars(env), *plain} - {"params", "_memo"}
    return [(name, env) for name in sorted(names) if getattr(env, name, None) is not None]


def differing(one: Any, other: Any) -> str:
    """The first difference of two pytrees of arrays in structure, shape or dtype, in words; empty if there is none."""
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
    """Raise EnvError unless an observation that `function` returned, ``"reset"`` or ``"step"``, fits the space."""
    try:
        leaves = list(zip(env.observation_leaves, disassemble(env.observation_space, observation), strict=True))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EnvError(
            f"the observation that {function} of {env!r} returned is {type(observation).__name__} and lacks the "
            f"structure of its space {env.observation_space} ({error!r}): correct {function} or the space"
        ) from error
    for leaf, value in leaves:
        what = f"observation {leaf.name!r} that {function} of {env!r} returned"
        _check_leaf(what, value, f"{leaf.dtype} {list(leaf.shape)}, as its space has it", leaf.shape, leaf.dtype)


def _check_leaf(what: str, value: Any, expected: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raise EnvError unless an array has this shape and a dtype that fits; the message has `what` and `expected`."""
    if not hasattr(value, "dtype") or tuple(value.shape) != shape or not _fits(value.dtype, dtype):
        raise EnvError(
            f"the {what} is {_words(value)}, expected {expected}: both functions are for one lane, without a batch "
            "dimension; correct the function or the space"
        )


def _fits(given: Any, wanted: np.dtype[Any]) -> bool:
    """Whether arrays may be cast from one dtype to the other: both are floating, or all values are kept."""
    jnp = import_jax().numpy
    both_floating = jnp.issubdtype(given, jnp.floating) and wanted.kind == "f"
    return bool(both_floating or given == wanted or jnp.promote_types(given, wanted) == wanted)
