"""Where `MultiStep` takes what is under ``next`` from later frames, everything else goes by the frames' own ends."""

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


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_episodes_are_those_of_single_steps(cut: dict[str, Any]) -> None:
    stats: list[Any] = [None, None]
    for pair in zip(batches(**cut), batches(**cut, postproc=SUMS), strict=True):
        stats = [fc.episode_stats(each, one) for each, one in zip(pair, stats, strict=True)]
        for name in ("returns", "lengths", "traj_ids", "lanes", "terminated"):
            assert torch.equal(*(getattr(each, name) for each in stats)), name
        assert stats[0].open_returns.keys() == stats[1].open_returns.keys()
    assert len(stats[0])


def test_trajectories_slices_and_scaled_rewards_are_those_of_single_steps() -> None:
    def found(batch: TensorDict) -> list[torch.Tensor]:
        split = fc.split_trajectories(batch)
        variance = fc.scale_rewards(batch)[1].statistics.variance["return"]
        storage, sampler = fc.LazyTensorStorage(100, ndim=2), fc.SliceSampler(slice_len=4)
        generator = torch.Generator().manual_seed(0)
        buffer = fc.ReplayBuffer(storage=storage, sampler=sampler, batch_size=80, generator=generator)
        buffer.extend(batch)
        return [split["observation"], split["collector", "mask"], variance, buffer.sample()["observation"]]

    batch = batches()[0]
    for one, two in zip(found(batch), found(SUMS(batch)), strict=True):
        assert torch.equal(one, two)


def test_rewards_are_summed_once() -> None:
    summed = SUMS(batches()[0])
    value = torch.zeros(*summed.shape, 1)
    sampler = fc.MultiStepSampler(gamma=0.9, n_steps=3)
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(100, ndim=2), sampler=sampler, batch_size=8)
    buffer.extend(summed)
    for call in (lambda: SUMS(summed), lambda: fc.gae(summed, value, value), buffer.sample):
        with pytest.raises(ValueError, match=r"sums of several rewards.*expected single rewards.*either MultiStep or"):
            call()
