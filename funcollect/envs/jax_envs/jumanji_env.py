"""jumanji environments (https://github.com/instadeepai/jumanji)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from funcollect.envs.jax_envs.jax_env import FunctionsEnv, jax_env
from funcollect.envs.jax_envs.spaces import box
from funcollect.envs.jax_envs.suite import Suite
from funcollect.messages import shown
from funcollect.protocols import Starts, Transition
from funcollect.specs import Space


def from_jumanji(
    env: Any,
    *,
    num_envs: int | None = None,
    one_hot: bool = False,
    info_keys: Sequence[str] = (),
    starts: Starts = "fresh",
    **kwargs: Any,
) -> FunctionsEnv:
    """A JAX environment over jumanji's; a last step whose discount is not zero is a truncation.

    Named tuples become dicts. Where there are several agents, their rewards are ``next.reward`` [*B, T, agents]. Many
    environments of the suite call their own time limit a termination: so does the batch.

    Args:
        env: an id such as ``"Snake-v1"``, or an instance without autoreset.
        num_envs: P; None for a single environment without a batch dimension.
        one_hot: discrete actions as one-hot rows, TorchRL's encoding.
        info_keys: the keys of the time step's `extras` that a batch records under ``next.info``.
        starts: ``"cached"`` starts every episode of a lane as its first one. The state holds the key, so everything
            random in the episode repeats, too.
        **kwargs: for `jumanji.make`.

    Raises:
        ImportError: without jumanji.
        ValueError: for an unknown id.
        TypeError: for a spec without a Gymnasium counterpart.

    >>> from_jumanji("Snake-v1", num_envs=64)
    JaxEnv('jumanji/Snake-v1', num_envs=64)
    """
    label, raw = _SUITE.make(env, kwargs)
    observed = _space(raw.observation_spec)

    def reset(key: Any, _: Any) -> tuple[Any, Any]:
        state, timestep = raw.reset(key)
        return state, _plain(observed, timestep.observation)

    def step(_: Any, env_state: Any, action: Any, __: Any) -> Transition:
        state, timestep = raw.step(env_state, action)
        over, ended = timestep.last(), (timestep.discount == 0).all()
        observation = _plain(observed, timestep.observation)
        return Transition(state, observation, timestep.reward, over & ended, over & ~ended, timestep.extras)

    return jax_env(
        label,
        reset,
        step,
        observation_space=observed,
        action_space=_space(raw.action_spec),
        num_envs=num_envs,
        one_hot=one_hot,
        info_keys=info_keys,
        starts=starts,
    )


def _load() -> tuple[Iterable[str], Callable[..., Any]]:
    from jumanji import registration

    return registration.registered_environments(), registration.make


_SUITE = Suite("jumanji", _load, ("observation_spec", "action_spec", "reset", "step"))


def _plain(space: Space, observation: Any) -> Any:
    """Named tuples and dataclasses as the dicts that a Dict space has."""
    if not isinstance(space, spaces.Dict):
        return observation
    named = isinstance(observation, Mapping)
    parts = {name: observation[name] if named else getattr(observation, name) for name in space.spaces}
    return {name: _plain(child, parts[name]) for name, child in space.spaces.items()}


def _space(spec: Any) -> Space:
    """A Gymnasium space from one of jumanji's specs."""
    match type(spec).__name__:
        case "DiscreteArray":
            return spaces.Discrete(int(spec.num_values))
        case "MultiDiscreteArray":
            return spaces.MultiDiscrete(np.asarray(spec.num_values))
        case "BoundedArray":
            return box(tuple(spec.shape), spec.dtype, spec.minimum, spec.maximum)
        case "Array":
            return box(tuple(spec.shape), spec.dtype)
    children = vars(spec).get("_specs")
    if not children:
        raise TypeError(
            f"the spec {shown(spec)} of jumanji has no counterpart in Gymnasium: expected arrays, or a Spec of such"
        )
    return spaces.Dict({name: _space(child) for name, child in children.items()})
