"""MuJoCo Playground environments (https://github.com/google-deepmind/mujoco_playground)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from funcollect.arguments import check_optional_positive
from funcollect.envs.jax_envs.brax_env import over_states
from funcollect.envs.jax_envs.jax_env import JaxEnv, Reset
from funcollect.envs.jax_envs.suite import check_instance, check_known, check_no_keywords, not_installed
from funcollect.interop.jax_setup import import_jax


def from_playground(
    env: Any,
    *,
    num_envs: int | None = None,
    episode_length: int | None = None,
    info_keys: Sequence[str] = (),
    reset: Reset = "fresh",
    **kwargs: Any,
) -> JaxEnv:
    """A JAX environment over a raw one of MuJoCo Playground, without its training wrappers.

    Physics run by MJX's ``"jax"`` implementation unless a `config` or ``config_overrides={"impl": …}`` says otherwise:
    it runs on every device. A step is one of the environment's: `action_repeat` of its config is not applied.

    Args:
        env: an id such as ``"CartpoleBalance"``, or an instance without wrappers that batch, count or reset.
        num_envs: P; None for a single environment without a batch dimension.
        episode_length: steps after which an episode is truncated; the config's unless given.
        info_keys: what of the state's `metrics` a batch records under ``next.info``.
        reset: ``"cached"`` starts every episode of a lane as its first one, as Playground's own autoreset does: no
            reset, which is dear here, is paid after `init`, and each lane sees one start only.
        **kwargs: for `mujoco_playground.registry.load`: `config`, `config_overrides`.

    Raises:
        ImportError: without MuJoCo Playground.
        ValueError: for an unknown id, or a training wrapper.

    >>> from_playground("CartpoleBalance", num_envs=64)
    JaxEnv('playground/CartpoleBalance', num_envs=64)
    """
    import_jax()
    check_optional_positive("episode_length", episode_length)
    if not isinstance(env, str):
        check_no_keywords("playground", kwargs)
    raw = _make(env, kwargs) if isinstance(env, str) else env
    check_instance("playground", raw, "unwrapped")
    return over_states(
        f"playground/{env if isinstance(env, str) else type(env).__name__}",
        raw,
        num_envs=num_envs,
        max_episode_steps=raw.unwrapped._config.episode_length if episode_length is None else episode_length,
        info_keys=info_keys,
        reset=reset,
    )


def _make(name: str, kwargs: dict[str, Any]) -> Any:
    try:
        from mujoco_playground import registry
    except ImportError as error:
        raise not_installed("mujoco_playground", "playground") from error
    check_known("playground", name, registry.ALL_ENVS)
    if "config" not in kwargs and "impl" in registry.get_default_config(name):
        kwargs = kwargs | {"config_overrides": {"impl": "jax"} | (kwargs.get("config_overrides") or {})}
    return registry.load(name, **kwargs)
