"""Torch policies called at each step of JAX environments: the data are the same as from the fused loop."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import funcollect as fc
from funcollect.core.loops import over_jax
from funcollect.envs.jax_envs.like_gymnax import from_gymnax
from funcollect.keys import Purpose, key_from_seed, lane_keys, random_words
from tests.support.cases import tensordict_actor, tensordict_module, torch_mlp, torch_normal, torch_recurrent
from tests.support.compare import assert_same, bits, collect, compilations, leaves
from tests.support.devices import forbid_waits
from tests.support.running import in_soak

LENGTH = 40
CUTS = (1, 9, 30)
KINDS = (torch_mlp, torch_normal, torch_recurrent, tensordict_actor, tensordict_module, lambda env: ByHand())


class ByHand(fc.PolicyBase):
    """A policy that only follows the protocol, with a state of its own kind."""

    backend, params = "torch", None

    def init(self, key, num_envs, /):
        return torch.zeros(num_envs)

    def __call__(self, params, policy_state, observation, noise, spec, exploration):
        return policy_state + 1, {"action": (observation[:, 2] > 0).long(), "count": policy_state}


def eager(policy):
    policy.compiler = "eager"
    return policy


@pytest.mark.parametrize(
    ("num_envs", "options"),
    [(None, {"max_frames_per_traj": 5}), (3, {"reset_when_done": False}), *in_soak([(None, {}), (3, {})])],
)
def test_gives_what_the_fused_loop_gives(num_envs, options):
    env = from_gymnax("CartPole-v1", num_envs=num_envs)
    crossing = fc.torch_policy(lambda x: (x[:, 2] > 0).long(), compile="eager")
    fused = fc.jax_policy(lambda params, x: (x[:, 2] > 0).astype(jnp.int32), None)
    batches = [collect(env, policy, 40, 40, seed=0, **options) for policy in (crossing, fused)]
    assert_same(*batches)
    assert batches[0]["next", "done"].any()
    assert batches[0]["action"].dtype == torch.int64


@pytest.mark.parametrize("make", KINDS)
def test_cuts_change_nothing(cartpole, make):
    policy = eager(make(cartpole))
    whole = collect(cartpole, policy, LENGTH)
    assert_same(whole, collect(cartpole, policy, *CUTS))
    if isinstance(policy, ByHand):
        assert whole["next", "done"].any()
        assert torch.equal(whole["count"].long(), whole["collector", "step"])


def test_a_state_is_a_value(cartpole):
    policy = eager(torch_recurrent(cartpole))
    state, _ = fc.rollout(cartpole, policy, fc.init(cartpole, policy, seed=0), 9)
    _, first = fc.rollout(cartpole, policy, state, 30)
    kept = {path: bits(leaf) for path, leaf in leaves(first).items()}
    for leaf in leaves(first.clone(False)).values():
        if leaf.stride(-1) or leaf.ndim == 0:
            leaf.untyped_storage().fill_(1)
    _, second = fc.rollout(cartpole, policy, fc.fork(cartpole, state), 30)
    assert {path: bits(leaf) for path, leaf in leaves(second).items()} == kept


def test_one_program_for_all_rollouts():
    env = from_gymnax("CartPole-v1", num_envs=2)
    policy = eager(torch_mlp(env))
    fresh = fc.init(env, policy, seed=0)
    state, _ = fc.rollout(env, policy, fc.reset(env, fresh), 33)
    with compilations() as compiled:
        for before in (fresh, state):
            for length in (33, 34):
                state, _ = fc.rollout(env, policy, before, length)
                state = fc.reset(env, state, torch.tensor([True, False]))
    assert not compiled


@pytest.mark.gpu
def test_on_a_gpu_the_host_waits_for_nothing_and_cuts_change_nothing(monkeypatch):
    env = from_gymnax("CartPole-v1", num_envs=64)
    network = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)).cuda()
    policy = fc.torch_policy(network, head=fc.heads.categorical, compile="eager")
    with torch.cuda.stream(torch.cuda.Stream()):
        assert_same(collect(env, policy, 200), collect(env, policy, 1, 2, 7, 190))
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), 32)  # compiles
    calls = forbid_waits(monkeypatch, over_jax._CrossingStepper, "step", "cuda")
    _, batch = fc.rollout(env, policy, state, 32)
    assert len(calls) == 32
    assert {leaf.device.type for leaf in leaves(batch).values()} == {"cuda"}


@pytest.mark.parametrize(("lanes", "length", "width"), [(64, 33, 9), (64, 100, 1), (2000, 2, 2), (3, 4, 5)])
def test_a_program_draws_the_same_words_as_numpy(lanes, length, width):
    env = from_gymnax("CartPole-v1", num_envs=2)
    keys = lane_keys(key_from_seed(5), Purpose.NOISE, np.arange(7, 7 + lanes))
    for start in (0, 2**32 - 1, 5 * 2**32):
        steps = np.arange(start, start + length)[:, None]
        drawn = over_jax._draw_words(env, keys, steps, width)
        np.testing.assert_array_equal(drawn, random_words(keys, steps, width))


def test_on_a_gpu_a_strided_action_crosses(monkeypatch):
    numpy = SimpleNamespace(zeros=lambda shape, device: torch.zeros(shape))
    monkeypatch.setattr(over_jax, "import_jax", lambda: SimpleNamespace(numpy=numpy))
    monkeypatch.setattr(over_jax, "torch_view", lambda array: array)
    cross = over_jax._crosser(fc.make_env("Pendulum-v1").action_spec, SimpleNamespace(platform="gpu"))
    answer = torch.randn(3, 2)
    np.testing.assert_array_equal(cross(answer.chunk(2, -1)[0]), answer[:, :1])
    np.testing.assert_array_equal(cross(answer[:1, :1].expand(3, 1)), answer[:1, :1].expand(3, 1))
