"""brax environments (https://github.com/google/brax)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from funcollect.arguments import check_positive
from funcollect.envs.jax_envs.jax_env import FunctionsEnv, jax_env
from funcollect.envs.jax_envs.spaces import box, space_like
from funcollect.envs.jax_envs.suite import Suite, check_instance, first_observation
from funcollect.protocols import Starts, Transition

_TRAINING = ("AutoResetWrapper", "EpisodeWrapper", "EvalWrapper", "VmapWrapper")  # in brax's and playground's names


def from_brax(
    env: Any,
    *,
    num_envs: int | None = None,
    episode_length: int = 1000,
    info_keys: Sequence[str] = (),
    starts: Starts = "fresh",
    **kwargs: Any,
) -> FunctionsEnv:
    """A JAX environment over a raw brax one, without its training wrappers.

    Args:
        env: an id such as ``"ant"``, or an instance without wrappers that batch, count or reset.
        num_envs: P; None for a single environment without a batch dimension.
        episode_length: steps after which an episode is truncated.
        info_keys: the keys of the state's `metrics` that a batch records under ``next.info``.
        starts: ``"cached"`` starts every episode of a lane as its first one, as brax's own autoreset does.
        **kwargs: for `brax.envs.get_environment`, such as `backend`.

    Raises:
        ImportError: without brax.
        ValueError: for an unknown id, or a training wrapper.

    >>> from_brax("inverted_pendulum", num_envs=64)
    JaxEnv('brax/inverted_pendulum', num_envs=64)
    """
    check_positive("episode_length", episode_length, 1000)
    label, raw = _SUITE.make(env, kwargs)
    return over_states(
        label,
        raw,
        num_envs=num_envs,
        max_episode_steps=episode_length,
        info_keys=info_keys,
        starts=starts,
    )


def _load() -> tuple[Iterable[str], Callable[..., Any]]:
    from brax import envs

    return envs._envs, envs.get_environment


_SUITE = Suite("brax", _load, ())


def over_states(label: str, raw: Any, **options: Any) -> FunctionsEnv:
    """An environment whose ``reset(key)`` and ``step(state, action)`` give states with `obs`, `reward` and `done`."""
    check_instance(label.partition("/")[0], raw, "reset", "step", "action_size")
    _refuse_wrappers(label, raw)

    def reset(key: Any, _: Any) -> tuple[Any, Any]:
        state = raw.reset(key)
        return state, state.obs

    def step(_: Any, env_state: Any, action: Any, __: Any) -> Transition:
        state = raw.step(env_state, action)
        return Transition(state, state.obs, state.reward, state.done > 0, False, state.metrics)

    return jax_env(
        label,
        reset,
        step,
        observation_space=space_like(first_observation(reset)),
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
