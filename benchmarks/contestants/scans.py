"""Hand-written rollouts for one suite: a `lax.scan` with a fresh reset in every step."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from gymnasium import spaces

HIDDEN = 64


def make_env(env_id: str, num_envs: int) -> Any:
    """Our environment, whose functions of one lane the scan takes as well: both do the suite's work alike."""
    import funcollect as fc

    return fc.make_env(env_id, num_envs=num_envs)


def discrete(env: Any) -> bool:
    return isinstance(env.action_space, spaces.Discrete)


def flat(observation: Any) -> Any:
    """[P, n] float32 of all leaves, or of the key `observation`."""
    if isinstance(observation, dict) and "observation" in observation:
        observation = observation["observation"]
    leaves = [leaf.reshape(leaf.shape[0], -1).astype(jnp.float32) for leaf in jax.tree.leaves(observation)]
    return jnp.concatenate(leaves, -1)


def functions(env: Any) -> tuple[Any, Any]:
    """The environment's two functions of one lane: reset of a key, step of a key, a state and an action."""
    if hasattr(env, "begin"):  # of revisions before these had parameters
        return env.begin, env.advance
    return (
        lambda key: env.reset(key, env.params),
        lambda key, env_state, action: env.step(key, env_state, action, env.params),
    )


def sizes(env: Any) -> tuple[int, int]:
    """Return the numbers of a network's inputs and outputs for the environment."""
    start = jax.eval_shape(lambda key: functions(env)[0](key)[1], jnp.zeros(2, jnp.uint32))
    batched = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), start)
    inputs: int = jax.eval_shape(flat, batched).shape[-1]
    return inputs, int(env.action_space.n) if discrete(env) else env.action_space.shape[0]


def network(env: Any) -> tuple[Any, Any]:
    """Parameters, and a function of them and an observation to logits, or to a pair (loc, scale)."""
    inputs, outputs = sizes(env)
    shapes = [(inputs, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, outputs)]
    keys = jax.random.split(jax.random.PRNGKey(0), 3)
    params = [jax.random.normal(key, size) / size[0] ** 0.5 for key, size in zip(keys, shapes, strict=True)]

    def apply(params: Any, observation: Any) -> Any:
        answer = jnp.tanh(jnp.tanh(flat(observation) @ params[0]) @ params[1]) @ params[2]
        return answer if discrete(env) else (answer, jnp.full_like(answer, 0.5))

    return params, apply


def act(params: Any, apply: Any, observation: Any, key: Any) -> tuple[Any, Any]:
    """Actions and their log-probabilities."""
    answer = apply(params, observation)
    if not isinstance(answer, tuple):
        action = (answer + jax.random.gumbel(key, answer.shape)).argmax(-1)
        return action, jnp.take_along_axis(jax.nn.log_softmax(answer), action[:, None], 1)[:, 0]
    loc, scale = answer
    noise = jax.random.normal(key, loc.shape)
    return loc + scale * noise, (-0.5 * noise**2 - jnp.log(scale) - 0.9189385).sum(-1)


def picked(mask: Any, one: Any, other: Any) -> Any:
    def pick(x: Any, y: Any) -> Any:
        return jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, y)

    return jax.tree.map(pick, one, other)


def wide(number: Any) -> Any:
    return jnp.stack([number, number >> 31], -1).astype(jnp.int32)


def body(env: Any, apply: Any, num_envs: int, params: Any, carry: Any, _: None) -> Any:
    key, env_state, observation, episode, step = carry
    reset_lane, step_lane = functions(env)
    key, noise, dynamics, start = jax.random.split(key, 4)
    action, log_prob = act(params, apply, observation, noise)
    moved = jax.vmap(step_lane)(jax.random.split(dynamics, num_envs), env_state, action)
    truncated = moved.truncated
    if getattr(env, "max_episode_steps", None) is not None:
        truncated |= step + 1 >= env.max_episode_steps
    done = moved.terminated | truncated
    fresh, root = jax.vmap(reset_lane)(jax.random.split(start, num_envs))
    lane = jnp.arange(num_envs)
    row = {
        "observation": observation,
        "action": wide(action) if discrete(env) else action,
        "action_log_prob": log_prob,
        "next": moved.observation,
        "reward": moved.reward,
        "terminated": moved.terminated,
        "truncated": truncated,
        "done": done,
        "traj_ids": wide(episode * num_envs + lane),
        "step": wide(step),
    }
    env_state, observation = picked(done, (fresh, root), (moved[0], moved.observation))
    return (key, env_state, observation, episode + done, jnp.where(done, 0, step + 1)), row


class Scan:
    """The hand-written loop: one call of `length` steps per run.

    Args:
        env: the id of an environment, or one that is made.
        num_envs: its lanes.
        length: T.
        made: parameters and function of a network for it; by default those of `network`.
    """

    def __init__(self, env: Any, num_envs: int, length: int, made: tuple[Any, Any] | None = None) -> None:
        env = make_env(env, num_envs) if isinstance(env, str) else env
        self._params, apply = made or network(env)
        loop = partial(body, env, apply, num_envs)

        def go(params: Any, carry: Any) -> Any:
            return jax.lax.scan(partial(loop, params), carry, None, length=length)

        self.program = jax.jit(go)
        env_state, observation = jax.jit(jax.vmap(functions(env)[0]))(jax.random.split(jax.random.PRNGKey(0), num_envs))
        zero = jnp.zeros(num_envs, jnp.int32)
        self._carry = (jax.random.PRNGKey(1), env_state, observation, zero, zero)
        self._frames = num_envs * length

    def lower(self) -> Any:
        return self.program.lower(self._params, self._carry)

    def run(self) -> int:
        self._carry, rows = self.program(self._params, self._carry)
        jax.block_until_ready(rows)
        return self._frames

    def close(self) -> None:
        pass
