"""PettingZoo's environments and VMAS's in random configurations, each beside a raw loop with the same actions."""

import random
from functools import partial
from importlib import import_module

import numpy as np
import pytest
import torch
from gymnasium import spaces
from pettingzoo import ParallelEnv

import funcollect as fc
from funcollect.keys import Purpose, fold, key_from_seed
from tests.support.agents import check_parallel
from tests.support.cases import mlp
from tests.support.compare import assert_same, collect
from tests.support.running import scaled

import vmas  # isort: skip

LENGTH = 25


class Roaming(ParallelEnv):
    """Agents come, leave and come back at random times; they end by a flag of either kind, or by none."""

    metadata = {"name": "roaming"}  # noqa: RUF012
    render_mode = None
    state_space = spaces.Box(-9, 99, (2,), np.float32)

    def __init__(self, sizes, discrete, horizon, stays):
        self.possible_agents, self.sizes, self.discrete = [*sizes], sizes, discrete
        self.horizon, self.stays = horizon, stays

    def observation_space(self, agent):
        return spaces.Box(-9, 99, (self.sizes[agent],), np.float32)

    def action_space(self, agent):
        size = self.sizes[agent]
        return spaces.Discrete(size + 1) if agent[0] in self.discrete else spaces.Box(-1, 1, (size,))

    def reset(self, seed=None, options=None):
        self.random = np.random.default_rng(seed) if seed is not None else self.random
        self.time = 0
        changes = self.random.random((self.horizon, len(self.sizes))) > self.stays
        self.there = changes.cumsum(0) % 2 == self.random.integers(2, size=len(self.sizes))
        self.there[0, 0], self.there[-1] = True, False
        self.agents = self.those()
        return self.seen(self.agents), {name: {} for name in self.agents}

    def those(self):
        return [name for name, there in zip(self.sizes, self.there[self.time], strict=True) if there]

    def seen(self, names):
        return {name: self.random.random(self.sizes[name], np.float32) for name in names}

    def state(self):
        return np.array([self.time, len(self.agents)], np.float32)

    def step(self, actions):
        assert sorted(actions) == sorted(self.agents)
        self.time += 1
        before, self.agents = self.agents, self.those()
        kinds = {name: (name not in self.agents) * self.random.integers(3) for name in before}
        reward = {name: float(np.sum(actions[name])) + self.random.random() for name in before}
        rows = self.seen([name for name in self.possible_agents if name in {*before, *self.agents}])
        flags = ({name: kind == number for name, kind in kinds.items()} for number in (1, 2))
        return rows, reward, *flags, {name: {"time": self.time} for name in before}


def roaming(draw):
    kinds, sizes = int(draw.integers(1, 4)), {}
    for kind in "abc"[:kinds]:
        size = int(draw.integers(1, 4))
        sizes |= {f"{kind}_{number}": size for number in range(draw.integers(1, 4))}
    names = draw.permutation([*sizes]).tolist()
    sizes = {name: sizes[name] for name in names}
    discrete = "".join(kind for kind in "abc" if draw.integers(2))
    settings = discrete, int(draw.integers(4, 14)), draw.uniform(0.5, 0.95)
    return partial(Roaming, sizes, *settings), {"info_keys": ["time"], "state": bool(draw.integers(2))}


def of_mpe(draw):
    name = draw.choice(["simple_spread_v3", "simple_tag_v3"])
    counts = {"simple_spread_v3": ("N",), "simple_tag_v3": ("num_good", "num_adversaries", "num_obstacles")}
    kwargs = {key: int(draw.integers(1, 4)) for key in counts[name]} | {"max_cycles": int(draw.integers(2, 9))}
    kwargs["continuous_actions"] = bool(draw.integers(2))
    return partial(import_module(f"mpe2.{name}").parallel_env, **kwargs), {"state": bool(draw.integers(2))}


@pytest.mark.parametrize("number", range(scaled(5)))
def test_the_rows_of_pettingzoo_are_those_of_a_raw_loop(number):
    draw = np.random.default_rng(number)
    make, options = (of_mpe if number % 5 == 4 else roaming)(draw)
    done, num_envs, names = str(draw.choice(["all", "any"])), int(draw.integers(1, 4)), make().possible_agents
    if draw.integers(2):  # each agent for itself
        options["groups"] = {f"of {name}": [name] for name in draw.permutation(names).tolist()}
    env = fc.envs.from_pettingzoo(make, done=done, num_envs=num_envs, **options)
    cuts = sorted({0, *draw.integers(1, LENGTH, 2).tolist(), LENGTH})
    batch = collect(env, fc.random_policy(env), *np.diff(cuts).tolist(), seed=1)
    assert sorted(name for group in env.groups.values() for name in group.names) == sorted(names)
    options.pop("groups", None)
    check_parallel(env, batch, make, done, **options)


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


@pytest.mark.parametrize("number", range(scaled(5)))
def test_the_rows_of_vmas_are_those_of_a_raw_loop(number):
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


@pytest.mark.needs("torchrl")
def test_torchrls_own_environment_of_vmas_and_a_policy_for_the_group():
    from torchrl.envs.libs.vmas import VmasEnv

    from tests.envs.test_torchrl_env import AGGREGATED, check_keys, own_loop

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
