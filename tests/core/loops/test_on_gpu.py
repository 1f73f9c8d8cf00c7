"""Loops whose host does not wait for the device: what the page "One GPU for JAX and Torch" says of them."""

import gymnasium
import pytest
import torch
from torch import nn

import funcollect as fc
from funcollect.core.loops import device as device_loop
from funcollect.core.loops import eager, over_jax, tensor
from funcollect.core.loops.blocks import BlockOptions
from funcollect.interop.cuda_graph import CudaGraph
from tests.envs.test_torch_vector_env import LikeIsaacLab
from tests.support.captured_calls import capture_on_the_cpu
from tests.support.compare import assert_same, collect
from tests.support.devices import each_device, forbid_waits
from tests.support.running import in_soak


def on_gpu(cases):
    """Further cases where there is a GPU, or in `make soak`."""
    return list(cases) if torch.cuda.is_available() else in_soak(cases)


LENGTH = 70  # more than two blocks, or graphs
CARTPOLE, PENDULUM = "torch/CartPole-v1", "torch/Pendulum-v1"


@pytest.fixture
def as_on_a_gpu(device, monkeypatch):
    """Loops that do not read, on the CPU too."""
    if device == "cpu":
        monkeypatch.setattr(over_jax, "waits_for_host", lambda place: True)
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
    policy = (
        network(4, 2, device, fc.heads.categorical) if env_id == CARTPOLE else network(3, 2, device, fc.heads.normal)
    )
    calls = []
    batch = twice(env, policy, lambda: calls.append(forbid_waits(monkeypatch, eager, "step_all", device)))
    assert calls == [["step_all"]]
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
    owner = device_loop._DeviceStepper
    batch = twice(env, policy, lambda: calls.append(forbid_waits(monkeypatch, owner, "step", device)))
    assert len(calls[0]) == LENGTH
    assert batch["next", "done"].any()


@each_device
@pytest.mark.parametrize(
    ("kind", "made_each_step"), [("network", True), ("random", False), *on_gpu([("network", False), ("random", True)])]
)
def test_blocks_give_what_branches_give(device, kind, made_each_step, monkeypatch):
    env = fc.make_env("gymnax/CartPole-v1", num_envs=64)
    made = network(4, 2, device, fc.heads.categorical, compile="xla")
    policy = made if kind == "network" else fc.random_policy(env)
    monkeypatch.setattr(over_jax, "waits_for_host", lambda place: False)
    wanted = collect(env, policy, 61, 64)
    monkeypatch.setattr(over_jax, "waits_for_host", lambda place: True)
    monkeypatch.setattr(over_jax.block_loop, "__defaults__", (BlockOptions(made_each_step=made_each_step),))
    assert wanted["next", "done"].any()
    assert_same(wanted, collect(env, policy, 61, 64))


@each_device
@pytest.mark.usefixtures("as_on_a_gpu")
def test_cuts_of_the_fused_loop_change_nothing(device):
    env = fc.make_env("gymnax/CartPole-v1", num_envs=64)
    policy = network(4, 2, device, fc.heads.categorical, compile="xla")
    assert_same(collect(env, policy, 100), collect(env, policy, 1, 2, 32, 65))


@each_device
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("policy", [fc.torch_policy(torch.nn.Linear(4, 2), head=fc.heads.categorical), *on_gpu([None])])
def test_a_state_gives_the_same_answer_again_and_a_collector_uses_its_own_up(policy, device):
    kwargs = {"frames_per_batch": 400, "create_env_kwargs": {"num_envs": 4}}
    with fc.SyncDataCollector("gymnax/CartPole-v1", policy, **kwargs) as one:
        old, kept = one.state, fc.fork(one.env, one.state)
        first, second = next(one), next(one)
        with pytest.raises(ValueError, match=r"was donated or deleted.*take a funcollect.fork"):
            fc.rollout(one.env, one.policy, old, 100)
        for _ in range(2):
            state, batch = fc.rollout(one.env, one.policy, kept, 100)
            assert_same(batch, first)
        assert_same(fc.rollout(one.env, one.policy, state, 100)[1], second)
