"""Environments over worker processes that are lost on purpose, and the processes behind a state."""

import os
import signal
import sys
import time

import numpy as np

from tests.support.envs.light_envs import Nested


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


DEEDS = {
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(3),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": lambda: time.sleep(10**6),
    "leave": lambda: sys.exit("no more"),
}


def check_lanes(batch):
    """In each lane, trajectories are whole: steps follow each other, rows continue, and no id comes back."""
    ids, steps = batch["collector", "traj_ids"], batch["collector", "step"]
    for lane in range(len(ids)):
        begins = [0, *(t for t in range(1, ids.shape[1]) if ids[lane, t] != ids[lane, t - 1])]
        assert len({*ids[lane, begins].tolist()}) == len(begins)
        for t in range(1, ids.shape[1]):
            if t in begins:
                assert steps[lane, t] == 0
                assert batch["next", "done"][lane, t - 1]
            else:
                assert steps[lane, t] == steps[lane, t - 1] + 1
                assert not batch["next", "done"][lane, t - 1]
                for key in ("pixels", "mode"):
                    assert (batch[key][lane, t] == batch["next", key][lane, t - 1]).all()
