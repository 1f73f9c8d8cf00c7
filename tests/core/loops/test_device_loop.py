"""The loop over Torch environments as on an accelerator, run on the CPU: the same data, and no tensor is read."""

from types import SimpleNamespace

import pytest
import torch

import funcollect as fc
from funcollect.core.loops import tensor
from funcollect.core.loops.eager import step_all
from funcollect.core.request import Request, step_limit
from funcollect.interop.memory import reads_together
from tests.support.compare import assert_same
from tests.support.devices import NoReads

CARTPOLE, PENDULUM = "torch/CartPole-v1", "torch/Pendulum-v1"


def policies():
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    return {
        (CARTPOLE, "random"): None,
        (CARTPOLE, "network"): fc.torch_policy(network, head=fc.heads.categorical),
        (PENDULUM, "random"): None,
    }


def batches(name, policy, num_envs, **kwargs):
    env = fc.make_env(name, num_envs=num_envs)
    policy = fc.random_policy(env) if policy is None else policy
    with fc.SyncDataCollector(env, policy, frames_per_batch=60 * (num_envs or 1), total_frames=-1, **kwargs) as one:
        return [next(one) for _ in range(3)], one.state


@pytest.mark.parametrize("num_envs", [None, 3])
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"max_frames_per_traj": 7}, {"reset_when_done": False}, {"init_random_frames": 90}],
    ids=["plain", "limit", "finished", "random"],
)
@pytest.mark.parametrize(("name", "kind"), policies())
def test_data_and_states_are_those_of_the_cpu(name, kind, kwargs, num_envs, monkeypatch):
    policy = policies()[name, kind]
    wanted, before = batches(name, policy, num_envs, seed=1, **kwargs)
    monkeypatch.setattr(tensor, "reads_wait", lambda device: True)
    got, after = batches(name, policy, num_envs, seed=1, **kwargs)
    for one, two in zip(wanted, got, strict=True):
        assert_same(one, two)
    for field in ("episode", "step", "returns", "terminated", "truncated"):
        one, two = getattr(before, field), getattr(after, field)
        assert (one.dtype, one.tolist()) == (two.dtype, two.tolist()), field


@pytest.mark.parametrize("kwargs", [{}, {"max_frames_per_traj": 7}, {"reset_when_done": False}], ids=str)
@pytest.mark.parametrize(("name", "kind"), policies())
def test_nothing_is_read_before_the_batch_is_delivered(name, kind, kwargs, monkeypatch):
    monkeypatch.setattr(tensor, "reads_wait", lambda device: True)
    env = fc.make_env(name, num_envs=4)
    policy = policies()[name, kind] or fc.random_policy(env)
    request = Request(length=30, **kwargs)
    state = fc.init(env, policy, seed=0)
    lanes, limit = tensor.TensorLanes.of(state), step_limit(env, request)
    stepper = tensor.TensorStepper(env, policy, state, request, lanes, limit)
    stepper.begin()
    action = torch.zeros(4, *env.action_spec.shape, dtype=env.action_spec.dtype)
    still = SimpleNamespace(act=lambda t: action, restart=lambda lanes: None)
    actions = {("action",): action.expand(30, *action.shape)}
    with reads_together(), NoReads():
        step_all(stepper, still, request.length)
        stepper.deliver(actions)
