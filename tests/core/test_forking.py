"""Simulators brought to the point where others stand, by replaying seeds and actions."""

from __future__ import annotations

import random
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import funcollect as fc
from tests.support.compare import assert_same
from tests.support.copies import COPIES


def make_env(name: str, num_envs: int | None) -> Any:
    """The environments over which forks are tested; HalfCheetah cut to 15 steps, so that episodes end."""
    if name == "SyncVectorEnv":
        factories = [lambda: gymnasium.make("CartPole-v1")] * (num_envs or 1)
        return fc.make_env(SyncVectorEnv(factories, autoreset_mode=AutoresetMode.DISABLED))
    short = {"max_episode_steps": 15} if name == "HalfCheetah-v5" else {}
    return fc.make_env(name, num_envs=num_envs, **short)


NAMES = ["CartPole-v1", "HalfCheetah-v5", "LunarLander-v3", "SyncVectorEnv"]


def noisy(env: Any) -> Any:
    """A policy that draws from Torch's global generator and is recurrent, so its own state has to be forked too."""

    def act(observation: torch.Tensor, count: torch.Tensor) -> Any:
        if isinstance(env.action_space, spaces.Discrete):
            action = torch.randint(int(env.action_space.n), (len(observation),))
        else:
            action = torch.rand(len(observation), *env.action_space.shape) * 2 - 1
        return {"action": action, "count": count}, count + 1

    return fc.torch_policy(act, initial_state=torch.zeros(()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_envs", [None, 3])
def test_a_fork_goes_on_as_its_source_does(name: str, num_envs: int | None) -> None:
    env = make_env(name, num_envs)
    policy = noisy(env)
    state = fc.init(env, policy, seed=3)
    forks = [fc.fork(env, state)]
    sources = []
    for length in (7, 1, 60, 13):
        state, batch = fc.rollout(env, policy, state, length)
        sources.append(batch)
        forks.append(fc.fork(env, state))
    state, batch = fc.rollout(env, policy, state, 60)
    sources.append(batch)
    assert torch.cat(sources, -1)["next", "done"].any()
    for first, fork in enumerate(forks):
        for source in sources[first:]:
            fork, batch = fc.rollout(env, policy, fork, source.batch_size[-1])
            assert_same(batch, source)
        fc.close(fork)
    fc.close(state)


class Masked(gymnasium.Env):
    """One of two actions is legal at each step, and an episode has 3 to 22 steps."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Dict(action_mask=spaces.MultiBinary(2), x=spaces.Box(0, 1, (1,)))

    def _seen(self) -> Any:
        self.legal = int(self.np_random.integers(2))
        mask = np.eye(2, dtype=np.int8)[self.legal]
        return {"action_mask": mask, "x": self.np_random.random(1, np.float32)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(3, 23))
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        if action != self.legal:
            raise ValueError("an illegal action")
        self.left -= 1
        return self._seen(), 1.0, self.left == 0, False, {}


@pytest.mark.parametrize("copied", COPIES)
def test_a_replay_takes_no_actions_of_other_episodes(copied: str) -> None:
    env = fc.make_env(Masked, num_envs=4)
    policy = fc.random_policy(env)
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), 30)
    assert len(state.step.unique()) > 2
    copy = COPIES[copied](env, policy, state)
    assert_same(fc.rollout(env, policy, copy, 30)[1], fc.rollout(env, policy, state, 30)[1])


def test_after_another_seed() -> None:
    env = fc.make_env("CartPole-v1", num_envs=2)
    with fc.SyncDataCollector(env, frames_per_batch=30, seed=1) as collector:
        next(collector)
        collector.set_seed(9)
        next(collector)
        fork = fc.fork(env, collector.state)
        wanted = next(collector)
    assert_same(fc.rollout(env, collector.policy, fork, 15)[1], wanted)


def test_an_instance_is_rebuilt_from_its_spec() -> None:
    env = fc.make_env(gymnasium.make("CartPole-v1", max_episode_steps=9))
    policy = noisy(env)
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=2), 14)
    fork = fc.fork(env, state)
    wanted = fc.rollout(env, policy, state, 20)[1]
    assert (wanted["collector", "step"] < 9).all()
    assert_same(fc.rollout(env, policy, fork, 20)[1], wanted)


class Secret(gymnasium.Env):
    """Draws from Python's global generator, at the reset or at each step, where no seed reaches."""

    observation_space = spaces.Box(-9, 9, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self, at: str, made: list[Any]) -> None:
        self.at = at
        self.closed = 0
        made.append(self)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.float32([random.random() if self.at == "reset" else 0]), {}

    def step(self, action: Any) -> Any:
        return np.float32([random.random() if self.at == "step" else 0]), 0.0, False, False, {}

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize(("at", "length"), [("reset", 0), ("step", 1), ("step", 6)])
def test_an_environment_that_cannot_be_replayed_is_named_and_the_state_stays_good(at: str, length: int) -> None:
    made: list[Any] = []
    env = fc.make_env([lambda: Secret("never", made), lambda: Secret(at, made)])
    policy = fc.random_policy(env)
    state = fc.init(env, policy, seed=0)
    if length:
        state, _ = fc.rollout(env, policy, state, length)
    with pytest.raises(fc.ReplayError, match=r"lane 1: replaying .* gave another observation") as caught:
        fc.fork(env, state)
    assert caught.tb is not None  # which keeps the copy alive, so that nothing but fork can have closed it
    assert [secret.closed for secret in made] == [0, 0, 1, 1]
    fc.rollout(env, policy, state, 3)


class Nameless(gymnasium.Env):
    observation_space = spaces.Box(-9, 9, (1,))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}


def test_an_instance_without_a_spec_cannot_be_forked() -> None:
    env = fc.make_env(Nameless())
    state = fc.init(env, fc.random_policy(env), seed=0)
    with pytest.raises(ValueError, match=r"cannot be rebuilt \(it has no spec\)"):
        fc.fork(env, state)
