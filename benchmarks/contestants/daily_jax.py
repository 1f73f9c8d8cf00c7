"""The collection of algorithms in JAX: a scan written by hand, and ours. A run blocks until its columns are there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch

import funcollect as fc
from benchmarks.contestants import policy_networks, scans
from benchmarks.contestants.daily_host import Turns

CARTPOLE = "gymnax/CartPole-v1"
LANES, LENGTH = 64, 128  # of recurrent PPO and of levels
MEMBERS, EPISODE = 256, 200  # of an evolution strategy
GAMES, MOVES, PLAYOUTS = 16, 9, 8  # of a search


def _scanned(step: Callable[[Any, Any], Any], carry: Any, length: int, frames: int, *params: Any) -> Turns:
    """Turns of a jitted scan of `step` over `length`."""
    program = jax.jit(lambda carry, *params: jax.lax.scan(partial(step, *params), carry, None, length=length))
    held = [carry]

    def turn() -> int:
        held[0], rows = program(held[0], *params)
        jax.block_until_ready(rows)
        return frames

    return Turns(turn)


def _rolled(env: Any, policy: Any, length: int, change: Callable[[Any], Any] = lambda state: state) -> Turns:
    states = [fc.init(env, policy, seed=0)]

    def turn() -> int:
        states[0], batch = fc.rollout(env, policy, change(states[0]), length)
        return int(batch.numel())

    return Turns(turn, lambda: fc.close(states[0]))


def _begun(env: Any, count: int) -> tuple[Any, Any]:
    started: tuple[Any, Any] = jax.jit(jax.vmap(scans.functions(env)[0]))(
        jax.random.split(jax.random.PRNGKey(0), count)
    )
    return started


def recurrent_ppo_by_hand() -> Turns:
    """An LSTM over CartPole, whose state begins at zero with each episode."""
    env, net = scans.make_env(CARTPOLE, LANES), policy_networks.network("lstm")
    zeros = jax.tree.map(lambda leaf: jnp.zeros((LANES, *leaf.shape)), net.initial_state)

    def step(params: Any, carry: Any, _: None) -> Any:
        memory, *others = carry
        following: list[Any] = []

        def apply(params: Any, observation: Any) -> Any:
            logits, after = net.apply(params, observation, memory)
            following.append(after)
            return logits

        others, row = scans.body(env, apply, LANES, params, tuple(others), None)
        memory = scans.picked(row["done"], zeros, following[0])
        return (memory, *others), row

    env_state, observation = _begun(env, LANES)
    none = jnp.zeros(LANES, jnp.int32)
    carry = (zeros, jax.random.PRNGKey(1), env_state, observation, none, none)
    return _scanned(step, carry, LENGTH, LANES * LENGTH, net.params)


def recurrent_ppo() -> Turns:
    net = policy_networks.network("lstm")
    policy = fc.jax_policy(net.apply, net.params, head=fc.heads.categorical, initial_state=net.initial_state)
    return _rolled(fc.make_env(CARTPOLE, num_envs=LANES), policy, LENGTH)


def _population() -> tuple[Any, Any]:
    params, apply = scans.network(scans.make_env(CARTPOLE, 1))
    keys = jax.random.split(jax.random.PRNGKey(2), len(params))
    each = [leaf + 0.1 * jax.random.normal(key, (MEMBERS, *leaf.shape)) for key, leaf in zip(keys, params, strict=True)]
    return each, apply


def evolution_by_hand() -> Turns:
    """A lane for each of 256 members, 200 steps."""
    env, (params, apply) = scans.make_env(CARTPOLE, MEMBERS), _population()

    def of_all(params: Any, observation: Any) -> Any:
        return jax.vmap(lambda own, row: apply(own, row[None])[0])(params, observation)

    env_state, observation = _begun(env, MEMBERS)
    none = jnp.zeros(MEMBERS, jnp.int32)
    step = partial(scans.body, env, of_all, MEMBERS)
    carry = (jax.random.PRNGKey(1), env_state, observation, none, none)
    return _scanned(step, carry, EPISODE, MEMBERS * EPISODE, params)


def evolution() -> Turns:
    params, apply = _population()
    member = fc.jax_policy(apply, [leaf[0] for leaf in params], head=fc.heads.categorical)
    return _rolled(fc.make_env(CARTPOLE, num_envs=MEMBERS), fc.population(member, params), EPISODE)


def _search(game: Any) -> Callable[..., Any]:
    """A move's worth is the mean result of random games after it, as in the guide."""

    def score(board: Any, move: Any, key: Any) -> Any:
        player = board.current_player

        def play(carry: Any, key: Any) -> Any:
            board, move, total = carry
            moved = game.step(key, board, move, None)
            legal = jnp.where(moved.observation["action_mask"], 0.0, -jnp.inf)
            return (moved.env_state, jax.random.categorical(key, legal), total + moved.reward[player]), None

        return jax.lax.scan(play, (board, move, 0.0), jax.random.split(key, MOVES))[0][-1]

    def search(params: Any, observation: Any, env_state: Any, keys: Any) -> dict[str, Any]:
        def scores(board: Any, key: Any) -> Any:
            games = jax.vmap(score, (None, None, 0))
            return jax.vmap(lambda move: games(board, move, jax.random.split(key, PLAYOUTS)).mean())(jnp.arange(9))

        value = jnp.where(observation["action_mask"], jax.vmap(scores)(env_state, keys), -2.0)
        return {"action": value.argmax(-1), "search_value": value}

    return search


