"""Observations, and frames of stacks, that are stored once: the same frames come out as of a storage that holds all."""

import errno
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import funcollect as fc
from funcollect.buffers.storages.shared_leaves import PlanePool
from funcollect.keys import key_from_seed
from tests.buffers.conftest import filled
from tests.support.compare import assert_same
from tests.support.frames import (
    CAPACITY,
    STACK,
    batches,
    both,
    check_alike,
    check_uses,
    extend,
    made,
    noisy,
    stacked,
    streams,
)
from tests.support.running import in_soak, once, scaled


def everything(state):
    return state.memory.storage.read(np.arange(len(state))).clone()


KINDS = st.sampled_from([fc.LazyMemmapStorage, fc.LazyTensorStorage])
OPTIONS = st.sampled_from([(True, None), (False, STACK), (True, STACK)])


@settings(max_examples=scaled(15), deadline=None)
@given(streams(), st.integers(1, 60), st.integers(0, 9), KINDS, OPTIONS)
def test_the_same_frames_come_out(batches, capacity, seed, kind, options):
    generator, (compact_obs, stack) = torch.Generator().manual_seed(seed), options
    storage = kind(capacity, ndim=2, compact_obs=compact_obs, frame_stack=stack)
    both = (fc.LazyTensorStorage(capacity, ndim=2), storage)
    plain, shared = (fc.ring.init(each, trajectories=fc.ring.Trajectories()) for each in both)
    for lanes in batches:
        batch = stacked(lanes, generator)
        batch["camera", "empty"] = batch["next", "camera", "empty"] = torch.zeros(*batch.shape, 0)
        (plain, one), (shared, two) = fc.ring.extend(plain, batch), fc.ring.extend(shared, batch)
        assert one.tolist() == two.tolist()
        assert not compact_obs or plain.memory.index is not None  # then it is updated with each batch
        assert_same(everything(shared), everything(plain))
        check_uses(storage)
    key = key_from_seed(seed)
    for spec in (fc.ring.Flat(9), fc.ring.Slices(num_slices=4, slice_len=3, strict_length=False)):
        assert_same(fc.ring.sample(shared, key, spec).clone(), fc.ring.sample(plain, key, spec).clone())
    copied = fc.ring.snapshot(shared)
    check_uses(copied.memory.storage)
    fc.ring.extend(shared, batch)
    assert_same(everything(copied), everything(plain))


@pytest.mark.parametrize(("storage", "length"), once([fc.LazyTensorStorage, fc.LazyMemmapStorage], [1, 25]))
def test_half_the_memory_also_frame_by_frame(storage, length):
    buffers = [fc.ReplayBuffer(storage=storage(1000, compact_obs=compact), batch_size=20) for compact in (True, False)]
    screen = torch.randint(256, (1001, 40, 40), dtype=torch.uint8)
    following = {"screen": screen[1:], "reward": torch.ones(1000, 1)}
    batch = TensorDict({"screen": screen[:-1], "next": following}, [1000])
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
    whole = PlanePool._hash
    monkeypatch.setattr(PlanePool, "_hash", lambda pool, planes: whole(pool, planes) % np.uint64(distinct))
    plain, shared = both()
    for batch in batches(4):
        extend([plain, shared], batch)
        check_alike(plain, shared)


@pytest.mark.parametrize("ndim", [1, 3])
def test_other_batches(ndim):
    """``[T]`` and ``[W, P, T]``; views with other strides; more frames than the buffer holds, and none."""
    storages = [fc.LazyTensorStorage(CAPACITY, ndim=ndim, frame_stack=stack) for stack in (None, STACK)]
    plain, shared = (fc.ReplayBuffer(storage=storage) for storage in storages)
    whole = torch.cat(batches(4, odd=0), 1)
    whole = whole[0] if ndim == 1 else torch.stack([whole, whole.flip(0)])
    for steps in (slice(0, 7), slice(1, 24, 3), slice(3, 3), slice(0, 24), slice(9, 10)):
        extend([plain, shared], whole[(..., steps)])
        assert_same(shared[:].clone(), plain[:].clone())
        check_uses(shared.storage)


def test_trees_of_tensors():
    screens = torch.randn(6, 3, 3)
    stacks = torch.stack([screens[:-1], screens[1:]], 1)
    buffer = filled({"pixels": stacks, "reward": torch.arange(5.0)}, fc.LazyTensorStorage(9, frame_stack=2))
    buffer.add({"pixels": stacks[0], "reward": torch.tensor(7.0)})
    assert torch.equal(buffer[:]["pixels"], stacks[[0, 1, 2, 3, 4, 0]])
    assert buffer[:]["reward"].tolist() == [0, 1, 2, 3, 4, 7]
    assert buffer.storage._held[1].pools[0]._end == 7  # six screens, and zeros


