"""pgx games (https://github.com/sotetsuk/pgx), of one player or several."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces

from funcollect.envs.jax_envs.jax_env import JaxEnv, Transition, jax_env
from funcollect.envs.jax_envs.spaces import space_like
from funcollect.envs.jax_envs.suite import check_instance, check_known, not_installed
from funcollect.interop.jax_setup import import_jax


def from_pgx(
    env: Any, *, num_envs: int | None = None, one_hot: bool = False, max_episode_steps: int | None = None
) -> JaxEnv:
    """A JAX environment over a pgx game: the observation is that of the player whose turn it is.

    An observation is a dict of ``observation``, ``action_mask`` (the legal actions) and, for several players,
    ``current_player``. Their rewards are ``next.reward`` [*B, T, players].

    Args:
        env: an id such as ``"go_9x9"``, or an instance.
        num_envs: P; None for a single game without a batch dimension.
        one_hot: actions as one-hot rows, TorchRL's encoding.
        max_episode_steps: steps after which a game is truncated; None: never, and some of the games have no
            end of their own.

    Raises:
        ImportError: without pgx.
        ValueError: for an unknown id.

    >>> from_pgx("tic_tac_toe", num_envs=64)
    JaxEnv('pgx/tic_tac_toe', num_envs=64)
    """
    raw = _make(env) if isinstance(env, str) else env
    check_instance("pgx", raw, "init", "num_players", "num_actions")
    several = raw.num_players > 1

    def observe(state: Any) -> dict[str, Any]:
        player = {"current_player": state.current_player} if several else {}
        return {"observation": state.observation, "action_mask": state.legal_action_mask} | player

    def begin(key: Any) -> tuple[Any, Any]:
        state = raw.init(key)
        return state, observe(state)

    def advance(key: Any, physics: Any, action: Any) -> Transition:
        state = raw.step(physics, action, key)
        reward = state.rewards if several else state.rewards[0]
        return Transition(state, observe(state), reward, state.terminated, state.truncated)

    return jax_env(
        f"pgx/{raw.id}",
        begin,
        advance,
        observation_space=_space(begin, raw.num_players),
        action_space=spaces.Discrete(raw.num_actions),
        num_envs=num_envs,
        one_hot=one_hot,
        max_episode_steps=max_episode_steps,
    )


def _make(name: str) -> Any:
    import_jax()
    try:
        import pgx
    except ImportError as error:
        raise not_installed("pgx") from error
    check_known("pgx", name, pgx.available_envs())
    return pgx.make(name)


def _space(begin: Any, players: int) -> spaces.Dict:
    """The space by the observation's dtypes: pgx itself does not say it."""
    jax = import_jax()
    _, observation = jax.eval_shape(begin, jax.numpy.zeros(2, "uint32"))
    known: dict[str, spaces.Space[Any]] = {"current_player": spaces.Discrete(players)}
    return spaces.Dict({name: known.get(name) or space_like(part) for name, part in observation.items()})
