"""In a process that `torch.multiprocessing.spawn` started, the functions and classes of the script reach workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.running import ROOT

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
def test_what_the_script_defines_reaches_workers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["20", "20", "20", "20", "10"]
