"""navix environments (https://github.com/epignatelli/navix)."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from funcollect.envs.jax_env import JaxEnv, Transition
from funcollect.specs import ActionSpec, observation_leaves

_TRUNCATION, _TERMINATION = 1, 2  # navix's step types; 0 is a transition


def from_navix(env: Any, *, num_envs: int | None = None, **kwargs: Any) -> JaxEnv:
    """A JAX environment over navix's. Its autoreset acts on steps after an end, of which this loop makes none.

    Args:
        env: an id such as ``"Navix-Empty-8x8-v0"``, or an instance.
        num_envs: P; None for a single environment without a batch dimension.
        **kwargs: for `navix.make`.

    Raises:
        ImportError: without navix.
        ValueError: for an unknown id.
    """
    label = env if isinstance(env, str) else type(env).__name__
    raw = _make(env, kwargs) if isinstance(env, str) else env
    given = raw.observation_space
    low, high = (np.broadcast_to(np.asarray(bound), given.shape) for bound in (given.minimum, given.maximum))
    dtype = np.dtype(given.dtype)
    observed = spaces.Box(low.astype(dtype), high.astype(dtype), given.shape, dtype.type)

    def begin(key: Any) -> tuple[Any, Any]:
        timestep = raw.reset(key)
        return timestep, timestep.observation

    def advance(key: Any, physics: Any, action: Any) -> Transition:
        timestep = raw._step(physics, action)
        kind = timestep.step_type
        return Transition(
            timestep, timestep.observation, timestep.reward, kind == _TERMINATION, kind == _TRUNCATION, {}
        )

    return JaxEnv(
        label=f"navix/{label}",
        num_envs=num_envs,
        observation_space=observed,
        action_spec=ActionSpec(spaces.Discrete(int(raw.action_space.maximum) + 1)),
        observation_leaves=observation_leaves(observed),
        begin=begin,
        advance=advance,
    )


def _make(name: str, kwargs: dict[str, Any]) -> Any:
    try:
        import navix
    except ImportError as error:
        raise ImportError("navix is not installed: pip install funcollect[envs]") from error
    if name not in (known := navix.registry()):
        raise ValueError(f"navix has no environment {name!r}, expected one of {sorted(known)}")
    return navix.make(name, **kwargs)
