"""pgx games (https://github.com/sotetsuk/pgx), of one player or several."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from funcollect.envs.jax_env import JaxEnv, Transition
from funcollect.interop.jax_setup import import_jax
from funcollect.specs import ActionSpec, observation_leaves


def from_pgx(env: Any, *, num_envs: int | None = None, **kwargs: Any) -> JaxEnv:
    """A JAX environment over a pgx game: the observation is that of the player whose turn it is.

    An observation is a dict of ``observation``, ``action_mask`` (the legal actions) and, for several players,
    ``current_player``. Their rewards are ``next.reward`` [*B, T, players].

    Args:
        env: an id such as ``"go_9x9"``, or an instance.
        num_envs: P; None for a single game without a batch dimension.
        **kwargs: for `pgx.make`.

    Raises:
        ImportError: without pgx.
        ValueError: for an unknown id.
    """
    raw = _make(env, kwargs) if isinstance(env, str) else env
    several = raw.num_players > 1
    observed = spaces.Dict(
        {"observation": _box(raw), "action_mask": spaces.MultiBinary(raw.num_actions)}
        | ({"current_player": spaces.Discrete(raw.num_players)} if several else {})
    )

    def observe(state: Any) -> dict[str, Any]:
        player = {"current_player": state.current_player} if several else {}
        return {"observation": state.observation, "action_mask": state.legal_action_mask} | player

    def begin(key: Any) -> tuple[Any, Any]:
        state = raw.init(key)
        return state, observe(state)

    def advance(key: Any, physics: Any, action: Any) -> Transition:
        state = raw.step(physics, action, key)
        reward = state.rewards if several else state.rewards[0]
        return Transition(state, observe(state), reward, state.terminated, state.truncated, {})

    return JaxEnv(
        label=f"pgx/{raw.id}",
        num_envs=num_envs,
        observation_space=observed,
        action_spec=ActionSpec(spaces.Discrete(raw.num_actions)),
        observation_leaves=observation_leaves(observed),
        begin=begin,
        advance=advance,
    )


def _make(name: str, kwargs: dict[str, Any]) -> Any:
    try:
        import pgx
    except ImportError as error:
        raise ImportError("pgx is not installed: pip install funcollect[envs]") from error
    if name not in (known := pgx.available_envs()):
        raise ValueError(f"pgx has no game {name!r}, expected one of {sorted(known)}")
    return pgx.make(name, **kwargs)


def _box(raw: Any) -> spaces.Space[Any]:
    """The observation's space by its dtype, which pgx itself does not say."""
    observation = import_jax().eval_shape(lambda key: raw.init(key).observation, np.zeros(2, np.uint32))
    dtype = np.dtype(observation.dtype)
    if dtype.kind == "b":
        return spaces.MultiBinary(observation.shape)
    low, high = (-np.inf, np.inf) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return spaces.Box(low, high, observation.shape, dtype.type)
