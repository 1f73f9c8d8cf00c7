"""gymnax environments (https://github.com/RobertTLange/gymnax), of its releases 1.x and 0.0.x."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from funcollect.envs.jax_envs.jax_env import JaxEnv, Reset, Transition, jax_env
from funcollect.envs.jax_envs.spaces import box
from funcollect.envs.jax_envs.suite import check_instance, check_known, check_no_keywords, not_installed
from funcollect.interop.jax_setup import import_jax
from funcollect.specs import Space


def from_gymnax(
    env: Any,
    params: Any = None,
    *,
    num_envs: int | None = None,
    one_hot: bool = False,
    info_keys: Sequence[str] = (),
    reset: Reset = "fresh",
    **kwargs: Any,
) -> JaxEnv:
    """A JAX environment over gymnax's, without its autoreset; its time limit truncates.

    Args:
        env: an id such as ``"CartPole-v1"``, or an instance.
        params: the environment's parameters; its defaults unless given.
        num_envs: P; None for a single environment without a batch dimension.
        one_hot: discrete actions as one-hot rows, TorchRL's encoding.
        info_keys: what of gymnax's `info` a batch records under ``next.info``, such as ``"discount"``.
        reset: ``"cached"`` starts every episode of a lane as its first one: less work, and less variety.
        **kwargs: for `gymnax.make`.

    Raises:
        ImportError: without gymnax.
        ValueError: for an unknown id.

    >>> from_gymnax("CartPole-v1", num_envs=64)
    JaxEnv('gymnax/CartPole-v1', num_envs=64)
    """
    jax = import_jax()
    if not isinstance(env, str):
        check_no_keywords("gymnax", kwargs)
    raw = _make(env, kwargs) if isinstance(env, str) else env
    check_instance("gymnax", raw, "reset_env", "step_env")
    params = raw.default_params if params is None else params
    advance = _advance if hasattr(raw, "is_truncated") else _advance_old

    def begin(key: Any) -> tuple[Any, Any]:
        observation, physics = raw.reset_env(key, params)
        return physics, observation

    _, observation = jax.eval_shape(begin, jax.numpy.zeros(2, "uint32"))
    return jax_env(
        f"gymnax/{raw.name}",
        begin,
        advance=lambda key, physics, action: advance(raw, params, key, physics, action),
        observation_space=_space(raw.observation_space(params), observation),
        action_space=_space(raw.action_space(params)),
        num_envs=num_envs,
        one_hot=one_hot,
        info_keys=info_keys,
        reset=reset,
    )


def _make(name: str, kwargs: dict[str, Any]) -> Any:
    try:
        import gymnax
    except ImportError as error:
        raise not_installed("gymnax") from error
    check_known("gymnax", name, gymnax.registered_envs)
    return gymnax.make(name, **kwargs)[0]


def _advance(raw: Any, params: Any, key: Any, physics: Any, action: Any) -> Transition:
    observation, physics, reward, terminated, info = raw.step_env(key, physics, action, params)
    return Transition(physics, observation, reward, terminated, raw.is_truncated(physics, params), info)


def _advance_old(raw: Any, params: Any, key: Any, physics: Any, action: Any) -> Transition:
    """0.0.x counts the time limit among the ends: what ends without it is a termination.

    The same step is traced twice, which the compiler makes one: some environments keep the end in their state, so it
    cannot be asked for afterwards.
    """
    endless = params.replace(max_steps_in_episode=np.iinfo(np.int32).max)
    terminated = raw.step_env(key, physics, action, endless)[3]
    observation, physics, reward, _, info = raw.step_env(key, physics, action, params)
    return Transition(physics, observation, reward, terminated, physics.time >= params.max_steps_in_episode, info)


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
