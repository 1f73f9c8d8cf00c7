"""gymnax environments (https://github.com/RobertTLange/gymnax), of its releases 1.x and 0.0.x."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from funcollect.envs.jax_envs.jax_env import FunctionsEnv, jax_env
from funcollect.envs.jax_envs.spaces import box
from funcollect.envs.jax_envs.suite import Suite, first_observation
from funcollect.protocols import Starts, Transition
from funcollect.specs import Space


def from_gymnax(
    env: Any,
    params: Any = None,
    *,
    num_envs: int | None = None,
    one_hot: bool = False,
    info_keys: Sequence[str] = (),
    starts: Starts = "fresh",
    **kwargs: Any,
) -> FunctionsEnv:
    """A JAX environment over gymnax's, without its autoreset; its time limit truncates.

    Args:
        env: an id such as ``"CartPole-v1"``, or an instance.
        params: the environment's parameters; its defaults unless given.
        num_envs: P; None for a single environment without a batch dimension.
        one_hot: discrete actions as one-hot rows, TorchRL's encoding.
        info_keys: the keys of gymnax's `info`, such as ``"discount"``, that a batch records under ``next.info``.
        starts: ``"cached"`` starts every episode of a lane as its first one: less work, and less variety.
        **kwargs: for `gymnax.make`.

    Raises:
        ImportError: without gymnax.
        ValueError: for an unknown id.

    >>> from_gymnax("CartPole-v1", num_envs=64)
    JaxEnv('gymnax/CartPole-v1', num_envs=64)
    """
    _, raw = _SUITE.make(env, kwargs)
    params = raw.default_params if params is None else params
    step_raw = _step if hasattr(raw, "is_truncated") else _step_old

    def reset(key: Any, _: Any) -> tuple[Any, Any]:
        observation, env_state = raw.reset_env(key, params)
        return env_state, observation

    def step(key: Any, env_state: Any, action: Any, _: Any) -> Transition:
        return step_raw(raw, params, key, env_state, action)

    return jax_env(
        f"gymnax/{raw.name}",
        reset,
        step,
        observation_space=_space(raw.observation_space(params), first_observation(reset)),
        action_space=_space(raw.action_space(params)),
        num_envs=num_envs,
        one_hot=one_hot,
        info_keys=info_keys,
        starts=starts,
    )


def _load() -> tuple[Iterable[str], Callable[..., Any]]:
    import gymnax

    return gymnax.registered_envs, lambda name, **kwargs: gymnax.make(name, **kwargs)[0]


_SUITE = Suite("gymnax", _load, ("reset_env", "step_env"))


def _step(raw: Any, params: Any, key: Any, env_state: Any, action: Any) -> Transition:
    observation, after, reward, terminated, info = raw.step_env(key, env_state, action, params)
    return Transition(after, observation, reward, terminated, raw.is_truncated(after, params), info)


def _step_old(raw: Any, params: Any, key: Any, env_state: Any, action: Any) -> Transition:
    """0.0.x counts the time limit among the ends: what ends without it is a termination.

    The same step is traced twice, which the compiler makes one: some environments keep the end in their state, so it
    cannot be asked for afterwards.
    """
    endless = params.replace(max_steps_in_episode=np.iinfo(np.int32).max)
    terminated = raw.step_env(key, env_state, action, endless)[3]
    observation, after, reward, _, info = raw.step_env(key, env_state, action, params)
    return Transition(after, observation, reward, terminated, after.time >= params.max_steps_in_episode, info)


def _space(given: Any, delivered: Any = None) -> Space:
    """A Gymnasium space from one of gymnax's; some say another dtype than that of what is `delivered`."""
    match type(given).__name__:
        case "Discrete":
            return spaces.Discrete(int(given.n))
        case "Box":
            return box(tuple(given.shape), (given if delivered is None else delivered).dtype, given.low, given.high)
        case "Dict":
            return spaces.Dict(
                {name: _space(child, delivered and delivered[name]) for name, child in given.spaces.items()}
            )
        case "Tuple":
            return spaces.Tuple([_space(child, delivered and delivered[i]) for i, child in enumerate(given.spaces)])
    raise TypeError(
        f"the space {given!r} of gymnax has no counterpart in Gymnasium: expected Discrete, Box, Dict, Tuple"
    )
