"""A step is a sign of life: `timeout` is about silence, not about the length of a rollout; every kind of process."""

import functools
import os
import time

import pytest
import torch

import funcollect as fc
from funcollect.envs.host.lane_workers import simulators
from funcollect.processes import pool
from funcollect.processes.system import SIGNS
from tests.envs.test_torch_vector_env import LikeManiSkill
from tests.support.envs.counting import make_counting
from tests.support.envs.lane_workers import workers_of
from tests.support.faulty.faulty_workers import Plain
from tests.support.running import AN_EVENING_OVER_RAY, FORKS_OF_RAY
from tests.support.worker_runs import wait_until
from tests.support.workers import FOREVER, multi, ray_collector

pytestmark = FORKS_OF_RAY


class Paced(Plain):
    """Each step appends a byte to the file ``arrived``, and waits until ``allowed`` has as many."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def step(self, action):
        with open(self.folder / "arrived", "ab") as file:
            file.write(b".")
            place = file.tell()
        while size_of(self.folder / "allowed") < place:
            os.sched_yield()
        return super().step(action)


def size_of(file):
    return file.stat().st_size if file.exists() else 0


class StepClock:
    """Goes on by some seconds with each step that a `Paced` environment makes, and stands still in between.

    Args:
        steps: after so many the environment is no longer held.

    Attributes:
        signs: returns a number that changes with each sign of life that the awaited process shows, as far as the
            waiting one knows; the clock goes on once it has changed. Set by the test.
    """

    sleep = staticmethod(time.sleep)

    def __init__(self, folder, seconds, steps):
        self._folder, self._seconds, self._steps = folder, seconds, steps
        self._now, self._allowed, self._seen = 0.0, 0, 0

    def monotonic(self):
        arrived = size_of(self._folder / "arrived")
        if self._allowed < arrived < self._steps:
            self._allow(self._allowed + 1)
            wait_until(lambda: self.signs() != self._seen)
            self._seen = self.signs()
            self._now += self._seconds
        elif arrived >= self._steps:
            self._allow(1 << 12)
        return self._now

    def _allow(self, count):
        self._allowed = count
        (self._folder / "allowed").write_bytes(bytes(count))


def lanes_of(folder, count, **kwargs):
    return fc.make_env([functools.partial(Paced, folder)] * count, **kwargs)


LIMITS = {"timeout": 2, "start_timeout": 2}
WORKERS = {
    "steps": (multi, 1, {}),
    "lanes of one step": (multi, 12, {}),
    "lanes over processes in a worker": (multi, 6, {"num_workers": 1}),
    "Ray": (ray_collector, 1, {}),
    "workers in an actor": (ray_collector, 1, {}),
}
NESTED = {"collector_class": fc.MultiSyncDataCollector, "collector_kwargs": dict.fromkeys(LIMITS, FOREVER)}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(each, marks=AN_EVENING_OVER_RAY if WORKERS[each][0] is ray_collector else ()) for each in WORKERS],
)
def test_a_rollout_may_last_longer_than_the_timeout_of_its_worker(kind, tmp_path, monkeypatch, request):
    """A second passes in each step, and two are the limit of silence."""
    make, lanes, spread = WORKERS[kind]
    if make is ray_collector:
        request.getfixturevalue("ray_cluster")
    kwargs = LIMITS | (NESTED if kind == "workers in an actor" else {})
    made = [functools.partial(lanes_of, tmp_path, lanes, **spread)]
    clock = StepClock(tmp_path, 1.0, 12 if kind in ("steps", "lanes of one step", "Ray") else 4)
    monkeypatch.setattr(pool, "time", clock)
    with make(create_env_fn=made, policy=None, frames_per_batch=12, **kwargs) as collector:
        clock.signs = collector.run.records[0].handle.signs
        assert next(collector).numel() == 12


def test_an_order_may_last_longer_than_the_timeout_of_worker_lanes(tmp_path, monkeypatch):
    monkeypatch.setattr(simulators, "SLICE", 0.01)
    env = lanes_of(tmp_path, 6, num_workers=1, timeout=2)
    policy = fc.random_policy(env)
    state = fc.init(env, policy, seed=0)
    clock = StepClock(tmp_path, 1.0, 12)
    clock.signs = workers_of(state)[0].signs
    for module in (simulators, pool):
        monkeypatch.setattr(module, "time", clock)
    state, batch = fc.rollout(env, policy, state, 2)
    assert batch.numel() == 12
    monkeypatch.undo()
    fc.close(state)


ENVS = {
    "simulators": lambda: make_counting("vector", {}, {}),
    "tensors": lambda: fc.make_env("torch/CartPole-v1", num_envs=2),
    "a device": lambda: fc.envs.from_torch_vector_env(LikeManiSkill),
    "JAX with Torch": lambda: fc.make_env("gymnax/CartPole-v1", num_envs=2),
}


@pytest.mark.parametrize("env", ENVS)
def test_a_step_is_a_sign_on_every_loop_that_makes_single_ones(env):
    env = ENVS[env]()
    compiler = {"compile": "eager"} if env.backend == "jax" else {}
    policy = fc.torch_policy(lambda observation: torch.zeros(len(observation), dtype=torch.int64), **compiler)
    state = fc.init(env, policy, seed=0)
    before = SIGNS.count[0]
    fc.rollout(env, policy, state, 7)
    assert SIGNS.count[0] - before == 7
