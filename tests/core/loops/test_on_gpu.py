"""Loops whose host does not wait for the device: what the page "One GPU for JAX and Torch" says of them."""

import gymnasium
import pytest
import torch
from torch import nn

import funcollect as fc
from funcollect.core.loops import device as device_loop
from funcollect.core.loops import fused, tensor
from funcollect.interop.cuda_graph import CudaGraph
from tests.envs.torch.test_torch_vector_env import LikeIsaacLab
from tests.support.captured_calls import capture_on_the_cpu
from tests.support.devices import each_device, forbid_waits

LENGTH = 70  # more than two blocks, or graphs
CARTPOLE, PENDULUM = "torch/CartPole-v1", "torch/Pendulum-v1"


@pytest.fixture
def as_on_a_gpu(device, monkeypatch):
    """Loops that do not read, on the CPU too."""
    if device == "cpu":
        monkeypatch.setattr(fused, "waits_for_host", lambda place: True)
        monkeypatch.setattr(tensor, "reads_wait", lambda device: True)


def network(inputs, outputs, place, head, **kwargs):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))
    return fc.torch_policy(module.to(place), head=head, **kwargs)


def twice(env, policy, before_the_second=lambda: None):
    """Two batches of one run; what is made once, such as constants, is made in the first."""
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), LENGTH)
    before_the_second()
    state, batch = fc.rollout(env, policy, state, LENGTH)
    fc.close(state)
    return batch


@each_device
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("env_id", [CARTPOLE, PENDULUM])
def test_steps_of_torch_do_not_wait(device, env_id, monkeypatch):
    env = fc.make_env(env_id, num_envs=8, device=device)
    policy = network(4, 2, device, fc.heads.categorical) if env_id == CARTPOLE else network(3, 2, device, fc.heads.normal)
    calls = []
    batch = twice(env, policy, lambda: calls.append(forbid_waits(monkeypatch, tensor.TensorLoop, "run", device)))
    assert calls == [["run"]]
    assert {leaf.device.type for leaf in batch.values(True, True)} == {device}


@each_device
def test_cuda_graphs_do_not_wait(device, monkeypatch):
    if device == "cpu":
        capture_on_the_cpu(monkeypatch)
    env = fc.make_env(CARTPOLE, num_envs=8, device=device)
    policy = network(4, 2, device, fc.heads.categorical, compile="cudagraph")
    calls = []
    twice(env, policy, lambda: calls.append(forbid_waits(monkeypatch, CudaGraph, "__call__", device)))
    assert calls == [["__call__"] * 3]


@each_device
def test_steps_of_simulators_on_the_device_do_not_wait(device, monkeypatch):
    env = fc.envs.from_torch_vector_env(lambda: gymnasium.Wrapper(LikeIsaacLab(device=device)))
    inner = network(2, 3, device, None).module
    policy = fc.torch_policy(lambda x: inner(x["policy"]), head=fc.heads.categorical, device=device)
    calls = []
    batch = twice(env, policy, lambda: calls.append(forbid_waits(monkeypatch, device_loop._Lanes, "step", device)))
    assert len(calls[0]) == LENGTH
    assert batch["next", "done"].any()
