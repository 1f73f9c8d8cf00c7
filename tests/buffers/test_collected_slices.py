"""Batches of every collector go into a buffer and come out in slices, whose observations count along."""

import pytest
import torch

import funcollect as fc
from tests.support.envs.counting import make_counting
from tests.support.workers import COLLECTORS, counting_workers, multi

SYNC, ASYNC = COLLECTORS
LANE = {"lengths": (12, 7, 9)}
STEPS = 5  # of a lane in one batch: every slice comes from two batches at least
SLICE = 6
CAPACITY = 300


def single(lanes):
    env = make_counting("host", *[LANE] * (lanes or 1), batched=lanes is not None)
    return fc.SyncDataCollector(env, None, frames_per_batch=STEPS * (lanes or 1), seed=0)


def of_workers(kind, transport, lanes, **kwargs):
    envs = counting_workers(*[[LANE] * (lanes or 1)] * 2, batched=lanes is not None)
    frames = STEPS * (lanes or 1) * (2 if kind is SYNC else 1)
    return multi(kind, transport, create_env_fn=envs, policy=None, frames_per_batch=frames, **kwargs)


def fill(collector, ndim):
    """A buffer after so many batches that it has forgotten some frames."""
    storage = fc.LazyTensorStorage(CAPACITY, ndim=ndim)
    generator = torch.Generator().manual_seed(0)
    buffer = fc.ReplayBuffer(
        storage=storage, sampler=fc.SliceSampler(slice_len=SLICE), batch_size=16 * SLICE, generator=generator
    )
    with collector:
        while collector.frames < 1.5 * CAPACITY:
            batch = next(collector)
            assert batch.batch_dims == ndim
            buffer.extend(batch)
    return buffer


def long_enough(buffer):
    """The trajectories of which the buffer holds a slice at least, by brute force."""
    ids, counts = buffer[:]["collector", "traj_ids"].unique(return_counts=True)
    return set(ids[counts >= SLICE].tolist())


def check_slices(buffer):
    seen = set()
    for _ in range(60):
        slices = buffer.sample().view(-1, SLICE)
        observation, following = slices["observation"], slices["next", "observation"]
        assert (observation[..., :2].diff(dim=1) == 0).all()  # lane and episode
        assert (observation[..., 2].diff(dim=1) == 1).all()  # step
        assert torch.equal(observation[:, 1:], following[:, :-1])
        assert torch.equal(observation[..., 0].long(), slices["collector", "lane"])
        assert torch.equal(observation[..., 2].long(), slices["collector", "step"])
        assert not slices["next", "terminated"][:, :-1].any()
        seen |= set(slices["collector", "traj_ids"].flatten().tolist())
    assert seen == long_enough(buffer)
    assert len(buffer) == CAPACITY


@pytest.mark.parametrize(("make", "ndim"), [
    (lambda: single(None), 1),
    (lambda: single(3), 2),
    (lambda: of_workers(SYNC, "serial", None, cat_results="stack"), 2),
    (lambda: of_workers(SYNC, "processes", 3, cat_results="stack"), 3),
    (lambda: of_workers(SYNC, "serial", None, cat_results=0), 1),
    (lambda: of_workers(SYNC, "processes", 3, cat_results=-1), 2),
    (lambda: of_workers(ASYNC, "serial", None), 1),  # whichever worker was first
    (lambda: of_workers(ASYNC, "processes", 3), 2),
])  # fmt: skip
def test_slices(make, ndim):
    check_slices(fill(make(), ndim))
