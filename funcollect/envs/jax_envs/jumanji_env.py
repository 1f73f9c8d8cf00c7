"""jumanji environments (https://github.com/instadeepai/jumanji)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from funcollect.envs.jax_envs.jax_env import JaxEnv, Reset, Transition, jax_env
from funcollect.envs.jax_envs.spaces import box
from funcollect.envs.jax_envs.suite import check_instance, check_known, check_no_keywords, not_installed
from funcollect.interop.jax_setup import import_jax
from funcollect.messages import shown
from funcollect.specs import Space


def from_jumanji(
    env: Any,
    *,
    num_envs: int | None = None,
    one_hot: bool = False,
    info_keys: Sequence[str] = (),
    reset: Reset = "fresh",
    **kwargs: Any,
) -> JaxEnv:
    """A JAX environment over jumanji's; a last step whose discount is not zero is a truncation.

    Named tuples become dicts. Where there are several agents, their rewards are ``next.reward`` [*B, T, agents]. Many
    environments of the suite call their own time limit a termination: so does the batch.

    Args:
        env: an id such as ``"Snake-v1"``, or an instance without autoreset.
        num_envs: P; None for a single environment without a batch dimension.
        one_hot: discrete actions as one-hot rows, TorchRL's encoding.
        info_keys: what of the time step's `extras` a batch records under ``next.info``.
        reset: ``"cached"`` starts every episode of a lane as its first one. The state holds the key, so all that is
            random inside the episode repeats, too.
        **kwargs: for `jumanji.make`.

    Raises:
        ImportError: without jumanji.
        ValueError: for an unknown id.
        TypeError: for a spec without a Gymnasium counterpart.

    >>> from_jumanji("Snake-v1", num_envs=64)
    JaxEnv('jumanji/Snake-v1', num_envs=64)
    """
    import_jax()
    if not isinstance(env, str):
        check_no_keywords("jumanji", kwargs)
    raw = _make(env, kwargs) if isinstance(env, str) else env
    check_instance("jumanji", raw, "observation_spec", "action_spec", "reset", "step")
    observed = _space(raw.observation_spec)

    def begin(key: Any) -> tuple[Any, Any]:
        state, timestep = raw.reset(key)
        return state, _plain(observed, timestep.observation)

    def advance(key: Any, physics: Any, action: Any) -> Transition:
        state, timestep = raw.step(physics, action)
        over, ended = timestep.last(), (timestep.discount == 0).all()
        observation = _plain(observed, timestep.observation)
        return Transition(state, observation, timestep.reward, over & ended, over & ~ended, timestep.extras)

    return jax_env(
        f"jumanji/{env if isinstance(env, str) else type(env).__name__}",
        begin,
        advance,
        observation_space=observed,
        action_space=_space(raw.action_spec),
        num_envs=num_envs,
        one_hot=one_hot,
        info_keys=info_keys,
        reset=reset,
    )


def _make(name: str, kwargs: dict[str, Any]) -> Any:
    try:
        from jumanji import registration
    except ImportError as error:
        raise not_installed("jumanji") from error
    check_known("jumanji", name, registration.registered_environments())
    return registration.make(name, **kwargs)


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
