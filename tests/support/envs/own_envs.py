"""A Torch environment in parts, of which a test can break one, and simulators with snapshots and without."""

import copy

import numpy as np
import torch
from gymnasium import spaces

import funcollect as fc
from funcollect.envs import TorchEnvBase, Transition


class InParts(TorchEnvBase):
    """`draws` uniform numbers per lane make a start; `move` returns the next place, reward and termination."""

    draws = 1

    def start(self, uniforms):
        return uniforms

    def observe(self, place):
        return place.float()

    def move(self, place, action):
        return place, place[:, 0], place[:, 0] > 9

    def reset(self, key, params, /):
        place = self.start(key.uniform(self.draws))
        return place, self.observe(place)

    def step(self, key, env_state, action, params, /):
        place, reward, terminated = self.move(env_state, action)
        return Transition(place, self.observe(place), reward, terminated, torch.zeros(len(key), dtype=torch.bool))


class Walkers(fc.envs.SimulatorsBase):
    """Walks by a generator that goes on from episode to episode, so that only a snapshot shows where it stands."""

    def __init__(self, env):
        super().__init__(env)
        self.generator = np.random.default_rng(0)
        self.place = np.zeros((env.num_envs, 1), np.float32)
        self.closed = False

    def reset(self, lanes, seeds, /):
        self.place[lanes] = self.observation["observation",][lanes] = 0

    def step(self, lanes, action, /):
        self.place[lanes] += self.generator.random((len(lanes), 1), np.float32)
        self.observation["observation",][lanes] = place = self.place[lanes]
        return place[:, 0], place[:, 0] > 3, place[:, 0] > 99, ()

    def close(self):
        self.closed = True


class SnapshotWalkers(Walkers):
    def snapshot(self):
        return copy.deepcopy((self.generator, self.place, self.observation))

    def restore(self, snapshot, /):
        self.generator, self.place, observation = copy.deepcopy(snapshot)
        for path, value in observation.items():
            self.observation[path][...] = value


class HostWalk(fc.envs.HostEnvBase):
    observation_space, action_space = spaces.Box(-99, 99, (1,)), spaces.Discrete(2)
    seeding, forking = "run", "snapshot"

    def __init__(self, kind):
        super().__init__(num_envs=2)
        self.kind, self.opened = kind, []

    def open(self):
        self.opened.append(self.kind(self))
        return self.opened[-1]


class ForgetsInAFile(SnapshotWalkers):
    """Its snapshots hold everything, and what is saved of them nothing."""

    def reset(self, lanes, seeds, /):
        if seeds[0] is not None:
            self.generator = np.random.default_rng(seeds[0])
        super().reset(lanes, seeds)

    def snapshot_data(self, snapshot):
        return []

    def snapshot_from(self, data):
        return SnapshotWalkers(HostWalk(SnapshotWalkers)).snapshot()
