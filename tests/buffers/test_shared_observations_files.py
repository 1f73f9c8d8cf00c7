"""Frames of stacks stored once, in files: dumps, checkpoints, full disks; and how much room they take."""

import errno
import os

import pytest
import torch

import funcollect as fc
from tests.support.compare import assert_same
from tests.support.frames.stacked_frames import STACK, batches, both, check_alike, check_uses, extend, made, noisy


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
    joined = torch.cat(whole, 1)
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