BATCH = batches(1)[0]
BARE = BATCH.exclude("observation", "camera", "far", "sensors")
SHORTER = BATCH.clone().set("far", BATCH["far"][:, :, 1:])
REFUSED = [  # an option, the batch, whether it is the second one, and the message
    ({"compact_obs": True}, BARE, False, r"no next observation of the same shape .* leave compact_obs out"),
    ({"frame_stack": 7}, BATCH, False, r"is 7, and no .* \[7, ...\] .*'far': \[3, 5, 7\]"),
    ({"compact_obs": True}, BATCH.exclude(("next", "far")), True, r"lacks \['next\.far'\], expected"),
    ({"frame_stack": STACK}, SHORTER, True, r"far is \[2, 5, 7\] torch.uint8 .*, the storage holds \[3, 5, 7\]"),
]


@pytest.mark.parametrize(("options", "batch", "second", "message"), REFUSED)
def test_batches_that_do_not_fit(options, batch, second, message):
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(99, ndim=2, **options))
    if second:
        buffer.extend(BATCH)
    with pytest.raises(ValueError, match=message):
        buffer.extend(batch)
    assert len(buffer) == (BATCH.numel() if second else 0)
    check_uses(buffer.storage)


# In files: full disks and damaged dumps; and how much room they take.


def full(room):
    """A call that allocates a file on a disk with room for so many."""
    given, allocate = iter(range(room)), os.posix_fallocate

    def call(*args):
        if next(given, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(*args)

    return call


def test_no_room_for_further_planes(monkeypatch):
    plain, shared = both(kind=fc.LazyMemmapStorage)
    for batch in batches(4):
        extend([plain, shared], batch)
    other = noisy(batches(1)[0], torch.Generator().manual_seed(0))
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full(0))
        with pytest.raises(OSError, match=r"no room for \d+ distinct frames of 40 bytes .*: give a smaller max_size"):
            shared.extend(other)
        check_alike(plain, shared)
    extend([plain, shared], other)
    check_alike(plain, shared)


@pytest.mark.parametrize("room", [0, 1, 2])  # for the files of two kinds of planes, and that of rows
def test_no_room_at_first(monkeypatch, tmp_path, room):
    monkeypatch.setattr(os, "posix_fallocate", full(room))
    buffer = made(STACK, kind=fc.LazyMemmapStorage, scratch_dir=tmp_path)
    with pytest.raises(OSError, match=r"50 frames of \d+ bytes, \d+ in all \(No space left on device\): give a small"):
        buffer.extend(batches(1)[0])
    assert not list(tmp_path.iterdir())


def test_damaged_dumps(tmp_path):
    _, buffer = both(compact_obs=True)
    for batch in batches(2):
        buffer.extend(batch)
    buffer.dumps(tmp_path)
    for path in (tmp_path / "v0").glob("*.bin"):
        whole = path.read_bytes()
        for changed in (whole[:-8], whole[:-16] + bytes(16), whole + bytes(8)):
            path.write_bytes(changed)
            with pytest.raises(ValueError, match="the dump is damaged"):
                made(STACK, compact_obs=True).loads(tmp_path)
        path.write_bytes(whole)
    with pytest.raises(ValueError, match="frame_stack of the dump is 3, of this buffer None: build the buffer like"):
        made(None, compact_obs=True).loads(tmp_path)


@pytest.fixture(scope="module")
def pong():
    """Batches ``[2, 150]`` with the end of an episode."""
    env = fc.make_env("ale/Pong", num_envs=2, max_episode_steps=400)
    with fc.SyncDataCollector(env, frames_per_batch=300, total_frames=1_200, seed=0) as collector:
        return list(collector)


@pytest.mark.parametrize(("options", "screens"), [({"frame_stack": 4}, 1), *in_soak([({"compact_obs": True}, 4)])])
def test_pong_takes_one_screen_per_frame(pong, options, screens, tmp_path):
    shared = fc.ReplayBuffer(storage=fc.LazyTensorStorage(1_200, ndim=2, **options))
    for batch in pong:
        shared.extend(batch)
    size = screens * 1_200 * 84 * 84
    assert shared.storage.nbytes < 1.05 * size
    (pool,) = shared.storage._held[1].pools
    assert pool._end <= 1_200 + 5  # at most one per frame and per start of an episode; and zeros
    joined = torch.cat(pong, 1)
    for batch in pong:  # once more, over the same frames: most screens are found again
        shared.extend(batch)
    assert_same(shared[:].clone(), joined.clone())
    assert shared.storage.nbytes < 1.15 * size
    check_uses(shared.storage)
    shared.dumps(tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.glob("v0/*")) < 1.15 * size
