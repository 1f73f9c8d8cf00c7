"""One lane with groups of agents, made by hand, and its frames beside those of a batch."""

import functools
import itertools

import jax
import numpy as np
import torch
from gymnasium import spaces

import funcollect as fc
from funcollect.keys import Purpose, fold, key_from_seed
from tests.support.plain import as_given

GROUPS = {
    "ant": fc.envs.Group(("ant_0", "ant_1"), spaces.Box(-9, 99, (2,)), spaces.Discrete(3), comes_and_goes=True),
    "bee": fc.envs.Group(("bee_0",), spaces.Box(-9, 99, (3,)), spaces.Discrete(3), comes_and_goes=True),
}
AGENTS = [name for group in GROUPS.values() for name in group.names]
CLOCK = spaces.Box(0, 99, (1,))


class Raw:
    """One lane by hand: which agents are there, what they see, and how each has ended."""

    def __init__(self, start, step, lane, agents):
        self.functions, self.lane, self.agents, self.episode = (start, step), lane, agents, -1
        self.begin()

    def begin(self):
        self.episode += 1
        self.state, self.seen = self.functions[0](self.lane, self.episode)
        self.there, self.took_part = {*self.seen}, {*self.seen}
        self.over = dict.fromkeys(self.agents, (False, False))

    def move(self, t, actions):
        """The rewards, and the agents that were there before or are there now."""
        before = self.there
        self.state, self.seen, reward, ends = self.functions[1](self.lane, t, self.state, actions)
        ends = {name: tuple(map(bool, end)) for name, end in ends.items()}
        self.there = {name for name, end in ends.items() if not any(end)}
        self.over |= {name: end for name, end in ends.items() if name in before | self.there}
        self.took_part |= self.there
        return {name: reward[name] if name in before else 0 for name in self.agents}, before | self.there


def places_of(env):
    return {name: (key, row) for key, group in env.groups.items() for row, name in enumerate(group.names)}


def check_frames(env, batch, start, step, *, enough=all, tolerance=1e-5):
    """Each frame of a batch [P, T] is that of the raw functions, given its actions; how many lanes ended, and how.

    ``start(lane, episode)`` returns a state and observations by agent, of those that are there; ``step(lane, t, state,
    actions)``, with actions by agent, the same, rewards, and pairs of flags of those that have been or are there.
    """
    places, ends = places_of(env), {"terminated": 0, "truncated": 0}

    def same(one, two):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), one, two)

    def check(frame, raw, shown):
        for name, (group, row) in places.items():
            own = frame[group]
            assert own["mask"][row] == (name in raw.there)
            assert (own["terminated"][row], own["truncated"][row]) == raw.over[name]
            seen = own["observation"].to_dict() if hasattr(own["observation"], "to_dict") else own["observation"]
            seen = jax.tree.map(lambda leaf, row=row: leaf[row].numpy(), seen)
            same(seen, jax.tree.map(np.asarray, raw.seen[name]) if name in shown else jax.tree.map(np.zeros_like, seen))

    for lane in range(len(batch)):
        raw = Raw(start, step, lane, [*places])
        for t, frame in enumerate(batch[lane].unbind(0)):
            check(frame, raw, raw.there)
            reward, shown = raw.move(t, {name: frame[group, "action"][row] for name, (group, row) in places.items()})
            check(frame["next"], raw, shown)
            for name, (group, row) in places.items():
                same(frame["next", group, "reward"][row, 0].numpy(), np.float32(reward[name]))
                assert frame["next", group, "done"][row] == any(raw.over[name])
            np.testing.assert_allclose(frame["next", "reward"][0], np.float32(sum(reward.values())), 1e-5, 1e-5)
            over = [raw.over[name] for name in raw.took_part]
            done, terminated = enough(map(any, over)), enough(end[0] for end in over)
            assert (frame["next", "done"], frame["next", "terminated"]) == (done, done and terminated)
            if done:
                ends["terminated" if terminated else "truncated"] += 1
                raw.begin()
    return ends


def check_parallel(env, batch, make, done="all", info_keys=(), state=False):
    """Each lane of a batch [P, T], of seed 1, is that of PettingZoo's `make()`, given its actions."""
    raws, told = [make() for _ in batch], []

    def start(lane, episode):
        seen, _ = raws[lane].reset(seed=fold(key_from_seed(1), Purpose.RESET, lane, episode)[0])
        return raws[lane].state() if state else None, {name: seen[name] for name in raws[lane].agents}

    def step(lane, t, shared, actions):
        raw, before = raws[lane], [*raws[lane].agents]
        seen, reward, *flags, info = raw.step({name: as_given(actions[name].numpy()) for name in before})
        told.append((batch[lane, t], shared, {name: info[name] for name in before}))
        ends = {name: tuple(bool(flag[name]) for flag in flags) for name in before}
        ends = {name: end if any(end) or name in raw.agents else (False, True) for name, end in ends.items()}
        return raw.state() if state else None, seen, reward, dict.fromkeys(raw.agents, (False, False)) | ends

    check_frames(env, batch, start, step, enough={"all": all, "any": any}[done], tolerance=0)
    assert batch["next", "done"].any(1).all()
    for frame, shared, infos in told:
        assert not state or torch.equal(frame["state"], torch.from_numpy(np.float32(shared)))
        for (name, (group, row)), key in itertools.product(places_of(env).items(), info_keys):
            assert frame["next", group, "info", key][row] == infos.get(name, {key: 0})[key]
