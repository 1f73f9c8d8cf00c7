"""navix environments (https://github.com/epignatelli/navix)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gymnasium import spaces

from funcollect.envs.jax_envs.jax_env import FunctionsEnv, jax_env
from funcollect.envs.jax_envs.spaces import space_like
from funcollect.envs.jax_envs.suite import Suite, first_observation
from funcollect.protocols import Starts, Transition

_TRUNCATION, _TERMINATION = 1, 2  # navix's step types; 0 is a transition


def from_navix(
    env: Any,
    *,
    num_envs: int | None = None,
    one_hot: bool = False,
    info_keys: Sequence[str] = (),
    starts: Starts = "fresh",
    **kwargs: Any,
) -> FunctionsEnv:
    """A JAX environment over navix's, without its autoreset, which would spend a step on each reset.

    Args:
        env: an id such as ``"Navix-Empty-8x8-v0"``, or an instance.
        num_envs: P; None for a single environment without a batch dimension.
        one_hot: discrete actions as one-hot rows, TorchRL's encoding.
        info_keys: the keys of the time step's `info`, such as ``"return"``, that a batch records under ``next.info``.
        starts: ``"cached"`` starts every episode of a lane as its first one, in the same grid.
        **kwargs: for `navix.make`, such as `max_steps`, after which an episode is truncated (100 unless given).

    Raises:
        ImportError: without navix.
        ValueError: for an unknown id.

    >>> from_navix("Navix-Empty-8x8-v0", num_envs=64)
    JaxEnv('navix/Navix-Empty-8x8-v0', num_envs=64)
    """
    label, raw = _SUITE.make(env, kwargs)

    def reset(key: Any, _: Any) -> tuple[Any, Any]:
        timestep = raw.reset(key)
        return timestep, timestep.observation

    def step(_: Any, env_state: Any, action: Any, __: Any) -> Transition:
        after = raw._step(env_state, action)
        terminated, truncated = after.step_type == _TERMINATION, after.step_type == _TRUNCATION
        return Transition(after, after.observation, after.reward, terminated, truncated, after.info)

    return jax_env(
        label,
        reset,
        step,
        observation_space=space_like(first_observation(reset)),
        action_space=spaces.Discrete(int(raw.action_space.maximum) + 1),
        num_envs=num_envs,
        one_hot=one_hot,
        info_keys=info_keys,
        starts=starts,
    )


def _load() -> tuple[Iterable[str], Callable[..., Any]]:
    import navix

    return navix.registry(), navix.make


_SUITE = Suite("navix", _load, ("reset", "_step", "action_space"))
