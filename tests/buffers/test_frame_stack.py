"""Frames of stacks stored once: the same frames come out as of a storage that holds whole stacks."""

import errno
import os
import threading

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import funcollect as fc
from funcollect.buffers.storages.plane_pool import PlanePool
from funcollect.keys import key_from_seed
from tests.support.compare import assert_same
from tests.support.running import in_soak, scaled
from tests.support.streams_of_frames import batch_of, frames_of, streams

STACK = 3
CAPACITY = 50


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
        known = [0, *np.flatnonzero(used[1:]) + 1, *pool._free[: pool._idle], *range(pool._end, len(used))]
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


def batches(count=8, odd=0.1):
    """Batches [3, 6] of three lanes, with a trajectory that is cut."""
    lanes = [frames_of(lane, [5, 3, 7, 4, 6, 9] * 3, cut={1}) for lane in range(3)]
    generator = torch.Generator().manual_seed(0)
    return [stacked([lane[6 * n : 6 * n + 6] for lane in lanes], generator, odd) for n in range(count)]


def noisy(batch, generator):
    """The batch with stacks that share nothing."""
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


def check_alike(plain, shared):
    assert_same(shared[:].clone(), plain[:].clone())
    assert_same(shared.sample().clone(), plain.sample().clone())
    check_uses(shared.storage)


PATHS = [("camera", "pixels"), ("next", "camera", "pixels"), ("far",), ("next", "far"), ("next", "sensors")]
SAMPLERS = {
    "random": fc.RandomSampler,
    "without replacement": fc.SamplerWithoutReplacement,
    "slices": lambda: fc.SliceSampler(slice_len=4, strict_length=False),
    "windows": lambda: fc.SliceSampler(num_slices=4, over="windows", strict_length=False),
    "priorities": lambda: fc.PrioritizedSampler(CAPACITY, 0.8, 0.6),
    "slices by priority": lambda: fc.PrioritizedSliceSampler(CAPACITY, 0.8, 0.6, slice_len=3),
    "n steps": lambda: fc.MultiStepSampler(gamma=0.9, n_steps=3),
}
CASES = [("slices", None, True), ("n steps", 2, False), ("slices by priority", None, False), ("windows", 2, True)]
CASES += in_soak((name, prefetch, compact) for name in SAMPLERS for prefetch in (None, 2) for compact in (False, True))
KINDS = pytest.mark.parametrize("kind", [fc.LazyTensorStorage, fc.LazyMemmapStorage])


@KINDS
@pytest.mark.parametrize(("sampler", "prefetch", "compact_obs"), CASES)
def test_samplers_and_dumps(sampler, prefetch, compact_obs, kind, tmp_path):
    """The same samples through several turns, before and after dumps, also in a buffer that has loaded one."""
    options = {"sampler": sampler, "kind": kind, "compact_obs": compact_obs, "prefetch": prefetch}
    plain, shared = both(**options)
    for number, batch in enumerate(batches()):
        extend([plain, shared], batch)
        check_alike(plain, shared)
        if number % 2:
            for name, buffer in (("plain", plain), ("shared", shared)):
                if "priorit" in sampler:
                    buffer.update_priority(torch.arange(12), torch.arange(12.0))
                buffer.dumps(
                    tmp_path / f"{name}{number}", base=tmp_path / f"{name}{number - 2}" if number > 2 else None
                )
            loaded = made(STACK, **options)
            loaded.loads(tmp_path / f"shared{number}")
            check_uses(loaded.storage)
            if number > 2:  # goes on in another process, which has loaded the dump
                shared = loaded
            check_alike(plain, shared)
    for buffer in (plain, shared):
        buffer.empty()
    for batch in batches(4):
        extend([plain, shared], batch)
        check_alike(plain, shared)


@KINDS
@pytest.mark.parametrize("compact_obs", [False, True])
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


def test_no_room_for_further_planes(monkeypatch):
    """The buffer is as before, and goes on once there is room."""
    plain, shared = both(kind=fc.LazyMemmapStorage)
    for batch in batches(4):
        extend([plain, shared], batch)
    generator, fallocate = torch.Generator().manual_seed(0), os.posix_fallocate

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    other = noisy(batches(1)[0], generator)
    with pytest.raises(OSError, match=r"no room for \d+ distinct frames of 40 bytes .*: give a smaller max_size, or"):
        shared.extend(other)
    check_alike(plain, shared)
    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    extend([plain, shared], other)
    check_alike(plain, shared)


