"""Environments for other processes, which import this module and nothing else of the tests, and for any space."""

import copy

import gymnasium
import numpy as np
from gymnasium import spaces

BOX = spaces.Box(-1, 1, (2,), np.float32)


class Nested(gymnasium.Env):
    """Dict observations of several dtypes, infos, and ends of both kinds, by its own generator."""

    observation_space = spaces.Dict({"pixels": spaces.Box(0, 255, (3, 2), np.uint8), "mode": spaces.Discrete(4)})
    action_space = spaces.Box(-1, 1, (2,))

    def _seen(self):
        return {"pixels": self.np_random.integers(0, 255, (3, 2), np.uint8), "mode": int(self.np_random.integers(4))}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._seen(), {}

    def step(self, action):
        draw = self.np_random.random()
        return self._seen(), float(action.sum()), bool(draw < 0.1), bool(draw > 0.9), {"draw": draw}


class Sampling(gymnasium.Env):
    """Observations drawn from their space, seeded with the episode; the reward encodes the action."""

    def __init__(self, observation_space=BOX, action_space=BOX):
        self.observation_space = copy.deepcopy(observation_space)
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.left = 3 + seed % 5
        return self.observation_space.sample(), {"half": 0.5}

    def step(self, action):
        assert self.action_space.contains(action), action
        flat = spaces.flatten(self.action_space, action).astype(np.float64)
        self.left -= 1
        info = {"half": self.left / 2, "pair": np.array([self.left, -self.left]), "flag": self.left > 2}
        reward = float(flat @ (np.arange(flat.size) + 1))
        return self.observation_space.sample(), reward, self.left == 0, self.left % 4 == 1, info
