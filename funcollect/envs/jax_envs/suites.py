"""Adapters for suites of JAX environments.

These are brax (https://github.com/google/brax), gymnax (https://github.com/RobertTLange/gymnax, of its releases 1.x and
0.0.x), MuJoCo Playground (https://github.com/google-deepmind/mujoco_playground), navix
(https://github.com/epignatelli/navix), and pgx (https://github.com/sotetsuk/pgx) with games of one player or several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces

from funcollect.arguments import check_optional_positive, check_positive
from funcollect.envs.jax_envs.jax_env import FunctionsEnv, Suite, copy_with, first_observation, jax_env
from funcollect.envs.jax_envs.renderers import brax_renderer, gymnax_renderer, navix_renderer, playground_renderer
from funcollect.envs.spaces import box, space_like
from funcollect.interop.jax_setup import own_generator
from funcollect.protocols import Starts, Transition
from funcollect.specs import Space


def _load_playground(registry: Any, name: str, **kwargs: Any) -> Any:
    """Load an environment of MuJoCo Playground, with MJX's JAX implementation unless the arguments name one."""
    if "config" not in kwargs and "impl" in registry.get_default_config(name):
        kwargs["config_overrides"] = {"impl": "jax"} | (kwargs.get("config_overrides") or {})
    return registry.load(name, **kwargs)


_PHYSICS = ("reset", "step", "action_size")
_BRAX = Suite("brax", "brax.envs", lambda envs: (envs._envs, envs.get_environment), _PHYSICS)
_GYMNAX = Suite(
    "gymnax",
    "gymnax",
    lambda gymnax: (gymnax.registered_envs, lambda name, **kwargs: gymnax.make(name, **kwargs)[0]),
    ("reset_env", "step_env"),
)
_NAVIX = Suite("navix", "navix", lambda navix: (navix.registry(), navix.make), ("reset", "_step", "action_space"))
_PGX = Suite("pgx", "pgx", lambda pgx: (pgx.available_envs(), pgx.make), ("init", "num_players", "num_actions"))
_PLAYGROUND = Suite(
    "playground",
    "mujoco_playground",
    lambda playground: (playground.registry.ALL_ENVS, partial(_load_playground, playground.registry)),
    (*_PHYSICS, "unwrapped"),
)
_TRAINING = ("AutoResetWrapper", "EpisodeWrapper", "EvalWrapper", "VmapWrapper")  # in brax's and playground's names
_TRUNCATION, _TERMINATION = 1, 2  # navix's step types; 0 is a transition


def from_gymnax(
    env: Any,
    params: Any = None,
    *,
    num_envs: int | None = None,
    one_hot: bool = False,
    info_keys: Sequence[str] = (),
    starts: Starts = "fresh",
    param_keys: Sequence[str] = (),
    **kwargs: Any,
) -> FunctionsEnv:
    """A JAX environment over gymnax's, without its autoreset; its time limit truncates.

    Most of gymnax's environments stop gradients at each step; those that can let them pass do, such as Pendulum of its
    releases 1.x.

    Args:
        env: an id such as ``"CartPole-v1"``, or an instance.
        params: the environment's parameters instead of its defaults. `set_env_params` changes them during a run.
        info_keys: the keys of gymnax's `info`, such as ``"discount"``, that a batch records under ``next.info``.
        **kwargs: for `gymnax.make`.
        num_envs, one_hot, starts, param_keys: see `from_functions`.

    Raises:
        ImportError: if the suite's package is not installed.
        ValueError: for an unknown id, or an option out of range.
        TypeError: for something else as `env`, or an argument that the suite does not take.

    >>> from_gymnax("CartPole-v1", num_envs=64)
    JaxEnv('gymnax/CartPole-v1', num_envs=64)
    """
    _, raw = _GYMNAX.make(env, kwargs)
    if getattr(raw, "supports_transition_gradients", False):
        raw = raw.with_transition_gradients()  # else its steps cut those of `differentiable_rollout` and `jax.grad`
    own = raw.default_params if params is None else params

    def reset(key: Any, given: Any) -> tuple[Any, Any]:
        observation, env_state = raw.reset_env(key, own if given is None else given)
        return env_state, observation

    def step(key: Any, env_state: Any, action: Any, given: Any) -> Transition:
        params = own if given is None else given
        observation, after, reward, terminated, info = raw.step_env(key, env_state, action, params)
        if hasattr(raw, "is_truncated"):
            truncated = raw.is_truncated(after, params)
        else:
            # Releases 0.0.x count the time limit as a termination, and some environments keep that in their state. So
            # the same step is also traced without the limit; the compiler merges the two.
            endless = params.replace(max_steps_in_episode=np.iinfo(np.int32).max)
            terminated = raw.step_env(key, env_state, action, endless)[3]
            truncated = after.time >= params.max_steps_in_episode
        return Transition(after, observation, reward, terminated, truncated, info)

    observed, actions = _space(raw.observation_space(own), first_observation(reset)), _space(raw.action_space(own))
    facts = {"default_params": own, "param_keys": param_keys, "renderer": partial(gymnax_renderer, raw, own)}
    common = (observed, actions, num_envs, one_hot, info_keys, starts)
    return jax_env(f"gymnax/{raw.name}", reset, step, *common, truncates=True, **facts)


