"""Observations, and frames of stacks, that are stored once: the same frames come out as of a storage that holds all."""

import threading

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import funcollect as fc
from funcollect.buffers.storages.planes import PlanePool
from funcollect.keys import key_from_seed
from tests.support.compare import assert_same
from tests.support.frames.stacked_frames import (
    CAPACITY,
    STACK,
    batches,
    both,
    check_alike,
    check_aside,
    check_uses,
    extend,
    noisy,
    stacked,
)
from tests.support.frames.streams_of_frames import streams
from tests.support.running import scaled


def everything(state):
    return state.memory.read(np.arange(len(state))).clone()


@settings(max_examples=scaled(40), deadline=None)
@given(
    streams(), st.integers(1, 60), st.integers(0, 9), st.booleans(),
    st.sampled_from([(True, None), (False, STACK), (True, STACK)]),
)  # fmt: skip
def test_the_same_frames_come_out(batches, capacity, seed, in_file, options):
    generator, (compact_obs, stack) = torch.Generator().manual_seed(seed), options
    storage = (fc.LazyMemmapStorage if in_file else fc.LazyTensorStorage)(
        capacity, ndim=2, compact_obs=compact_obs, frame_stack=stack
    )
    plain, shared = (
        fc.ring.init(each, trajectories=fc.ring.Trajectories())
        for each in (fc.LazyTensorStorage(capacity, ndim=2), storage)
    )
    for lanes in batches:
        batch = stacked(lanes, generator)
        batch["camera", "empty"] = batch["next", "camera", "empty"] = torch.zeros(*batch.shape, 0)
        (plain, one), (shared, two) = fc.ring.extend(plain, batch), fc.ring.extend(shared, batch)
        assert one.tolist() == two.tolist()
        assert_same(everything(shared), everything(plain))
        check_uses(storage)
        if compact_obs:
            check_aside(storage, everything(plain), plain.memory.index)
    key = key_from_seed(seed)
    for spec in (fc.ring.Flat(9), fc.ring.Slices(num_slices=4, slice_len=3, strict_length=False)):
        assert_same(fc.ring.sample(shared, key, spec).clone(), fc.ring.sample(plain, key, spec).clone())
    copied = fc.ring.snapshot(shared)
    check_uses(copied.memory.storage)
    fc.ring.extend(shared, batch)
    assert_same(everything(copied), everything(plain))


@pytest.mark.parametrize("storage", [fc.LazyTensorStorage, fc.LazyMemmapStorage])
@pytest.mark.parametrize("length", [1, 25])
def test_half_the_memory_also_frame_by_frame(storage, length):
    """Whole batches and single frames; samplers that know nothing of trajectories too."""
    buffers = [fc.ReplayBuffer(storage=storage(1000, compact_obs=compact), batch_size=20) for compact in (True, False)]
    screen = torch.randint(256, (1001, 20, 20), dtype=torch.uint8)
    step = torch.arange(1000)
    batch = TensorDict(
        {"screen": screen[:-1], "episode": step // 250, "next": {"screen": screen[1:], "reward": torch.ones(1000, 1)}},
        [1000],
    )
    for start in range(0, 1000, length):
        extend(buffers, batch[start : start + length])
    assert_same(buffers[0][:].clone(), batch.clone())
    assert buffers[0].storage.nbytes < 0.55 * buffers[1].storage.nbytes
    sample, info = buffers[0].sample(return_info=True)
    assert_same(sample.clone(), batch[info["index"]].clone())


@pytest.mark.parametrize(("kind", "compact_obs"), [(fc.LazyTensorStorage, True), (fc.LazyMemmapStorage, False)])
def test_frames_that_share_nothing(kind, compact_obs):
    """The memory grows; frame by frame, too."""
    plain, shared = both(kind=kind, compact_obs=compact_obs)
    generator = torch.Generator().manual_seed(0)
    for batch in batches(4):
        for frames in noisy(batch, generator).unbind(1):
            for buffer in (plain, shared):
                buffer.add(frames)
        check_alike(plain, shared)


@pytest.mark.parametrize("distinct", [1, 4])
def test_hashes_need_not_differ(distinct, monkeypatch):
    """The bytes decide, though the hashes of all planes are among a few."""
    whole = PlanePool._hash
    monkeypatch.setattr(PlanePool, "_hash", lambda pool, planes: whole(pool, planes) % np.uint64(distinct))
    plain, shared = both()
    for batch in batches(4):
        extend([plain, shared], batch)
        check_alike(plain, shared)


@pytest.mark.parametrize("ndim", [1, 3])
def test_other_batches(ndim):
    """``[T]`` and ``[W, P, T]``; views with other strides; more frames than the buffer holds, and none."""
    plain, shared = (
        fc.ReplayBuffer(storage=fc.LazyTensorStorage(CAPACITY, ndim=ndim, frame_stack=stack), batch_size=9)
        for stack in (None, STACK)
    )
    whole = torch.cat(batches(4, odd=0), 1)
    whole = whole[0] if ndim == 1 else torch.stack([whole, whole.flip(0)])
    for steps in (slice(0, 7), slice(1, 24, 3), slice(3, 3), slice(0, 24), slice(9, 10)):
        extend([plain, shared], whole[(..., steps)])
        assert_same(shared[:].clone(), plain[:].clone())
        check_uses(shared.storage)


def test_trees_of_tensors():
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(9, frame_stack=2), batch_size=5)
    screens = torch.randn(6, 3, 3)
    stacks = torch.stack([screens[:-1], screens[1:]], 1)
    buffer.extend({"pixels": stacks, "reward": torch.arange(5.0)})
    assert torch.equal(buffer[:]["pixels"], stacks)
    assert torch.equal(buffer[1:3]["reward"], torch.tensor([1.0, 2.0]))
    buffer.add({"pixels": stacks[0], "reward": torch.tensor(7.0)})
    assert torch.equal(buffer[5]["pixels"], stacks[0])
    assert buffer.storage._stacks.pools[0]._end == 7  # six screens, and zeros


