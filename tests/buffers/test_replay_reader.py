"""A process writes, others read, and the writer is killed: no reader ever sees part of a frame."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import funcollect as fc
from funcollect.buffers.storages.packed_rows import gather
from tests.buffers.conftest import filled
from tests.support.programs.shared_writer import BEHIND, CAPACITY, LANES, STEPS, WIDTH, batch_of
from tests.support.running import ROOT, scaled

SLICE = 6


@pytest.fixture(scope="module")
def start():
    """Starts a writer in a directory; returns its process id when the buffer is full."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.programs.shared_writer"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    ) as process:  # fmt: skip

        def started(directory, kind="careful"):
            print(directory, kind, file=process.stdin, flush=True)
            return int(process.stdout.readline())

        yield started
        process.kill()


def early(frames):
    """The numbers ``[N, WIDTH]``, all alike in a whole frame, that a writer wrote first."""
    numbers = frames["early"]
    return (numbers + BEHIND).flatten(1) if numbers.ndim == 3 else numbers


def torn(frames):
    """Whether numbers of different frames stand in one: [N]."""
    name, late = early(frames)[:, :1], frames["late"]
    return ((early(frames) != name) | (late != -name)).any(1) | (frames["collector", "step"] != name[:, 0] // 3 % 25)


def readers(directory):
    single = fc.ReplayReader(directory, batch_size=64)
    strict = fc.ReplayReader(directory, sampler=fc.SliceSampler(slice_len=SLICE), batch_size=10 * SLICE)
    sampler = fc.SliceSampler(slice_len=30, strict_length=False, pad_output=True)
    return single, strict, fc.ReplayReader(directory, sampler=sampler, batch_size=120)


def check(single, strict, padded):
    assert not torn(single.sample()).any()
    frames = strict.sample()
    assert not torn(frames).any()
    assert (early(frames)[:, 0].view(-1, SLICE).diff() == LANES).all()  # the next step of the same lane
    frames = padded.sample()
    mask = frames["collector", "mask"].view(-1, 30)
    assert (early(frames)[:, 0].view(-1, 30).diff()[mask[:, 1:]] == LANES).all()
    assert not torn(frames[mask.view(-1)]).any()
    assert not frames["early"][~mask.view(-1)].any()


def stop(pid):
    """Stop a process, and return once it stands still."""
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0)


