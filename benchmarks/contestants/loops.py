"""The limit: hand-written loops with the same networks.

The observation stands in one preallocated [P, n] float32 array. Action and log-probability are computed at every step.
A `Loop` stores nothing else; a `RecordingLoop` keeps what a batch has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import torch

from benchmarks.contestants.networks import discrete, jax_network, torch_module

Observation = npt.NDArray[np.float32]  # [P, n]
Act = Callable[[], Sequence[Any]]  # one action per environment, for the observation that stands in the array
Env = gymnasium.Env[Any, Any]
NoiseOf = Callable[[Any, Callable[..., Any], tuple[int, ...]], Any]  # (extra, jax.random's function, shape) -> noise
AHEAD = 100  # steps for which noise is drawn at once


class Loop:
    """`length` steps of P environments per run.

    Args:
        make_act: given the environments and the observation array, returns the policy.
        reseed: whether each episode starts with a seed of its own, as ours does, or with a plain `reset()`.
    """

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        length: int,
        make_act: Callable[[list[Env], Observation], Act],
        *,
        reseed: bool,
    ) -> None:
        self._envs: list[Env] = [gymnasium.make(env_id, disable_env_checker=True) for _ in range(num_envs)]
        self._observation = np.zeros((num_envs, *self._envs[0].observation_space.shape), np.float32)
        self._act = make_act(self._envs, self._observation)
        self._length = length
        self._steps = [env.step for env in self._envs]
        self._resets = [self._seeded(env) if reseed else env.reset for env in self._envs]
        for lane, env in enumerate(self._envs):
            self._observation[lane], _ = env.reset(seed=lane)

    def _seeded(self, env: Env) -> Callable[[], tuple[Any, Any]]:
        seeds = itertools.count(len(self._envs))
        return lambda: env.reset(seed=next(seeds))

    def run(self) -> int:
        with torch.inference_mode():
            _roll(self._steps, self._resets, self._observation, self._act, self._length)
        return self._length * len(self._envs)

    def close(self) -> None:
        for env in self._envs:
            env.close()


class RecordingLoop(Loop):
    """Keeps the columns of a batch but for log-probabilities, ids and counters: the limit of a loop that records."""

    def run(self) -> int:
        shape = (self._length, *self._observation.shape)
        roots, following = np.empty(shape, np.float32), np.empty(shape, np.float32)
        with torch.inference_mode():
            self.columns = _record(self._steps, self._resets, self._observation, self._act, roots, following)
        return self._length * len(self._envs)


def _record(
    steps: list[Callable[[Any], Any]],
    resets: list[Callable[[], Any]],
    observation: Observation,
    act: Act,
    roots: npt.NDArray[np.float32],
    following: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[Any], ...]:
    lanes = range(len(steps))
    actions: list[Sequence[Any]] = []
    outcomes: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
    keep_reward, keep_terminated, keep_truncated = (each.append for each in outcomes)
    for root, after in zip(roots, following, strict=True):
        root[:] = observation
        chosen = act()
        actions.append(chosen)
        for lane, step, action in zip(lanes, steps, chosen, strict=True):
            row, reward, terminated, truncated, _ = step(action)
            after[lane] = row
            keep_reward(reward)
            keep_terminated(terminated)
            keep_truncated(truncated)
            if terminated or truncated:
                row, _ = resets[lane]()
            observation[lane] = row
    rewards, *flags = (np.array(each).reshape(len(roots), -1) for each in outcomes)
    return roots, following, np.array(actions), rewards.astype(np.float32), *flags


def _roll(
    steps: list[Callable[[Any], Any]],
    resets: list[Callable[[], Any]],
    observation: Observation,
    act: Act,
    length: int,
) -> None:
    lanes = range(len(steps))
    for _ in range(length):
        for lane, step, action in zip(lanes, steps, act(), strict=True):
            row, _, terminated, truncated, _ = step(action)
            if terminated or truncated:
                row, _ = resets[lane]()
            observation[lane] = row


def random_act(envs: list[Env], observation: Observation) -> Act:
    """Sample from the `action_space` of every environment."""
    samples = [env.action_space.sample for env in envs]
    return lambda: [sample() for sample in samples]


def torch_act(envs: list[Env], observation: Observation) -> Act:
    """Call the Torch network and sample with Torch's own functions."""
    module, rows = torch_module(envs[0]), torch.from_numpy(observation)
    softmax, log_softmax, multinomial = torch.softmax, torch.log_softmax, torch.multinomial
    randn_like, log, constant = torch.randn_like, torch.log, 0.5 * math.log(2 * math.pi)

    def categorical() -> list[int]:
        logits = module(rows)
        action = multinomial(softmax(logits, -1), 1)
        log_softmax(logits, -1).gather(-1, action)
        return action.squeeze(-1).tolist()

    def normal() -> npt.NDArray[np.float32]:
        loc, scale = module(rows)
        noise = randn_like(loc)
        action = loc + scale * noise
        (-0.5 * noise * noise - log(scale) - constant).sum(-1)
        return action.numpy()

    return categorical if discrete(envs[0]) else normal


