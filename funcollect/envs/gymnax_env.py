"""gymnax environments (https://github.com/RobertTLange/gymnax), of its releases 1.x and 0.0.x."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from funcollect.envs.jax_env import JaxEnv, Transition
from funcollect.interop.jax_setup import import_jax
from funcollect.specs import ActionSpec, Space, observation_leaves


def from_gymnax(
    env: Any, params: Any = None, *, num_envs: int | None = None, one_hot: bool = False, **kwargs: Any
) -> JaxEnv:
    """A JAX environment over gymnax's, without its autoreset; its time limit truncates.

    Args:
        env: an id such as ``"CartPole-v1"``, or an instance.
        params: the environment's parameters; its defaults unless given.
        num_envs: P; None for a single environment without a batch dimension.
        one_hot: discrete actions as one-hot rows, TorchRL's encoding.
        **kwargs: for `gymnax.make`.

    Raises:
        ImportError: without gymnax.
        ValueError: for an unknown id.

    >>> from_gymnax("CartPole-v1", num_envs=64)
    JaxEnv('gymnax/CartPole-v1', num_envs=64)
    """
    if isinstance(env, str):
        env, defaults = _make(env, kwargs)
        params = defaults if params is None else params
    params = env.default_params if params is None else params
    advance = _advance if hasattr(env, "is_truncated") else _advance_old
    observed = _space(env.observation_space(params))
    return JaxEnv(
        label=f"gymnax/{env.name}",
        num_envs=num_envs,
        observation_space=observed,
        action_spec=ActionSpec(_space(env.action_space(params)), one_hot),
        observation_leaves=observation_leaves(observed),
        begin=lambda key: tuple(reversed(env.reset_env(key, params))),
        advance=lambda key, physics, action: advance(env, params, key, physics, action),
    )


def _make(name: str, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    try:
        import gymnax
    except ImportError as error:
        raise ImportError("gymnax is not installed: pip install funcollect[envs]") from error
    import_jax()
    if name not in gymnax.registered_envs:
        raise ValueError(f"gymnax has no environment {name!r}, expected one of {sorted(gymnax.registered_envs)}")
    made: tuple[Any, Any] = gymnax.make(name, **kwargs)
    return made


def _advance(env: Any, params: Any, key: Any, physics: Any, action: Any) -> Transition:
    observation, physics, reward, terminated, _ = env.step_env(key, physics, action, params)
    return Transition(physics, observation, reward, terminated, env.is_truncated(physics, params), {})


def _advance_old(env: Any, params: Any, key: Any, physics: Any, action: Any) -> Transition:
    """0.0.x counts the time limit among the ends: what the state says without it was a termination."""
    observation, physics, reward, done, _ = env.step_env(key, physics, action, params)
    truncated = physics.time >= params.max_steps_in_episode
    endless = params.replace(max_steps_in_episode=np.iinfo(np.int32).max)
    return Transition(physics, observation, reward, done & env.is_terminal(physics, endless), truncated, {})


def _space(given: Any) -> Space:
    """A Gymnasium space from one of gymnax's."""
    match type(given).__name__:
        case "Discrete":
            return spaces.Discrete(int(given.n))
        case "Box":
            dtype = np.dtype(given.dtype)
            low, high = (np.broadcast_to(np.asarray(bound, dtype), given.shape) for bound in (given.low, given.high))
            return spaces.Box(low, high, given.shape, dtype.type)
        case "Dict":
            return spaces.Dict({name: _space(child) for name, child in given.spaces.items()})
        case "Tuple":
            return spaces.Tuple([_space(child) for child in given.spaces])
    raise TypeError(f"the space {given!r} of gymnax has no counterpart in Gymnasium")
