"""Every kind of process: a step is a sign of life (`timeout` is about silence), and the user's own processes."""

import functools
import multiprocessing
import os
import subprocess
import sys
import time

import pytest
import torch

import funcollect as fc
from funcollect.envs.host.lane_workers import lane_pool
from funcollect.processes import pool
from funcollect.processes.system import SIGNS
from tests.envs.test_torch_vector_env import LikeManiSkill
from tests.support.compare import fresh
from tests.support.envs.counting import make_counting
from tests.support.faulty.faulty_workers import Plain, workers_of
from tests.support.running import AN_EVENING_OVER_RAY, FORKS_OF_RAY, ROOT
from tests.support.workers import FOREVER, descendants, gone, multi, ray_collector, wait_until

pytestmark = [pytest.mark.usefixtures("ray_cluster_if_marked"), FORKS_OF_RAY]


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
NESTED = {"collector_class": fc.MultiSyncDataCollector, "collector_kwargs": dict.fromkeys(LIMITS, FOREVER)}


@pytest.mark.parametrize(("make", "lanes", "spread", "steps", "kwargs"), [
    pytest.param(multi, 1, {}, 12, {}, id="steps"),
    pytest.param(multi, 12, {}, 12, {}, id="lanes of one step"),
    pytest.param(multi, 6, {"num_workers": 1}, 4, {}, id="lanes over processes in a worker"),
    pytest.param(ray_collector, 1, {}, 12, {}, id="Ray", marks=AN_EVENING_OVER_RAY),
    pytest.param(ray_collector, 1, {}, 4, NESTED, id="workers in an actor", marks=AN_EVENING_OVER_RAY),
])  # fmt: skip
def test_a_rollout_may_outlast_the_timeout_of_its_worker(make, lanes, spread, steps, kwargs, tmp_path, monkeypatch):
    made = [functools.partial(lanes_of, tmp_path, lanes, **spread)]
    clock = StepClock(tmp_path, 1.0, steps)
    monkeypatch.setattr(pool, "time", clock)
    with make(create_env_fn=made, policy=None, frames_per_batch=12, **LIMITS, **kwargs) as collector:
        clock.signs = collector.run.records[0].handle.signs
        assert next(collector).numel() == 12
        own = [] if make is ray_collector else descendants(collector.run.records[0].handle.pid)
    assert len(own) == 2 * bool(spread)  # the server that forks, and the worker of the lanes
    wait_until(lambda: all(map(gone, own)))


def test_an_order_may_last_longer_than_the_timeout_of_worker_lanes(tmp_path, monkeypatch):
    monkeypatch.setattr(lane_pool, "SLICE", 0.01)
    env, policy, state = fresh(lanes_of(tmp_path, 6, num_workers=1, timeout=2))
    clock = StepClock(tmp_path, 1.0, 12)
    clock.signs = workers_of(state)[0].signs
    for module in (lane_pool, pool):
        monkeypatch.setattr(module, "time", clock)
    assert fc.rollout(env, policy, state, 2)[1].numel() == 12
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


# Other processes of the user: a manager's proxies, and a script that spawns them.
class Counted(Plain):
    """Writes its steps into a list of the manager's."""

    def __init__(self, steps):
        super().__init__()
        self.log = steps

    def step(self, action):
        self.log.append(self.steps)
        return super().step(action)


@pytest.fixture(scope="module")
def manager():
    with multiprocessing.get_context("spawn").Manager() as manager:
        yield manager


@pytest.mark.parametrize("make", [multi, pytest.param(ray_collector, marks=AN_EVENING_OVER_RAY)])
def test_an_environment_uses_a_proxy(make, manager):
    steps = manager.list()
    with make(create_env_fn=[functools.partial(Counted, steps)], policy=None, frames_per_batch=2) as collector:
        next(collector)
    assert steps[0] == 0


SCRIPT = """
import gymnasium
import torch.multiprocessing as mp
from torch import nn
import funcollect as fc

class Net(nn.Linear):
    def forward(self, x):
        return super().forward(x).argmax(-1)

class Wrapped(gymnasium.Wrapper):
    pass

def make_env():
    return Wrapped(gymnasium.make("CartPole-v1"))

def work(rank):
    for kind in (fc.MultiSyncDataCollector, fc.MultiaSyncDataCollector):
        net = Net(4, 2)
        with kind([make_env] * 2, fc.torch_policy(net), frames_per_batch=20, total_frames=40) as collector:
            for batch in collector:
                net.register_forward_hook(lambda *_: None)
                collector.update_policy_weights_()
                print(batch.numel(), flush=True)
    env, policy = fc.make_env(make_env, num_envs=2, parallel=True), fc.torch_policy(Net(4, 2))
    state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 5)
    print(batch.numel(), flush=True)
    fc.close(state)

if __name__ == "__main__":
    mp.spawn(work, nprocs=1)
"""


@pytest.mark.evening
def test_what_a_script_defines_reaches_workers_of_a_process_that_it_spawned(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["20", "20", "20", "20", "10"]
