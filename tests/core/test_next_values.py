"""`next_values` equals a second pass over all next observations, and calls the network for few of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.modules import LSTMModule

import funcollect as fc
from funcollect.errors import PolicyError
from tests.support.misuse import refused
from tests.support.running import in_soak

KEY, HIDDEN = "state_value", 8


class Critic(nn.Module):
    """Records the rows that it is called with, if it has a list for them."""

    def __init__(self, seen=None):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.out = nn.GRUCell(4, HIDDEN), nn.Linear(HIDDEN, 3)
        self.seen = seen

    def forward(self, x, hidden=None):
        if self.seen is not None:
            self.seen.append(len(x))
        after = self.cell(x, torch.zeros(len(x), HIDDEN) if hidden is None else hidden)
        out = self.out(after)
        answer = {"logits": out[:, :2], KEY: out[:, 2:], "after": after}
        return answer if hidden is None else (answer, after)


def of_torch(*, recurrent=False, **options):
    given = {"initial_state": torch.zeros(HIDDEN), "record_state": True} if recurrent else {}
    return fc.torch_policy(Critic([]), head=fc.heads.categorical, compile="eager", **given | options)


def second_pass(policy, batch):
    """The values of all next observations, by the network."""
    rows = [batch["next", "observation"], *([] if policy.initial_state is None else [batch["after"]])]
    with torch.no_grad():
        answer = policy.module(*(leaf.flatten(0, -2) for leaf in rows))
    return (answer if len(rows) == 1 else answer[0])[KEY].reshape(*rows[0].shape[:-1], 1)


VALUED = [(None, False, True), (3, False, False), (3, True, True), (3, True, False)]


@pytest.mark.parametrize(("lanes", "compact", "recurrent"), VALUED)
def test_values_are_those_of_a_second_pass_for_few_rows(recurrent, lanes, compact):
    policy, env = of_torch(recurrent=recurrent), fc.make_env("CartPole-v1", num_envs=lanes)
    options = {"frames_per_batch": 60 * (lanes or 1), "max_frames_per_traj": 11, "seed": 0}
    with fc.SyncDataCollector(env, policy, compact_obs=compact, **options) as collector:
        next(collector)
        batch = next(collector)
        whole = fc.next_observations(batch)
        wanted, before = second_pass(policy, whole), sum(policy.module.seen)
        found = fc.next_values(policy, None, batch)
    assert found.shape == (*batch.shape, 1)
    assert not found.requires_grad
    torch.testing.assert_close(found, wanted)
    ends = whole["next", "done"][..., 0].clone()
    ends[..., -1] = True
    assert sum(policy.module.seen) - before == (1 + recurrent) * ends.sum()
    copied = ~ends[..., :-1]
    assert torch.equal(found[..., :-1, :][copied], batch[KEY][..., 1:, :][copied])
    fc.gae(whole, whole[KEY], found)


def test_values_in_workers_batches_in_padding_and_of_a_cut():
    policy, two = of_torch(), lambda: fc.make_env("CartPole-v1", num_envs=2)
    keywords = {"frames_per_batch": 120, "seed": 0, "set_truncated": True, "in_process": True}
    with fc.MultiSyncDataCollector([two] * 2, policy, **keywords) as collector:
        batch = next(collector).clone()
    assert batch.shape == (2, 2, 30)
    torch.testing.assert_close(fc.next_values(policy, None, batch), second_pass(policy, batch))
    split = fc.split_trajectories(batch)
    mask = split["collector", "mask"]
    found = fc.next_values(policy, None, split)
    torch.testing.assert_close(found[mask], second_pass(policy, split)[mask])
    assert (found[~mask] == 0).all()


def in_jax(recurrent, env):
    net = jax.random.normal(jax.random.key(0), (env.observation_space.shape[0] + HIDDEN, HIDDEN + 3))

    def apply(params, x, hidden=None):
        out = jnp.tanh(jnp.concatenate([x, jnp.zeros((len(x), HIDDEN)) if hidden is None else hidden], -1) @ params)
        answer = {"logits": out[:, :2], KEY: out[:, 2], "after": out[:, 3:]}
        return answer if hidden is None else (answer, out[:, 3:])

    state = {"initial_state": jnp.zeros(HIDDEN), "record_state": True} if recurrent else {}
    return fc.jax_policy(apply, net, head=fc.heads.categorical, **state), apply


@pytest.mark.parametrize("recurrent", [True, *in_soak([False])])
def test_values_in_jax_inside_and_outside_of_jit_and_vmap(recurrent):
    env = fc.make_env("gymnax/CartPole-v1", num_envs=3)
    policy, apply = in_jax(recurrent, env)

    def second(params, batch):
        rows = [batch["next"]["observation"], *([batch["after"]] if recurrent else [])]
        flat = [leaf.reshape(-1, leaf.shape[-1]) for leaf in rows]
        answer = apply(params, *flat)
        return (answer[0] if recurrent else answer)[KEY].reshape(rows[0].shape[:-1])

    def train(params, key):
        state = fc.traced.init(env, policy, params, key=key)
        state, batch = fc.traced.rollout(env, policy, params, state, 40, max_frames_per_traj=13)
        values = fc.next_values(policy, params, batch)
        return values, second(params, batch), fc.gae(batch, batch[KEY], values)[0]

    def valued(params, key):
        found, wanted, _ = train(params, key)
        return found.sum(), (found, wanted)

    slopes = jax.jit(jax.vmap(jax.grad(valued, has_aux=True), (None, 0)))
    slope, (found, wanted) = slopes(policy.params, jax.random.split(jax.random.key(1), 2))
    assert found.shape == (2, 40, 3)
    assert not slope.any()
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    _, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 40, max_frames_per_traj=13)
    arrays = fc.interop.to_jax(batch.contiguous())
    assert fc.next_values(policy, None, arrays).shape == (3, 40, 1)
    np.testing.assert_allclose(fc.next_values(policy, None, arrays)[..., 0], second(policy.params, arrays), atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_values_of_agents_that_end_before_their_lane(backend):
    group = fc.envs.Group(("a", "b"), spaces.Box(-9, 99, (1,)), spaces.Discrete(2), comes_and_goes=True)

    def seen(t):
        return t, {"red": jnp.stack([t, 10 * t])[:, None].astype(jnp.float32)}

    def step(key, t, action, params):
        over = {"red": t + 1 >= jnp.array([3, 5])}
        return *seen(t + 1), {"red": jnp.ones(2)}, {"red": jnp.zeros(2, bool)}, over

    env = fc.envs.from_functions(lambda *_: seen(jnp.int32(0)), step, groups={"red": group}, num_envs=2)
    weights, make = (torch.ones(1, 2), fc.torch_policy) if backend == "torch" else (jnp.ones((1, 2)), fc.jax_policy)

    def network(*args):
        return {"logits": args[-1] @ weights, KEY: args[-1] + 100}

    policy = make(network, *[None] * (backend == "jax"), head=fc.heads.categorical)
    team = fc.by_group({"red": policy})
    rows = fc.agents_as_rows(fc.rollout(env, team, fc.init(env, team, seed=0), 13)[1], "red")
    found = fc.next_values(policy, None, rows if backend == "torch" else fc.interop.to_jax(rows))
    found, there = torch.tensor(found.tolist()), ~rows["done"]
    assert torch.equal(found[there], rows["next", "observation"][there] + 100)
    assert found[0, 0, 2] == 103


def test_other_counts_of_ends_compile_nothing():
    env, calls = fc.make_env("CartPole-v1", num_envs=3), []

    def apply(params, x):
        calls.append(1)
        return {"logits": x[:, :2] * params, KEY: x.sum(-1)}

    policy = fc.jax_policy(apply, 1.0, head=fc.heads.categorical)
    state = fc.init(env, policy, seed=0)
    for limit in (3, 5):
        state, batch = fc.rollout(env, policy, state, 40, max_frames_per_traj=limit)
        arrays, before = fc.interop.to_jax(batch.contiguous()), len(calls)
        found = fc.next_values(policy, None, arrays)[..., 0]
        np.testing.assert_allclose(found, arrays["next"]["observation"].sum(-1), atol=1e-6)
        assert (len(calls) > before) is (limit == 3)


def actor(lstm):
    parts = [TensorDictModule(nn.Linear(HIDDEN, 2), ["embed"], ["logits"])]
    parts += [TensorDictModule(nn.Linear(HIDDEN, 1), ["embed"], [KEY])]
    parts += [ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=torch.distributions.Categorical)]
    first = TensorDictModule(nn.Linear(4, HIDDEN), ["observation"], ["embed"])
    if lstm:
        first = LSTMModule(input_size=4, hidden_size=HIDDEN, in_key="observation", out_key="embed")
    return TensorDictSequential(first, *parts)


@pytest.mark.parametrize("lstm", [False, True])
def test_values_of_tensordict_policies(lstm):
    torch.manual_seed(0)
    module, env = actor(lstm), fc.make_env("CartPole-v1", num_envs=3)
    policy = fc.tensordict_policy(module)
    _, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 50, max_frames_per_traj=11)
    found = fc.next_values(policy, None, batch)
    assert found.shape == (3, 50, 1)
    with torch.no_grad():
        rows = batch["next"].select(*module.in_keys, strict=False).clone().flatten(0, 1)
        wanted = module(rows)[KEY].reshape(3, 50, 1)
    torch.testing.assert_close(found, wanted)


def test_values_of_a_lowered_policy():
    env = fc.make_env("gymnax/CartPole-v1", num_envs=3)
    policy = fc.torch_policy(Critic(), head=fc.heads.categorical)
    state = fc.traced.init(env, lowered := fc.lower_policy(policy, env), lowered.params, key=jax.random.key(0))
    _, batch = fc.traced.rollout(env, lowered, lowered.params, state, 20, max_frames_per_traj=7)
    given = torch.from_numpy(np.array(batch["next"]["observation"]))
    wanted = policy.module(given.flatten(0, 1))[KEY].detach().reshape(20, 3)
    np.testing.assert_allclose(fc.next_values(lowered, lowered.params, batch), wanted, atol=1e-5)


def test_what_is_refused():
    env, policy = fc.make_env("CartPole-v1", num_envs=2), of_torch()
    lost = of_torch(recurrent=True, record_state=False)
    batch, no_state = (fc.rollout(env, each, fc.init(env, each, seed=0), 6)[1] for each in (policy, lost))
    for error, says, *given in (
        (ValueError, "lacks ['value'], expected the policy's value … pass key=", policy, batch, "value"),
        (ValueError, "lacks ['recurrent'] … record_state=True", lost, no_state),
        (
            PolicyError,
            "['after', 'logits', 'state_value'], expected 'x'",
            policy,
            batch.clone().set("x", batch[KEY]),
            "x",
        ),
        (ValueError, "the batch lacks ['next.observation']", policy, batch.exclude(("next", "observation"))),
        (ValueError, "sums of several rewards", policy, fc.MultiStep(gamma=0.9, n_steps=2)(batch.clone())),
        (ValueError, "the batch has no batch dimensions, expected [*B, T]", policy, batch[0, 0]),
        (TypeError, "expected what a policy in Torch takes", policy, fc.interop.to_jax(batch.contiguous())),
        (TypeError, "policy is … expected one of torch_policy, jax_policy, or", fc.random_policy(env), batch),
    ):
        with refused(error, says):
            fc.next_values(given[0], None, *given[1:])
