"""A Torch environment in three parts, so that a test can break one of them: start, observe and move."""

import torch

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
