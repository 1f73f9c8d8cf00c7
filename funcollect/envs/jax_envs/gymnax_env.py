"""gymnax environments (https://github.com/RobertTLange/gymnax), of its releases 1.x and 0.0.x."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces

from funcollect.envs.jax_envs.jax_env import FunctionsEnv, jax_env
from funcollect.envs.jax_envs.renderers import gymnax_renderer
from funcollect.envs.jax_envs.suite import Suite, first_observation
from funcollect.envs.spaces import box
from funcollect.protocols import Starts, Transition
from funcollect.specs import Space

_SUITE = Suite(
    "gymnax",
    "gymnax",
    lambda gymnax: (gymnax.registered_envs, lambda name, **kwargs: gymnax.make(name, **kwargs)[0]),
    ("reset_env", "step_env"),
)


def from_gymnax(
    env: Any,
    params: Any = None,
    *,
    num_envs: int | None = None,
    one_hot: bool = False,
    info_keys: Sequence[str] = (),
    starts: Starts = "fresh",
    param_keys: Sequence[str] = (),
    **kwargs: Any,
) -> FunctionsEnv:
    """A JAX environment over gymnax's, without its autoreset; its time limit truncates.

    Most of gymnax's environments stop gradients at each step; those that can let them pass do, such as Pendulum of its
    releases 1.x.

    Args:
        env: an id such as ``"CartPole-v1"``, or an instance.
        params: the environment's parameters instead of its defaults. `set_env_params` changes them during a run.
        info_keys: the keys of gymnax's `info`, such as ``"discount"``, that a batch records under ``next.info``.
        **kwargs: for `gymnax.make`.
        num_envs, one_hot, starts, param_keys: see `from_functions`.

    Raises:
        ImportError: if the suite's package is not installed.
        ValueError: for an unknown id, or an option out of range.
        TypeError: for something else as `env`, or an argument that the suite does not take.

    >>> from_gymnax("CartPole-v1", num_envs=64)
    JaxEnv('gymnax/CartPole-v1', num_envs=64)
    """
    _, raw = _SUITE.make(env, kwargs)
    if getattr(raw, "supports_transition_gradients", False):
        raw = raw.with_transition_gradients()  # else its steps cut those of `differentiable_rollout` and `jax.grad`
    own = raw.default_params if params is None else params

    def reset(key: Any, given: Any) -> tuple[Any, Any]:
        observation, env_state = raw.reset_env(key, own if given is None else given)
        return env_state, observation

    def step(key: Any, env_state: Any, action: Any, given: Any) -> Transition:
        params = own if given is None else given
        observation, after, reward, terminated, info = raw.step_env(key, env_state, action, params)
        if hasattr(raw, "is_truncated"):
            truncated = raw.is_truncated(after, params)
        else:
            # Releases 0.0.x count the time limit as a termination, and some environments keep that in their state. So
            # The same step is also traced without the limit; the compiler merges the two.
            endless = params.replace(max_steps_in_episode=np.iinfo(np.int32).max)
            terminated = raw.step_env(key, env_state, action, endless)[3]
            truncated = after.time >= params.max_steps_in_episode
        return Transition(after, observation, reward, terminated, truncated, info)

    observed = _space(raw.observation_space(own), first_observation(reset))
    actions = _space(raw.action_space(own))
    options = (num_envs, one_hot, info_keys, starts)
    more: dict[str, Any] = {"truncates": True, "default_params": own, "param_keys": param_keys}
    more["renderer"] = partial(gymnax_renderer, raw, own)
    return jax_env(f"gymnax/{raw.name}", reset, step, observed, actions, *options, **more)


def _space(given: Any, delivered: Any = None) -> Space:
    """The Gymnasium counterpart of a space of gymnax.

    A Box gets the dtype of the `delivered` array, if that is given: some spaces of gymnax name another one.
    """
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
