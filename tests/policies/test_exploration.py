"""Numbers that change during a run: epsilon, temperature, and those of a policy of one's own."""

from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import funcollect as fc
from tests.support import cases
from tests.support.compare import collect
from tests.support.running import in_soak, once

KEY = ("collector", "exploration", "epsilon")
EACH = [0.0, 0.5, 1.0]  # of three lanes


def values(framework, epsilon):
    """A policy that prefers the first choice by far."""
    head = fc.heads.epsilon_greedy(epsilon)
    if framework == "torch":
        return fc.torch_policy(lambda x: torch.stack([x[:, 0] * 0 + 9, x[:, 0] * 0], -1), head=head)
    return fc.jax_policy(lambda p, x: jnp.stack([x[:, 0] * 0 + p, x[:, 0] * 0], -1), jnp.asarray(9.0), head=head)


NAMES = ["CartPole-v1", "torch/CartPole-v1", "gymnax/CartPole-v1"]


@pytest.mark.parametrize(("framework", "name"), once(["torch", "jax"], NAMES))
def test_epsilon_acts_and_is_in_the_batch(framework, name):
    env, policy = fc.make_env(name, num_envs=16), values(framework, 0.0)
    assert dict(policy.exploration) == {"epsilon": 0.0}
    state = fc.init(env, policy, seed=0)
    for given in (None, 1.0, 0.5, 0.0):
        exploration = {} if given is None else {"epsilon": given}
        state, batch = fc.rollout(env, policy, state, 64, exploration=exploration)
        wanted = given or 0.0
        assert batch[KEY].shape == (16, 64)
        assert batch[KEY].unique().tolist() == [wanted]
        drawn = batch["action"].float().mean()
        assert abs(drawn - wanted / 2) <= 4.5 * np.sqrt(wanted / 2 * (1 - wanted / 2) / batch.numel())
        share = torch.where(batch["action"] == 0, 1 - wanted / 2, wanted / 2)
        torch.testing.assert_close(batch["action_log_prob"], share.log())
    state, row = fc.step(env, policy, state, exploration={"epsilon": 1.0})
    assert row[KEY].tolist() == [1.0] * 16


PARAMS = {
    "small": jnp.ones(()),
    "large": jnp.ones(1 << 17),  # too large to be packed into one vector
    "integers": [jnp.ones(()), jnp.ones(2, jnp.uint32)],
    "numpy": np.ones(1 << 17, np.float32),
}


@pytest.mark.parametrize(("name", "kind"), [
    *((NAMES[0], kind) for kind in PARAMS), (NAMES[2], "small"), *in_soak((NAMES[2], kind) for kind in [*PARAMS][1:]),
])  # fmt: skip
def test_another_value_compiles_nothing(name, kind):
    calls = []

    def apply(params, x):
        calls.append(1)
        return x[:, :2] * jax.tree.leaves(params)[0].mean()

    policy = fc.jax_policy(apply, PARAMS[kind], head=fc.heads.boltzmann(1.0))
    env = fc.make_env(name, num_envs=2)
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), 8)
    traced = len(calls)
    for temperature in (0.5, 2.0):
        state, batch = fc.rollout(env, policy, state, 8, exploration={"temperature": temperature})
        assert batch["collector", "exploration", "temperature"].unique().tolist() == [temperature]
    assert len(calls) == traced


def test_values_are_arguments_of_traced_rollouts():
    env, policy = fc.make_env("gymnax/CartPole-v1", num_envs=3), values("jax", 0.3)
    state = fc.traced.init(env, policy, policy.params, key=jax.random.key(0))

    @jax.jit
    def run(epsilon):
        return fc.traced.rollout(env, policy, policy.params, state, 32, exploration={"epsilon": epsilon})[1]

    random, greedy, mixed = map(run, (jnp.float32(1.0), jnp.float32(0.0), jnp.array(EACH)))
    assert random["collector"]["exploration"]["epsilon"].shape == (32, 3)
    assert 0.3 < random["action"].mean() < 0.7
    assert greedy["action"].sum() == 0
    assert fc.deliver(greedy, env)[KEY].unique().tolist() == [0.0]
    assert mixed["collector"]["exploration"]["epsilon"][5].tolist() == EACH
    assert jnp.array_equal(mixed["action"][:, 2], random["action"][:, 2])
    with pytest.raises(ValueError, match=r"has shape \[2\], expected a number or \[3\]"):
        run(jnp.zeros(2))


def schedule(frames):
    return max(0.0, 1 - frames / 200)


OF_LANES = torch.tensor([0.125, 0.5, 0.625, 1.0])


@pytest.mark.parametrize(("in_process", "given"), once([True, False], [schedule, OF_LANES]))
def test_lanes_in_workers_have_the_values_of_the_run(given, in_process):
    policy, two = values("torch", 0.3), lambda: fc.make_env("CartPole-v1", num_envs=2)
    keywords = {"frames_per_batch": 100, "total_frames": 300, "seed": 0, "exploration": {"epsilon": given}}
    with fc.MultiSyncDataCollector([two] * 2, policy, in_process=in_process, **keywords) as collector:
        batches = [batch.clone() for batch in collector]
    wanted = [OF_LANES.tolist()] * 3 if given is OF_LANES else [[number] * 4 for number in (1.0, 0.5, 0.0)]
    assert [batch[KEY][..., 0].flatten().tolist() for batch in batches] == wanted
    with fc.SyncDataCollector(fc.make_env("CartPole-v1", num_envs=4), policy, **keywords) as collector:
        for batch, whole in zip(batches, collector, strict=True):
            assert torch.equal(batch["action"].flatten(0, 1), whole["action"])
            assert torch.equal(batch[KEY].flatten(0, 1), whole[KEY])


