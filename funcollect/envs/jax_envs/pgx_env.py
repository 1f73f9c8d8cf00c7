"""pgx games (https://github.com/sotetsuk/pgx), of one player or several."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gymnasium import spaces

from funcollect.envs.jax_envs.jax_env import FunctionsEnv, jax_env
from funcollect.envs.jax_envs.spaces import space_like
from funcollect.envs.jax_envs.suite import Suite, first_observation
from funcollect.protocols import Transition


def from_pgx(
    env: Any, *, num_envs: int | None = None, one_hot: bool = False, max_episode_steps: int | None = None
) -> FunctionsEnv:
    """A JAX environment over a pgx game: the observation is that of the player whose turn it is.

    An observation is a dict of ``observation``, ``action_mask`` (the legal actions) and, for several players,
    ``current_player``. Their rewards are ``next.reward`` [*B, T, players].

    Args:
        env: an id such as ``"go_9x9"``, or an instance.
        num_envs: P; None for a single game without a batch dimension.
        one_hot: actions as one-hot rows, TorchRL's encoding.
        max_episode_steps: steps after which a game is truncated; None for no limit, and some games never end.

    Raises:
        ImportError: without pgx.
        ValueError: for an unknown id.

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

    return jax_env(
        f"pgx/{raw.id}",
        reset,
        step,
        observation_space=_space(first_observation(reset), raw.num_players),
        action_space=spaces.Discrete(raw.num_actions),
        num_envs=num_envs,
        one_hot=one_hot,
        max_episode_steps=max_episode_steps,
    )


def _load() -> tuple[Iterable[str], Callable[..., Any]]:
    import pgx

    return pgx.available_envs(), pgx.make


_SUITE = Suite("pgx", _load, ("init", "num_players", "num_actions"))


def _space(observation: Any, players: int) -> spaces.Dict:
    """The space, from the observation's shapes and dtypes: pgx does not give it."""
    known: dict[str, spaces.Space[Any]] = {"current_player": spaces.Discrete(players)}
    return spaces.Dict({name: known.get(name) or space_like(part) for name, part in observation.items()})
