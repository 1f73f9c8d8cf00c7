"""Proxies of a `multiprocessing.Manager` work in every kind of process; scripts that spawn processes reach workers."""

import functools
import multiprocessing
import subprocess
import sys

import pytest

from tests.support.faulty.faulty_workers import Plain
from tests.support.running import AN_EVENING_OVER_RAY, FORKS_OF_RAY, ROOT
from tests.support.workers import multi, ray_collector

pytestmark = FORKS_OF_RAY


class Counted(Plain):
    """Writes its steps into a list of the manager's."""

    def __init__(self, steps):
        super().__init__()
        self.log = steps

    def step(self, action):
        self.log.append(self.steps)
        return super().step(action)


KINDS = {"a process": multi, "an actor of Ray": ray_collector}


@pytest.fixture(scope="module")
def manager():
    with multiprocessing.get_context("spawn").Manager() as manager:
        yield manager


@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=AN_EVENING_OVER_RAY if "Ray" in each else ()) for each in KINDS]
)
def test_an_environment_uses_a_proxy(kind, manager, request):
    if "Ray" in kind:
        request.getfixturevalue("ray_cluster")
    steps = manager.list()
    env = functools.partial(Counted, steps)
    with KINDS[kind](create_env_fn=[env], policy=None, frames_per_batch=2) as collector:
        next(collector)
    assert steps[0] == 0


SCRIPT = """
import gymnasium
import torch.multiprocessing as mp
from torch import nn

import funcollect as fc


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x).argmax(-1)


class Wrapped(gymnasium.Wrapper):
    pass


def make_env():
    return Wrapped(gymnasium.make("CartPole-v1"))


def work(rank):
    for kind in (fc.MultiSyncDataCollector, fc.MultiaSyncDataCollector):
        net = Net()
        with kind([make_env] * 2, fc.torch_policy(net), frames_per_batch=20, total_frames=40) as collector:
            for batch in collector:
                net.register_forward_hook(lambda *_: None)
                collector.update_policy_weights_()
                print(batch.numel(), flush=True)
    env = fc.make_env(make_env, num_envs=2, parallel=True)
    state = fc.init(env, fc.torch_policy(Net()), seed=0)
    state, batch = fc.rollout(env, fc.torch_policy(Net()), state, 5)
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
