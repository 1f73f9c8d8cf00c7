"""Environments and policies of which one part takes by far the most time, however slow the machine is."""

import time

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

import funcollect as fc


class Sleeping(gymnasium.Env):
    """Sleeps in each step; an episode has ten."""

    observation_space, action_space = spaces.Box(-1, 1, (4,)), spaces.Discrete(2)
    steps = 0

    def __init__(self, seconds=0.0):
        self.seconds = seconds

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action):
        time.sleep(self.seconds)
        self.steps += 1
        return np.zeros(4, np.float32), 1.0, self.steps == 10, False, {}


def slow_env():
    return Sleeping(0.005)


class Slow(torch.nn.Linear):
    """A network that sleeps."""

    def __init__(self):
        super().__init__(4, 2)

    def forward(self, x):
        time.sleep(0.005)
        return super().forward(x)


def network(**kwargs):
    return fc.torch_policy(torch.nn.Linear(4, 2), head=fc.heads.categorical, **kwargs)


def slow_reader(batch):
    """Works on a batch for long."""
    time.sleep(0.2)


def check(profile):
    """Parts add up to the time of a frame, everywhere, and the rest is there."""
    for timeline in profile.timelines:
        assert abs(sum(timeline.parts.values()) / profile.microseconds - 1) < 1e-6, timeline
        assert min(timeline.parts.values()) >= 0
        for part in timeline.parts:
            assert f"\n{part} " in str(profile)
    assert profile.limits
    assert min(limit.frames_per_second for limit in profile.limits) > 0
    assert abs(profile.frames_per_second * profile.microseconds / 1e6 - 1) < 1e-9
    assert profile.advice
    assert "\nadvice: " in str(profile)


def largest(profile):
    """The largest part where frames are collected."""
    return max(profile.parts, key=profile.parts.get)
