"""Policies with running statistics among their parameters, on every loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optree
import pytest
import torch
from gymnasium import spaces
from torch import nn

import funcollect as fc
from funcollect import running_statistics as rs
from tests.support.compare import assert_close, assert_same, collect, compilations
from tests.support.envs.light_envs import Sampling
from tests.support.misuse import refused
from tests.support.running import in_soak, once

WEIGHT = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)


def policy_in(backend, compiler=None):
    if backend == "jax":
        return fc.jax_policy(lambda params, x: x @ params, jnp.asarray(WEIGHT), head=fc.heads.categorical)
    module = nn.Linear(4, 2, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.from_numpy(WEIGHT.T))
    return fc.torch_policy(module, head=fc.heads.categorical, compile=compiler)


in_both = pytest.mark.parametrize("backend", ["torch", "jax"])


def some_stats(backend="torch"):
    draw = np.random.default_rng(1)
    rows = (draw.normal(size=(50, 4)) * [1, 2, 0.1, 3] + 0.2).astype(np.float32)
    stats = rs.init(spaces.Box(-1, 1, (4,)), backend=backend)
    return rs.update(stats, torch.from_numpy(rows) if backend == "torch" else jnp.asarray(rows))


def by_hand(stats, env, length=30):
    """The same network over a first layer of constants."""
    shift, scale = stats.mean["observation"].float(), (stats.variance["observation"] + 1e-8).sqrt().float()
    module = policy_in("torch").module
    policy = fc.torch_policy(lambda x: module(((x - shift) / scale).clamp(-10, 10)), head=fc.heads.categorical)
    return fc.rollout(env, policy, fc.init(env, policy, seed=3), length)[1]


@pytest.mark.parametrize(
    ("kind", "prefix"), once(["xla", "eager", "jax", *in_soak(["torch"])], ["torch/", "gymnax/", ""])
)
def test_every_loop_acts_on_normalised_observations_and_records_raw_ones(prefix, kind):
    env, backend = fc.make_env(f"{prefix}CartPole-v1", num_envs=3), "jax" if kind == "jax" else "torch"
    base = policy_in(backend, kind if kind in ("xla", "eager") else None)
    policy = fc.normalized(base, some_stats(backend))
    _, batch = fc.rollout(env, policy, fc.init(env, policy, seed=3), 30)
    wanted = by_hand(some_stats(), env)
    assert torch.equal(batch["action"], wanted["action"])
    assert_close(batch, wanted)


@in_both
def test_new_statistics_act_at_the_next_rollout_and_compile_nothing(backend):
    env = fc.make_env("gymnax/CartPole-v1", num_envs=3)
    policy = fc.normalized(policy_in(backend), rs.init(env.observation_space, backend=backend))
    state, before = fc.rollout(env, policy, fc.init(env, policy, seed=3), 30)
    state, _ = fc.rollout(env, policy, state, 30)
    policy.statistics = rs.update(policy.statistics, before)
    other = some_stats(backend)
    with compilations() as compiled:
        policy.statistics = other
        fc.rollout(env, policy, state, 30)
        _, batch = fc.rollout(env, policy, fc.init(env, policy, seed=3), 30)
        fc.rollout(env, policy, state, 30, params=(policy.params[0], other))
    assert not compiled
    assert_close(batch, by_hand(some_stats(), env))


@in_both
def test_parameters_are_a_pair(backend):
    env, base = fc.make_env("CartPole-v1", num_envs=2), policy_in(backend)
    plain = fc.normalized(base, rs.init(env.observation_space, backend=backend))
    trainable, stats = plain.params
    assert int(np.asarray(stats.count).reshape(-1)[0]) == 0
    _, wanted = fc.rollout(env, fc.normalized(base, some_stats(backend)), fc.init(env, plain, seed=1), 20)
    pair = (trainable, some_stats(backend))
    _, batch = fc.rollout(env, plain, fc.init(env, plain, seed=1), 20, params=pair)
    assert_same(batch, wanted)
    saved = fc.normalized(base, some_stats(backend)).state_dict()
    plain.load(saved)
    np.testing.assert_array_equal(plain.statistics.mean["observation"], some_stats(backend).mean["observation"])
    assert np.asarray(plain.statistics.count).tolist() == np.asarray(some_stats(backend).count).tolist()
    plain.load((trainable, rs.init(env.observation_space, backend=backend)))
    assert not np.asarray(plain.statistics.count).any()


def test_gradients_and_optimizers_see_the_trainable_part():
    base = policy_in("torch")
    policy = fc.normalized(base, some_stats())
    assert [name for name, _ in policy.module.named_parameters()] == ["policy.weight"]
    assert policy.module.policy is base.module
    trainable, _ = policy.params
    assert set(trainable.keys(True, True)) == {"weight"}
    jaxed = fc.normalized(policy_in("jax"), some_stats("jax"))
    assert [leaf.shape for leaf in jax.tree.leaves(jaxed.params[0])] == [(4, 2)]


def test_keys_of_a_function_and_hidden_states_are_passed_on():
    env = fc.make_env("gymnax/CartPole-v1", num_envs=2)

    def apply(params, x, hidden, key):
        return x @ params + jax.random.normal(key, (len(x), 2)), hidden + 1

    base = fc.jax_policy(apply, jnp.asarray(WEIGHT), head=fc.heads.categorical, initial_state=jnp.zeros(3))
    policy = fc.normalized(base, some_stats("jax"))
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), 9)
    assert state.policy_state.shape == (2, 3)
    cell = nn.GRUCell(4, 2)
    recurrent = fc.torch_policy(lambda x, h: (cell(x, h),) * 2, head=fc.heads.categorical, initial_state=torch.zeros(2))
    collect(fc.make_env("CartPole-v1", num_envs=2), fc.normalized(recurrent, some_stats()), 9)


@pytest.mark.parametrize(("kind", "backend"), once(["sync", "multi", "async", "processes"], ["torch", "jax"]))
def test_collectors_update_statistics_with_every_batch(kind, backend):
    space = fc.make_env("CartPole-v1").observation_space
    policy = fc.normalized(policy_in(backend), rs.init(space, backend=backend))
    workers = {} if kind == "sync" else {"num_workers": 2, "in_process": kind != "processes"}
    of_their_own = {"sync": fc.SyncDataCollector, "async": fc.MultiaSyncDataCollector}
    make = of_their_own.get(kind, fc.MultiSyncDataCollector)
    wanted, total = rs.init(space), 0
    with make("CartPole-v1", policy, frames_per_batch=40, seed=0, update_statistics=True, **workers) as collector:
        for number in range(4):
            batch = next(collector)
            if kind != "async":
                assert {*batch["collector", "policy_version"].flatten().tolist()} == {number}
            assert int(np.asarray(policy.statistics.count).reshape(-1)[0]) == total  # those that acted in the batch
            means = policy.statistics.mean["observation"], wanted.mean["observation"]
            np.testing.assert_allclose(*means, rtol=1e-4, atol=1e-5)
            total += batch.numel()
            wanted = rs.update(wanted, batch)
        if backend == "jax" and kind == "multi":  # parameters that are passed on, as in a functional loop
            collector.update_policy_weights_((policy.params[0] * 2, policy.statistics))
            next(collector)
            assert float(collector.params[0][0, 0]) == pytest.approx(2 * WEIGHT[0, 0])
            assert collector.params[1] is policy.statistics


@pytest.mark.parametrize("kind", ["sync", *in_soak(["in process"]), "processes"])
def test_a_network_alone_is_given_beside_the_statistics(kind):
    network, other = nn.Linear(4, 2), nn.Linear(4, 2)

    def made(network):
        policy = fc.normalized(fc.torch_policy(network, head=fc.heads.categorical), some_stats())
        keywords = {"frames_per_batch": 40, "seed": 0, "update_statistics": True}
        if kind == "sync":
            return fc.SyncDataCollector("CartPole-v1", policy, **keywords)
        return fc.MultiSyncDataCollector(["CartPole-v1"] * 2, policy, in_process=kind == "in process", **keywords)

    with made(other) as collector:
        wanted = [next(collector).clone() for _ in range(3)]
    for given in (other, other.state_dict()):
        with made(network) as collector:
            collector.update_policy_weights_(given)
            for each in wanted:
                batch = next(collector)
                assert torch.equal(batch["action_log_prob"], each["action_log_prob"])
    with made(network) as collector:
        collector.update_policy_weights_(network)  # the policy's own
        assert collector.params is None
        for wrong in (nn.Linear(3, 2), {"weights": torch.ones(2, 4)}):
            with pytest.raises(ValueError, match=r"policy\.weight"):
                collector.update_policy_weights_(wrong)


PAIR = spaces.Tuple([spaces.Discrete(2), spaces.Box(2, 9, (3,))])


@pytest.mark.parametrize(
    ("backend", "kind"),
    once(["torch", "jax"], [(PAIR, "observation"), (spaces.Dict(a=spaces.Discrete(3), b=PAIR), "b")]),
)
def test_floats_in_a_tuple_have_statistics(backend, kind):
    space, key = kind
    env = fc.make_env(lambda: Sampling(space, spaces.Discrete(2)), num_envs=2)

    def answer(observation):
        count, box = observation if isinstance(observation, tuple) else observation["b"]
        return {"action": count, "seen": box * 1}

    base = fc.torch_policy(answer) if backend == "torch" else fc.jax_policy(lambda _, x: answer(x), None)
    policy, stats = fc.random_policy(env), rs.init(space, backend=backend)
    _, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 40)
    stats = rs.update(stats, batch)
    assert [*stats.mean] == [f"{key}.1"]
    pair = tuple(batch[key, part] if backend == "torch" else jnp.asarray(batch[key, part].numpy()) for part in "01")
    alone = pair if space is PAIR else {"a": batch["a"], "b": pair}
    again = rs.update(rs.init(space, backend=backend), alone)
    assert np.array_equal(again.mean[f"{key}.1"], stats.mean[f"{key}.1"])
    _, scaled = rs.normalize(stats, alone) if space is PAIR else rs.normalize(stats, alone)["b"]
    np.testing.assert_allclose(np.asarray(scaled).mean((0, 1)), 0, atol=1e-5)
    policy = fc.normalized(base, stats)
    _, batch = fc.rollout(env, policy, fc.init(env, policy, seed=1), 9)
    torch.testing.assert_close(batch["seen"], rs.normalize(stats, batch)[key, "1"])
    assert not torch.equal(batch["seen"], batch[key, "1"])


def test_the_last_batch_of_a_run_counts_and_statistics_that_wait_are_saved(tmp_path):
    def collector(total):
        policy = fc.normalized(policy_in("torch"), rs.init(fc.make_env("CartPole-v1").observation_space))
        keywords = {"frames_per_batch": 40, "total_frames": total, "seed": 0, "update_statistics": True}
        return policy, fc.SyncDataCollector("CartPole-v1", policy, **keywords)

    whole, run = collector(120)
    batches = list(run)
    assert int(whole.statistics.count) == 120
    first, run = collector(40)
    next(run)
    run.save(tmp_path / "run")
    run.shutdown()
    assert int(first.statistics.count) == 0
    resumed, run = collector(120)
    run.restore(tmp_path / "run")
    assert [torch.equal(one["action"], two["action"]) for one, two in zip(batches[1:], run, strict=True)] == [True] * 2
    for one, two in zip(optree.tree_leaves(whole.statistics), optree.tree_leaves(resumed.statistics), strict=True):
        assert torch.equal(one, two)


def test_bad_arguments_are_refused():
    stats, env, one = rs.init(spaces.Box(-1, 1, (4,))), fc.make_env("gymnax/CartPole-v1", num_envs=2), "CartPole-v1"
    base, random = policy_in("torch"), fc.random_policy(fc.make_env(one))
    policy, members = fc.normalized(base, some_stats()), fc.population(base, {"weight": torch.zeros(2, 2, 4)})
    two, multi = fc.make_env(one, num_envs=2), fc.MultiSyncDataCollector
    updating = {"frames_per_batch": 4, "update_statistics": True}
    for call, error, says in (
        (lambda: fc.normalized(base, None), TypeError, "stats is"),
        (lambda: fc.normalized(policy_in("jax"), stats), TypeError, "JaxPolicy with statistics of Torch … backend='j"),
        (lambda: fc.normalized(random, stats), TypeError, "RandomPolicy"),
        (lambda: fc.normalized(policy, stats), TypeError, "normalised already"),
        (lambda: fc.normalized(base, stats, clip=0), ValueError, "clip is 0"),
        (lambda: fc.Collector(one, base, **updating), TypeError, "is True, but the policy is TorchPolicy"),
        (lambda: fc.Collector(two, members, **updating), TypeError, "TorchPopulation … call funcollect.running_"),
        (lambda: fc.Collector(env, fc.lower_policy(policy, env), **updating), TypeError, "LoweredPolicy … without low"),
        (lambda: multi([one] * 2, policy_factory=lambda: policy, **updating), TypeError, "None … as policy … factory"),
    ):
        with refused(error, says):
            call()
    with fc.SyncDataCollector(env, policy, **updating) as collector:
        before = int(policy.statistics.count)
        for _ in range(2):
            next(collector)
        assert int(policy.statistics.count) == before + 4
