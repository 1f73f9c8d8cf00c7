"""brax environments (https://github.com/google/brax)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from funcollect.arguments import check_positive
from funcollect.envs.jax_envs.jax_env import JaxEnv, Reset, Transition, jax_env
from funcollect.envs.jax_envs.spaces import box, space_like
from funcollect.envs.jax_envs.suite import check_instance, check_known, check_no_keywords, not_installed
from funcollect.interop.jax_setup import import_jax

_TRAINING = ("AutoResetWrapper", "EpisodeWrapper", "EvalWrapper", "VmapWrapper")  # in brax's and playground's names


def from_brax(
    env: Any,
    *,
    num_envs: int | None = None,
    episode_length: int = 1000,
    info_keys: Sequence[str] = (),
    reset: Reset = "fresh",
    **kwargs: Any,
) -> JaxEnv:
    """A JAX environment over a raw brax one, without its training wrappers.

    Args:
        env: an id such as ``"ant"``, or an instance without wrappers that batch, count or reset.
        num_envs: P; None for a single environment without a batch dimension.
        episode_length: steps after which an episode is truncated.
        info_keys: what of the state's `metrics` a batch records under ``next.info``.
        reset: ``"cached"`` starts every episode of a lane as its first one, as brax's own autoreset does: no reset is
            paid after `init`, and each lane sees one start only.
        **kwargs: for `brax.envs.get_environment`, such as `backend`.

    Raises:
        ImportError: without brax.
        ValueError: for an unknown id, or a training wrapper.

    >>> from_brax("inverted_pendulum", num_envs=64)
    JaxEnv('brax/inverted_pendulum', num_envs=64)
    """
    import_jax()
    check_positive("episode_length", episode_length, 1000)
    if not isinstance(env, str):
        check_no_keywords("brax", kwargs)
    raw = _make(env, kwargs) if isinstance(env, str) else env
    return over_states(
        f"brax/{env if isinstance(env, str) else type(env).__name__}",
        raw,
        num_envs=num_envs,
        max_episode_steps=episode_length,
        info_keys=info_keys,
        reset=reset,
    )


def _make(name: str, kwargs: dict[str, Any]) -> Any:
    try:
        from brax import envs
    except ImportError as error:
        raise not_installed("brax") from error
    check_known("brax", name, envs._envs)
    return envs.get_environment(name, **kwargs)


def over_states(label: str, raw: Any, **options: Any) -> JaxEnv:
    """An environment whose ``reset(key)`` and ``step(state, action)`` give states with `obs`, `reward` and `done`."""
    check_instance(label.partition("/")[0], raw, "reset", "step", "action_size")
    _refuse_wrappers(label, raw)

    def begin(key: Any) -> tuple[Any, Any]:
        state = raw.reset(key)
        return state, state.obs

    def advance(key: Any, physics: Any, action: Any) -> Transition:
        state = raw.step(physics, action)
        return Transition(state, state.obs, state.reward, state.done > 0, False, state.metrics)

    jax = import_jax()
    _, observation = jax.eval_shape(begin, jax.numpy.zeros(2, "uint32"))
    return jax_env(
        label,
        begin,
        advance,
        observation_space=space_like(observation),
        action_space=box((raw.action_size,), "float32", -1.0, 1.0),
        **options,
    )


def _refuse_wrappers(label: str, raw: Any) -> None:
    """A wrapper keeps what it wraps as `env`."""
    inner = raw
    while inner is not None:
        if type(inner).__name__.endswith(_TRAINING):
            raise ValueError(
                f"{label} is wrapped in {type(inner).__name__}, expected an environment of one lane that neither "
                "counts its steps nor resets itself: pass env.unwrapped"
            )
        inner = vars(inner).get("env")
