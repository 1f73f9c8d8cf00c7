"""A rollout of JaxMARL written by hand: a `lax.scan` with a fresh reset in every step, over agents of one group."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.contestants.scans import HIDDEN, picked, wide


def raw_env(name: str) -> Any:
    import jaxmarl

    return jaxmarl.make(name)


def network(inputs: int, outputs: int) -> tuple[Any, Any]:
    """Parameters, and a function of them and an observation [..., inputs] to logits."""
    shapes = [(inputs, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, outputs)]
    keys = jax.random.split(jax.random.PRNGKey(0), 3)
    params = [jax.random.normal(key, size) / size[0] ** 0.5 for key, size in zip(keys, shapes, strict=True)]

    def apply(params: Any, observation: Any) -> Any:
        return jnp.tanh(jnp.tanh(observation @ params[0]) @ params[1]) @ params[2]

    return params, apply


def rows(raw: Any, values: Any) -> Any:
    """[P, n, ...] of a dict by agent."""
    return jnp.stack([values[name] for name in raw.agents], 1)


def body(raw: Any, apply: Any, num_envs: int, params: Any, carry: Any, _: None) -> Any:
    key, state, observation, episode, step = carry
    key, noise, dynamics, start = jax.random.split(key, 4)
    logits = apply(params, observation.reshape(-1, observation.shape[-1]))
    chosen = (logits + jax.random.gumbel(noise, logits.shape)).argmax(-1)
    log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), chosen[:, None], 1)[:, 0]
    action, log_prob = chosen.reshape(num_envs, -1), log_prob.reshape(num_envs, -1)
    own = {name: action[:, i] for i, name in enumerate(raw.agents)}
    seen, after, reward, dones, _ = jax.vmap(raw.step_env)(jax.random.split(dynamics, num_envs), state, own)
    following, rewards, over = (rows(raw, each) for each in (seen, reward, dones))
    done, never, lane = dones["__all__"], jnp.zeros_like(over), jnp.arange(num_envs)
    fresh, begun = jax.vmap(raw.reset)(jax.random.split(start, num_envs))
    row = {
        "observation": observation,
        "action": wide(action),
        "action_log_prob": log_prob,
        "agents": {"terminated": never, "truncated": never, "done": never, "mask": ~never},
        "next": {"observation": following, "reward": rewards, "terminated": never, "truncated": over, "mask": ~over},
        "next_done": over,
        "reward": rewards.sum(-1),
        "terminated": jnp.zeros_like(done),
        "truncated": done,
        "done": done,
        "traj_ids": wide(episode * num_envs + lane),
        "step": wide(step),
    }
    state, observation = picked(done, (begun, rows(raw, fresh)), (after, following))
    return (key, state, observation, episode + done, jnp.where(done, 0, step + 1)), row


class AgentScan:
    """The hand-written loop: one call of `length` steps per run."""

    def __init__(self, name: str, num_envs: int, length: int) -> None:
        raw = raw_env(name)
        begun, state = jax.jit(jax.vmap(raw.reset))(jax.random.split(jax.random.PRNGKey(0), num_envs))
        observation = rows(raw, begun)
        self._params, apply = network(observation.shape[-1], raw.action_space(raw.agents[0]).n)
        loop = partial(body, raw, apply, num_envs)
        self.program = jax.jit(lambda params, carry: jax.lax.scan(partial(loop, params), carry, None, length=length))
        zero = jnp.zeros(num_envs, jnp.int32)
        self._carry = (jax.random.PRNGKey(1), state, observation, zero, zero)
        self._frames = num_envs * length

    def lower(self) -> Any:
        return self.program.lower(self._params, self._carry)

    def run(self) -> int:
        self._carry, columns = self.program(self._params, self._carry)
        jax.block_until_ready(columns)
        return self._frames

    def close(self) -> None:
        pass