BATCH = batches(1)[0]
REFUSED = {  # an option, a change of the second batch, and the message; None for the first batch
    "no next observation": (
        {"compact_obs": True}, None, lambda batch: batch.exclude("observation", "camera", "far", "sensors"),
        r"no next observation of the same shape .* leave compact_obs out"),
    "no stack": ({"frame_stack": 7}, None, lambda batch: batch, r"is 7, and no .* \[7, ...\] .*'far': \[3, 5, 7\]"),
    "lacks": (
        {"compact_obs": True}, BATCH, lambda batch: batch.exclude(("next", "far")), r"lacks \['next\.far'\], expected"),
    "shorter stack": (
        {"frame_stack": STACK}, BATCH, lambda batch: batch.set("far", batch["far"][:, :, 1:]),
        r"far is \[2, 5, 7\] torch.uint8 in each frame, the storage holds \[3, 5, 7\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_batches_that_do_not_fit(case):
    options, first, change, message = REFUSED[case]
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(99, ndim=2, **options))
    if first is not None:
        buffer.extend(first)
    with pytest.raises(ValueError, match=message):
        buffer.extend(change(BATCH.clone()))
    assert len(buffer) == (0 if first is None else first.numel())
    check_uses(buffer.storage)


def test_bad_options():
    for options in ({"compact_obs": True}, {"frame_stack": 4}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} is for storages on the host, device is cuda"):
            fc.LazyTensorStorage(9, device="cuda", **options)
    with pytest.raises(ValueError, match="frame_stack is 0, expected at least 1: pass for example frame_stack=4"):
        fc.LazyMemmapStorage(9, frame_stack=0)


class Both:
    """Extends two buffers with each batch, until both have been filled several times over."""

    def __init__(self, plain, shared):
        self.buffers, self.turned = (plain, shared), threading.Event()
        self.left = 4 * CAPACITY

    def extend(self, batch):
        if not self.turned.is_set():
            extend(self.buffers, batch)
            self.left -= batch.numel()
            if self.left <= 0:
                self.turned.set()


def cart_poles():
    return gymnasium.wrappers.FrameStackObservation(gymnasium.make("CartPole-v1"), STACK)


def test_asynchronous_workers_fill_a_buffer_in_a_thread():
    """Their batches interleave, and are compact; the stacks are of numbers."""
    plain, shared = (
        fc.ReplayBuffer(
            storage=fc.LazyTensorStorage(CAPACITY, compact_obs=True, frame_stack=stack), batch_size=12,
            sampler=fc.SliceSampler(slice_len=3), generator=torch.Generator().manual_seed(0),
        )
        for stack in (None, STACK)
    )  # fmt: skip
    filled = Both(plain, shared)
    with fc.MultiaSyncDataCollector([cart_poles] * 2, frames_per_batch=7, seed=0, compact_obs=True) as collector:
        collector.start(filled)
        filled.turned.wait()
    check_alike(plain, shared)
    (pool,) = shared.storage._stacks.pools
    assert np.count_nonzero(pool._uses) < 2 * CAPACITY  # of 6 * CAPACITY
