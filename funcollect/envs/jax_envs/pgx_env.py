"""pgx games (https://github.com/sotetsuk/pgx), of one player or several."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces

from funcollect.envs.jax_envs.jax_env import FunctionsEnv, jax_env
from funcollect.envs.jax_envs.suite import Suite, first_observation
from funcollect.envs.spaces import space_like
from funcollect.interop.jax_setup import own_generator
from funcollect.protocols import Transition
from funcollect.specs import Space

_SUITE = Suite("pgx", "pgx", lambda pgx: (pgx.available_envs(), pgx.make), ("init", "num_players", "num_actions"))


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
    _, raw = _SUITE.make(env, {})
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
    space = spaces.Dict(observed)
    with own_generator():  # pgx begins a game to find the number of its actions
        actions: Space = spaces.Discrete(raw.num_actions)
    return jax_env(f"pgx/{raw.id}", reset, step, space, actions, num_envs, one_hot, max_episode_steps=max_episode_steps)