@pytest.mark.parametrize("room", [0, 1, 2])  # for the files of two shapes of planes
def test_no_room_at_first(monkeypatch, tmp_path, room):
    """No file stays behind."""
    given, fallocate = iter(range(room)), os.posix_fallocate

    def full(*args):
        if next(given, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        fallocate(*args)

    monkeypatch.setattr(os, "posix_fallocate", full)
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


def test_bad_input():
    with pytest.raises(ValueError, match="frame_stack is for storages on the host, device is cuda"):
        fc.LazyTensorStorage(9, device="cuda", frame_stack=4)
    with pytest.raises(ValueError, match="frame_stack is 0, expected at least 1: pass for example frame_stack=4"):
        fc.LazyMemmapStorage(9, frame_stack=0)
    batch = batches(1)[0]
    with pytest.raises(ValueError, match=r"frame_stack is 7, and no observation .* \[7, ...\] .*'far': \[3, 5, 7\]"):
        fc.ReplayBuffer(storage=fc.LazyTensorStorage(9, ndim=2, frame_stack=7)).extend(batch)
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(99, ndim=2, frame_stack=STACK))
    buffer.extend(batch)
    with pytest.raises(
        ValueError, match=r"far is \[2, 5, 7\] torch.uint8 in each frame, the storage holds \[3, 5, 7\]"
    ):
        buffer.extend(batch.clone().set("far", batch["far"][:, :, 1:]))
    with pytest.raises(ValueError, match=r"lacks \['next.far'\]"):
        buffer.extend(batch.exclude(("next", "far")))
    with pytest.raises(ValueError, match=r"lacks \[\] and has \['more'\] besides"):
        buffer.extend(batch.clone().set("more", batch["far"]))
    check_uses(buffer.storage)
    assert len(buffer) == 18


@pytest.fixture(scope="module")
def pong():
    """Whole and compact batches ``[2, 250]`` of the same run, with the end of an episode."""
    found = []
    for compact_obs in (False, True):
        env = fc.make_env("ale/Pong", num_envs=2, max_episode_steps=700)
        with fc.SyncDataCollector(
            env, frames_per_batch=500, total_frames=2_000, seed=0, compact_obs=compact_obs
        ) as collector:
            found.append(list(collector))
    return found


@pytest.mark.parametrize("compact_obs", [False, True])
def test_pong_takes_one_screen_per_frame(pong, compact_obs, tmp_path):
    whole, compact = pong
    shared = fc.ReplayBuffer(storage=fc.LazyTensorStorage(2_000, ndim=2, compact_obs=compact_obs, frame_stack=4))
    for batch in compact if compact_obs else whole:
        shared.extend(batch)
    assert shared.storage.nbytes < 1.05 * 2_000 * 84 * 84
    (pool,) = shared.storage._stacks.pools
    assert pool._end <= 2_000 + 5  # at most one screen per frame and per start of an episode; and zeros
    joined = torch.cat(whole, 1).transpose(0, 1).reshape(-1)
    assert_same(shared[:].clone(), joined.clone())
    for batch in whole:  # once more, over the same frames: most screens are found again
        shared.extend(batch)
    assert_same(shared[:].clone(), joined.clone())
    assert shared.storage.nbytes < 1.15 * 2_000 * 84 * 84
    check_uses(shared.storage)
    shared.dumps(tmp_path)
    files = sum(path.stat().st_size for path in tmp_path.glob("v0/*"))
    assert files < 1.15 * 2_000 * 84 * 84


def test_a_checkpoint_links_and_restores_stacks(tmp_path):
    plain, shared = both("slices")
    checkpoint = fc.Checkpoint(tmp_path, keep=2)
    for step, batch in enumerate(batches()):
        extend([plain, shared], batch)
        checkpoint.save(step, buffer=shared)
        other = made(STACK, "slices")
        checkpoint.restore(buffer=other)
        check_uses(other.storage)
        assert_same(other[:].clone(), plain[:].clone())
    files = [path.stat().st_nlink for path in tmp_path.glob("step-7/buffer/v*/rows-*.bin")]
    assert (files.count(1), files.count(2) > 6) == (6, True)


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
