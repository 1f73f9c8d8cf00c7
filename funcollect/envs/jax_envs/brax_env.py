"""Adapters for brax (github.com/google/brax) and MuJoCo Playground (github.com/google-deepmind/mujoco_playground)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

from funcollect.arguments import check_optional_positive, check_positive
from funcollect.envs.jax_envs.jax_env import FunctionsEnv, Open, Suite, first_observation, jax_env
from funcollect.envs.jax_envs.renderers import brax_renderer, playground_renderer
from funcollect.envs.spaces import box, space_like
from funcollect.protocols import Starts, Transition

_TRAINING = ("AutoResetWrapper", "EpisodeWrapper", "EvalWrapper", "VmapWrapper")  # in brax's and playground's names

_MEMBERS = ("reset", "step", "action_size")
_BRAX = Suite("brax", "brax.envs", lambda envs: (envs._envs, envs.get_environment), _MEMBERS)
_PLAYGROUND = Suite(
    "playground",
    "mujoco_playground",
    lambda playground: (playground.registry.ALL_ENVS, partial(_load_playground, playground.registry)),
    (*_MEMBERS, "unwrapped"),
)


def from_brax(
    env: Any,
    *,
    num_envs: int | None = None,
    episode_length: int = 1000,
    info_keys: Sequence[str] = (),
    starts: Starts = "fresh",
    param_keys: Sequence[str] = (),
    **kwargs: Any,
) -> FunctionsEnv:
    """A JAX environment over a raw brax one, without its training wrappers.

    Args:
        env: an id such as ``"ant"``, or an instance without wrappers that batch, count or reset.
        episode_length: steps after which an episode is truncated.
        info_keys: the keys of the state's `metrics` that a batch records under ``next.info``.
        **kwargs: for `brax.envs.get_environment`, such as `backend`.
        num_envs: see `from_functions`.
        starts: see `from_functions`; ``"cached"`` is what brax's own autoreset does.
        param_keys: see `from_functions`; the parameters are brax's system.

    Raises the errors of `from_gymnax`, and ValueError for a training wrapper.

    >>> from_brax("inverted_pendulum", num_envs=64)
    JaxEnv('brax/inverted_pendulum', num_envs=64)
    """
    check_positive("episode_length", episode_length, 1000)
    label, raw = _BRAX.make(env, kwargs)
    options = (num_envs, False, info_keys, starts, episode_length)
    return _over_states(label, raw, "sys", options, param_keys, partial(brax_renderer, raw))


def from_playground(
    env: Any,
    *,
    num_envs: int | None = None,
    episode_length: int | None = None,
    info_keys: Sequence[str] = (),
    starts: Starts = "fresh",
    param_keys: Sequence[str] = (),
    **kwargs: Any,
) -> FunctionsEnv:
    """A JAX environment over a raw one of MuJoCo Playground, without its training wrappers.

    The physics are MJX's ``"jax"`` implementation, which runs on every device, unless a `config` or
    ``config_overrides={"impl": …}`` names another. The `action_repeat` of the config is not applied.

    Args:
        env: an id such as ``"CartpoleBalance"``, or an instance without wrappers that batch, count or reset.
        episode_length: steps after which an episode is truncated; by default the config's.
        **kwargs: for `mujoco_playground.registry.load`: `config`, `config_overrides`.
        num_envs, info_keys: see `from_brax`.
        starts: see `from_brax`; resets are slow here, so ``"cached"`` saves much time.
        param_keys: see `from_brax`; the parameters are MJX's model.

    Raises the errors of `from_brax`.

    >>> from_playground("CartpoleBalance", num_envs=64)
    JaxEnv('playground/CartpoleBalance', num_envs=64)
    """
    check_optional_positive("episode_length", episode_length)
    label, raw = _PLAYGROUND.make(env, kwargs)
    length = raw.unwrapped._config.episode_length if episode_length is None else episode_length
    options = (num_envs, False, info_keys, starts, length)
    return _over_states(label, raw, "_mjx_model", options, param_keys, partial(playground_renderer, raw))


def _load_playground(registry: Any, name: str, **kwargs: Any) -> Any:
    """Load an environment of MuJoCo Playground, with MJX's JAX implementation unless the arguments name one."""
    if "config" not in kwargs and "impl" in registry.get_default_config(name):
        kwargs["config_overrides"] = {"impl": "jax"} | (kwargs.get("config_overrides") or {})
    return registry.load(name, **kwargs)


def _over_states(
    label: str, raw: Any, physics: str, options: tuple[Any, ...], param_keys: Sequence[str], renderer: Open
) -> FunctionsEnv:
    """Adapt an environment with ``reset(key)`` and ``step(state, action)``: states have `obs`, `reward` and `done`.

    Its attribute `physics` holds the parameters of the simulation. The `options` are arguments of `jax_env`, from
    `num_envs` to `max_episode_steps`.
    """
    inner = raw
    while inner is not None:
        if type(inner).__name__.endswith(_TRAINING):
            raise ValueError(
                f"{label} is wrapped in {type(inner).__name__}, expected an environment of one lane that neither "
                "counts its steps nor resets itself: pass env.unwrapped"
            )
        inner = vars(inner).get("env")  # the environment that a wrapper wraps

    def reset(key: Any, params: Any) -> tuple[Any, Any]:
        state = _with(raw, physics, params).reset(key)
        return state, state.obs

    def step(_: Any, env_state: Any, action: Any, params: Any) -> Transition:
        state = _with(raw, physics, params).step(env_state, action)
        return Transition(state, state.obs, state.reward, state.done > 0, False, state.metrics)

    observed = space_like(first_observation(reset))
    actions = box((raw.action_size,), "float32", -1.0, 1.0)
    own = getattr(raw.unwrapped, physics, None)
    more: dict[str, Any] = {"default_params": own, "param_keys": param_keys, "renderer": renderer}
    return jax_env(label, reset, step, observed, actions, *options, **more)


def _with(env: Any, physics: str, params: Any) -> Any:
    """The environment itself, or a copy with other parameters of the simulation under its wrappers, for one trace."""
    if params is None:
        return env
    copied = copy.copy(env)
    if "env" in vars(env):
        copied.env = _with(env.env, physics, params)
    else:
        setattr(copied, physics, params)
    return copied
