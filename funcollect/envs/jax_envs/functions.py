"""Environments that are a plain pair of functions in JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gymnasium import spaces

from funcollect.arguments import check_function, check_kind
from funcollect.envs.jax_envs.checks import check_functions
from funcollect.envs.jax_envs.jax_env import Advance, Begin, JaxEnv, Reset, jax_env
from funcollect.interop.jax_setup import import_jax
from funcollect.specs import Space


def from_functions(
    begin: Begin,
    advance: Advance,
    *,
    observation_space: Space,
    action_space: Space,
    num_envs: int | None = None,
    max_episode_steps: int | None = None,
    one_hot: bool = False,
    info_keys: Sequence[str] = (),
    reset: Reset = "fresh",
    name: str = "functions",
) -> JaxEnv:
    """A JAX environment from two pure functions of one lane, which the library batches, compiles and resets.

    Args:
        begin: ``key -> (physics, observation)``: the start of an episode; `key` is uint32[2], `physics` any pytree.
        advance: ``(key, physics, action) -> (physics, observation, reward, terminated, truncated)``, or with a dict
            `info` as a sixth: one step. The reward is [], or [players]; the flags are []. It does not reset.
        observation_space: of one environment.
        action_space: of one environment.
        num_envs: P; None for a single environment without a batch dimension.
        max_episode_steps: steps after which an episode is truncated, beside what `advance` says.
        one_hot: discrete actions as one-hot rows, TorchRL's encoding, in a batch; `advance` gets them as in the space.
        info_keys: what of `info` a batch records under ``next.info``.
        reset: ``"cached"`` starts every episode of a lane as its first one: less work, and less variety.
        name: how it is called in messages.

    Raises:
        TypeError: for functions that return something else.
        EnvError: for results that do not fit each other or the spaces.
        ValueError: for options that cannot be.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from gymnasium.spaces import Box
    >>> line = Box(-5, 5, (1,))
    >>> walk = from_functions(
    ...     lambda key: (jnp.zeros(1), jnp.zeros(1)),
    ...     lambda key, x, action: (x + action, x + action, -jnp.abs(x + action)[0], abs(x + action)[0] > 4, False),
    ...     observation_space=line, action_space=Box(-1, 1, (1,)), num_envs=64, max_episode_steps=100, name="walk",
    ... )
    >>> walk
    JaxEnv('walk', num_envs=64)
    """
    check_kind("name", name, str, "pass for example 'walk'")
    check_function("begin", begin, "a function of a key")
    check_function("advance", advance, "a function of a key, the physics and an action")
    check_kind("observation_space", observation_space, spaces.Space, "pass a space of gymnasium.spaces")
    check_kind("action_space", action_space, spaces.Space, "pass a space of gymnasium.spaces")
    env = jax_env(
        name,
        begin,
        advance,
        observation_space=observation_space,
        action_space=action_space,
        num_envs=num_envs,
        max_episode_steps=max_episode_steps,
        one_hot=one_hot,
        info_keys=info_keys,
        reset=reset,
    )
    _check_results(name, begin, advance, action_space)
    check_functions(env)
    return env


def _check_results(name: str, begin: Begin, advance: Advance, action_space: Space) -> None:
    """Trace both functions: how many values they give is known without running them."""
    jax = import_jax()
    started = jax.eval_shape(begin, jax.ShapeDtypeStruct((2,), "uint32"))
    if not isinstance(started, tuple) or len(started) != 2:
        raise TypeError(f"{name}: begin gives {_kind(started)}, expected a pair (physics, observation)")
    dtype = jax.dtypes.canonicalize_dtype(action_space.dtype)
    action = jax.ShapeDtypeStruct(tuple(action_space.shape or ()), dtype)
    moved = jax.eval_shape(advance, jax.ShapeDtypeStruct((2,), "uint32"), started[0], action)
    if not isinstance(moved, tuple) or len(moved) not in (5, 6):
        raise TypeError(
            f"{name}: advance gives {_kind(moved)}, expected (physics, observation, reward, terminated, truncated), "
            "and info if there is any"
        )


def _kind(given: Any) -> str:
    return f"{len(given)} values" if isinstance(given, tuple) else type(given).__name__
