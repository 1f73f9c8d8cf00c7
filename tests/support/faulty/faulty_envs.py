"""A small good environment, and versions of it that each break one rule."""

import random
from dataclasses import replace

import gymnasium
import jax
import numpy as np
import torch
from gymnasium import spaces

import funcollect as fc
from tests.support.envs.own_envs import InParts

BOX = spaces.Box(-4, 4, (2,), np.float32)


class Walk(gymnasium.Env):
    """A noisy walk from near the middle until it is far out, or takes long."""

    observation_space = BOX
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        self.place = self.start()
        return self.seen(), {}

    def step(self, action):
        self.time += 1
        self.place = self.place + self.push(action)
        far = bool(abs(self.place).max() > 1)
        return self.seen(), self.reward(), far, self.time >= 12, {}

    def start(self):
        return self.np_random.uniform(-0.1, 0.1, 2)

    def push(self, action):
        return 0.3 * (np.asarray(action) - 1) + self.noise()

    def noise(self):
        return self.np_random.normal(0, 0.1, 2)

    def seen(self):
        return self.place.astype(np.float32)

    def reward(self):
        return 1.0


def walk(name, **members):
    return type(name, (Walk,), members)


def jump(seen, time):
    return seen * 5 + np.float32(4) if time == 3 else seen


LeavesItsSpace = walk("LeavesItsSpace", seen=lambda self: jump(Walk.seen(self), self.time))
SeesNothing = walk("SeesNothing", seen=lambda self: Walk.seen(self) * np.float32(np.nan if self.time == 4 else 1))
PaysInfinitely = walk("PaysInfinitely", reward=lambda self: np.inf if self.time == 6 else 1.0)
DrawsFromNumPy = walk("DrawsFromNumPy", noise=lambda self: np.random.normal(0, 0.1, 2))
DrawsFromPython = walk("DrawsFromPython", start=lambda self: Walk.start(self) + 0 * random.random())


def generator(seed):
    return lambda self: setattr(self, "own", np.random.default_rng(seed))


def counted(self):
    self.count = getattr(self, "count", 0) + 1
    return self.count


SeedsItself = walk("SeedsItself", __init__=generator(None), noise=lambda self: self.own.normal(0, 0.1, 2))
IgnoresItsSeed = walk("IgnoresItsSeed", __init__=generator(0), start=lambda self: self.own.uniform(-0.1, 0.1, 2))
RemembersEpisodes = walk("RemembersEpisodes", start=lambda self: Walk.start(self) + 0.01 * counted(self))
WearsOut = walk("WearsOut", noise=lambda self: Walk.noise(self) + 0.001 * counted(self))


class ResetsItself(Walk):
    def step(self, action):
        seen, *answer = super().step(action)
        return [self.reset()[0] if any(answer[1:3]) else seen, *answer]


class ResetsItselfAnywhere(ResetsItself):
    observation_space = spaces.Box(-np.inf, np.inf, (12,), np.float32)
    start = noise = lambda self: self.np_random.normal(0, 0.1, 12)


class TerminatesAtItsLimit(Walk):
    def step(self, action):
        return (*super().step(action)[:2], self.time == 6, False, {})


class HidesItsEnds(Walk):
    def step(this, action):  # noqa: N805  any name will do
        seen, reward, *_ = super().step(action)
        return (this.reset()[0] if this.time == 6 else seen), reward, False, False, {}


class KeepsItsClock(Walk):
    """Every episode but the first ends at once."""

    time = 0

    def reset(self, **kwargs):
        before = self.time
        answer = super().reset(**kwargs)
        self.time = before
        return answer


class CannotClose(Walk):
    def close(self):
        raise OSError("the socket is gone")


class Proxy:
    """Real simulators, to be got wrong."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    @property
    def rows(self):
        return self.inner.observation["observation",]


class WritesOtherRows(Proxy):
    """A reset of one lane blurs the others."""

    def reset(self, lanes, seeds):
        self.inner.reset(lanes, seeds)
        self.rows[[lane for lane in range(3) if lane not in lanes]] += np.float32(0.01)


class ReplacesItsRows(Proxy):
    """New memory at every step, which nobody who holds the old sees."""

    def receive(self):
        answer = self.inner.receive()
        self.inner.observation = {path: array.copy() for path, array in self.observation.items()}
        return answer


class ForgetsToWrite(Proxy):
    """Resets lanes, but leaves what they showed at their end."""

    def reset(self, lanes, seeds):
        before = self.rows.copy()
        self.inner.reset(lanes, seeds)
        if before.any():  # not at the start
            self.rows[...] = before


class ResetsASlice(Proxy):
    def reset(self, lanes, seeds):
        between = [lane for lane in range(min(lanes), max(lanes)) if lane not in lanes]
        self.inner.reset([*lanes, *between], [*seeds, *[0 for _ in between]])


class DisturbsAnother(Proxy):
    """A reset of lanes 0 and 2 moves lane 1, which does not show it before its next step."""

    def reset(self, lanes, seeds):
        self.inner.reset(lanes, seeds)
        if list(lanes) == [0, 2]:
            self.inner._envs[1].unwrapped.place += 0.05


class WritesItsAction(Proxy):
    def send(self, lanes, action):
        self.inner.send(lanes, np.asarray(action).copy())
        np.asarray(action)[...] = 0


class KeepsItsAction(Proxy):
    """Acts on what the array of the step before holds now."""

    last = None

    def send(self, lanes, action):
        self.inner.send(lanes, action if self.last is None else self.last)
        self.last = action

    def reset(self, lanes, seeds):
        self.inner.reset(lanes, seeds)
        self.last = self.last if len(lanes) < 3 else None


class LivesInItsRows(Proxy):
    """Its place is what stands in the rows."""

    def receive(self):
        for env, row in zip(self.inner._envs, self.rows, strict=True):
            env.unwrapped.place = row.astype(np.float64)
        return self.inner.receive()


def over(kind):
    return lambda: fc.envs.from_gymnasium(kind, num_envs=3)


def through(proxy, **changes):
    def make():
        env = over(Walk)()
        return replace(env, opener=lambda _: proxy(env.open()), **changes)

    return make


class TorchWalk(InParts):
    """Drifts from a random start until it is far out."""

    observation_space = BOX
    action_space = spaces.Discrete(3)
    draws = 2
    max_episode_steps = 12

    def start(self, uniforms):
        return uniforms * 0.2 - 0.1

    def move(self, place, action):
        moved = place * 1.1 + 0.1 * (action[:, None] - 1)
        return moved, torch.ones(len(moved)), moved.abs().amax(-1) > 1


class BranchesInJax(fc.envs.JaxEnvBase):
    observation_space = BOX
    action_space = spaces.Discrete(3)
    max_episode_steps = 12

    def reset(self, key, params, /):
        place = jax.random.uniform(key, (2,))
        return place, place

    def step(self, key, place, action, params, /):
        if action == 0:
            place = place * 0.9
        return fc.envs.Transition(place, place, 1.0, False, False)


class PaysThrice(BranchesInJax):
    def step(self, key, place, action, params, /):
        return fc.envs.Transition(place, place, jax.numpy.ones(3), False, False)


class MixesItsLanes(TorchWalk):
    def move(self, place, action):
        return super().move(place, action + action.double().mean())


class MovesInPlace(TorchWalk):
    def move(self, place, action):
        moved, *answer = super().move(place, action)
        return place.copy_(moved), *answer
