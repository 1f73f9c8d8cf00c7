"""Rewards scaled as `VecNormalize` scales them, across the borders of batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import funcollect as fc
from tests.support.misuse import refused


def batches(count=5, frames=60, **keywords):
    with fc.SyncDataCollector(
        fc.make_env("CartPole-v1", num_envs=3), frames_per_batch=frames, total_frames=count * frames, seed=0, **keywords
    ) as collector:
        return list(collector)


def discounted(rewards, dones, gamma):
    """The return of `VecNormalize` after each step, one lane."""
    total, found = 0.0, []
    for reward, done in zip(rewards, dones, strict=True):
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
    rows = [
        discounted(reward.tolist(), ends.tolist(), 0.9)
        for reward, ends in zip(whole["next", "reward"][..., 0], done[..., 0], strict=True)
    ]
    returns = np.array(rows)
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
    rows = [torch.cat(each, 0) for each in lanes.values()]
    returns = np.concatenate(
        [discounted(row["next", "reward"][:, 0].tolist(), row["next", "done"][:, 0].tolist(), 0.99) for row in rows]
    )
    np.testing.assert_allclose(float(scaling.statistics.variance["return"]), returns.var(), rtol=1e-10)


def test_jax_gives_the_same_inside_jit():
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
    env = fc.make_env("gymnax/CartPole-v1", num_envs=3)
    policy = fc.random_policy(env)
    state = fc.traced.init(env, policy, None, key=jax.random.key(0))
    ours = theirs = None
    for finishes in (True, True, False):
        state = fc.traced.reset(env, state)
        state, arrays = fc.traced.rollout(env, policy, None, state, 40, reset_when_done=finishes)
        wanted, ours = fc.scale_rewards(fc.deliver(arrays, env), ours, gamma=0.9)
        got, theirs = fc.scale_rewards(arrays, theirs, gamma=0.9)
        np.testing.assert_allclose(got, wanted[..., 0].T, rtol=1e-4)
    assert int(theirs.statistics.count[0]) == int(ours.statistics.count) < 360


def test_several_players_have_a_deviation_each():
    env = fc.make_env("pgx/tic_tac_toe", num_envs=2)
    with fc.SyncDataCollector(env, frames_per_batch=60, seed=0) as collector:
        batch = next(collector)
    scaled, scaling = fc.scale_rewards(batch)
    assert scaled.shape == batch["next", "reward"].shape
    assert scaling.statistics.variance["return"].shape == (2,)
    with refused(ValueError, ("gamma",)):
        fc.scale_rewards(batch, gamma=1.5)
    with refused(ValueError, ("lacks ['next.reward']",)):
        fc.scale_rewards({"next": {"done": jnp.zeros((2, 2), bool)}})
    batch_in_jax = {"next": {"done": jnp.zeros((2, 3, 1), bool), "reward": jnp.zeros((2, 3, 1))}}
    with refused(ValueError, ("next.done [2, 3, 1]", "expected [T, P]")):
        fc.scale_rewards(batch_in_jax)


def test_both_results_in_place_of_the_second():
    with fc.SyncDataCollector("CartPole-v1", frames_per_batch=10, seed=0) as collector:
        batch = next(iter(collector))
    with pytest.raises(TypeError, match="expected its second part: unpack the result"):
        fc.scale_rewards(batch, fc.scale_rewards(batch))
