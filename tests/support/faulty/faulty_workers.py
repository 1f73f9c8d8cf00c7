"""Environments and policies that fail in a worker, as badly as they can. Workers import this, so it imports little."""

import ctypes
import os
import signal
import sys
import time
from functools import partial

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from tests.support.envs.light_envs import Nested


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
    """Does `act` at step `at` of its life, or at all (None); only the first of those that share the file `once`."""

    def __init__(self, act, at=7, once=None):
        super().__init__()
        self.act, self.at, self.once = act, at, once

    def step(self, action):
        answer = super().step(action)
        if self.at in (None, self.total) and self._first():
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


class Uneven(Failing):
    def __init__(self, seconds):
        super().__init__(lambda: time.sleep(seconds), at=None)


class Held(Failing):
    def __init__(self, file):
        super().__init__(lambda: self.wait(file), at=None)

    def wait(self, file):
        while not os.path.exists(file):
            os.sched_yield()


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


BadInit = stumble  # a factory that fails


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


def workers_of(state):
    return [record.handle for record in state.env_state.simulation.simulators.records]


def pids_of(state):
    return [worker.pid for worker in workers_of(state)]


class Doomed(Nested):
    """Does at a step of its life what a file says: it dies, hangs, raises or stops."""

    def __init__(self, folder="", lane=0):
        self.folder, self.lane, self.steps = folder, lane, 0

    def step(self, action):
        self.steps += 1
        file = f"{self.folder}/{self.lane} {self.steps}"
        if self.folder and os.path.exists(file):
            with open(file) as text:
                deed = text.read()
            os.remove(file)  # the next process lives
            DEEDS.get(deed, _fail)()
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated, {**info, "vector": np.full(2, info["draw"], np.float32)}


def _fail():
    raise RuntimeError("out of petrol")


DEEDS = {"die": die, "exit": leave, "stop": stop, "hang": sleep_forever, "leave": lambda: sys.exit("no more")}


def check_lanes(batch):
    """In each lane, trajectories are whole: steps follow each other, rows continue, and no id comes back."""
    from tests.support.check_collector import expect_chained, expect_counters

    expect_counters(batch)
    expect_chained(batch)


INFOS = ["draw", "vector"]


class Late(Nested):
    """Ends at every third step; its infos are too large for the shared memory."""

    def step(self, action):
        observation, reward, _, _, info = super().step(action)
        self.time = getattr(self, "time", 0) + 1
        return observation, reward, self.time % 3 == 0, False, {**info, "vector": np.full(9_000, info["draw"])}


def wait_until(condition):
    """Wait until the condition holds; pytest's own limit ends it, and shows the condition."""
    while not condition():
        time.sleep(0.001)  # nothing else: processes of idle priority have to proceed, too


def kill(state, worker):
    os.kill(pids_of(state)[worker], signal.SIGKILL)
    wait_until(partial(workers_of(state)[worker].ended_by, 0))