class Nudged(fc.PolicyBase):
    backend, params = "torch", None
    exploration = MappingProxyType({"push": 0.25})

    def __call__(self, params, state, observation, noise, spec, exploration, /):
        push = exploration.values["push"]
        return state, {"action": (observation[:, 2] > push).long(), "push": observation[:, 0] * 0 + push}


def test_a_policy_of_ones_own_reads_its_numbers():
    cases = [(2, {}, [0.25] * 2), (2, {"push": -1.0}, [-1.0] * 2), (3, {"push": EACH}, EACH)]
    for lanes, given, wanted in (*cases, (None, {"push": torch.tensor([0.5])}, [0.5])):
        batch = collect(fc.make_env("CartPole-v1", num_envs=lanes), Nudged(), 4, exploration=given)
        assert batch["push"].reshape(-1, 4)[:, 3].tolist() == wanted
        assert torch.equal(batch["collector", "exploration", "push"], batch["push"])


@pytest.mark.parametrize(("given", "error", "message"), [
    ({"temperature": 1.0}, ValueError, r"exploration has \['temperature'\], expected names out of \['epsilon'\]"),
    ({"epsilon": 2.0}, ValueError, r"epsilon is 2.0, expected a number in \[0, 1\]"),
    ({"epsilon": lambda frames: -1.0}, ValueError, r"epsilon is -1.0"),
    ({"epsilon": [0.5] * 3}, ValueError, r"exploration\['epsilon'\] has shape \[3\], expected a number or \[2\]"),
    ({"epsilon": torch.zeros(2, 1)}, ValueError, r"has shape \[2, 1\], expected a number or \[2\]"),
    ({"epsilon": [0.5, 2.0]}, ValueError, r"epsilon is 2.0, expected a number in \[0, 1\]"),
    ({"epsilon": [-1.0, 0.5]}, ValueError, r"epsilon is -1.0"),
    ({"epsilon": ["much", "more"]}, TypeError, r"exploration\['epsilon'\] is .*, expected a number"),
    ({"epsilon": "much"}, TypeError, r"exploration\['epsilon'\] is 'much', expected a number"),
])  # fmt: skip
def test_values_that_do_not_fit(given, error, message):
    env, policy = fc.make_env("CartPole-v1", num_envs=2), values("torch", 0.1)
    state = fc.init(env, policy, seed=0)
    with pytest.raises(error, match=message):
        fc.rollout(env, policy, state, 4, exploration=given)
    state, _ = fc.rollout(env, policy, state, 4)  # nothing is lost
    other = fc.torch_policy(cases.mlp(4, 2), head=fc.heads.categorical)
    with pytest.raises(ValueError, match=r"expected names out of \[\]"):
        fc.rollout(env, other, fc.init(env, other, seed=0), 4, exploration={"epsilon": 0.1})


def lowered(_, epsilon):
    torch.manual_seed(0)
    return fc.torch_policy(cases.mlp(4, 2), head=fc.heads.epsilon_greedy(epsilon))


MAKERS = {"function": ("torch", values), "module": ("torch", lowered), "jax": ("jax", values)}


@pytest.mark.parametrize(("kind", "name"), once(MAKERS, NAMES))
def test_each_lane_has_the_data_of_its_own_number(kind, name):
    env, policy = fc.make_env(name, num_envs=3), MAKERS[kind][1](MAKERS[kind][0], 0.25)

    def run(*given):
        state, batches, exploration = fc.init(env, policy, seed=0), [], {}
        for exploration["epsilon"] in given:  # in the same dict
            state, batch = fc.rollout(env, policy, state, 16, exploration=exploration)
            batches.append(batch)
        return torch.cat(batches, -1)

    found = run(0.5, 0.25, torch.tensor(EACH), np.array(EACH[::-1]), EACH)
    for lane, epsilon in enumerate(EACH):
        wanted = run(0.5, 0.25, epsilon, EACH[2 - lane], epsilon)[lane]
        for key in ("observation", "action", "action_log_prob", KEY):
            assert torch.equal(found[lane].get(key), wanted.get(key)), key
    assert torch.equal(run(0.5, 1.0)["action"], run([0.5] * 3, [1.0] * 3)["action"])
    _, row = fc.step(env, policy, fc.init(env, policy, seed=0), exploration={"epsilon": EACH})
    assert row[KEY].tolist() == EACH
    scored = fc.evaluate_actions(policy, None, fc.interop.to_jax(found) if kind == "jax" else found)
    np.testing.assert_allclose(scored["action_log_prob"].tolist(), found["action_log_prob"].tolist(), atol=1e-5)


def test_values_per_lane_change_in_place_and_compile_nothing():
    calls, seen = [], []

    def apply(params, x):
        calls.append(1)
        return x[:, :2] * params

    policy, given = fc.jax_policy(apply, jnp.ones(()), head=fc.heads.boltzmann(1.0)), {"temperature": torch.ones(2)}
    for name in ("gymnax/CartPole-v1", "CartPole-v1"):
        env = fc.make_env(name, num_envs=2)
        with fc.SyncDataCollector(env, policy, frames_per_batch=8, seed=0, exploration=given) as collector:
            for i in range(3):
                given["temperature"].copy_(torch.tensor([1.0, 2.0 + i]))
                batch = next(collector)
                assert batch["collector", "exploration", "temperature"][:, 0].tolist() == [1.0, 2.0 + i]
                seen.append(len(calls))
        assert seen[-1] == seen[-3]
