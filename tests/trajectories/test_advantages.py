"""Advantages, against TorchRL's and against a loop in float64."""

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
from tests.support.cases import make_env
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


@settings(max_examples=scaled(40), deadline=None)
@given(
    SHAPES, st.sampled_from([1, 2]), st.sampled_from([0.0, 0.9, 1.0]), st.sampled_from([0.0, 0.95, 1.0]), st.integers(0)
)
def test_against_a_loop(shape, players, gamma, lmbda, seed):
    batch, value, next_value = made(shape, players, seed % 2**32)
    advantage, target = fc.gae(batch, value, next_value, gamma=gamma, lmbda=lmbda)
    assert advantage.dtype == target.dtype == torch.float32
    expected = naive(batch, value, next_value, gamma, lmbda)
    assert_close(advantage.double(), expected, atol=1e-5, rtol=1e-5)
    assert_close(target, advantage + value)


@pytest.mark.parametrize(("name", "num_envs"), [("CartPole-v1", 3), ("HalfCheetah-v5", None), ("torch/Pendulum-v1", 3)])
def test_as_torchrls_on_collected_batches(name, num_envs):
    env = make_env(name, num_envs)
    policy = fc.random_policy(env)
    limit = 20 if name == "CartPole-v1" else None  # of some episodes only
    state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 200, max_frames_per_traj=limit)
    fc.close(state)
    assert batch["next", "truncated"].any()
    assert batch["next", "terminated"].any() == (name == "CartPole-v1")
    value, next_value = (key[..., :1].sin() * 3 for key in (batch["observation"], batch["next", "observation"]))
    flags = (batch["next", name] for name in ("reward", "done", "terminated"))
    expected = generalized_advantage_estimate(0.99, 0.95, value, next_value, *flags)
    assert_close(fc.gae(batch, value, next_value), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("split", [False, True])
def test_trajectories_cut_from_outside_are_not_joined(split):
    env = fc.make_env("torch/Pendulum-v1", num_envs=2)
    policy = fc.random_policy(env)
    state, first = fc.rollout(env, policy, fc.init(env, policy, seed=0), 7)
    _, second = fc.rollout(env, policy, fc.reset(env, state), 7)
    whole = torch.cat([first, second], 1)
    if split:
        whole = fc.split_trajectories(whole)
        first, second = whole[::2], whole[1::2]
    wanted = [fc.gae(part, *values(part))[0] for part in (first, second)]
    got = fc.gae(whole, *values(whole))[0]
    assert_close(got, torch.stack(wanted, 1).flatten(0, 1) if split else torch.cat(wanted, 1))
    assert not whole["next", "done"].any()


def values(batch):
    return batch["observation"][..., :1] * 2, batch["next", "observation"][..., :1] * 2


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


def test_gradients_are_those_of_torchrls():
    batch, value, next_value = made((2, 9))
    del batch["collector"]
    flags = [batch["next", name] for name in ("reward", "done", "terminated")]
    weight = torch.randn(2, 9, 1)
    gradients = []
    for estimate in (
        lambda *both: fc.gae(batch, *both),
        lambda *both: generalized_advantage_estimate(0.99, 0.95, *both, *flags),
    ):
        leaves = [one.clone().requires_grad_() for one in (value, next_value)]
        gradients.append(torch.autograd.grad((estimate(*leaves)[0] * weight).sum(), leaves))
    assert_close(*gradients)


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
