"""A JAX policy over Torch tensors, DLPack each way: what it answers is what it answers over NumPy rows."""

import jax.numpy as jnp
import pytest
import torch

import funcollect as fc
from funcollect.core.loops import tensor
from funcollect.specs import assemble
from tests.support.cases import jax_keyed, jax_mlp, jax_recurrent, make_env
from tests.support.compare import assert_same, collect


@pytest.fixture
def over_tensors(monkeypatch):
    """The path that an accelerator takes, taken on the CPU."""

    monkeypatch.setattr(tensor, "as_read", lambda env, policy, root: assemble(env.observation_space, root))


@pytest.mark.parametrize("make", [jax_mlp, jax_keyed, jax_recurrent])
@pytest.mark.parametrize("name", ["torch/CartPole-v1", "torch/Pendulum-v1"])
def test_cuts_change_nothing(over_tensors, make, name):
    env = make_env(name, 3)
    policy = make(env)
    whole = collect(env, policy, 40)
    assert_same(whole, collect(env, policy, 1, 2, 37))
    assert whole["next", "done"].any()


def test_answers_as_over_rows(over_tensors, request):
    env = make_env("torch/CartPole-v1", 3)
    policy = fc.jax_policy(lambda params, x: (x[:, 2] > 0).astype(jnp.int32), None)
    over = collect(env, policy, 40)
    request.getfixturevalue("monkeypatch").undo()
    assert_same(over, collect(env, policy, 40))


def test_a_recurrent_state_begins_anew_with_each_episode(over_tensors):
    env = make_env("torch/CartPole-v1", 3)

    def apply(params, x, count):
        return {"action": (x[:, 2] > 0).astype(jnp.int32), "count": count}, count + 1

    policy = fc.jax_policy(apply, None, initial_state=jnp.zeros((), jnp.int32))
    batch = collect(env, policy, 40)
    assert torch.equal(batch["count"].long(), batch["collector", "step"])


class Counting(fc.PolicyBase):
    """A policy of a user's own with noise, and a state."""

    backend, params = "jax", None

    def noise(self, spec, /):
        return fc.Noise(kind="normal", shape=(2,))

    def init(self, key, num_envs, /):
        return jnp.zeros(num_envs, jnp.int32)

    def __call__(self, params, count, observation, noise, spec, exploration, /):
        action = (observation[:, 2] + noise.sum(-1) > 0).astype(jnp.int32)
        return count + 1, {"action": action, "count": count}


@pytest.mark.parametrize("name", ["CartPole-v1", "torch/CartPole-v1"])
def test_the_state_of_a_policy_of_ones_own_begins_anew_with_each_episode(name):
    batch = collect(make_env(name, 3), Counting(), 60)
    assert torch.equal(batch["count"].long(), batch["collector", "step"])
    assert batch["next", "done"].any()


def test_a_policy_of_ones_own_answers_as_over_rows(over_tensors, request):
    env = make_env("torch/CartPole-v1", 3)
    over = collect(env, Counting(), 40)
    request.getfixturevalue("monkeypatch").undo()
    assert_same(over, collect(env, Counting(), 40))


def test_nan_from_the_policy_is_said(over_tensors):
    env = make_env("torch/Pendulum-v1", 3)
    policy = fc.jax_policy(lambda params, x: x[:, :1] * jnp.nan, None)
    with pytest.raises(fc.PolicyError, match="lane 0, step 0 of this batch: action is NaN"):
        collect(env, policy, 3)


@pytest.mark.gpu
def test_on_a_gpu_cuts_change_nothing():
    env = fc.make_env("torch/CartPole-v1", num_envs=3, device="cuda")
    policy = jax_mlp(env)
    whole = collect(env, policy, 40)
    assert whole["action"].is_cuda
    assert_same(whole, collect(env, policy, 1, 2, 37))
