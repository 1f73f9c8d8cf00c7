"""jumanji environments (https://github.com/instadeepai/jumanji)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces

from funcollect.arguments import check_keys
from funcollect.envs.jax_envs.jax_env import FunctionsEnv, Suite, jax_env
from funcollect.envs.jax_envs.jumanji_params import NumberParams
from funcollect.envs.jax_envs.renderers import jumanji_renderer
from funcollect.envs.spaces import box
from funcollect.messages import shown
from funcollect.protocols import Starts, Transition
from funcollect.specs import Space

_SUITE = Suite(
    "jumanji",
    "jumanji",
    lambda jumanji: (jumanji.registered_environments(), jumanji.make),
    ("observation_spec", "action_spec", "reset", "step"),
)


def from_jumanji(
    env: Any,
    *,
    num_envs: int | None = None,
    one_hot: bool = False,
    info_keys: Sequence[str] = (),
    starts: Starts = "fresh",
    params: Sequence[str] = (),
    param_keys: Sequence[str] = (),
    **kwargs: Any,
) -> FunctionsEnv:
    """A JAX environment over jumanji's; a last step whose discount is not zero is a truncation.

    Named tuples become dicts. The rewards of several agents are ``next.reward`` [*B, T, agents]. Many environments of
    the suite report their own time limit as a termination, and so does the batch.

    Args:
        env: an id such as ``"Snake-v1"``, or an instance without autoreset.
        info_keys: the keys of the time step's `extras` that a batch records under ``next.info``.
        params: the names of numbers that `set_env_params` changes during a run: attributes of the environment, of its
            generator, or of both, such as ``["total_budget"]`` of Knapsack or ``["time_limit"]`` of many. Whatever else
            jumanji computed from these numbers as it made the environment stays, its bounds of observations too.
        **kwargs: for `jumanji.make`.
        num_envs, one_hot, param_keys: see `from_functions`.
        starts: see `from_functions`; the state holds the key, so with ``"cached"`` everything random in a lane's
            episode also repeats.

    Raises the errors of `from_gymnax`, TypeError for a spec without a Gymnasium counterpart, and ValueError for a
    name in `params` that is no number, or whose value is needed earlier, such as the size of a grid.

    >>> from_jumanji("Snake-v1", num_envs=64)
    JaxEnv('jumanji/Snake-v1', num_envs=64)
    """
    label, raw = _SUITE.make(env, kwargs)
    observed = _space(raw.observation_spec)
    check_keys("params", params, "time_limit")
    numbers = NumberParams(raw, params)

    def reset(key: Any, given: Any) -> tuple[Any, Any]:
        state, timestep = numbers.env(given).reset(key)
        return state, _plain(observed, timestep.observation)

    def step(_: Any, env_state: Any, action: Any, given: Any) -> Transition:
        state, timestep = numbers.env(given).step(env_state, action)
        over, ended = timestep.last(), (timestep.discount == 0).all()
        observation = _plain(observed, timestep.observation)
        return Transition(state, observation, timestep.reward, over & ended, over & ~ended, timestep.extras)

    options = (num_envs, one_hot, info_keys, starts)
    limited = getattr(raw.unwrapped, "time_limit", None) is not None
    more: dict[str, Any] = {"truncates": limited, "renderer": partial(jumanji_renderer, raw)}
    more |= {"default_params": numbers.defaults or None, "param_keys": param_keys}
    return jax_env(label, reset, step, observed, _space(raw.action_spec), *options, **more)


def _plain(space: Space, observation: Any) -> Any:
    """The observation with its named tuples and dataclasses as dicts."""
    if not isinstance(space, spaces.Dict):
        return observation
    part = observation.__getitem__ if isinstance(observation, Mapping) else partial(getattr, observation)
    return {name: _plain(child, part(name)) for name, child in space.spaces.items()}


def _space(spec: Any) -> Space:
    """The Gymnasium counterpart of a spec of jumanji."""
    match type(spec).__name__:
        case "DiscreteArray":
            return spaces.Discrete(int(spec.num_values))
        case "MultiDiscreteArray":
            return spaces.MultiDiscrete(np.asarray(spec.num_values))
        case "BoundedArray":
            return box(tuple(spec.shape), spec.dtype, spec.minimum, spec.maximum)
        case "Array":
            return box(tuple(spec.shape), spec.dtype)
    if children := vars(spec).get("_specs"):
        return spaces.Dict({name: _space(child) for name, child in children.items()})
    raise TypeError(
        f"the spec {shown(spec)} of jumanji has no counterpart in Gymnasium, expected arrays or a Spec of arrays: "
        "adapt it with funcollect.envs.from_functions"
    )
