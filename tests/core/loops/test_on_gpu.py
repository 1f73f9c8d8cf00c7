"""Loops that do not wait for the device, as the page "One GPU for JAX and Torch" states."""

import gymnasium
import pytest

import funcollect as fc
from funcollect.core.loops import device as device_loop
from funcollect.core.loops import eager, over_jax, tensor
from funcollect.interop.cuda_graph import CudaGraph
from tests.envs.test_torch_vector_env import IsaacLab
from tests.support.cases import mlp
from tests.support.compare import assert_same, collect
from tests.support.devices import GPU_FIRST, capture_on_the_cpu, each_device, forbid_waits
from tests.support.running import in_soak

LENGTH = 20  # more than two graphs of the 8 steps that they have here
CARTPOLE, PENDULUM = "torch/CartPole-v1", "torch/Pendulum-v1"


@pytest.fixture
def as_on_a_gpu(device, monkeypatch):
    """Loops that read no tensor during a rollout, on the CPU too."""
    if device == "cpu":
        monkeypatch.setattr(over_jax, "waits_for_host", lambda place: True)
        monkeypatch.setattr(tensor, "reads_wait", lambda device: True)


def network(inputs, outputs, place, head, **kwargs):
    return fc.torch_policy(mlp(inputs, outputs).to(place), head=head, **kwargs)


def twice(env, policy, before_the_second=lambda: None):
    """Two batches of one run; things that are made only once, such as constants, are made in the first."""
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), LENGTH)
    before_the_second()
    vars(state).pop("opened", None)  # the open loop holds functions that may be patched now
    state, batch = fc.rollout(env, policy, state, LENGTH)
    fc.close(state)
    return batch


@each_device
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("env_id", [CARTPOLE, PENDULUM])
def test_steps_of_torch_do_not_wait(device, env_id, monkeypatch):
    env = fc.make_env(env_id, num_envs=8, device=device)
    (inputs,), head = env.observation_space.shape, fc.heads.categorical if env_id == CARTPOLE else fc.heads.normal
    policy, calls = network(inputs, 2, device, head), []
    batch = twice(env, policy, lambda: calls.append(forbid_waits(monkeypatch, eager.Stepper, "make_steps", device)))
    assert calls == [["make_steps"]]
    assert {leaf.device.type for leaf in batch.values(True, True)} == {device}


@each_device
def test_cuda_graphs_do_not_wait(device, monkeypatch):
    if device == "cpu":
        capture_on_the_cpu(monkeypatch)
    monkeypatch.setattr(tensor, "STEPS", 8)
    env = fc.make_env(CARTPOLE, num_envs=8, device=device)
    policy = network(4, 2, device, fc.heads.categorical, compile="cudagraph")
    calls = []
    twice(env, policy, lambda: calls.append(forbid_waits(monkeypatch, CudaGraph, "__call__", device)))
    assert calls == [["__call__"] * 3]


@each_device
def test_steps_of_simulators_on_the_device_do_not_wait(device, monkeypatch):
    env = fc.envs.from_torch_vector_env(lambda: gymnasium.Wrapper(IsaacLab(device=device)))
    inner = network(2, 3, device, None).module
    policy = fc.torch_policy(lambda x: inner(x["policy"]), head=fc.heads.categorical, device=device)
    calls, owner = [], device_loop._DeviceStepper
    batch = twice(env, policy, lambda: calls.append(forbid_waits(monkeypatch, owner, "step", device)))
    assert len(calls[0]) == LENGTH
    assert batch["next", "done"].any()


@pytest.mark.parametrize("device", GPU_FIRST)
@pytest.mark.usefixtures("as_on_a_gpu")
def test_cuts_of_the_fused_loop_change_nothing(device):
    env = fc.make_env("gymnax/CartPole-v1", num_envs=64)
    policy = network(4, 2, device, fc.heads.categorical, compile="xla")
    assert_same(collect(env, policy, 16), collect(env, policy, 1, 2, 13))  # of which only 16 steps are unrolled


@pytest.mark.parametrize("device", GPU_FIRST)  # on the CPU, test_blocks.py has a collector that goes on
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("policy", [fc.torch_policy(mlp(4, 2), head=fc.heads.categorical), *in_soak([None])])
def test_a_state_gives_the_same_answer_again_and_a_collector_uses_its_own_up(policy, device):
    kwargs = {"frames_per_batch": 60, "create_env_kwargs": {"num_envs": 4}}  # 15 steps, which are not unrolled
    with fc.SyncDataCollector("gymnax/CartPole-v1", policy, **kwargs) as one:
        old, kept = one.state, fc.fork(one.env, one.state)
        first, second = next(one), next(one)
        with pytest.raises(ValueError, match=r"was donated or deleted.*take a funcollect.fork"):
            fc.rollout(one.env, one.policy, old, 15)
        for _ in range(2):
            state, batch = fc.rollout(one.env, one.policy, kept, 15)
            assert_same(batch, first)
        assert_same(fc.rollout(one.env, one.policy, state, 15)[1], second)