def alphazero_by_hand() -> Turns:
    """Tic-tac-toe by a search over its own games."""
    game = scans.make_env("pgx/tic_tac_toe", GAMES)
    search, (reset_lane, step_lane) = _search(game), scans.functions(game)

    def step(carry: Any, _: None) -> Any:
        key, env_state, observation, episode, count = carry
        key, noise, dynamics, start = jax.random.split(key, 4)
        chosen = search(None, observation, env_state, jax.random.split(noise, GAMES))
        moved = jax.vmap(step_lane)(jax.random.split(dynamics, GAMES), env_state, chosen["action"])
        done = moved.terminated | moved.truncated
        fresh, root = jax.vmap(reset_lane)(jax.random.split(start, GAMES))
        beside = {"reward": moved.reward, "terminated": moved.terminated, "truncated": moved.truncated, "done": done}
        row = {
            "observation": observation,
            **chosen,
            "next": moved.observation,
            **beside,
            "traj_ids": episode,
            "step": count,
        }
        env_state, observation = scans.picked(done, (fresh, root), (moved.env_state, moved.observation))
        return (key, env_state, observation, episode + done, jnp.where(done, 0, count + 1)), row

    env_state, observation = _begun(game, GAMES)
    none = jnp.zeros(GAMES, jnp.int32)
    return _scanned(step, (jax.random.PRNGKey(1), env_state, observation, none, none), 8, GAMES * 8)


def alphazero() -> Turns:
    game = fc.make_env("pgx/tic_tac_toe", num_envs=GAMES)
    return _rolled(game, fc.jax_policy(_search(game), None, reads_env_state=True), 8)


def levels_by_hand() -> Turns:
    """CartPole from levels of a list, which are its states, as prioritised level replay has it."""
    env = scans.make_env(CARTPOLE, LANES)
    params, apply = scans.network(env)
    levels, roots = _begun(env, LANES)
    body = partial(scans.body, env, apply, LANES, params)
    program = jax.jit(lambda key, none: jax.lax.scan(body, (key, levels, roots, none, none), None, length=LENGTH))
    held = [jax.random.PRNGKey(1)]

    def turn() -> int:
        (held[0], *_), rows = program(held[0], jnp.zeros(LANES, jnp.int32))
        jax.block_until_ready(rows)
        return LANES * LENGTH

    return Turns(turn)


def levels() -> Turns:
    env = fc.make_env(CARTPOLE, num_envs=LANES)
    params, apply = scans.network(env)
    begun, _ = _begun(env, LANES)
    everyone = torch.ones(LANES, dtype=torch.bool)
    policy = fc.jax_policy(apply, params, head=fc.heads.categorical)
    return _rolled(env, policy, LENGTH, lambda state: fc.reset(env, state, everyone, to=begun))
