"""Weights of lowered policies on a GPU, which both frameworks have in one memory."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

import funcollect as fc
from funcollect.core.loops import over_jax
from funcollect.interop import to_jax, to_torch
from funcollect.interop.bridge import joining, opened, torch_followed
from funcollect.policies import torch_in_jax
from tests.support.cases import mlp
from tests.support.compare import assert_same, collect
from tests.support.devices import each_device
from tests.support.running import scaled

CARTPOLE = "gymnax/CartPole-v1"
pytestmark = each_device


@pytest.fixture(autouse=True)
def as_on_a_gpu(device, monkeypatch):
    """Policies join their tensors, and loops run in blocks, on the CPU too."""
    if device == "cpu":
        monkeypatch.setattr(torch_in_jax, "_can_join", bool)
        monkeypatch.setattr(over_jax, "waits_for_host", lambda place: True)


def network(device):
    return mlp(4, 2).to(device)


def lowered(module):
    return fc.torch_policy(module, head=fc.heads.categorical, compile="xla")


def test_traced_code_reads_what_was_written_last(device):
    tensors = {
        "weight": torch.arange(6.0, device=device).view(2, 3).T,
        "count": torch.tensor(7, dtype=torch.int32, device=device),
        "none": torch.zeros(0, 3, device=device),
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16, device=device),
        "mask": torch.tensor([[True], [False]], device=device),
        "bias": torch.tensor([8.0], device=device, requires_grad=True),
    }
    copied = joining(tensors, dict)
    found = jax.jit(lambda given: {name: jnp.copy(leaf) for name, leaf in opened(given)["params"].items()})
    for factor in (1, 2):
        wanted = {name: (tensor * factor).to(tensor.dtype).detach() for name, tensor in tensors.items()}
        with torch_followed(jax.devices()[0]):
            joined = copied(wanted)
        assert len(jax.tree.leaves(joined)) == 4
        for name, array in found({"params": joined}).items():
            assert torch.equal(to_torch(array), wanted[name])
            assert array.dtype == to_jax(tensors[name]).dtype
    assert found._cache_size() == 1


@pytest.mark.parametrize("env_id", [CARTPOLE, "CartPole-v1"])
def test_each_rollout_reads_the_weights_of_its_time(device, env_id):
    """Those of the module, also if it is trained between rollouts, and those that are passed."""
    env, module = fc.make_env(env_id, num_envs=4), network(device)
    copies = [network(device) for _ in range(2)]
    with torch.no_grad():
        for parameter in copies[1].parameters():
            parameter.mul_(-2)
    policy, passing = lowered(module), lowered(network(device))
    state, again = fc.init(env, policy, seed=0), fc.init(env, passing, seed=0)
    for each in (*copies, copies[0]):
        module.load_state_dict(each.state_dict())
        state, batch = fc.rollout(env, policy, state, 20)
        again, other = fc.rollout(env, passing, again, 20, params=dict(each.state_dict()))
        assert_same(batch, other)
        now = fc.evaluate_actions(lowered(each), None, batch, env=env)["action_log_prob"]
        torch.testing.assert_close(now.to(batch.device or now.device), batch["action_log_prob"].to(now.device))
    fc.close(state)
    fc.close(again)


def test_threads_do_not_read_the_weights_of_others(device):
    env, policy = fc.make_env(CARTPOLE, num_envs=4), lowered(network(device))
    many = [{name: scale * each for name, each in policy.module.state_dict().items()} for scale in (-3.0, 1.0, 3.0)]
    state = fc.init(env, policy, seed=0)
    wanted = [fc.rollout(env, policy, state, 50, params=params)[1] for params in many]

    def run(params):
        return [fc.rollout(env, policy, state, 50, params=params)[1] for _ in range(scaled(5))]

    with ThreadPoolExecutor(len(many)) as threads:
        for batch, found in zip(wanted, threads.map(run, many), strict=True):
            for each in found:
                assert_same(batch, each)


@pytest.mark.parametrize(
    ("env_id", "head"), [(CARTPOLE, fc.heads.categorical), ("CartPole-v1", fc.heads.epsilon_greedy(0.5))]
)
def test_weights_act_alike_in_each_form(device, head, env_id):
    env, module = fc.make_env(env_id, num_envs=4), network(device)
    policy = fc.torch_policy(module, head=head, compile="xla")
    arrays = fc.lower_policy(policy, env).params
    on_the_cpu = {name: tensor.cpu() for name, tensor in module.state_dict().items()}
    state = fc.init(env, policy, seed=0)
    for given in (arrays, None, on_the_cpu, dict(module.state_dict()), arrays):
        state, batch = fc.rollout(env, policy, state, 5, params=given)
        now = fc.evaluate_actions(fc.torch_policy(module, head=head), None, batch, env=env)["action_log_prob"]
        torch.testing.assert_close(now.cpu(), batch["action_log_prob"].cpu(), rtol=1e-4, atol=1e-4)
    fc.close(state)


def test_modules_without_parameters_inference_mode_and_copied_params(device):
    env, policy = fc.make_env(CARTPOLE, num_envs=4), lowered(nn.Softplus())
    with pytest.raises(fc.PolicyError, match="wants"):
        collect(env, policy, 5)
    policy = lowered(network(device))
    with torch.inference_mode():
        state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), 5)
    fc.rollout(env, policy, state, 5)
    in_jax = fc.lower_policy(policy, env)
    params = in_jax.params
    kept = jax.tree.map(jnp.copy, params)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.zero_()
    collect(env, policy, 20)
    assert all(map(jnp.array_equal, jax.tree.leaves(params), jax.tree.leaves(kept)))
    assert not any(leaf.any() for leaf in jax.tree.leaves(in_jax.params))
    assert not any(tensor.any() for tensor in in_jax.state_dict(in_jax.prepare(None)).values())
