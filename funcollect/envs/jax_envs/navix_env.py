"""navix environments (https://github.com/epignatelli/navix)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gymnasium import spaces

from funcollect.envs.jax_envs.jax_env import FunctionsEnv, jax_env
from funcollect.envs.jax_envs.renderers import navix_renderer
from funcollect.envs.jax_envs.suite import Suite, first_observation
from funcollect.envs.spaces import space_like
from funcollect.protocols import Starts, Transition

_TRUNCATION, _TERMINATION = 1, 2  # navix's step types; 0 is a transition

_SUITE = Suite("navix", "navix", lambda navix: (navix.registry(), navix.make), ("reset", "_step", "action_space"))


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
        info_keys: the keys of the time step's `info`, such as ``"return"``, that a batch records under ``next.info``.
        **kwargs: for `navix.make`, such as `max_steps`, after which an episode is truncated (default: 100).
        num_envs, one_hot: see `from_functions`.
        starts: see `from_functions`; with ``"cached"`` a lane keeps its grid.

    Raises the errors of `from_gymnax`.

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

    observed = space_like(first_observation(reset))
    actions = int(raw.action_space.maximum) + 1
    options = (num_envs, one_hot, info_keys, starts)
    more: dict[str, Any] = {"truncates": True, "renderer": navix_renderer}
    return jax_env(label, reset, step, observed, spaces.Discrete(actions), *options, **more)
