"""MuJoCo Playground environments (https://github.com/google-deepmind/mujoco_playground)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from funcollect.arguments import check_optional_positive
from funcollect.envs.jax_envs.brax_env import over_states
from funcollect.envs.jax_envs.jax_env import FunctionsEnv
from funcollect.envs.jax_envs.suite import Suite
from funcollect.protocols import Starts


def from_playground(
    env: Any,
    *,
    num_envs: int | None = None,
    episode_length: int | None = None,
    info_keys: Sequence[str] = (),
    starts: Starts = "fresh",
    **kwargs: Any,
) -> FunctionsEnv:
    """A JAX environment over a raw one of MuJoCo Playground, without its training wrappers.

    Physics run by MJX's ``"jax"`` implementation unless a `config` or ``config_overrides={"impl": …}`` says otherwise:
    it runs on every device. A step is one of the environment's: `action_repeat` of its config is not applied.

    Args:
        env: an id such as ``"CartpoleBalance"``, or an instance without wrappers that batch, count or reset.
        num_envs: P; None for a single environment without a batch dimension.
        episode_length: steps after which an episode is truncated; the config's unless given.
        info_keys: the keys of the state's `metrics` that a batch records under ``next.info``.
        starts: ``"cached"`` starts every episode of a lane as its first one, as Playground's own autoreset does: a
            reset is slow here.
        **kwargs: for `mujoco_playground.registry.load`: `config`, `config_overrides`.

    Raises:
        ImportError: without MuJoCo Playground.
        ValueError: for an unknown id, or a training wrapper.

    >>> from_playground("CartpoleBalance", num_envs=64)
    JaxEnv('playground/CartpoleBalance', num_envs=64)
    """
    check_optional_positive("episode_length", episode_length)
    label, raw = _SUITE.make(env, kwargs)
    return over_states(
        label,
        raw,
        num_envs=num_envs,
        max_episode_steps=raw.unwrapped._config.episode_length if episode_length is None else episode_length,
        info_keys=info_keys,
        starts=starts,
    )


def _load() -> tuple[Iterable[str], Callable[..., Any]]:
    from mujoco_playground import registry

    def make(name: str, **kwargs: Any) -> Any:
        if "config" not in kwargs and "impl" in registry.get_default_config(name):
            kwargs["config_overrides"] = {"impl": "jax"} | (kwargs.get("config_overrides") or {})
        return registry.load(name, **kwargs)

    return registry.ALL_ENVS, make


_SUITE = Suite("playground", _load, ("unwrapped",))
