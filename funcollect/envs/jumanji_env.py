"""jumanji environments (https://github.com/instadeepai/jumanji)."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from funcollect.envs.jax_env import JaxEnv, Reset, Transition
from funcollect.interop.jax_setup import import_jax
from funcollect.specs import ActionSpec, Space, observation_leaves


def from_jumanji(env: Any, *, num_envs: int | None = None, reset: Reset = "fresh", **kwargs: Any) -> JaxEnv:
    """A JAX environment over jumanji's; a last step whose discount is not zero is a truncation.

    Args:
        env: an id such as ``"Snake-v1"``, or an instance without autoreset.
        num_envs: P; None for a single environment without a batch dimension.
        reset: ``"cached"`` starts every episode of a lane where its first one started.
        **kwargs: for `jumanji.make`.

    Raises:
        ImportError: without jumanji.
        ValueError: for an unknown id.
        TypeError: for a spec without a Gymnasium counterpart.
    """
    label = env if isinstance(env, str) else type(env).__name__
    raw = _make(env, kwargs) if isinstance(env, str) else env
    observed = _space(raw.observation_spec)
    return JaxEnv(
        label=f"jumanji/{label}",
        num_envs=num_envs,
        observation_space=observed,
        action_spec=ActionSpec(_space(raw.action_spec)),
        observation_leaves=observation_leaves(observed),
        begin=lambda key: _begin(raw, key),
        advance=lambda key, physics, action: _advance(raw, physics, action),
        reset=reset,
    )


def _make(name: str, kwargs: dict[str, Any]) -> Any:
    try:
        import jumanji.registration as registry
    except ImportError as error:
        raise ImportError("jumanji is not installed: pip install funcollect[envs]") from error
    if name not in (known := registry.registered_environments()):
        raise ValueError(f"jumanji has no environment {name!r}, expected one of {sorted(known)}")
    return registry.make(name, **kwargs)


def _begin(raw: Any, key: Any) -> tuple[Any, Any]:
    state, timestep = raw.reset(key)
    return state, _plain(timestep.observation)


def _advance(raw: Any, physics: Any, action: Any) -> Transition:
    jnp = import_jax().numpy
    state, timestep = raw.step(physics, action)
    over, ended = timestep.last(), (timestep.discount == 0).all()
    reward = jnp.asarray(timestep.reward, jnp.float32)
    return Transition(state, _plain(timestep.observation), reward, over & ended, over & ~ended, {})


def _plain(observation: Any) -> Any:
    """Named tuples as the dicts that a Dict space has."""
    if hasattr(observation, "_asdict"):
        return {name: _plain(value) for name, value in observation._asdict().items()}
    return observation


def _space(spec: Any) -> Space:
    """A Gymnasium space from one of jumanji's specs."""
    kind = type(spec).__name__
    if kind == "DiscreteArray":
        return spaces.Discrete(int(spec.num_values))
    if kind == "MultiDiscreteArray":
        return spaces.MultiDiscrete(np.asarray(spec.num_values))
    if hasattr(spec, "shape"):
        return _box(spec)
    children = vars(spec).get("_specs", {})
    if not children:
        raise TypeError(f"the spec {spec!r:.80} of jumanji has no counterpart in Gymnasium")
    return spaces.Dict({name: _space(child) for name, child in children.items()})


def _box(spec: Any) -> Space:
    dtype = np.dtype(spec.dtype)
    if dtype.kind == "b":
        return spaces.MultiBinary(spec.shape) if spec.shape else spaces.Discrete(2)
    bounds = (-np.inf, np.inf) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    low, high = getattr(spec, "minimum", bounds[0]), getattr(spec, "maximum", bounds[1])
    low, high = (np.broadcast_to(np.asarray(bound, dtype), spec.shape) for bound in (low, high))
    return spaces.Box(low, high, spec.shape, dtype.type)