def jax_act(envs: list[Env], observation: Observation) -> Act:
    """Call the JAX network in one jitted call per step, which draws its own noise."""
    return _jax_act(envs, observation, _drawn_inside, map(np.uint32, itertools.count()))


def jax_ahead_act(envs: list[Env], observation: Observation) -> Act:
    """Do the same with noise that NumPy draws ahead, as ours does."""
    rng = np.random.default_rng(0)
    draw = rng.gumbel if discrete(envs[0]) else rng.standard_normal
    width = int(envs[0].action_space.n) if discrete(envs[0]) else envs[0].action_space.shape[0]

    def rows() -> Iterator[npt.NDArray[np.float32]]:
        while True:
            yield from draw(size=(AHEAD, len(envs), width)).astype(np.float32)

    return _jax_act(envs, observation, lambda noise, draw, shape: noise, rows())


def _jax_act(envs: list[Env], observation: Observation, noise_of: NoiseOf, extras: Iterator[Any]) -> Act:
    params, call = packed(envs[0], noise_of)
    asarray = np.asarray

    def categorical() -> list[int]:
        return asarray(call(params, observation, next(extras)))[0].tolist()

    def normal() -> npt.NDArray[np.float32]:
        return asarray(call(params, observation, next(extras)))[:, :-1]

    return categorical if discrete(envs[0]) else normal


def _drawn_inside(counter: Any, draw: Callable[..., Any], shape: tuple[int, ...]) -> Any:
    import jax

    return draw(jax.random.fold_in(jax.random.key(0), counter), shape)


def packed(env: Env, noise_of: NoiseOf) -> tuple[Any, Callable[..., Any]]:
    """Parameters and a jitted (params, observation [P, n], extra) -> action and log-probability in one array.

    Choices come as int32 [2, P], the log-probability's bits in the second row; vectors as float32 [P, m + 1].
    """
    import jax
    import jax.numpy as jnp

    params, apply = jax_network(env)

    def categorical(params: Any, observation: Any, extra: Any) -> Any:
        logits = apply(params, observation)
        action = (logits + noise_of(extra, jax.random.gumbel, logits.shape)).argmax(-1)
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], -1)[:, 0]
        return jnp.stack([action, jax.lax.bitcast_convert_type(log_prob, jnp.int32)])

    def normal(params: Any, observation: Any, extra: Any) -> Any:
        loc, scale = apply(params, observation)
        noise = noise_of(extra, jax.random.normal, loc.shape)
        log_prob = (-0.5 * noise * noise - jnp.log(scale) - 0.5 * math.log(2 * math.pi)).sum(-1, keepdims=True)
        return jnp.concatenate([loc + scale * noise, log_prob], -1)

    return params, jax.jit(categorical if discrete(env) else normal)
