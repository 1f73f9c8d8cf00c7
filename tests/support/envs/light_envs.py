"""Environments for other processes, which import this module and nothing else of the tests."""

import gymnasium
import numpy as np
from gymnasium import spaces


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


class Failing(Nested):
    """Raises at its third step."""

    time = 0

    def step(self, action):
        self.time += 1
        if self.time == 3:
            raise RuntimeError("out of petrol")
        return super().step(action)
