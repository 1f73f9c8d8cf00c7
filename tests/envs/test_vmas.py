"""VMAS's scenarios beside a raw loop of VMAS, and of TorchRL."""

import random

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torchrl.envs.libs.vmas import VmasEnv

import funcollect as fc
from funcollect.keys import Purpose, fold, key_from_seed
from tests.envs.test_torchrl_env import AGGREGATED, check_keys, own_loop
from tests.support.cases import mlp
from tests.support.compare import assert_same, collect
from tests.support.running import in_soak

import vmas  # isort: skip


def raw_loop(scenario, batch, limit, **kwargs):
    """VMAS's own loop with the actions of a batch of 3 lanes: rows (observations, rewards, ends), each by agent."""
    seed = int(fold(key_from_seed(1), Purpose.RESET, 0, 0)[0]) % 2**31
    raw = vmas.make_env(scenario, num_envs=3, **kwargs)
    seen = raw.reset(seed=seed)
    for at in range(batch.shape[-1]):
        before, actions = seen, [batch["agent", "action"][:, at, n].clone() for n in range(raw.n_agents)]
        seen, rewards, terminated, infos = raw.step(actions)
        truncated = (raw.steps >= limit) & ~terminated
        yield before, seen, rewards, terminated, truncated, infos
        for lane in (terminated | truncated).nonzero()[:, 0].tolist():
            raw.reset_at(lane)
        seen = raw.get_from_scenario(True, False, False, False)[0]


@pytest.mark.parametrize(
    ("scenario", "kwargs"),
    [("navigation", {"n_agents": 2}), ("transport", {"continuous_actions": False}), *in_soak([("balance", {})])],
)
def test_the_rows_are_those_of_a_raw_loop(scenario, kwargs):
    info = {"navigation": "pos_rew", "balance": "pos_rew"}.get(scenario)
    keys = [info] if info else []
    env = fc.make_env(f"vmas/{scenario}", num_envs=3, max_episode_steps=6, info_keys=keys, **kwargs)
    discrete = isinstance(env.groups["agent"].action_space, spaces.Discrete)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    policy = fc.random_policy(env)
    batch = collect(env, policy, 10, 1, 9, seed=1)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]
    assert batch["agent", "action"].dtype == (torch.int64 if discrete else torch.float32)
    for at, (root, seen, rewards, terminated, truncated, infos) in enumerate(raw_loop(scenario, batch, 6, **kwargs)):
        frame = batch[:, at]
        assert torch.equal(frame["agent", "observation"], torch.stack(root, 1))
        assert torch.equal(frame["next", "agent", "observation"], torch.stack(seen, 1))
        assert torch.equal(frame["next", "agent", "reward"][..., 0], torch.stack(rewards, 1))
        torch.testing.assert_close(frame["next", "reward"][:, 0], sum(rewards))
        assert torch.equal(frame["next", "terminated"][:, 0], terminated)
        assert torch.equal(frame["next", "truncated"][:, 0], truncated)
        if info:
            assert torch.equal(frame["next", "agent", "info", info], torch.stack([each[info] for each in infos], 1))
    assert batch["next", "done"].sum() > 6
    assert_same(batch, collect(fc.make_env(env), policy, 10, 1, 9, seed=1))


def test_torchrls_own_environment_and_a_policy_for_the_group():
    def make():
        return VmasEnv(scenario="navigation", num_envs=3, n_agents=2, max_steps=5)

    env = fc.make_env(make)
    batch = collect(env, fc.random_policy(env), 12, seed=3)
    check_keys(batch, own_loop(make(), 3, {("agents", "action"): batch["agents", "action"]}), *AGGREGATED)
    env = fc.make_env("vmas/navigation", num_envs=3, n_agents=2, max_episode_steps=5)
    (inputs,) = env.groups["agent"].observation_space.shape
    policy = fc.by_group({"agent": fc.torch_policy(mlp(inputs, 4), head=fc.heads.tanh_normal)})
    rows = fc.agents_as_rows(collect(env, policy, 12), "agent")
    assert rows.batch_size == (3, 2, 12)
    assert rows["next", "done"][:, :, 4].all()
    assert "same_seed" in fc.testing.check_env("vmas/navigation", num_envs=3, max_episode_steps=5, steps=12).passed
