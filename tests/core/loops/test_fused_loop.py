"""Rollouts of JAX environments, against a plain Python loop over the same functions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

import funcollect as fc
from funcollect.core import api
from funcollect.core.request import Request
from funcollect.core.traced_step import columns
from funcollect.core.traced_step.columns import PackedRows
from funcollect.envs.jax_envs.like_gymnax import from_gymnax
from funcollect.interop import to_jax, words
from funcollect.interop.bridge import torch_view
from tests.support.compare import assert_same, bits, collect, compilations, fresh, leaves
from tests.support.envs.jax_counting import counting, counting_policy, plain_loop, reset
from tests.support.running import SCALE, in_soak

CUTS = [1, 2, 7, 64]  # into lengths that tests share, so that JAX compiles few programs
NUM_ENVS = (None, 1, 3, 8) if SCALE > 1 else (None, 3)


@functools.cache
def cartpole(num_envs=None):
    """The same environments and policies for all tests, so that JAX compiles each pair once."""
    weights = jax.random.normal(jax.random.PRNGKey(3), (4, 2)) * 0.3
    policy = fc.jax_policy(lambda params, x: jnp.tanh(x) @ params, weights, head=fc.heads.categorical)
    return from_gymnax("CartPole-v1", num_envs=num_envs), policy


@functools.cache
def foretold(num_envs=None):
    """The counting environment, with a policy whose outputs can be written down by hand."""
    return counting(num_envs), counting_policy()


def lanes_of(batch):
    return [batch] if batch.batch_dims == 1 else list(batch)


@pytest.mark.parametrize("num_envs", NUM_ENVS)
def test_every_leaf_equals_the_plain_loop(num_envs, monkeypatch):
    monkeypatch.setattr(columns, "_LARGE", 1 << 22 if num_envs else 0)  # which makes each leaf a column of its own
    env, policy = foretold(num_envs)
    batch = collect(env, policy, *CUTS[0 if num_envs else -1 :], seed=5)
    assert batch["next", "terminated"].any()
    assert batch["next", "truncated"].any()
    for lane, rows in enumerate(lanes_of(batch)[:3]):
        wanted = plain_loop(env, rows["action"].numpy(), seed=5, lane=lane, lanes=num_envs or 1)
        got = leaves(rows)
        assert got.keys() == wanted.keys() | {("action",)}
        for path, leaf in wanted.items():
            assert (got[path].dtype, got[path].shape) == (leaf.dtype, leaf.shape), path
            assert bits(got[path]) == bits(leaf), path
        assert torch.equal(rows["action"], (rows["start"][:, 0] % 3 + 2 * rows["count"] + 1) % 3)


@pytest.mark.parametrize("starts", ["fresh", "cached"])
def test_a_start_is_worked_out_only_where_an_episode_needs_it(starts):
    """A costly reset is not made at every step: once for all lanes, and again when a lane has used up its start."""
    begun = []

    def counted(key, params):
        jax.debug.callback(lambda _: begun.append(1), key)
        return reset(key, params)

    env = counting(3, reset=counted, starts=starts)
    state, batch = fc.rollout(env, counting_policy(), fc.init(env, counting_policy(), seed=5), 200)
    jax.effects_barrier()
    most = int(state.episode.max())  # of any lane
    ends = int(batch["next", "done"].any(0).sum())  # steps at which some lane ended
    assert len(begun) % 3 == 0
    if starts == "cached":
        assert len(begun) == 3
    else:
        assert most <= len(begun) // 3 - 1 <= ends < 200


def test_a_limit_truncates():
    env, policy = foretold(3)
    batch = collect(env, policy, 7, 7, 7, max_frames_per_traj=3)
    for lane, rows in enumerate(batch):
        wanted = plain_loop(env, rows["action"].numpy(), seed=1, lane=lane, lanes=3, limit=3)
        assert all(torch.equal(rows[path], leaf) for path, leaf in wanted.items())
    assert batch["collector", "step"].max() == 2
    assert_same(collect(env, policy, 7, max_frames_per_traj=2**40), collect(env, policy, 7))


def test_finished_lanes_stay_finished():
    env, policy = foretold(3)
    batch = collect(env, policy, 2, 7, 2, reset_when_done=False)
    assert_same(batch, collect(env, policy, 7, 2, 2, reset_when_done=False))
    normal = collect(env, policy, 7, 2, 2)
    for rows, usual in zip(batch, normal, strict=True):
        end = int(usual["next", "done"][:, 0].nonzero()[0]) + 1
        assert_same(rows[:end], usual[:end])
        assert rows["done"][end:].all()
        assert torch.equal(rows["terminated"][end:], rows["next", "terminated"][end:])
        assert (rows["next", "count"][end - 1 :] == rows["next", "count"][end - 1]).all()
        assert (rows["count"][end:] == rows["next", "count"][end - 1]).all()
        assert (rows["next", "reward"][end:] == 0).all()
        assert (rows["collector", "step"][end:] == end).all()


def test_random_steps_end_where_they_should():
    env, policy = foretold(3)
    batch = collect(env, policy, 2, 7, 7, random_steps=10)
    assert_same(batch, collect(env, policy, 7, 7, 2, random_steps=10))
    policys = (batch["start"][..., 0] % 3 + 2 * batch["count"] + 1) % 3
    assert torch.equal(batch["action"][:, 10:], policys[:, 10:])
    assert not torch.equal(batch["action"][:, :10], policys[:, :10])
    assert batch["action"][:, :10].unique().tolist() == [0, 1, 2]


@pytest.mark.parametrize("reset_when_done", [True, *in_soak([False])])
def test_no_leaf_shares_memory_and_every_leaf_can_be_written(reset_when_done):
    def apply(params, observation):
        return params * jnp.stack([observation["count"], observation["start"][:, 0] % 5, observation["count"] % 2], -1)

    env, policy, state = fresh(counting(3), fc.jax_policy(apply, jnp.float32(0.3), head=fc.heads.categorical), steps=3)
    run = functools.partial(api.run, env, policy, request=Request(length=10, reset_when_done=reset_when_done))
    after, batch = run(state)
    expected, follow = run(state)[1].clone(), run(after)[1].clone()
    for path, leaf in leaves(batch).items():
        before = {other: value.clone() for other, value in leaves(batch).items() if other != path}
        kept = leaf.clone()
        leaf[0, 0] = 1 - leaf[0, 0].to(torch.int64) if leaf.dtype != torch.bool else ~leaf[0, 0]
        changed = (leaf != kept).flatten(2).any(-1) if leaf.ndim > 2 else leaf != kept
        assert changed.sum() <= 1, f"{path}: one row was written, others changed with it"
        assert all(torch.equal(leaves(batch)[other], value) for other, value in before.items()), path
    assert_same(run(state)[1], expected)
    assert_same(run(after)[1], follow)


def traced_policy():
    """A policy, and the list to which each trace of its function adds an entry."""
    traces = []
    policy = fc.jax_policy(
        lambda params, x: traces.append(1) or x @ params, jnp.ones((4, 2)), head=fc.heads.categorical
    )
    return policy, traces


def committed(weights):
    return jax.device_put(weights, jax.devices()[0])


FORMS = (jnp.asarray, np.asarray, committed, lambda weights: to_jax(torch.from_numpy(weights), copy=True))


def test_it_compiles_once():
    """The same program serves parameters of JAX and NumPy, and arrays committed to a device."""
    env, (policy, traces) = cartpole(8)[0], traced_policy()
    fc.rollout(env, policy, fc.init(env, policy, seed=0), 20)
    first = len(traces)
    with fc.SyncDataCollector(env, policy, frames_per_batch=160, seed=1) as collector:

        def collect_anew(i, form):
            collector.set_seed(i)
            collector.update_policy_weights_(form(np.full((4, 2), i / 100, np.float32)))
            next(collector)
            collector.reset()
            policy.params = form(np.full((4, 2), i / 50, np.float32))
            collector.update_policy_weights_()
            next(collector)

        collect_anew(0, jnp.asarray)
        with compilations() as compiled:
            for i in range(12):
                collect_anew(i, FORMS[i % 4])
    assert [form(np.ones(2, np.float32)).committed for form in FORMS if form is not np.asarray] == [False, True, True]
    assert len(traces) == first
    assert not compiled


def test_weak_types_compile_nothing_anew():
    """Starts have weak types, which steps make strong, as in brax; so do parameters."""
    env = fc.envs.from_functions(
        lambda key, params: (jnp.asarray(0.0), jnp.zeros(1)),
        lambda key, place, action, params: (place + jnp.float32(1), place[None], place, place > 5, False),
        observation_space=Box(-np.inf, np.inf, (1,)),
        action_space=Discrete(2),
        num_envs=2,
    )
    policy = fc.jax_policy(lambda params, x: x * params * jnp.ones(2), jnp.asarray(1.0), head=fc.heads.categorical)
    assert jax.eval_shape(env.reset, jax.random.PRNGKey(0), None)[0].weak_type
    assert policy.params.weak_type
    traced = fc.traced.init(env, policy, policy.params, key=jax.random.PRNGKey(0))
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(traced))
    fresh = fc.init(env, policy, seed=0)
    fc.rollout(env, policy, fresh, 20)
    with compilations() as compiled:
        state, _ = fc.rollout(env, policy, fresh, 20)
        for params in (jnp.float32(2.0), 2.0, np.float32(2.0)):
            state, _ = fc.rollout(env, policy, state, 20, params=params)
    assert "jit(_loop)" not in [each["fun_name"] for each in compiled]  # converting a number compiles, too


def test_lengths_of_one_bucket_share_a_program():
    env, (policy, traces) = cartpole(8)[0], traced_policy()
    state = fc.init(env, policy, seed=0)
    fc.rollout(env, policy, state, 97)
    first = len(traces)
    for length in (98, 101, 104):
        assert fc.rollout(env, policy, state, length)[1].batch_size == (8, length)
    assert len(traces) == first
    fc.rollout(env, policy, state, 105)
    assert len(traces) > first


def test_frames_beyond_32_bits():
    env, policy, state = fresh(*foretold(3), seed=5)
    near = state.replace(steps=np.array([2**32 - 3, 0], np.uint32))
    assert near.frames == 3 * (2**32 - 3)
    after, batch = fc.rollout(env, policy, near, 8)
    assert after.frames == 3 * (2**32 + 5)
    for lane, rows in enumerate(batch):
        wanted = plain_loop(env, rows["action"].numpy(), seed=5, lane=lane, lanes=3, first_step=2**32 - 3)
        assert all(torch.equal(rows[path], leaf) for path, leaf in wanted.items())
    _, first = fc.rollout(env, policy, state, 8)
    assert not torch.equal(batch["next", "info", "draw"][:, 3:], first["next", "info", "draw"][:, :5])


def test_ids_and_steps_beyond_32_bits():
    env, policy, state = fresh(*foretold(3))
    late = {"episode": np.full(3, 2**31 - 1, np.int32), "step": np.full(3, 2**31 - 2, np.int32)}
    far = state.replace(**late, lane=state.lane + 70_000, total_lanes=69_999)
    _, batch = fc.rollout(env, policy, far, 6)
    lane = batch["collector", "lane"]
    new = batch["next", "done"][..., 0].cumsum(-1).roll(1, -1)
    new[:, 0] = 0
    expected = ((lane // 69_999) << 40) + (2**31 - 1 + new) * 69_999 + lane % 69_999
    assert torch.equal(batch["collector", "traj_ids"], expected)
    assert batch["collector", "step"].min() >= 0


def test_words_of_an_odd_number_of_lanes_become_int64_without_a_copy():
    row = {("a",): jnp.ones(3, jnp.int32), ("b",): jnp.array([[7, 1], [8, 0], [-1, -1]], jnp.int32)}
    layout = PackedRows(row)
    column = torch_view(layout.pack(row)["int32"][None])
    leaf = words.as_int64(layout.unpack({"int32": column})["b",])
    assert leaf.tolist() == [[2**32 + 7, 8, -1]]
    assert leaf.untyped_storage().data_ptr() == column.data_ptr()
