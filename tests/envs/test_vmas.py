"""VMAS's scenarios beside a raw loop of VMAS, and of TorchRL."""

import random

import numpy as np
import pytest
import torch
from torchrl.envs.libs.vmas import VmasEnv

import funcollect as fc
from funcollect.keys import Purpose, fold, key_from_seed
from tests.envs.test_torchrl_env import AGGREGATED, check_keys, own_loop
from tests.support.cases import mlp
from tests.support.compare import assert_same, collect
from tests.support.running import scaled

import vmas  # isort: skip


SCENARIOS = {
    "balance": {"n_agents": (2, 5)},
    "dispersion": {"n_agents": (1, 5), "share_reward": (0, 2)},
    "navigation": {"n_agents": (1, 4), "collisions": (0, 2)},
    "simple_spread": {"n_agents": (1, 5)},
    "simple_tag": {"num_good_agents": (1, 3), "num_adversaries": (1, 4)},
    "transport": {"n_agents": (1, 5), "n_packages": (1, 3)},
    "wheel": {"n_agents": (1, 5)},
}
INFOS = {"balance": ["pos_rew"], "navigation": ["pos_rew"]}
LENGTH = 25


@pytest.mark.parametrize("number", range(scaled(5)))
def test_the_rows_are_those_of_a_raw_loop(number):
    """In random configurations."""
    draw = np.random.default_rng(number)
    scenario = [*SCENARIOS][number % len(SCENARIOS)]
    kwargs = {name: int(draw.integers(*bounds)) for name, bounds in SCENARIOS[scenario].items()}
    kwargs |= {"continuous_actions": bool(draw.integers(2)), "num_envs": int(draw.integers(1, 5))}
    limit, raw = int(draw.integers(2, 9)), vmas.make_env(scenario, **kwargs)
    names, infos = [agent.name for agent in raw.agents], INFOS.get(scenario, [])
    groups = {f"of {name}": [name] for name in draw.permutation(names).tolist()} if draw.integers(2) else None
    env = fc.make_env(f"vmas/{scenario}", max_episode_steps=limit, groups=groups, info_keys=infos, **kwargs)
    generators = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    batch = collect(env, fc.random_policy(env), 5, 1, LENGTH - 6, seed=1)
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert (np.random.get_state()[1] == generators[1]).all()
    assert random.getstate() == generators[2]
    seen = raw.reset(seed=int(fold(key_from_seed(1), Purpose.RESET, 0, 0)[0]) % 2**31)
    places = {name: (key, row) for key, group in env.groups.items() for row, name in enumerate(group.names)}
    assert sorted(places) == sorted(names)
    for frame in batch.unbind(1):
        rows = [frame[group, "action"][:, row].clone() for group, row in map(places.get, names)]
        assert {row.dtype for row in rows} == {torch.float32 if kwargs["continuous_actions"] else torch.int64}
        before, (seen, rewards, terminated, told) = seen, raw.step(rows)
        truncated = (raw.steps >= limit) & ~terminated
        for name, root, after, reward, info in zip(names, before, seen, rewards, told, strict=True):
            (group, row), following = places[name], frame["next", places[name][0]]
            assert torch.equal(frame[group, "observation"][:, row], root)
            assert torch.equal(following["observation"][:, row], after)
            assert torch.equal(following["reward"][:, row, 0], reward.flatten())
            assert all(torch.equal(following["info", key][:, row], info[key]) for key in infos)
            for key, flags in (("terminated", terminated), ("truncated", truncated)):
                assert torch.equal(following[key][:, row, 0], flags)
                assert torch.equal(frame["next", key][:, 0], flags)
                assert not frame[group, key].any()
        torch.testing.assert_close(frame["next", "reward"][:, 0], sum(rewards).flatten())
        for lane in (terminated | truncated).nonzero()[:, 0].tolist():
            raw.reset_at(lane)
        seen = raw.get_from_scenario(True, False, False, False)[0]
    assert batch["next", "done"].sum() >= LENGTH // limit
    assert_same(batch, collect(env, fc.random_policy(env), 5, 1, LENGTH - 6, seed=1))


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
