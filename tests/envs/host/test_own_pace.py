"""Lanes that do not wait for each other: the data are those of lanes in step, whoever answers first."""

import os
import random
import signal
import time
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule
from torch import nn

import funcollect as fc
from funcollect.errors import PolicyError
from tests.support.cases import POLICIES
from tests.support.compare import assert_same, collect, fresh, rollouts
from tests.support.running import scaled

LANES = 6


class Sleepy(gymnasium.Env):
    """Steps and resets take any time; episodes have 2 to 12 steps, and say how many are left."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,))
    action_space = spaces.Discrete(4)

    def __init__(self, most=0.002):
        self.most, self.schedule = most, random.Random()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(2, 13))
        return self._observed()

    def _observed(self):
        time.sleep(self.schedule.uniform(0, self.most))
        return self.np_random.normal(size=3).astype(np.float32), {"left": self.left}

    def step(self, action):
        self.left -= 1
        observation, info = self._observed()
        return observation, float(action) + self.np_random.random(), self.left == 0, False, info


def both(make=Sleepy, **more):
    """Lanes in step, and lanes at their own pace."""
    spread = {"num_envs": LANES, "num_workers": 3, "info_keys": ["left"]} | more
    return [fc.make_env(make, **spread, **wait) for wait in ({}, {"wait": "any", "min_ready": 1})]


KINDS = ["random", "torch_mlp", "torch_recurrent", "jax_mlp", "jax_recurrent"]
REQUESTS = [{}, {"max_frames_per_traj": 5}]


@pytest.mark.parametrize("place", range(scaled(5)))
def test_the_data_are_those_of_lanes_in_step(place):
    kind, request = KINDS[place % len(KINDS)], REQUESTS[place % len(REQUESTS)]
    ends = []
    for env in both():
        policy = POLICIES[kind](env)
        ends.append(rollouts(env, policy, fc.init(env, policy, seed=place), (9, 1, 14, 6), **request))
        fc.close(ends[-1][0])
    assert_same(*(batch for _, batch in ends))
    for name in ("episode", "step", "returns"):
        assert torch.equal(*(getattr(state, name) for state, _ in ends))


@pytest.mark.parametrize(("name", "more"), [
    ("CartPole-v1", {"num_workers": 2}),
    ("HalfCheetah-v5", {"max_episode_steps": 8}),
    ("ale/Pong", {"max_episode_steps": 8}),
])  # fmt: skip
def test_environments(name, more):
    assert_same(*(collect(env, fc.random_policy(env), 20, 11) for env in both(name, info_keys=[], **more)))


def test_forks_files_evaluations_and_collectors(tmp_path):
    scores, frames = [], []
    for env in both():
        _, policy, state = fresh(env, steps=9, seed=3)
        fc.save(tmp_path / "state", state)
        fork, loaded = fc.fork(env, state), fc.load(tmp_path / "state", env, policy)
        _, batch = fc.rollout(env, policy, state, 9)
        for other in (fork, loaded):
            assert_same(batch, fc.rollout(env, policy, other, 9)[1])
        scores.append(fc.evaluate(env, policy, episodes=7, seed=4).returns)
        options = {"frames_per_batch": 48, "total_frames": 144, "init_random_frames": 48, "max_frames_per_traj": 7}
        with fc.SyncDataCollector(env, policy, compact_obs=True, seed=1, **options) as collector:
            frames.append([fc.next_observations(each) for each in collector])
    assert torch.equal(*scores)
    assert_same(*frames)


def test_no_lane_waits_for_a_slow_one(tmp_path):
    """The slow lane's worker makes its first step only after the others have made all of theirs."""
    done = [tmp_path / str(lane) for lane in range(3)]
    env = fc.make_env([partial(Patient, lane, done) for lane in range(3)], num_workers=3, wait="any", min_ready=1)
    _, batch = fc.rollout(env, policy := fc.random_policy(env), fc.init(env, policy, seed=0), 8)
    assert batch["next", "observation"][..., 0].eq(torch.arange(1, 9.0)).all()


class Patient(gymnasium.Env):
    observation_space, action_space = spaces.Box(0, 99, (1,)), spaces.Discrete(2)

    def __init__(self, lane, done):
        self.lane, self.done, self.steps = lane, done, 0

    def reset(self, **options):
        super().reset(**options)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        while self.lane == 0 and not all(file.exists() for file in self.done[1:]):
            time.sleep(1e-3)
        self.steps += 1
        if self.steps == 8:
            self.done[self.lane].touch()
        return np.full(1, self.steps, np.float32), 0.0, False, False, {}


def keyed(env):
    return fc.jax_policy(lambda params, x, key: x @ params, np.ones((3, 4), np.float32), head=fc.heads.categorical)


NORMED = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4))
DROPPED = nn.Sequential(nn.Linear(3, 4), nn.Dropout())


def normed(env):
    return fc.torch_policy(NORMED, head=fc.heads.categorical)


def members(env):
    params, buffers = torch.func.stack_module_state([NORMED, NORMED])
    return fc.population(normed(env), params | buffers)


def scaled_normed(env):
    return fc.normalized(normed(env), fc.running_statistics.init(env.observation_space))


IN_TRAINING = "BatchNorm1d in training mode"
REFUSED = [
    ("takes `key`", keyed),
    ("draws from Torch's generator", lambda env: fc.torch_policy(DROPPED, head=fc.heads.categorical)),
    (IN_TRAINING, normed),
    (IN_TRAINING, members),
    (IN_TRAINING, scaled_normed),
]


@pytest.mark.parametrize(("says", "make"), REFUSED)
def test_a_policy_whose_data_would_depend_on_the_schedule(says, make):
    in_step, apart = both()
    policy = make(apart)
    with pytest.raises(PolicyError, match=f"{says}.*wait='all'"):
        fc.rollout(apart, policy, fc.init(apart, policy, seed=0), 4)
    fc.close(fc.rollout(in_step, policy, fc.init(in_step, policy, seed=0), 4)[0])


def told(td):
    """Finds what it wrote at the step before, which is 0 where a trajectory has begun."""
    td["seen"] = td.get("seen", torch.zeros(len(td), 1)) + 1
    td["action"] = td["seen"][:, 0].long() % 4
    return td


BEGINS = {
    "a module": TensorDictModule(lambda x, is_init: is_init[..., 0].long(), ["observation", "is_init"], ["action"]),
    "a function": told,
}


@pytest.mark.parametrize("name", BEGINS)
def test_policies_of_tensordicts_see_where_trajectories_begin(name):
    policy = fc.tensordict_policy(BEGINS[name])
    one, two = (collect(env, policy, 20, 20) for env in both())
    assert_same(one, two)
    assert torch.equal(two["action"] == 1, two["collector", "step"] % 4 == 0) or name == "a module"
    assert torch.equal(two["action"] == 1, two["collector", "step"] == 0) or name == "a function"


def test_ctrl_c_as_a_pool_answers_loses_no_answer(monkeypatch):
    env, policy, state = fresh("envpool/CartPole-v1", steps=5, num_envs=4, batch_size=2)
    pool = state.env_state.simulation.simulators._pool

    def interrupted(**given):
        answer = received(**given)
        monkeypatch.undo()
        os.kill(os.getpid(), signal.SIGINT)
        return answer

    received = pool.recv
    monkeypatch.setattr(pool, "recv", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fc.rollout(env, policy, state, 5)
    state = fc.recover(env, state)
    assert fc.rollout(env, policy, state, 5)[1].shape == (4, 5)
