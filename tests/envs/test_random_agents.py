"""PettingZoo's environments in random configurations, each beside a raw loop with the same actions."""

from functools import partial
from importlib import import_module

import numpy as np
import pytest
from gymnasium import spaces
from pettingzoo import ParallelEnv

import funcollect as fc
from tests.support.agents import check_parallel
from tests.support.compare import collect
from tests.support.running import scaled

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
def test_the_rows_are_those_of_a_raw_loop(number):
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
