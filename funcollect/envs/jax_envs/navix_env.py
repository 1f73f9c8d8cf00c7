"""navix environments (https://github.com/epignatelli/navix)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gymnasium import spaces

from funcollect.envs.jax_envs.jax_env import JaxEnv, Reset, Transition, jax_env
from funcollect.envs.jax_envs.spaces import space_like
from funcollect.envs.jax_envs.suite import check_instance, check_known, check_no_keywords, not_installed
from funcollect.interop.jax_setup import import_jax

_TRUNCATION, _TERMINATION = 1, 2  # navix's step types; 0 is a transition


def from_navix(
    env: Any,
    *,
    num_envs: int | None = None,
    one_hot: bool = False,
    info_keys: Sequence[str] = (),
    reset: Reset = "fresh",
    **kwargs: Any,
) -> JaxEnv:
    """A JAX environment over navix's, without its autoreset, which would spend a step on each reset.

    Args:
        env: an id such as ``"Navix-Empty-8x8-v0"``, or an instance.
        num_envs: P; None for a single environment without a batch dimension.
        one_hot: actions as one-hot rows, TorchRL's encoding.
        info_keys: what of the time step's `info` a batch records under ``next.info``, such as ``"return"``.
        reset: ``"cached"`` starts every episode of a lane as its first one, in the same grid.
        **kwargs: for `navix.make`, such as `max_steps`, after which an episode is truncated (100 unless given).

    Raises:
        ImportError: without navix.
        ValueError: for an unknown id.

    >>> from_navix("Navix-Empty-8x8-v0", num_envs=64)
    JaxEnv('navix/Navix-Empty-8x8-v0', num_envs=64)
    """
    jax = import_jax()
    if not isinstance(env, str):
        check_no_keywords("navix", kwargs)
    raw = _make(env, kwargs) if isinstance(env, str) else env
    check_instance("navix", raw, "reset", "_step", "action_space")

    def begin(key: Any) -> tuple[Any, Any]:
        timestep = raw.reset(key)
        return timestep, timestep.observation

    def advance(key: Any, physics: Any, action: Any) -> Transition:
        step = raw._step(physics, action)
        terminated, truncated = step.step_type == _TERMINATION, step.step_type == _TRUNCATION
        return Transition(step, step.observation, step.reward, terminated, truncated, step.info)

    _, observation = jax.eval_shape(begin, jax.numpy.zeros(2, "uint32"))
    return jax_env(
        f"navix/{env if isinstance(env, str) else type(env).__name__}",
        begin,
        advance,
        observation_space=space_like(observation),
        action_space=spaces.Discrete(int(raw.action_space.maximum) + 1),
        num_envs=num_envs,
        one_hot=one_hot,
        info_keys=info_keys,
        reset=reset,
    )


def _make(name: str, kwargs: dict[str, Any]) -> Any:
    try:
        import navix
    except ImportError as error:
        raise not_installed("navix") from error
    check_known("navix", name, navix.registry())
    return navix.make(name, **kwargs)
