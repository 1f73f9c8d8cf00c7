"""brax environments (https://github.com/google/brax)."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from funcollect.envs.jax_env import JaxEnv, Reset, Transition
from funcollect.interop.jax_setup import import_jax
from funcollect.specs import ActionSpec, observation_leaves


def from_brax(
    env: Any, *, num_envs: int | None = None, episode_length: int = 1000, reset: Reset = "fresh", **kwargs: Any
) -> JaxEnv:
    """A JAX environment over a raw brax one, without its wrappers.

    Args:
        env: an id such as ``"ant"``, or an instance without wrappers.
        num_envs: P; None for a single environment without a batch dimension.
        episode_length: steps after which an episode is truncated.
        reset: ``"cached"`` starts every episode of a lane where its first one started.
        **kwargs: for `brax.envs.get_environment`, such as `backend`.

    Raises:
        ImportError: without brax.
        ValueError: for an unknown id.
    """
    label = env if isinstance(env, str) else type(env).__name__
    raw = _make(env, kwargs) if isinstance(env, str) else env
    observed = spaces.Box(-np.inf, np.inf, (raw.observation_size,), np.float32)
    return JaxEnv(
        label=f"brax/{label}",
        num_envs=num_envs,
        observation_space=observed,
        action_spec=ActionSpec(spaces.Box(-1.0, 1.0, (raw.action_size,), np.float32)),
        observation_leaves=observation_leaves(observed),
        begin=lambda key: _begin(raw, key),
        advance=lambda key, physics, action: _advance(raw, episode_length, physics, action),
        reset=reset,
    )


def _make(name: str, kwargs: dict[str, Any]) -> Any:
    try:
        from brax import envs
    except ImportError as error:
        raise ImportError("brax is not installed: pip install funcollect[envs]") from error
    if name not in envs._envs:
        raise ValueError(f"brax has no environment {name!r}, expected one of {sorted(envs._envs)}")
    return envs.get_environment(name, **kwargs)


def _begin(raw: Any, key: Any) -> tuple[Any, Any]:
    state = raw.reset(key)
    return (state, import_jax().numpy.int32(0)), state.obs


def _advance(raw: Any, episode_length: int, physics: Any, action: Any) -> Transition:
    state, elapsed = physics
    state = raw.step(state, action)
    elapsed = elapsed + 1
    return Transition((state, elapsed), state.obs, state.reward, state.done > 0, elapsed >= episode_length, {})
