"""Where `MultiStep` takes what is under ``next`` from later frames, everything else goes by the frames' own ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

import funcollect as fc

SUMS = fc.MultiStep(gamma=0.9, n_steps=3)
CUTS: list[dict[str, Any]] = [{}, {"split_trajs": True}, {"set_truncated": True}, {"max_frames_per_traj": 9}]


def batches(**kwargs: Any) -> list[TensorDict]:
    env = fc.make_env("CartPole-v1", num_envs=4)
    with fc.SyncDataCollector(env, None, frames_per_batch=100, total_frames=400, seed=0, **kwargs) as collector:
        return [batch.clone() for batch in collector]


def pair(batch: TensorDict) -> tuple[TensorDict, TensorDict]:
    return batch, SUMS(batch)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_episodes_are_those_of_single_steps(cut: dict[str, Any]) -> None:
    stats: list[Any] = [None, None]
    for batch, summed in zip(batches(**cut), batches(**cut, postproc=SUMS), strict=True):
        stats = [fc.episode_stats(each, one) for each, one in zip((batch, summed), stats, strict=True)]
        for name in ("returns", "lengths", "traj_ids", "lanes", "terminated"):
            assert torch.equal(*(getattr(each, name) for each in stats)), name
        assert stats[0].open_returns.keys() == stats[1].open_returns.keys()
    assert len(stats[0])


def test_trajectories_and_statistics_of_rewards_too() -> None:
    batch, summed = pair(batches()[0])
    one, two = (fc.split_trajectories(each) for each in (batch, summed))
    assert torch.equal(one["observation"], two["observation"])
    assert torch.equal(one["collector", "mask"], two["collector", "mask"])
    scalings = [fc.scale_rewards(each)[1] for each in (batch, summed)]
    assert torch.equal(*(each.statistics.variance["return"] for each in scalings))


def test_slices_are_those_of_single_steps() -> None:
    drawn = []
    for each in pair(batches()[0]):
        storage, sampler = fc.LazyTensorStorage(100, ndim=2), fc.SliceSampler(slice_len=4)
        generator = torch.Generator().manual_seed(0)
        buffer = fc.ReplayBuffer(storage=storage, sampler=sampler, batch_size=80, generator=generator)
        buffer.extend(each)
        drawn.append(buffer.sample()["observation"])
    assert torch.equal(*drawn)


def test_rewards_are_summed_once() -> None:
    batch, summed = pair(batches()[0])
    value = torch.zeros(*batch.shape, 1)
    buffer = fc.ReplayBuffer(
        storage=fc.LazyTensorStorage(100, ndim=2), sampler=fc.MultiStepSampler(gamma=0.9, n_steps=3), batch_size=8
    )
    buffer.extend(summed)
    for call in (lambda: SUMS(summed), lambda: fc.gae(summed, value, value), buffer.sample):
        with pytest.raises(ValueError, match=r"sums of several rewards.*expected single rewards.*either MultiStep or"):
            call()
