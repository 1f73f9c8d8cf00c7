"""Environments and policies that fail in a worker, as badly as they can."""

import ctypes
import os
import signal
import time

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

import funcollect as fc


class Plain(gymnasium.Env):
    """Episodes of five steps; the observation is the step."""

    observation_space = spaces.Box(-1, 100, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.steps = self.total = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        self.total += 1
        return np.full(2, self.steps, np.float32), 1.0, self.steps >= 5, False, {}


class Uneven(Plain):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def step(self, action):
        time.sleep(self.seconds)
        return super().step(action)


class Held(Plain):
    def __init__(self, file):
        super().__init__()
        self.file = file

    def step(self, action):
        while not os.path.exists(self.file):
            os.sched_yield()
        return super().step(action)


class Wide(Plain):
    SIZE = 1 << 19
    observation_space = spaces.Box(0, 255, (SIZE,), np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(self.SIZE, np.uint8), {}

    def step(self, action):
        _, *others = super().step(action)
        return np.full(self.SIZE, self.steps, np.uint8), *others


class Failing(Plain):
    """Does `act` at step `at` of its life; only the first of those that share the file `once`, where one is given."""

    def __init__(self, act, at=7, once=None):
        super().__init__()
        self.act, self.at, self.once = act, at, once

    def step(self, action):
        answer = super().step(action)
        if self.total == self.at and self._first():
            self.act()
        return answer

    def _first(self):
        if self.once is None:
            return True
        try:
            os.close(os.open(self.once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


def stumble():
    raise ArithmeticError("stumbled")


def sleep_forever():
    time.sleep(1e6)


def hold_the_gil():
    while True:  # a signal ends a sleep
        ctypes.PyDLL(None).sleep(1_000_000)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def leave():
    os._exit(3)


class BadInit(Plain):
    def __init__(self):
        super().__init__()
        stumble()


class SlowToReturn(Plain):
    """Killed in its sixteenth step, and then while it is built, until that has happened `times` times.

    Args:
        log: a file that grows by a byte at each build.
    """

    def __init__(self, log, times=3):
        super().__init__()
        with open(log, "ab") as file:
            file.write(b".")
            builds = file.tell()
        self._dies = builds == 1
        if 1 < builds <= times:
            os.kill(os.getpid(), signal.SIGKILL)

    def step(self, action):
        if self._dies and self.total == 15:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class BadReset(Plain):
    def reset(self, *, seed=None, options=None):
        if self.total:
            stumble()
        return super().reset(seed=seed)


def bad_policy(observation):
    if observation[0, 0] == 4:
        stumble()
    return torch.zeros(len(observation), dtype=torch.int64)


class Doubled(fc.SyncDataCollector):
    """A collector of the user's own class, with a keyword of its own."""

    def __init__(self, *args, factor, **kwargs):
        super().__init__(*args, **kwargs)
        self.factor = factor

    def rollout(self):
        batch = super().rollout()
        batch["next", "reward"] *= self.factor
        return batch
