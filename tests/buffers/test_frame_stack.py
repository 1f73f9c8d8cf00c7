"""Frames of stacks stored once: the same frames come out as of a storage that holds whole stacks."""


import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import funcollect as fc
from funcollect.keys import key_from_seed
from tests.support.compare import assert_same
from tests.support.running import scaled
from tests.support.streams_of_frames import batch_of, streams

STACK = 3


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
        batch[(*path, "sensors")] = pixels[..., 0, :2].float().movedim(-1, -1) / 3 - 1
        batch[(*path, "far")] = pixels.clone()
    return batch


def everything(state):
    return state.memory.read(np.arange(len(state))).clone()


def check_uses(storage):
    """Whether the planes in use are those of the rows and of the next observations aside, and no others."""
    stacks, aside = storage._stacks, storage._next
    expected = {id(pool): np.zeros(len(pool._uses), np.int64) for pool in stacks.pools}
    rows = [(storage.layout, storage._rows)]
    if aside is not None:
        rows.append((aside.aside, aside._aside[torch.from_numpy(aside.place[aside.place >= 0])]))
    for layout, some in rows:
        for pool, numbers in stacks.numbers(layout, some):
            np.add.at(expected[id(pool)], numbers.reshape(-1), 1)
    for pool in stacks.pools:
        used = expected[id(pool)]
        assert (used[1:] == pool._uses[1:]).all()
        assert not pool.memory.rows[0].any()
        known = [0, *np.flatnonzero(used[1:]) + 1, *pool._free, *range(pool._end, len(used))]
        assert sorted(known) == list(range(len(used)))


@settings(max_examples=scaled(30), deadline=None)
@given(streams(), st.integers(1, 60), st.integers(0, 9), st.booleans(), st.booleans())
def test_the_same_frames_come_out(batches, capacity, seed, compact_obs, in_file):
    generator = torch.Generator().manual_seed(seed)
    storage = (fc.LazyMemmapStorage if in_file else fc.LazyTensorStorage)(
        capacity, ndim=2, compact_obs=compact_obs, frame_stack=STACK
    )
    plain, shared = (
        fc.ring.init(storage, trajectories=fc.ring.Trajectories())
        for storage in (fc.LazyTensorStorage(capacity, ndim=2, compact_obs=compact_obs), storage)
    )
    for lanes in batches:
        batch = stacked(lanes, generator)
        (plain, one), (shared, two) = fc.ring.extend(plain, batch), fc.ring.extend(shared, batch)
        assert one.tolist() == two.tolist()
        assert_same(everything(shared), everything(plain))
        check_uses(storage)
    key = key_from_seed(seed)
    for spec in (fc.ring.Flat(9), fc.ring.Slices(num_slices=4, slice_len=3, strict_length=False)):
        assert_same(fc.ring.sample(shared, key, spec).clone(), fc.ring.sample(plain, key, spec).clone())
    copied = fc.ring.snapshot(shared)
    check_uses(copied.memory.storage)
    fc.ring.extend(shared, batch)
    assert_same(everything(copied), everything(plain))
