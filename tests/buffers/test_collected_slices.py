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


@pytest.mark.parametrize(("lanes", "ndim"), [(None, 1), (3, 2)])
def test_the_sync_collector(lanes, ndim):
    check_slices(fill(single(lanes), ndim))


@pytest.mark.parametrize(("transport", "cat_results", "lanes", "ndim"), [
    ("serial", "stack", None, 2), ("processes", "stack", 3, 3), ("serial", 0, None, 1), ("processes", -1, 3, 2),
])  # fmt: skip
def test_sync_workers(transport, cat_results, lanes, ndim):
    check_slices(fill(of_workers(SYNC, transport, lanes, cat_results=cat_results), ndim))


def test_rows_of_frames_are_not_taken_for_frames():
    """A batch [W, P, T] in a storage for [P, T]: samples would be rows [T], which losses broadcast without an error."""
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(CAPACITY, ndim=2), batch_size=8)
    with of_workers(SYNC, "serial", 3) as collector, pytest.raises(ValueError, match="build it with ndim=3"):
        buffer.extend(next(collector))


@pytest.mark.parametrize(("transport", "lanes", "ndim"), [("serial", None, 1), ("processes", 3, 2)])
def test_async_workers(transport, lanes, ndim):
    """Whichever worker was first."""
    check_slices(fill(of_workers(ASYNC, transport, lanes), ndim))


def test_runs_with_equal_ids_are_not_linked_to_one_another():
    """Lanes of several runs, as of a vmap over seeds, would be taken for one trajectory."""
    env = fc.make_env("CartPole-v1", num_envs=2)
    policy = fc.random_policy(env)
    runs = [fc.rollout(env, policy, fc.init(env, policy, seed=seed), 20)[1] for seed in range(3)]
    batch = torch.stack(runs)
    sampler = fc.samplers.SliceSampler(slice_len=4)
    buffer = fc.ReplayBuffer(storage=fc.storages.LazyTensorStorage(120, ndim=3), sampler=sampler, batch_size=8)
    with pytest.raises(ValueError, match=r"\[3, 2, 20\] have the same trajectory id.*a separate buffer"):
        buffer.extend(batch)
