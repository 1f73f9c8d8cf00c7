"""Environments that are a plain pair of functions in JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from funcollect.envs.jax_env import Advance, Begin, JaxEnv, Reset, Transition, jax_env
from funcollect.interop.jax_setup import import_jax
from funcollect.specs import ActionSpec, Space, disassemble


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
        TypeError: for functions whose results do not fit each other or the spaces.
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
    _check(env, begin, advance)
    return env


def _check(env: JaxEnv, begin: Begin, advance: Advance) -> None:
    """Trace both functions once: what they give is known without running them."""
    jax = import_jax()
    key = jax.ShapeDtypeStruct((2,), "uint32")
    started = jax.eval_shape(begin, key)
    if not isinstance(started, tuple) or len(started) != 2:
        raise TypeError(f"{env.label}: begin gives {_kind(started)}, expected a pair (physics, observation)")
    physics, observation = started
    _check_observation(env, "begin", observation)
    moved = jax.eval_shape(advance, key, physics, _action(env.action_spec))
    if not isinstance(moved, tuple) or len(moved) not in (5, 6):
        raise TypeError(
            f"{env.label}: advance gives {_kind(moved)}, expected (physics, observation, reward, terminated, "
            "truncated), and info if there is any"
        )
    moved = Transition(*moved)
    _check_observation(env, "advance", moved.observation)
    _check_physics(env, physics, moved.physics)
    _check_numbers(env, moved)


def _action(spec: ActionSpec) -> Any:
    jax = import_jax()
    dtype = jax.dtypes.canonicalize_dtype(spec.space.dtype)
    return jax.ShapeDtypeStruct(tuple(spec.space.shape or ()), dtype)


def _check_observation(env: JaxEnv, function: str, observation: Any) -> None:
    try:
        parts = disassemble(env.observation_space, observation)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise TypeError(
            f"{env.label}: the observation of {function} is {_kind(observation)} ({error!r:.80}), expected the "
            f"structure of observation_space: {env.observation_space}"
        ) from error
    for leaf, part in zip(env.observation_leaves, parts, strict=True):
        if not hasattr(part, "shape") or tuple(part.shape) != leaf.shape:
            got = list(part.shape) if hasattr(part, "shape") else _kind(part)
            raise TypeError(
                f"{env.label}: {leaf.name} of {function} has shape {got}, observation_space wants {list(leaf.shape)}: "
                "both functions are for one environment, without a batch dimension"
            )
        if not _fits(part.dtype, leaf.dtype):
            raise TypeError(
                f"{env.label}: {leaf.name} of {function} is {part.dtype}, which {leaf.dtype} of observation_space "
                "does not hold: change the space's dtype, or cast with astype"
            )


def _fits(given: Any, wanted: np.dtype[Any]) -> bool:
    """A floating observation of any width may have a floating space: under 64-bit JAX most are wider than theirs."""
    jnp = import_jax().numpy
    both_floating = jnp.issubdtype(given, jnp.floating) and wanted.kind == "f"
    return bool(both_floating or given == wanted or jnp.promote_types(given, wanted) == wanted)


def _check_physics(env: JaxEnv, before: Any, after: Any) -> None:
    tree = import_jax().tree
    if tree.structure(before) != tree.structure(after):
        raise TypeError(
            f"{env.label}: advance gives physics of the structure {tree.structure(after)}, begin gave "
            f"{tree.structure(before)}: a compiled loop needs the same one at each step"
        )
    for one, two in zip(tree.leaves(before), tree.leaves(after), strict=True):
        if (one.shape, one.dtype) != (two.shape, two.dtype):
            raise TypeError(
                f"{env.label}: advance gives physics with {two.dtype}{list(two.shape)} where begin gave "
                f"{one.dtype}{list(one.shape)}: a compiled loop needs the same at each step, so cast with astype"
            )


def _check_numbers(env: JaxEnv, moved: Transition) -> None:
    if len(moved.reward.shape) > 1:
        raise TypeError(f"{env.label}: the reward has shape {list(moved.reward.shape)}, expected [] or [players]")
    for name, flag in (("terminated", moved.terminated), ("truncated", moved.truncated)):
        if flag.shape:
            raise TypeError(f"{env.label}: {name} has shape {list(flag.shape)}, expected []: one flag per environment")


def _kind(given: Any) -> str:
    return f"{len(given)} values" if isinstance(given, tuple) else type(given).__name__
