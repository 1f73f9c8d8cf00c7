"""Batches whose observations are stacks, and buffers that store them whole, or each of their frames once."""

import numpy as np
import torch

import funcollect as fc
from tests.support.compare import assert_same
from tests.support.frames.streams_of_frames import batch_of, frames_of

STACK = 3
CAPACITY = 50
PATHS = [("camera", "pixels"), ("next", "camera", "pixels"), ("far",), ("next", "far"), ("next", "sensors")]
SAMPLERS = {
    "random": fc.RandomSampler,
    "without replacement": fc.SamplerWithoutReplacement,
    "slices": lambda: fc.SliceSampler(slice_len=4, strict_length=False),
    "windows": lambda: fc.SliceSampler(num_slices=4, over="windows", strict_length=False, pad_output=True),
    "priorities": lambda: fc.PrioritizedSampler(CAPACITY, 0.8, 0.6),
    "slices by priority": lambda: fc.PrioritizedSliceSampler(CAPACITY, 0.8, 0.6, slice_len=3),
    "n steps": lambda: fc.MultiStepSampler(gamma=0.9, n_steps=3),
}


def screens(lane, trajectory, step):
    """Distinct screens [..., 5, 7] uint8 of these frames; one before the first is like the first."""
    number = lane * 100 + trajectory * 10 + step.clip(min=0)
    return (number[..., None, None] * 7 + torch.arange(35).reshape(5, 7)).to(torch.uint8)


def stacked(lanes, generator, odd=0.1):
    """A batch whose observations are stacks, nested and not, a few of which share no screens with the others."""
    batch = batch_of(lanes)
    lane, trajectory, step = batch["observation"].long().unbind(-1)
    back = torch.arange(1 - STACK, 1)
    for path, ahead in ((), 0), (("next",), 1):
        pixels = screens(lane[..., None], trajectory[..., None], step[..., None] + ahead + back)
        pixels[torch.rand(batch.shape, generator=generator) < odd, 1] ^= 1
        batch[(*path, "camera", "pixels")] = pixels
        batch[(*path, "sensors")] = pixels[..., 0, :2].float() / 3 - 1
        batch[(*path, "far")] = pixels.clone()
    batch["next", "reward"] = step[..., None].float()
    return batch


def batches(count=8, odd=0.1):
    lanes = [frames_of(lane, [5, 3, 7, 4, 6, 9] * 3, cut={1}) for lane in range(3)]
    generator = torch.Generator().manual_seed(0)
    return [stacked([lane[6 * n : 6 * n + 6] for lane in lanes], generator, odd) for n in range(count)]


def noisy(batch, generator):
    noise = {path: torch.rand(batch[path].shape, generator=generator) for path in PATHS}
    return batch.clone().update({path: (leaf * 256).to(batch[path].dtype) for path, leaf in noise.items()})


def made(stack, sampler="random", kind=fc.LazyTensorStorage, compact_obs=False, prefetch=None, **options):
    return fc.ReplayBuffer(
        storage=kind(CAPACITY, ndim=2, compact_obs=compact_obs, frame_stack=stack, **options), batch_size=12,
        sampler=SAMPLERS[sampler](), prefetch=prefetch, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip


def both(*args, **kwargs):
    """A buffer with whole stacks, and one that stores frames once, which draw the same samples."""
    return made(None, *args, **kwargs), made(STACK, *args, **kwargs)


def extend(buffers, batch):
    for buffer in buffers:
        buffer.extend(batch)


def check_uses(storage):
    """Whether the planes in use are those of the rows; each number is in use, free, or was never used."""
    if storage._shared is None:
        return
    expected = {pool: np.zeros(len(pool._uses), np.int64) for pool in storage._shared.pools}
    for pool, numbers in storage._shared.numbers(storage._rows):
        np.add.at(expected[pool], numbers.reshape(-1), 1)
    for pool, used in expected.items():
        assert (used[1:] == pool._uses[1:]).all()
        assert not pool.rows[0].any()
        known = [0, *np.flatnonzero(used[1:]) + 1, *pool._free, *range(pool._end, len(pool._uses))]
        assert sorted(known) == list(range(len(pool._uses)))


def check_alike(plain, shared):
    assert_same(shared[:].clone(), plain[:].clone())
    assert_same(shared.sample().clone(), plain.sample().clone())
    check_uses(shared.storage)
