"""One lane with groups of agents, made by hand, and its frames beside those of a batch."""

import functools

import jax
import numpy as np
import torch
from gymnasium import spaces

import funcollect as fc
from funcollect.keys import Purpose, fold, key_from_seed

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
        self.over = dict.fromkeys(self.agents, (False, False))

    def move(self, t, actions):
        """The rewards, and the agents that were there before or are there now."""
        before = {name for name, over in self.over.items() if not any(over)}
        self.state, self.seen, reward, ends = self.functions[1](self.lane, t, self.state, actions)
        for name, now in ends.items():
            now = tuple(map(bool, now))
            self.over[name] = now if name in before or not any(now) else self.over[name]
        shown = before | {name for name, over in self.over.items() if not any(over)}
        return {name: reward[name] if name in before else 0 for name in self.agents}, shown


def check_frames(env, batch, start, step):
    """Each frame of a batch [P, T] is that of the raw functions, given its actions; how many lanes ended, and how.

    ``start(lane, episode)`` returns a state and observations by agent; ``step(lane, t, state, actions)``, with actions
    by agent, the same, rewards and pairs of flags.
    """
    places = {name: (key, row) for key, group in env.groups.items() for row, name in enumerate(group.names)}
    ends = {"terminated": 0, "truncated": 0}

    def rows(leaf, row):
        return jax.tree.map(lambda value: value[row].numpy(), leaf.to_dict() if hasattr(leaf, "to_dict") else leaf)

    def same(one, two):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), one, two)

    for lane in range(len(batch)):
        raw = Raw(start, step, lane, [*places])
        for t, frame in enumerate(batch[lane].unbind(0)):
            for name, (group, row) in places.items():
                own, there = frame[group], not any(raw.over[name])
                assert own["mask"][row] == there
                expected = jax.tree.map(lambda leaf, there=there: np.asarray(leaf) * there, raw.seen[name])
                same(rows(own["observation"], row), expected)
                assert (own["terminated"][row], own["truncated"][row]) == raw.over[name]
            reward, shown = raw.move(t, {name: frame[group, "action"][row] for name, (group, row) in places.items()})
            for name, (group, row) in places.items():
                own = frame["next", group]
                same(own["reward"][row, 0].numpy(), np.float32(reward[name]))
                there = name in shown
                expected = jax.tree.map(lambda leaf, there=there: np.asarray(leaf) * there, raw.seen[name])
                same(rows(own["observation"], row), expected)
                assert (own["terminated"][row], own["truncated"][row]) == raw.over[name]
                assert own["done"][row] == any(raw.over[name]) == (not own["mask"][row])
            same(frame["next", "reward"][0].numpy(), np.float32(sum(reward.values())))
            done = all(map(any, raw.over.values()))
            terminated = done and all(over[0] for over in raw.over.values())
            assert (frame["next", "done"], frame["next", "terminated"]) == (done, terminated)
            if done:
                ends["terminated" if terminated else "truncated"] += 1
                raw.begin()
    return ends


def check_parallel(env, batch, make, done="all", info_keys=(), state=False):
    """Each lane of a batch [P, T], of seed 1, is that of a raw loop over PettingZoo's `make()`, given its actions."""
    places = {name: (key, row) for key, group in env.groups.items() for row, name in enumerate(group.names)}
    for lane, rows in enumerate(batch):
        raw, episode, seen = make(), -1, None
        zeros = {name: torch.zeros(raw.observation_space(name).shape) for name in places}
        for frame in rows.unbind(0):
            if seen is None:
                episode += 1
                seen, _ = raw.reset(seed=fold(key_from_seed(1), Purpose.RESET, lane, episode)[0])
                over, took_part = dict.fromkeys(places, (False, False)), {*raw.agents}
            present, actions = [*raw.agents], {}
            for name, (group, row) in places.items():
                own = frame[group]
                assert own["mask"][row] == (name in present)
                assert torch.equal(own["observation"][row], tensor(seen[name]) if name in present else zeros[name])
                assert (own["terminated"][row], own["truncated"][row]) == over[name]
            for name in present:
                action = frame[places[name][0], "action"][places[name][1]].numpy()
                actions[name] = action if action.ndim else int(action)
            if state:
                assert torch.equal(frame["state"], tensor(raw.state()))
            seen, reward, terminated, truncated, info = raw.step(actions)
            took_part |= {*raw.agents}
            for name in present:
                flags = bool(terminated[name]), bool(truncated[name])
                over[name] = flags if any(flags) or name in raw.agents else (False, True)
            over |= {name: (False, False) for name in raw.agents if name not in present}
            for name, (group, row) in places.items():
                own, shown = frame["next", group], name in present or name in raw.agents
                assert own["reward"][row] == np.float32(reward.get(name, 0))
                assert own["mask"][row] == (name in raw.agents)
                assert torch.equal(own["observation"][row], tensor(seen[name]) if shown else zeros[name])
                assert (own["terminated"][row], own["truncated"][row]) == over[name]
                assert own["done"][row] == any(over[name])
                for key in info_keys:
                    assert own["info", key][row] == (info[name][key] if name in present else 0)
            torch.testing.assert_close(frame["next", "reward"][0], torch.tensor(sum(reward.values())).float())
            ends, enough = [over[name] for name in took_part], any if done == "any" else all
            ended = enough(map(any, ends))
            assert frame["next", "done"] == ended
            assert frame["next", "terminated"] == (ended and enough(flags[0] for flags in ends))
            seen = None if ended else seen
        assert episode > 0


def tensor(array):
    return torch.as_tensor(np.asarray(array, np.float32))