@pytest.mark.parametrize(("in_the_midst", "kind"), [(True, "careful"), (False, "careful"), (True, "stacked")])
def test_a_writer_is_killed_in_the_midst_of_an_extend_or_between_two(start, tmp_path, in_the_midst, kind):
    chance = random.Random(0)
    for kill in range(scaled(2 if kind == "careful" and in_the_midst else 1)):
        pid = start(tmp_path / str(kill), kind)
        shared = readers(tmp_path / str(kill))
        for _ in range(chance.randrange(12)):
            check(*shared)
        while True:  # until it stands where it is wanted, however the two processes share the cores
            first = shared[0]._file.span
            while shared[0]._file.span == first:
                check(*shared)
            stop(pid)
            if (len(shared[0]) < CAPACITY) == in_the_midst:
                break
            os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGKILL)
        for _ in range(10):
            check(*shared)
        held = set()
        for _ in range(50):  # all of it, but for a chance of 1e-8
            some = shared[0].sample(CAPACITY // 2)
            assert not torn(some).any()
            held |= set(early(some)[:, 0].tolist())
        assert held == set(range(max(held) + 1 - len(held), max(held) + 1))  # the newest ones
        assert len(held) == len(shared[0]) == CAPACITY - in_the_midst * LANES * STEPS


def test_it_would_be_seen_if_frames_were_torn(start, tmp_path):
    pid = start(tmp_path, "careless")
    reader = fc.ReplayReader(tmp_path, batch_size=64)
    while not torn(reader.sample()).any():
        pass
    os.kill(pid, signal.SIGKILL)


def buffer_and_reader(path, sampler=None, stacked=False, **kwargs):
    frame_stack = 4 if stacked else None
    storage = fc.LazyMemmapStorage(CAPACITY, scratch_dir=path, ndim=2, frame_stack=frame_stack, **kwargs)
    return filled(batch_of(0, stacked), storage), fc.ReplayReader(path, sampler=sampler, batch_size=60)


def extend(buffer, steps, stacked=False):
    """Extend a buffer by batches that begin at these steps, of which some may be taken already."""
    for first in steps:
        buffer.extend(batch_of(first, stacked))


def test_a_reader_keeps_up_however_far_it_falls_behind(tmp_path):
    buffer, reader = buffer_and_reader(tmp_path, fc.SliceSampler(slice_len=SLICE))
    first = 0
    for pause in (1, 3, 60, 1, 17, 2):
        for _ in range(pause):
            first += STEPS
            buffer.extend(batch_of(first))
        seen = set()
        for _ in range(40):
            frames = reader.sample()
            assert (frames["early"][:, 0].view(-1, SLICE).diff() == LANES).all()
            seen |= set(frames["collector", "traj_ids"].tolist())
        ids, counts = buffer[torch.arange(len(buffer))]["collector", "traj_ids"].unique(return_counts=True)
        assert seen == set(ids[counts >= SLICE].tolist())
        assert len(reader) == len(buffer)


SHORT = {"slice_len": 30, "strict_length": False}


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("options", [None, {"slice_len": SLICE}, SHORT, SHORT | {"pad_output": True}])
def test_frames_retired_while_they_are_gathered_are_drawn_again(tmp_path, monkeypatch, stacked, options):
    buffer, reader = buffer_and_reader(tmp_path, fc.SliceSampler(**options) if options else None, stacked)
    extend(buffer, range(STEPS, 20 * STEPS, STEPS), stacked)
    later, real, passes = iter(range(20 * STEPS, 40 * STEPS, STEPS)), gather, []

    def late(records, slots, mask):
        passes.append(len(slots))
        extend(buffer, later, stacked)
        return real(records, slots, mask)

    monkeypatch.setattr("funcollect.buffers.reader.gather", late)
    frames = reader.sample()
    assert len(passes) > 1
    held = frames[frames.get(("collector", "mask"), torch.ones(len(frames), dtype=torch.bool))]
    assert not torn(held).any()
    assert early(held).min() >= LANES * 40 * STEPS - CAPACITY


@pytest.mark.parametrize("sampler", [None, fc.SliceSampler(slice_len=SLICE)])
def test_no_buffer_looks_empty_to_a_reader_that_is_overtaken(tmp_path, monkeypatch, sampler):
    buffer, reader = buffer_and_reader(tmp_path, sampler)
    oldest, later = type(reader._file).oldest, iter(range(STEPS, 20 * STEPS, STEPS))

    def late(file):
        extend(buffer, later)
        return oldest.fget(file)

    monkeypatch.setattr(type(reader._file), "oldest", property(late))
    assert not torn(reader.sample()).any()
    assert len(reader) == CAPACITY


def test_an_emptied_or_loaded_buffer(tmp_path):
    buffer, reader = buffer_and_reader(tmp_path / "rows", fc.SliceSampler(slice_len=SLICE))
    reader.sample()
    buffer.dumps(tmp_path / "dump")
    buffer.empty()
    assert len(reader) == 0
    with pytest.raises(ValueError, match="empty: extend it"):
        reader.sample()
    buffer.extend(batch_of(1000))
    assert reader.sample()["early"].min() >= 3000
    buffer.loads(tmp_path / "dump")
    one, two = (fc.ReplayReader(tmp_path / "rows", generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one.sample(9)["early"], two.sample(9)["early"])
    for frames, _ in zip(fc.ReplayReader(tmp_path / "rows", batch_size=50), range(2), strict=False):
        assert frames["early"].max() < LANES * STEPS


def test_the_file_of_a_readers_planes_grows(tmp_path):
    """Also after a restarted writer has replaced it, which the reader does not follow."""
    buffer, reader = buffer_and_reader(tmp_path, stacked=True)
    for first in range(STEPS, 20 * STEPS, STEPS):
        batch = batch_of(first, stacked=True)
        batch["early"] = torch.randint(2**62, (LANES, STEPS, 4, 1)) + torch.arange(WIDTH // 4)
        buffer.extend(batch)
        sample = reader.sample(200)
        frames, numbers = buffer[torch.arange(len(buffer))], -sample["late"][:, 0]
        order = (-frames["late"][:, 0]).argsort()
        place = order[torch.searchsorted(-frames["late"][order, 0], numbers)]
        assert torch.equal(sample["early"], frames["early"][place])
        if first == 10 * STEPS:
            (planes,) = tmp_path.glob("planes-*")
            buffer_and_reader(tmp_path, stacked=True, existsok=True)
            assert not planes.exists()


def test_bad_readers(tmp_path):
    with pytest.raises(FileNotFoundError, match="give its scratch_dir, after the first extend"):
        fc.ReplayReader(tmp_path)
    (tmp_path / "rows.bin").write_bytes(bytes(4096))
    with pytest.raises(ValueError, match=r"rows.bin was not written by a LazyMemmapStorage"):
        fc.ReplayReader(tmp_path)
    for sampler in (fc.SamplerWithoutReplacement(), fc.SliceSampler(slice_len=3, over="windows")):
        with pytest.raises(TypeError, match="expected a RandomSampler, or a SliceSampler over trajectories"):
            fc.ReplayReader(tmp_path, sampler=sampler)
    filled({"x": torch.zeros(3)}, fc.LazyMemmapStorage(10, scratch_dir=tmp_path, existsok=True))
    with pytest.raises(TypeError, match="store TensorDicts for readers"):
        fc.ReplayReader(tmp_path)


def test_frames_without_ids_and_observations_that_are_stored_once(tmp_path):
    frames = TensorDict({"x": torch.zeros(3), "next": {"done": torch.zeros(3, 1, dtype=torch.bool)}}, [3])
    filled(frames, fc.LazyMemmapStorage(10, scratch_dir=tmp_path / "plain"))
    reader = fc.ReplayReader(tmp_path / "plain", sampler=fc.SliceSampler(slice_len=2))
    with pytest.raises(ValueError, match="no batch_size"):
        reader.sample()
    with pytest.raises(ValueError, match=r"no collector.traj_ids or episode, which a reader .* name a key with"):
        reader.sample(4)
    storage = fc.LazyMemmapStorage(10, scratch_dir=tmp_path / "compact", compact_obs=True)
    seen = torch.arange(4)[:, None].expand(4, 9)
    filled(TensorDict({"x": seen[:-1], "next": {"x": seen[1:]}}, [3]), storage)
    sample = fc.ReplayReader(tmp_path / "compact").sample(20)
    assert torch.equal(sample["x"] + 1, sample["next", "x"])
    assert set(sample["x"][:, 0].tolist()) == {0, 1, 2}
