"""Advantages, against TorchRL's and a loop in float64; and rewards scaled as `VecNormalize` scales them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch.testing import assert_close
from torchrl.objectives.value.functional import generalized_advantage_estimate

import funcollect as fc
from tests.support.envs.jax_counting import counting
from tests.support.frames import make_batch
from tests.support.misuse import refused
from tests.support.running import scaled

SHAPES = st.lists(st.integers(1, 3), max_size=2).flatmap(
    lambda rows: st.integers(1, 17).map(lambda time: (*rows, time))
)


def made(shape, players=1, seed=0, often=0.2):
    """A batch with endings of every kind, trajectories cut from outside among them, and its values."""
    generator = torch.Generator().manual_seed(seed)
    terminated, truncated, cut = (torch.rand(*shape, 1, generator=generator) < often for _ in range(3))
    done = terminated | truncated
    begins = torch.cat([torch.zeros_like(done[..., :1, :]), (done | cut)[..., :-1, :]], -2)
    next_ = {"reward": torch.randn(*shape, players, generator=generator), "done": done, "terminated": terminated}
    batch = TensorDict({"next": next_, "collector": {"traj_ids": begins[..., 0].cumsum(-1)}}, shape)
    return batch, *(torch.randn(*shape, players, generator=generator) for _ in range(2))


def naive(batch, value, next_value, gamma, lmbda):
    """The definition, frame after frame from the back, in float64."""
    ids, advantage = batch["collector", "traj_ids"], torch.zeros(value.shape, dtype=torch.float64)
    for row in np.ndindex(tuple(batch.shape[:-1])):
        after, after_id = torch.zeros(value.shape[-1], dtype=torch.float64), None
        for t in reversed(range(batch.shape[-1])):
            at = (*row, t)
            go_on = not batch["next", "terminated"][at]
            delta = batch["next", "reward"][at].double() - value[at].double() + gamma * next_value[at].double() * go_on
            joined = bool(not batch["next", "done"][at] and ids[at] == after_id)
            after, after_id = delta + gamma * lmbda * joined * after, ids[at]
            advantage[at] = after
    return advantage


def in_jax(batch, value, next_value):
    """The same batch as traced rollouts have it: a nested dict, time first, without a last dimension of 1."""

    def time_first(leaf):
        leaf = leaf if leaf.ndim == batch.ndim else leaf.squeeze(-1)
        return jnp.asarray(np.moveaxis(leaf.numpy(), batch.ndim - 1, 0).copy())

    next_ = {name: time_first(leaf) for name, leaf in batch["next"].items()}
    ids = time_first(batch["collector", "traj_ids"].int())
    return {"next": next_, "collector": {"traj_ids": ids}}, time_first(value), time_first(next_value)


FACTORS = st.sampled_from([0.0, 0.9, 1.0])


@settings(max_examples=scaled(20), deadline=None)
@given(SHAPES, st.sampled_from([1, 2]), FACTORS, FACTORS, st.integers(0, 2**32 - 1))
def test_against_a_loop(shape, players, gamma, lmbda, seed):
    batch, value, next_value = made(shape, players, seed)
    advantage, target = fc.gae(batch, value, next_value, gamma=gamma, lmbda=lmbda)
    assert advantage.dtype == target.dtype == torch.float32
    expected = naive(batch, value, next_value, gamma, lmbda)
    assert_close(advantage.double(), expected, atol=1e-5, rtol=1e-5)
    assert_close(target, advantage + value)


def test_split_trajectories_give_the_same_and_zero_for_padding():
    batch, value, next_value = made((3, 20))
    batch["value"], batch["next", "value"] = value, next_value
    batch["expected"] = fc.gae(batch, value, next_value)[0]
    split = fc.split_trajectories(batch)
    padding = ~split["collector", "mask"]
    split["next", "value"][padding] = torch.nan  # what a value function says of padding counts for nothing
    advantage = fc.gae(split, split["value"], split["next", "value"])[0]
    assert padding.any()
    assert_close(advantage, split["expected"], atol=1e-5, rtol=1e-5)


def test_rows_of_a_lane_that_stays_finished_have_no_advantage():
    with fc.SyncDataCollector("CartPole-v1", frames_per_batch=100, reset_when_done=False, seed=0) as collector:
        batch = next(collector)
    ones = torch.ones(100, 1)
    advantage, target = fc.gae(batch, ones, ones * 5)
    stays = batch["done"]
    assert 0 < stays.sum() < 99
    assert (advantage[stays] == 0).all()
    assert (target[stays] == 1).all()
    last = int((~stays).sum()) - 1
    assert advantage[last] == 1 - 1  # its reward less its value: it was terminated


def test_lambda_one_gives_discounted_returns_to_go():
    rewards = torch.tensor([1.0, 2.0, 4.0, 8.0])[:, None]
    ended = torch.tensor([[False], [True], [False], [False]])
    batch = TensorDict({"next": {"reward": rewards, "done": ended, "terminated": ended}}, [4])
    value, next_value = (torch.tensor(row)[:, None] for row in ([3.0, 5.0, 6.0, 7.0], [5.0, 9.0, 7.0, 16.0]))
    _, target = fc.gae(batch, value, next_value, gamma=0.5, lmbda=1)
    assert_close(target[:, 0], torch.tensor([1 + 2 / 2, 2, 4 + 8 / 2 + 16 / 4, 8 + 16 / 2]))
    assert fc.gae(batch[:0], value[:0], value[:0])[0].shape == (0, 1)


@pytest.mark.parametrize("time", [2048, 2049])
def test_long_trajectories_keep_their_precision(time):
    batch, value, next_value = made((2, time), often=0)
    batch["next", "reward"] += 1
    lmbda = float(np.float32(0.9999))  # of any other number the sums see the rounding a thousandfold
    got, _ = fc.gae(batch, value, next_value, gamma=1.0, lmbda=lmbda)
    expected = naive(batch, value, next_value, 1.0, lmbda)
    assert (got - expected).abs().max() / expected.abs().max() < 5e-6


def test_float64_values_are_taken_as_they_are():
    batch, value, next_value = made((2, 50))
    got, _ = fc.gae(batch, value.double(), next_value.double(), gamma=0.997, lmbda=0.93)
    assert got.dtype == torch.float64
    assert_close(got, naive(batch, value, next_value, 0.997, 0.93), atol=1e-13, rtol=1e-13)


def test_values_and_gradients_are_those_of_torchrls():
    batch, *values = made((2, 50))
    del batch["collector"]
    flags = [batch["next", name] for name in ("reward", "done", "terminated")]
    leaves, weight = [each.requires_grad_() for each in values], torch.randn(2, 50, 1)
    ours, theirs = fc.gae(batch, *leaves)[0], generalized_advantage_estimate(0.99, 0.95, *leaves, *flags)[0]
    assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert_close(*(torch.autograd.grad((each * weight).sum(), leaves) for each in (ours, theirs)))


@pytest.mark.parametrize(("shape", "players"), [((30,), 1), ((4, 33), 1), ((3, 8), 2)])
def test_jax_arrays_under_jit_give_the_same(shape, players):
    batch, value, next_value = made(shape, players)
    expected = fc.gae(batch, value, next_value, gamma=0.9, lmbda=0.8)
    got = jax.jit(fc.gae)(*in_jax(batch, value, next_value), gamma=0.9, lmbda=0.8)
    for one, other in zip(got, expected, strict=True):
        one = np.moveaxis(np.asarray(one), 0, len(shape) - 1)
        np.testing.assert_allclose(one, other if players > 1 else other[..., 0], atol=1e-5, rtol=1e-5)


def test_jax_differentiates_in_values_and_factors():
    batch, value, next_value = in_jax(*made((2, 9)))

    @jax.jit
    def loss(value, gamma):
        return (fc.gae(batch, value, next_value, gamma=gamma)[0] ** 2).sum()

    by_value, by_gamma = jax.grad(loss, (0, 1))(value, 0.9)
    step = jnp.zeros_like(value).at[3, 1].set(1e-2)
    slope = (loss(value + step, 0.9) - loss(value - step, 0.9)) / 2e-2
    np.testing.assert_allclose(by_value[3, 1], slope, rtol=1e-2, atol=1e-2)
    slope = (loss(value, 0.91) - loss(value, 0.89)) / 2e-2
    np.testing.assert_allclose(by_gamma, slope, rtol=1e-2)


ARRAYS = dict(zip(("batch", "value", "next_value"), in_jax(*made((2, 5))), strict=True))
WIDE = {**ARRAYS["batch"], "next": {**ARRAYS["batch"]["next"], "done": jnp.zeros((5, 2, 1), bool)}}


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"value": torch.zeros(2, 5)}, ValueError, r"value has shape \[2, 5\], expected \[2, 5, 1\].*value\[\.\.\., Non"),
    ({"next_value": torch.zeros(2, 4, 1)}, ValueError, r"next_value has shape \[2, 4, 1\], expected \[2, 5, 1\]"),
    ({"value": torch.zeros(2, 5, 1).long()}, TypeError, "value is torch.int64, expected a floating"),
    ({"next_value": None}, TypeError, "next_value is NoneType.*the value function's result for next.observation"),
    ({"gamma": float("nan")}, ValueError, "gamma is nan, expected"),
    ({"batch": TensorDict({}, [2, 5])}, ValueError, "no tensor next.reward"),
    ({"batch": {"next": {"reward": 1}}}, ValueError, r"the batch lacks \['next.terminated', 'next.done'\].*reward"),
    (ARRAYS | {"batch": made((2, 5))[0].to_dict()}, TypeError, "reward is Tensor, expected a JAX array: tensors come"),
    (ARRAYS | {"next_value": None}, TypeError, "next_value is NoneType, expected a JAX array: pass the value"),
    (ARRAYS | {"value": ARRAYS["value"].T}, ValueError, r"value has shape \[2, 5\], expected \[5, 2\] as next.reward"),
    (ARRAYS | {"batch": WIDE}, ValueError, r"next.done \[5, 2, 1\].*time first, no trailing 1"),
    (ARRAYS | {"value": ARRAYS["value"].astype(int)}, TypeError, "value is int32, expected a floating"),
])  # fmt: skip
def test_bad_arguments(change, error, message):
    batch, value, next_value = made((2, 5))
    with pytest.raises(error, match=message):
        fc.gae(**({"batch": batch, "value": value, "next_value": next_value} | change))


def batches(count=5, frames=60, **keywords):
    keywords |= {"create_env_kwargs": {"num_envs": 3}, "frames_per_batch": frames, "total_frames": count * frames}
    with fc.SyncDataCollector("CartPole-v1", **keywords, seed=0) as collector:
        return list(collector)


def discounted(rewards, dones, gamma):
    """The return of `VecNormalize` after each step of a lane [T]."""
    total, found = 0.0, []
    for reward, done in zip(rewards.tolist(), dones.tolist(), strict=True):
        total = total * gamma + reward
        found.append(total)
        total = 0.0 if done else total
    return found


@pytest.mark.parametrize("keywords", [{}, {"max_frames_per_traj": 7}, {"set_truncated": True}])
def test_the_deviation_is_that_of_all_discounted_returns(keywords):
    parts = batches(**keywords)
    scaling, scaled = None, []
    for part in parts:
        reward, scaling = fc.scale_rewards(part, scaling, gamma=0.9)
        scaled.append(reward)
    whole = torch.cat(parts, 1)
    done = whole["next", "done"].clone()
    if "set_truncated" in keywords:
        done &= ~whole["collector", "cut"][..., None]
    lanes = zip(whole["next", "reward"][..., 0], done[..., 0], strict=True)
    returns = np.array([discounted(reward, ends, 0.9) for reward, ends in lanes])
    np.testing.assert_allclose(float(scaling.statistics.mean["return"]), returns.mean(), rtol=1e-10)
    np.testing.assert_allclose(float(scaling.statistics.variance["return"]), returns.var(), rtol=1e-10)
    np.testing.assert_allclose(scaled[-1], parts[-1]["next", "reward"] / (returns.var() + 1e-8) ** 0.5, rtol=1e-6)
    first, _ = fc.scale_rewards(whole, gamma=0.9)
    assert torch.allclose(first[:, -1], scaled[-1][:, -1])


def test_batches_of_workers_are_told_apart_by_their_lanes():
    with fc.MultiaSyncDataCollector(["CartPole-v1"] * 2, None, frames_per_batch=15, seed=0, in_process=True) as run:
        parts = [next(run).clone() for _ in range(8)]
    scaling = None
    for part in parts:
        _, scaling = fc.scale_rewards(part, scaling)
    lanes = {}
    for part in parts:
        lanes.setdefault(int(part["collector", "lane"][0]), []).append(part)
    rows = [torch.cat(each, 0)["next"] for each in lanes.values()]
    returns = np.concatenate([discounted(row["reward"][:, 0], row["done"][:, 0], 0.99) for row in rows])
    np.testing.assert_allclose(float(scaling.statistics.variance["return"]), returns.var(), rtol=1e-10)


def test_jax_scales_the_same_inside_jit():
    parts, ours, theirs = batches(), None, None
    scale = jax.jit(lambda batch, scaling: fc.scale_rewards(batch, scaling, gamma=0.95, clip=3.0))
    for part in parts:
        wanted, ours = fc.scale_rewards(part, ours, gamma=0.95, clip=3.0)
        reward, done = (jnp.asarray(part["next", name][..., 0].T.numpy()) for name in ("reward", "done"))
        got, theirs = scale({"next": {"reward": reward, "done": done}}, theirs)
        np.testing.assert_allclose(got, wanted[..., 0].T, rtol=1e-4)
    assert theirs.statistics.count.tolist() == [300, 0]
    restored = (theirs.returns, tuple(theirs.statistics))  # as `Checkpoint.restore` returns it
    assert scale({"next": {"reward": reward, "done": done}}, restored)[1].statistics.count.tolist() == [360, 0]


def test_traced_batches_are_scaled_as_delivered_ones():
    """Also after a reset between two batches, and where finished lanes repeat their last frame."""
    env = counting(3)
    policy = fc.random_policy(env)
    state = fc.traced.init(env, policy, None, key=jax.random.key(0))
    ours = theirs = None
    scale = jax.jit(lambda arrays, scaling: fc.scale_rewards(arrays, scaling, gamma=0.9))

    @partial(jax.jit, static_argnums=1)
    def run(state, finishes):
        state = fc.traced.reset(env, state)
        return fc.traced.rollout(env, policy, None, state, 40, reset_when_done=finishes)

    for finishes in (True, True, False):
        state, arrays = run(state, finishes)
        wanted, ours = fc.scale_rewards(fc.deliver(arrays, env), ours, gamma=0.9)
        got, theirs = scale(arrays, theirs)
        np.testing.assert_allclose(got, wanted[..., 0].T, rtol=1e-4)
    assert int(theirs.statistics.count[0]) == int(ours.statistics.count) < 360


def test_several_players_have_a_deviation_each():
    batch = make_batch(0, 60, players=2)
    batch["next", "reward"][..., 1] *= 3
    scaled, scaling = fc.scale_rewards(batch)
    assert scaled.shape == batch["next", "reward"].shape
    assert scaling.statistics.variance["return"].shape == (2,)
    assert_close(scaled[..., 1], -scaled[..., 0])


def test_bad_arguments_of_scale_rewards():
    (batch,) = batches(1)
    wide = {"done": jnp.zeros((2, 3, 1), bool), "reward": jnp.zeros((2, 3, 1))}
    for arguments, options, error, says in (
        ((batch,), {"gamma": 1.5}, ValueError, "gamma"),
        (({"next": {"done": wide["done"][..., 0]}},), {}, ValueError, "lacks ['next.reward']"),
        (({"next": wide},), {}, ValueError, "next.done [2, 3, 1] … expected [T, P]"),
        ((batch, fc.scale_rewards(batch)), {}, TypeError, "expected its second part: unpack the result"),
    ):
        with refused(error, says):
            fc.scale_rewards(*arguments, **options)
