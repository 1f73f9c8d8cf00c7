"""Samples of slices, split: each slice is a trajectory, whatever the shape of the sample, and padding is left out."""

import pytest
import torch

import funcollect as fc
from funcollect.trajectories.split import split_trajectories
from tests.support.compare import assert_same
from tests.support.frames.streams_of_frames import batch_of, frames_of

LENGTHS = [2, 7, 3, 9, 1]


def slices_of(kind, size=60, **options):
    """A buffer's sample of slices of up to 5 frames, among trajectories of LENGTHS."""
    sampler = kind(slice_len=5, **options)
    generator = torch.Generator().manual_seed(0)
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(100), sampler=sampler, generator=generator)
    buffer.extend(batch_of([frames_of(0, LENGTHS)])[0])
    return buffer.sample(size)


def by_priority(**options):
    return fc.PrioritizedSliceSampler(100, 1.0, 1.0, **options)


SHORT = {"strict_length=False": {"strict_length": False}, "padded": {"strict_length": False, "pad_output": True}}


@pytest.mark.parametrize("kind", [fc.SliceSampler, by_priority])
@pytest.mark.parametrize("lengths", ["strict", *SHORT])
@pytest.mark.parametrize("shaped", [False, True], ids=["flat", "[slices, slice_len]"])
def test_each_slice_is_a_trajectory(kind, lengths, shaped):
    sample = slices_of(kind, **SHORT.get(lengths, {}))
    if shaped and lengths == "strict_length=False":
        return  # of no common length
    held = sample.get(("collector", "mask"), torch.ones(len(sample), dtype=torch.bool))
    first = sample["collector", "is_first"][held]
    frames = sample[held].exclude(("collector", "mask"))
    split = split_trajectories(sample.view(-1, 5) if shaped else sample)
    mask = split["collector", "mask"]
    assert len(mask) == int(first.sum()) == 12
    assert (split["collector", "is_first"] == (torch.arange(mask.shape[1]) == 0)).all()
    assert_same(split.exclude(("collector", "mask"))[mask], frames)
    assert not split["observation"][~mask].any()
    assert_same(split_trajectories(split), split)  # again, which changes nothing
    nested = split_trajectories(sample, as_nested=torch.jagged)
    assert [len(each) for each in nested["observation"].unbind()] == mask.sum(-1).tolist()


def test_neighbours_of_one_trajectory_stay_apart():
    """Also where a slice begins with the frame that follows the last one of the slice before."""
    sample = slices_of(fc.SliceSampler, size=10)
    sample["collector", "traj_ids"][:] = 3
    sample["collector", "step"] = torch.arange(10)
    sample["done"] = torch.ones(10, 1, dtype=torch.bool)
    assert split_trajectories(sample)["collector", "step"].tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_numbers_take_the_place_of_ids():
    """Which are those of the trajectories that remain, without the padding."""
    sample = slices_of(fc.SliceSampler, strict_length=False, pad_output=True)
    sample = sample.exclude(("collector", "traj_ids"), ("collector", "step"))
    split = split_trajectories(sample)
    mask, ids = split["collector", "mask"], split["collector", "traj_ids"]
    assert (ids == torch.where(mask, torch.arange(12)[:, None], 0)).all()
