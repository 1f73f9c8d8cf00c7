"""Parameters as an argument, and the policy's own as they are at each rollout."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

import funcollect as fc
from funcollect.policies.as_policy import as_policy
from tests.support.cases import Recurrent, jax_weights, make_env, mlp
from tests.support.compare import assert_same, joined

HIDDEN = 5


def policies(seed=0):
    """Modules by kind, each with the policy over it."""
    plain, recurrent, inner = mlp(4, 2, seed), Recurrent(4, 2, seed), mlp(4, 2, seed)
    tensordict = TensorDictModule(nn.Sequential(inner, Argmax()), ["observation"], ["action"])
    return {
        "plain": (plain, fc.torch_policy(plain, head=fc.heads.categorical)),
        "recurrent": (
            recurrent,
            fc.torch_policy(recurrent, head=fc.heads.categorical, initial_state=torch.zeros(HIDDEN)),
        ),
        "tensordict": (tensordict, as_policy(tensordict, make_env("CartPole-v1", None))),
    }


class Argmax(nn.Module):
    def forward(self, answer):
        return (answer + torch.randn_like(answer)).argmax(-1)


KINDS = ["plain", "recurrent", "tensordict"]


def collect(env, policy, between=lambda batch: None, params=(None, None)):
    """Two rollouts with something done between them."""
    state = fc.init(env, policy, seed=0)
    state, first = fc.rollout(env, policy, state, 30, params=params[0])
    between(first)
    state, second = fc.rollout(env, policy, state, 30, params=params[1])
    fc.close(state)
    return joined([first, second])


def snapshot(module):
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def train(module, fused=True):
    """A step of Adam big enough to change what is done."""
    optimizer = torch.optim.Adam(module.parameters(), lr=2.0, fused=fused)
    sum(parameter.square().sum() + parameter.sum() for parameter in module.parameters()).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", ["CartPole-v1", "torch/CartPole-v1"])
@pytest.mark.parametrize("num_envs", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_optimizer_step_is_seen_by_the_next_rollout(kind, num_envs, name):
    """With no parameters given, as with the module's before and after the step given as an argument."""
    env = make_env(name, num_envs)
    module, policy = policies()[kind]
    versions = []

    def between(batch):
        versions.append(snapshot(module))
        versions.append(batch.clone())
        train(module)
        versions.append(snapshot(module))

    trained = collect(env, policy, between)
    before, _, after = versions
    assert not torch.equal(before[next(iter(before))], after[next(iter(after))])
    untrained_module, untrained = policies()[kind]
    still = collect(env, untrained)
    assert not torch.equal(trained["action"][..., 30:], still["action"][..., 30:])
    assert_same(trained[..., :30], still[..., :30])
    assert_same(trained, collect(env, untrained, params=(before, after)))
    assert_same(trained, collect(env, untrained, params=(TensorDict(before), TensorDict(after))))
    assert all(torch.equal(tensor, before[key]) for key, tensor in untrained_module.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_given_parameters_leave_the_module_alone(kind):
    env = make_env("CartPole-v1", 3)
    module, policy = policies()[kind]
    others, other = policies(seed=1)[kind]
    wanted = collect(env, other)
    train_flags = [each.training for each in module.modules()]
    before, tensors = snapshot(module), list(module.parameters())
    nested = TensorDict.from_module(others).detach()
    for given in (others.state_dict(), nested, nested.flatten_keys("."), nested.to_dict()):
        assert_same(wanted, collect(env, policy, params=(given, given)))
        assert all(one is two for one, two in zip(module.parameters(), tensors, strict=True))
        assert all(torch.equal(tensor, before[key]) for key, tensor in module.state_dict().items())
        assert [each.training for each in module.modules()] == train_flags
        assert all(tensor.grad is None for tensor in tensors)
    assert all(tensor.requires_grad for tensor in others.parameters())
    assert_same(collect(env, policy), collect(env, policies()[kind][1]))  # its own again


def test_a_policys_own_params_are_what_it_takes():
    env = make_env("CartPole-v1", 2)
    for kind in KINDS:
        module, policy = policies()[kind]
        assert_same(collect(env, policy), collect(env, policy, params=(policy.params, policy.params)))
        assert isinstance(policy.params, TensorDict)
        assert len(list(policy.params.keys(True, True))) == len(module.state_dict())


def jax_policy(params):
    return fc.jax_policy(lambda params, x: x @ params["w"], params, head=fc.heads.categorical)


@pytest.mark.parametrize("name", ["CartPole-v1", "torch/CartPole-v1"])
def test_replaced_jax_parameters_are_seen(name):
    env = make_env(name, 3)
    one, two = {"w": jax_weights(4, 2, 0) * 5}, {"w": jax_weights(4, 2, 1) * 5}
    policy = jax_policy(one)

    def between(_):
        policy.params = two

    replaced = collect(env, policy, between)
    policy.params = one
    assert_same(replaced, collect(env, policy, params=(None, two)))
    assert_same(replaced, collect(env, jax_policy(two), params=(one, None)))
    assert policy.params is one
    assert not torch.equal(replaced["action"], collect(env, policy)["action"])


def test_numpy_parameters_written_in_place_are_seen():
    env = make_env("CartPole-v1", 3)
    one, two = np.asarray(jax_weights(4, 2, 0)) * 5, np.asarray(jax_weights(4, 2, 1)) * 5
    policy = jax_policy({"w": one.copy()})

    def between(_):
        policy.params["w"][...] = two

    wanted = collect(env, jax_policy({"w": jnp.asarray(one)}), params=(None, {"w": jnp.asarray(two)}))
    assert_same(wanted, collect(env, policy, between))
