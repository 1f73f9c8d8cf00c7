"""Checks of the states that functions are given, and in traced code of what a step keeps."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from funcollect.arguments import check_kind
from funcollect.core.request import ANOTHER_POLICY
from funcollect.core.state import CollectorState, check_origin
from funcollect.envs.jax_envs.jax_env import JaxEnvState, differing
from funcollect.errors import PolicyError
from funcollect.interop.jax_setup import import_jax
from funcollect.messages import kind_of, shown
from funcollect.protocols import Env, JaxEnv, is_env


def check_state(env: Env, state: CollectorState, function: str, *, live: bool = True) -> None:
    """Raise unless `state` is a state of `env`, and live if that is asked for."""
    check_kind("state", state, CollectorState, "pass the state that init or rollout returned (after env and policy)")
    if not is_env(env):
        raise TypeError(f"env is {kind_of(env)}, expected an Env: pass the env that the state was made with")
    check_untraced(function, state.lane)
    check_one_run(state)
    if live and isinstance(state.env_state, JaxEnvState) and not is_live(state):
        raise ValueError(
            "the state was donated or deleted, expected a live one: continue with the state that the compiled function "
            "returned, or leave the state out of its donate_argnums; of a collector's state, which it uses up on a "
            "GPU, take a funcollect.fork before the next batch"
        )
    if state.num_lanes != (env.num_envs or 1):
        raise ValueError(f"the state has {state.num_lanes} lanes, {env!r} has {env.num_envs or 1}: pass its own env")
    check_origin(env, state)


def check_untraced(function: str, values: Any) -> None:
    """Raise TypeError inside a JAX transformation, also if it traces none of these values."""
    if "jax" not in sys.modules:
        return
    jax = import_jax()
    if not _untraced()() or any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values)):
        raise TypeError(
            f"funcollect.{function} got values that JAX traces, expected arrays: inside jit, vmap, grad or scan call "
            f"funcollect.traced.{function} over a JAX environment; over others call it outside"
        )


@cache
def _untraced() -> Callable[[], bool]:
    """Return JAX's function that reports whether this thread is outside all transformations."""
    import_jax()
    try:
        from jax._src.core import trace_state_clean
    except ImportError:  # a private function, without which only traced arguments are recognised
        return lambda: True
    return trace_state_clean


def check_one_run(state: CollectorState) -> None:
    """Raise TypeError for a state whose key is of another kind, ValueError for one with dimensions of a `vmap`."""
    key: Any = state.key
    if getattr(key, "dtype", None) != np.uint32 or key.shape[-1:] != (2,):
        raise TypeError(
            f"the state's key is {shown(key)}, expected uint32 [2]: pass funcollect.keys.key_from_seed(0) to "
            "state.replace, or jax.random.key_data of a typed key"
        )
    if key.ndim > 1:
        raise ValueError(
            f"the state is of {list(state.key.shape[:-1])} runs, expected one: call funcollect.traced.rollout inside "
            "the jax.vmap over the runs"
        )


def check_traced_state(env: Any, state: Any) -> None:
    """Raise unless `state` is the state of one run of `env`, which is written in JAX."""
    check_jax_env(env)
    mend = "pass the state that init or rollout returned, after env, policy and params"
    check_kind("state", state, CollectorState, mend)
    check_one_run(state)
    check_origin(env, state)


def check_jax_env(env: Any) -> None:
    """Raise TypeError unless `env` is an environment written in JAX."""
    mend = "make one with for example funcollect.make_env('gymnax/CartPole-v1'), or use funcollect.rollout for this one"
    check_kind("env", env, JaxEnv, mend)


def is_live(state: CollectorState) -> bool:
    """Whether the state's memory was donated to no compiled function."""
    leaves = import_jax().tree.leaves((state.env_state, dict(state.observation)))  # what collectors use up
    return not any(leaf.is_deleted() for leaf in leaves if isinstance(leaf, import_jax().Array))


def checked_lane(lane: Any) -> Any:
    """The number of a lane; raise unless it is a whole number of at least 0, which may be traced."""
    if np.shape(lane) or not np.issubdtype(getattr(lane, "dtype", type(lane)), np.integer):
        raise TypeError(f"first_lane is {shown(lane)}, expected an int or an integer array []: give a lane's number")
    if not isinstance(lane, import_jax().core.Tracer) and lane < 0:
        raise ValueError(f"first_lane is {lane}, expected at least 0: give a lane's number")
    return lane


def check_policy_state(wanted: Any, given: Any) -> None:
    """Raise ValueError for a state of another policy."""
    if difference := differing(given, wanted):
        raise ValueError(
            f"the state holds the policy state of another policy (first its own, then what this policy wants): "
            f"{difference}: {ANOTHER_POLICY}"
        )


def check_next_state(before: Any, after: Any) -> None:
    """Raise PolicyError for a policy state that changes its structure, shapes or dtypes in a step."""
    if difference := differing(before, after):
        raise PolicyError(
            f"the policy's state changes in a step: {difference}; a compiled loop wants the same structure, shapes and "
            "dtypes at every step: cast it, or give initial_state as the steps return it"
        )