def _space(given: Any, delivered: Any = None) -> Space:
    """The Gymnasium counterpart of a space of gymnax.

    A Box gets the dtype of the `delivered` array, if that is given: some spaces of gymnax name another one.
    """
    match type(given).__name__:
        case "Discrete":
            return spaces.Discrete(int(given.n))
        case "Box":
            return box(tuple(given.shape), (given if delivered is None else delivered).dtype, given.low, given.high)
        case "Dict":
            children = given.spaces.items()
            return spaces.Dict({name: _space(child, delivered and delivered[name]) for name, child in children})
        case "Tuple":
            return spaces.Tuple([_space(child, delivered and delivered[i]) for i, child in enumerate(given.spaces)])
    raise TypeError(
        f"the space {given!r} of gymnax has no counterpart in Gymnasium: expected Discrete, Box, Dict, Tuple"
    )


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
    label, raw = _NAVIX.make(env, kwargs)

    def reset(key: Any, _: Any) -> tuple[Any, Any]:
        timestep = raw.reset(key)
        return timestep, timestep.observation

    def step(_: Any, env_state: Any, action: Any, __: Any) -> Transition:
        after = raw._step(env_state, action)
        terminated, truncated = after.step_type == _TERMINATION, after.step_type == _TRUNCATION
        return Transition(after, after.observation, after.reward, terminated, truncated, after.info)

    actions: Space = spaces.Discrete(int(raw.action_space.maximum) + 1)
    common = (space_like(first_observation(reset)), actions, num_envs, one_hot, info_keys, starts)
    return jax_env(label, reset, step, *common, truncates=True, renderer=navix_renderer)


def from_pgx(
    env: Any, *, num_envs: int | None = None, one_hot: bool = False, max_episode_steps: int | None = None
) -> FunctionsEnv:
    """A JAX environment over a pgx game.

    The observation is what the player whose turn it is sees: a dict of ``observation``, ``action_mask`` (the legal
    actions) and, for several players, ``current_player``. Their rewards are ``next.reward`` [*B, T, players].

    Args:
        env: an id such as ``"go_9x9"``, or an instance.
        max_episode_steps: steps after which a game is truncated; None for no limit, and some games never end.
        num_envs, one_hot: see `from_functions`.

    Raises the errors of `from_gymnax`.

    >>> from_pgx("tic_tac_toe", num_envs=64)
    JaxEnv('pgx/tic_tac_toe', num_envs=64)
    """
    _, raw = _PGX.make(env, {})
    several = raw.num_players > 1

    def observe(state: Any) -> dict[str, Any]:
        player = {"current_player": state.current_player} if several else {}
        return {"observation": state.observation, "action_mask": state.legal_action_mask} | player

    def reset(key: Any, _: Any) -> tuple[Any, Any]:
        state = raw.init(key)
        return state, observe(state)

    def step(key: Any, env_state: Any, action: Any, _: Any) -> Transition:
        state = raw.step(env_state, action, key)
        reward = state.rewards if several else state.rewards[0]
        return Transition(state, observe(state), reward, state.terminated, state.truncated)

    # pgx declares no observation space, so it is derived from the shapes and dtypes
    known: dict[str, Space] = {"current_player": spaces.Discrete(raw.num_players)}
    observed = {name: known.get(name) or space_like(part) for name, part in first_observation(reset).items()}
    with own_generator():  # pgx begins a game to find the number of its actions
        actions: Space = spaces.Discrete(raw.num_actions)
    common = (spaces.Dict(observed), actions, num_envs, one_hot)
    return jax_env(f"pgx/{raw.id}", reset, step, *common, max_episode_steps=max_episode_steps)


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
    facts = {"max_episode_steps": episode_length, "param_keys": param_keys, "renderer": partial(brax_renderer, raw)}
    return _over_states(label, raw, "sys", (num_envs, False, info_keys, starts), facts)


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
    facts = {"max_episode_steps": length, "param_keys": param_keys, "renderer": partial(playground_renderer, raw)}
    return _over_states(label, raw, "_mjx_model", (num_envs, False, info_keys, starts), facts)


def _over_states(label: str, raw: Any, physics: str, common: tuple[Any, ...], facts: Mapping[str, Any]) -> FunctionsEnv:
    """Adapt an environment with ``reset(key)`` and ``step(state, action)``: states have `obs`, `reward` and `done`.

    Its attribute `physics` holds the parameters of the simulation. `common` and `facts` are arguments of `jax_env`.
    """
    inner = raw
    while inner is not None:
        if type(inner).__name__.endswith(_TRAINING):
            raise ValueError(
                f"{label} is wrapped in {type(inner).__name__}, expected an environment of one lane that neither "
                "counts its steps nor resets itself: pass env.unwrapped"
            )
        inner = vars(inner).get("env")  # the environment that a wrapper wraps

    def under(params: Any) -> Any:
        return raw if params is None else copy_with(raw, "env", lambda inner: setattr(inner, physics, params))

    def reset(key: Any, params: Any) -> tuple[Any, Any]:
        state = under(params).reset(key)
        return state, state.obs

    def step(_: Any, env_state: Any, action: Any, params: Any) -> Transition:
        state = under(params).step(env_state, action)
        return Transition(state, state.obs, state.reward, state.done > 0, False, state.metrics)

    observed, actions = space_like(first_observation(reset)), box((raw.action_size,), "float32", -1.0, 1.0)
    own = getattr(raw.unwrapped, physics, None)
    return jax_env(label, reset, step, observed, actions, *common, default_params=own, **facts)
