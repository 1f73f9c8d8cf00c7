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


UPDATES, EPOCHS, MINIBATCHES = 4, 4, 4  # of a training; in each update 64 lanes make 128 steps


def _actor_critic() -> tuple[Any, Callable[[Any, Any], tuple[Any, Any]]]:
    params, actor = scans.network(scans.make_env(CARTPOLE, 1))
    keys = jax.random.split(jax.random.PRNGKey(3), 3)
    shapes = [(4, scans.HIDDEN), (scans.HIDDEN, scans.HIDDEN), (scans.HIDDEN, 1)]
    critic = [jax.random.normal(key, size) / size[0] ** 0.5 for key, size in zip(keys, shapes, strict=True)]

    def apply(params: Any, observation: Any) -> tuple[Any, Any]:
        layers = params["critic"]
        value = jnp.tanh(jnp.tanh(observation @ layers[0]) @ layers[1]) @ layers[2]
        return actor(params["actor"], observation), value[..., 0]

    return {"actor": params, "critic": critic}, apply


def _learned(apply: Any, params: Any, moments: Any, rows: Any, key: Any) -> tuple[Any, Any]:
    """Parameters and moments of Adam after the epochs of PPO over rows [N, ...]."""

    def loss(params: Any, observation: Any, action: Any, before: Any, advantage: Any, target: Any) -> Any:
        logits, value = apply(params, observation)
        log_probs = jax.nn.log_softmax(logits)
        ratio = jnp.exp(jnp.take_along_axis(log_probs, action[:, None], 1)[:, 0] - before)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        gain = jnp.minimum(ratio * advantage, ratio.clip(0.8, 1.2) * advantage).mean()
        entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
        return 0.5 * ((value - target) ** 2).mean() - gain - 0.01 * entropy

    def descend(carry: Any, minibatch: Any) -> Any:
        params, (first, second) = carry
        slope = jax.grad(loss)(params, *minibatch)
        first = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, first, slope)
        second = jax.tree.map(lambda old, new: 0.999 * old + 0.001 * new**2, second, slope)
        params = jax.tree.map(lambda own, a, b: own - 3e-4 * a / (jnp.sqrt(b) + 1e-5), params, first, second)
        return (params, (first, second)), None

    def epoch(carry: Any, key: Any) -> Any:
        order = jax.random.permutation(key, LANES * LENGTH)
        mixed = jax.tree.map(lambda leaf: leaf[order].reshape(MINIBATCHES, -1, *leaf.shape[1:]), rows)
        return jax.lax.scan(descend, carry, mixed)

    learned: tuple[Any, Any] = jax.lax.scan(epoch, (params, moments), jax.random.split(key, EPOCHS))[0]
    return learned


def _flat(*leaves: Any) -> tuple[Any, ...]:
    return tuple(leaf.reshape(LANES * LENGTH, *leaf.shape[2:]) for leaf in leaves)


def _trained(update: Callable[[Any, Any], Any], start: Any, params: Any) -> Turns:
    zeros = jax.tree.map(jnp.zeros_like, params)
    carry = (start, params, (zeros, zeros), jax.random.PRNGKey(5))
    return _scanned(update, carry, UPDATES, UPDATES * LANES * LENGTH)


def jax_ppo_by_hand() -> Turns:
    """PureJaxRL's whole training: rollouts of gymnax with its own resets, advantages and updates, in one program."""
    import gymnax

    raw, env_params = gymnax.make("CartPole-v1")
    step_all, reset_all = jax.vmap(raw.step, (0, 0, 0, None)), jax.vmap(raw.reset, (0, None))
    params, apply = _actor_critic()

    def update(carry: Any, _: None) -> Any:
        runner, params, moments, key = carry

        def step(runner: Any, _: None) -> Any:
            observation, env_state, key = runner
            key, act, move = jax.random.split(key, 3)
            logits, value = apply(params, observation)
            action = jax.random.categorical(act, logits)
            log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
            after, env_state, reward, ended, cut, _ = step_all(
                jax.random.split(move, LANES), env_state, action, env_params
            )
            return (after, env_state, key), (observation, action, log_prob, value, reward, ended | cut)

        runner, rows = jax.lax.scan(step, runner, None, LENGTH)
        observation, action, log_prob, value, reward, done = rows

        def earlier(carry: Any, row: Any) -> Any:
            advantage, following = carry
            reward, done, value = row
            delta = reward + 0.99 * following * (1 - done) - value
            advantage = delta + 0.99 * 0.95 * (1 - done) * advantage
            return (advantage, value), advantage

        last = apply(params, runner[0])[1]
        advantage = jax.lax.scan(earlier, (jnp.zeros(LANES), last), (reward, done, value), reverse=True)[1]
        key, own = jax.random.split(key)
        rows = _flat(observation, action, log_prob, advantage, advantage + value)
        params, moments = _learned(apply, params, moments, rows, own)
        return (runner, params, moments, key), reward.mean()

    observation, env_state = reset_all(jax.random.split(jax.random.PRNGKey(1), LANES), env_params)
    return _trained(update, (observation, env_state, jax.random.PRNGKey(2)), params)


def jax_ppo() -> Turns:
    env = fc.make_env(CARTPOLE, num_envs=LANES)
    params, apply = _actor_critic()

    def both(params: Any, observation: Any) -> dict[str, Any]:
        logits, value = apply(params, observation)
        return {"logits": logits, "value": value}

    policy = fc.jax_policy(both, params, head=fc.heads.categorical)

    def update(carry: Any, _: None) -> Any:
        state, params, moments, key = carry
        state, batch = fc.traced.rollout(env, policy, params, state, LENGTH)
        following = fc.next_values(policy, params, batch, key="value")
        advantage, target = fc.gae(batch, batch["value"], following, gamma=0.99, lmbda=0.95)
        key, own = jax.random.split(key)
        rows = _flat(batch["observation"], batch["action"], batch["action_log_prob"], advantage, target)
        params, moments = _learned(apply, params, moments, rows, own)
        return (state, params, moments, key), batch["next"]["reward"].mean()

    return _trained(update, fc.traced.init(env, policy, params, key=jax.random.key(1)), params)
