"""Buffers dumped and loaded: the same samples follow, whatever becomes of the files; and Ctrl-C at any moment."""

import collections
import contextlib
import itertools
import json
import os
import pickle
import resource
import signal
import sys

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import funcollect as fc
from funcollect import files
from funcollect.buffers import dumping
from tests.buffers.conftest import filled, numbers
from tests.support.compare import assert_same
from tests.support.frames import SAMPLERS, STACK, batches, check_alike, check_uses, extend, made
from tests.support.running import pairwise


@pytest.mark.parametrize(
    ("sampler", "stack", "compact_obs", "prefetch", "kind"),
    pairwise(SAMPLERS, (None, STACK), (False, True), (None, 2), (fc.LazyTensorStorage, fc.LazyMemmapStorage)),
)
def test_the_next_sample_is_the_one_that_would_have_come(sampler, stack, compact_obs, prefetch, kind, tmp_path):
    """Through several turns, before and after dumps, in a buffer that has loaded one, and after it was emptied."""
    options = {"sampler": sampler, "kind": kind, "compact_obs": compact_obs, "prefetch": prefetch}
    plain, other = made(None, **options), made(stack, **options)
    for number, batch in enumerate(batches(6)):
        extend([plain, other], batch)
        check_alike(plain, other)
        if number % 2:
            for name, buffer in (("plain", plain), ("other", other)):
                if "priorit" in sampler:
                    buffer.update_priority(torch.arange(12), torch.arange(12.0))
                base = tmp_path / f"{name}{number - 2}" if number > 2 else None
                buffer.dumps(tmp_path / f"{name}{number}", base=base)
            loaded = made(stack, **options)
            loaded.loads(tmp_path / f"other{number}")
            check_uses(loaded.storage)
            if number > 2:  # goes on in another process, which has loaded the dump
                other = loaded
            check_alike(plain, other)
    for buffer in (plain, other):
        buffer.empty()
    for batch in batches(4):
        extend([plain, other], batch)
        check_alike(plain, other)


def test_a_file_is_opened_again_where_it_lay(tmp_path):
    filled(numbers(18), fc.LazyMemmapStorage(50, scratch_dir=tmp_path / "rows")).dumps(tmp_path / "dump")
    again = fc.ReplayBuffer(storage=fc.LazyMemmapStorage(50, scratch_dir=tmp_path / "rows"))
    again.loads(tmp_path / "dump")
    assert again[:]["x"].tolist() == [*range(18)]


@pytest.mark.parametrize("damaged", ["generator", "frames"])
def test_a_damaged_dump_leaves_a_buffer_as_it_was(damaged, tmp_path):
    def made(count):
        generator, sampler = torch.Generator().manual_seed(count), fc.PrioritizedSampler(20, 1.0, 1.0)
        buffer = filled(numbers(count), 20, sampler, generator=generator, batch_size=12)
        buffer.update_priority(torch.arange(count), torch.arange(count) + 1.0)
        return buffer

    made(4).dumps(tmp_path)
    if damaged == "frames":
        (tmp_path / "v0" / "rows-0.bin").write_bytes(b"short")
    else:
        with np.load(tmp_path / "v0" / "arrays.npz") as arrays:
            np.savez(tmp_path / "v0" / "arrays.npz", **{**arrays, "generator": arrays["generator"][:9]})
    buffer = made(9)
    with pytest.raises(ValueError, match="the dump is damaged"):
        buffer.loads(tmp_path)
    assert_same(buffer.sample(), made(9).sample())
    assert_same(buffer[:], numbers(9))


def test_a_damaged_dump_leaves_the_file_of_a_storage_as_it_was(tmp_path):
    buffer = filled(numbers(4), fc.LazyMemmapStorage(20, scratch_dir=tmp_path / "rows"))
    buffer.dumps(tmp_path / "dump")
    (tmp_path / "dump" / "v0" / "rows-0.bin").write_bytes(b"short")
    with pytest.raises(ValueError, match="the dump is damaged"):
        buffer.loads(tmp_path / "dump")
    buffer.extend(numbers(6))
    assert fc.ReplayReader(tmp_path / "rows").sample(100)["x"].unique().tolist() == [*range(6)]


def plain(size=20):
    return fc.ReplayBuffer(storage=fc.LazyTensorStorage(size))


class Cut(BaseException):
    """The process ends here."""


def test_a_dump_cut_off_leaves_the_former_one_whole(tmp_path, monkeypatch):
    (tmp_path / "v7" / "deep").mkdir(parents=True)  # of a process killed before it could clean up
    buffer, sync = filled(numbers(4), 20), dumping.sync
    buffer.dumps(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["current", "v0"]  # only the current dump stays
    buffer.extend(numbers(4, 4))
    monkeypatch.setattr(dumping.shutil, "rmtree", lambda *_, **__: None)  # as nobody cleans up after a process killed
    points = 0
    while True:
        calls = iter(range(points))

        def cut(path, calls=calls):
            if next(calls, None) is None:
                raise Cut
            sync(path)

        monkeypatch.setattr(dumping, "sync", cut)
        monkeypatch.setattr(files, "sync", cut)
        try:
            with monkeypatch.context() as patched:
                patched.setattr(dumping.Path, "mkdir", lambda path, **_: os.makedirs(path, exist_ok=True))
                buffer.dumps(tmp_path)
        except Cut:
            renamed = points >= 8  # all but the last sync, that of the directory, lie before the renaming
            points += 1
        else:
            break
        other = plain()
        other.loads(tmp_path)
        assert other[:]["x"].tolist() == list(range(8 if renamed else 4))
    # Four new files of rows, two others, the directory and the pointer; then the renaming. A buffer whose dump was cut
    # off after that does not know it, and writes all eight files of rows again.
    assert points == 13
    other.loads(tmp_path)
    assert len(other) == 8


@contextlib.contextmanager
def full_disk(message):
    """No file may grow past 4 kB; no fixture, under which the report of a test could not grow, either."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match=message):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_room_for_a_file_or_a_dump(tmp_path):
    buffer = fc.ReplayBuffer(storage=fc.LazyMemmapStorage(1000, scratch_dir=tmp_path / "rows"))
    with full_disk(r"has no room for 1000 frames of 8 bytes, 8000 in all .* smaller max_size"):
        buffer.extend(numbers(4))
    assert len(buffer) == 0
    assert not list((tmp_path / "rows").iterdir())
    buffer, other = filled(numbers(10), 20_000), plain(20_000)
    buffer.dumps(tmp_path)
    buffer.extend(numbers(15_000))
    with full_disk("File too large"):
        buffer.dumps(tmp_path)
    assert len(buffer) == 15_010
    other.loads(tmp_path)
    assert len(other) == 10


class Harmful:
    def __reduce__(self):
        return (exec, ("raise AssertionError('code from the file ran')",))


def test_no_code_from_a_file_runs_unasked(tmp_path):
    buffer = filled([1, "two", {"three": torch.arange(3)}], fc.ListStorage(5), collate_fn=list)
    other = fc.ReplayBuffer(storage=fc.ListStorage(5), collate_fn=list)
    buffer.dumps(tmp_path)
    other.loads(tmp_path)  # plain items need no code
    assert other[:2] == [1, "two"]
    assert other[2]["three"].tolist() == [0, 1, 2]
    buffer.extend([Harmful()])
    buffer.dumps(tmp_path)
    with pytest.raises(ValueError, match=r"if you trust it, load it with buffer.loads\(…, allow_pickle=True\)"):
        other.loads(tmp_path)
    assert len(other) == 3
    with pytest.raises(AssertionError, match="code from the file ran"):
        other.loads(tmp_path, allow_pickle=True)


def test_a_larger_sampler_goes_on_with_the_priorities_of_a_smaller_one(tmp_path):
    samplers = [fc.PrioritizedSampler(n, 1, 1) for n in (9, 20, 9)]
    buffers = [fc.ReplayBuffer(storage=fc.LazyTensorStorage(9), sampler=sampler) for sampler in samplers]
    buffers[0].extend(numbers(9))
    buffers[0].update_priority(torch.arange(9), torch.eye(9)[4])
    for one, other in itertools.pairwise(buffers):
        one.dumps(tmp_path)
        other.loads(tmp_path)
        assert other.sample(5)["x"].tolist() == [4] * 5


@pytest.mark.parametrize("capacity", [9, 41])
@pytest.mark.parametrize("kind", ["rows", "file", "stacks", "lanes", "items"])
def test_a_buffer_of_another_capacity_gets_the_newest_frames(kind, capacity, tmp_path):
    """In order, whatever slots they had, with what is known of each: priorities, trajectories, whether it was drawn."""
    storages = {
        "rows": fc.LazyTensorStorage,
        "file": fc.LazyMemmapStorage,
        "stacks": lambda size: fc.LazyTensorStorage(size, frame_stack=STACK, compact_obs=True),
        "lanes": lambda size: fc.LazyTensorStorage(size, ndim=2),
        "items": fc.ListStorage,
    }

    samplers = {
        "priorities": lambda: fc.PrioritizedSampler(50, 1.0, 1.0),
        "recent": lambda: fc.RecentSampler(once=True),
        "slices": lambda: fc.SliceSampler(slice_len=2, strict_length=False),
    }

    def made(size, name, batches):
        options = {"batch_size": 4, "generator": torch.Generator().manual_seed(0)}
        buffer = fc.ReplayBuffer(storage=storages[kind](size), sampler=samplers[name](), **options)
        for batch in batches:
            buffer.extend(batch)
        return buffer

    def in_order(buffer):
        slots = torch.tensor(buffer.state.memory.numbers)[-kept:] % buffer.storage.max_size
        return slots, buffer.storage[slots]

    each = [batch[:, :4] if kind == "lanes" else batch[0] for batch in batches(4)]  # the last 20 of 24 or 48 frames
    kept = min(20, capacity)
    kept -= kept % 3 if kind == "lanes" else 0
    for name in samplers if kind != "items" else ["priorities", "recent"]:
        former = made(20, name, each)
        if name == "priorities":
            former.update_priority(torch.arange(20), torch.arange(20) + 1.0)
        drawn = former.sample(7, return_info=True)[1]["index"] if name == "recent" else None
        former.dumps(tmp_path / name)
        loaded = made(capacity, name, each[:1])
        loaded.loads(tmp_path / name)
        assert (len(loaded), loaded.write_count) == (kept, former.write_count)
        (before, frames), (now, same) = in_order(former), in_order(loaded)
        assert_same(same, frames)
        if name == "priorities":
            weights = [torch.from_numpy(buffer.sampler.stored()[0]) for buffer in (former, loaded)]
            assert torch.equal(weights[1][now], weights[0][before])
            assert weights[1].count_nonzero() == kept
        elif name == "recent":
            left = loaded.sample(50, return_info=True)[1]["index"]
            assert {*left.tolist()} == {*now[~torch.isin(before, drawn)].tolist()}
        else:
            again = frames.reshape(-1, 3).transpose(0, 1) if kind == "lanes" else frames
            assert_same(loaded.sample(40), made(capacity, name, [again]).sample(40))


def test_files_that_were_changed(tmp_path):
    filled(numbers(4), 20).dumps(tmp_path)
    whole = (tmp_path / "v0" / "rows-0.bin").read_bytes()
    for changed in (b"short", whole + b"more", whole[:8] + b"otherone" + whole[16:]):
        for file in (tmp_path / "v0").glob("rows-*.bin"):
            file.write_bytes(changed)
        with pytest.raises(ValueError, match="the dump is damaged"):
            plain().loads(tmp_path)
    with open(tmp_path / "v0" / "arrays.npz", "wb") as file:
        pickle.dump(Harmful(), file)
    meta = (tmp_path / "v0" / "meta.json").read_text()
    for text, message in (
        (meta, r"cannot be read .*damaged, or another kind of file"),
        ('{"format": 3}', "has format 3, expected 4: load it"),
        ('{"format": 3', r"meta.json cannot be read .* the dump is damaged"),
    ):
        (tmp_path / "v0" / "meta.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            plain().loads(tmp_path)
    filled([1, 2], fc.ListStorage(5)).dumps(tmp_path / "items")
    torch.save([1], tmp_path / "items" / "v0" / "items.pt")
    with pytest.raises(ValueError, match="does not hold a list of 2 items: it was changed"):
        fc.ReplayBuffer(storage=fc.ListStorage(5)).loads(tmp_path / "items")


def test_buffers_of_another_kind(tmp_path):
    filled(numbers(4), 20).dumps(tmp_path)
    for storage, sampler, message in (
        (fc.ListStorage(20), None, "storage of the dump is rows, of this buffer list"),
        (fc.LazyTensorStorage(20, ndim=2), None, "ndim of the dump is 1, of this buffer 2"),
        (fc.LazyTensorStorage(20), fc.SliceSampler(slice_len=2), "dump is RandomSampler, of this buffer SliceSampler"),
    ):
        with pytest.raises(ValueError, match=message):
            fc.ReplayBuffer(storage=storage, sampler=sampler).loads(tmp_path)


Pair = collections.namedtuple("Pair", "x y")


def test_trees_of_other_nodes_have_no_file_format_and_nothing_is_nothing(tmp_path):
    buffer = plain()
    with pytest.raises(FileNotFoundError, match="has no complete dump of a buffer"):
        buffer.loads(tmp_path)
    buffer.dumps(tmp_path)
    plain().loads(tmp_path)
    buffer.extend(Pair(torch.zeros(3), torch.zeros(3)))
    with pytest.raises(TypeError, match="which have no file format: store TensorDicts"):
        buffer.dumps(tmp_path)
    assert json.loads((tmp_path / "v0" / "meta.json").read_text())["written"] == 0


def files_of(directory):
    """The files of rows in a dump, with the numbers of their inodes."""
    return {path.name: path.stat().st_ino for path in directory.glob("*/rows-*.bin")}


@pytest.mark.parametrize("storage", [fc.LazyTensorStorage, fc.LazyMemmapStorage])
def test_a_dump_writes_only_new_frames(storage, tmp_path):
    """At any fill, through several turns of the ring, in the same directory or with a base in another one."""
    buffer = fc.ReplayBuffer(storage=storage(40), batch_size=5, generator=torch.Generator())
    total, before = 0, {}
    for number, count in enumerate((3, 25, 1, 0, 30, 45, 7, 39, 40, 2)):
        if count:
            buffer.extend(numbers(count))
        total += count
        directory = tmp_path / (f"dump{number}" if number % 3 else "same")
        base = tmp_path / (f"dump{number - 1}" if (number - 1) % 3 else "same") if number else None
        buffer.dumps(directory, base=base)
        now = files_of(directory)
        linked = {name for name, inode in now.items() if before.get(name) == inode}
        first = min(int(name[5:-4]) for name in now)
        assert first > max(total - 40, 0) - 40 // 16
        written = sum(file.stat().st_size for file in directory.glob("*/rows-*.bin") if file.name not in linked)
        assert written == 8 * min(count, 40) if before else total
        before = now
        other = fc.ReplayBuffer(storage=storage(40), batch_size=5, generator=torch.Generator())
        other.loads(directory)
        assert torch.equal(other[:]["x"], buffer[:]["x"])
        if number == 6:  # goes on in another process, which has loaded the dump
            buffer = other


def test_a_dump_links_no_frames_of_another_run(tmp_path):
    """Neither of another buffer with as many frames, nor of one that was loaded and then went another way."""
    one, two = filled(numbers(8), 20), filled(numbers(9, 50), 20)
    one.dumps(tmp_path / "one")
    two.dumps(tmp_path / "one", base=tmp_path / "one")
    three = plain()
    three.loads(tmp_path / "one")
    assert torch.equal(three[:]["x"], two[:]["x"])
    two.extend(numbers(4))
    two.dumps(tmp_path / "two", base=tmp_path / "one")
    three.extend(numbers(4, 70))  # from where `two` was before
    three.dumps(tmp_path / "three", base=tmp_path / "two")
    four = plain()
    four.loads(tmp_path / "three")
    assert torch.equal(four[:]["x"], three[:]["x"])


# Ctrl-C at any moment: a buffer holds all of an extend or nothing of it, and goes on.

STEP = 7  # every so many lines of Python are tried


def frames(first):
    numbers = torch.arange(first, first + 6)
    counted = {"traj_ids": torch.zeros(6, dtype=torch.int64), "step": numbers}
    return TensorDict({"a": numbers, "b": numbers.float(), "collector": counted}, [6])


@contextlib.contextmanager
def interrupted_after(lines):
    """Ctrl-C once so many lines of the package have run."""
    left = itertools.count(lines, -1)

    def trace(frame, event, _):
        if event == "line" and "funcollect" in frame.f_code.co_filename and next(left) == 0:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def made_by(by_priority):
    sampler = fc.PrioritizedSampler(8, alpha=1.0, beta=1.0) if by_priority else fc.SliceSampler(slice_len=2)
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(8), sampler=sampler, batch_size=4)
    return buffer, buffer.extend(frames(0))


def interrupted(change, by_priority):
    """The buffers whose change was interrupted at one line after another, until it ends first."""
    for lines in itertools.count(0, STEP):
        buffer, slots = made_by(by_priority)
        try:
            with interrupted_after(lines):
                change(buffer, slots)
            return
        except KeyboardInterrupt:
            yield buffer


@pytest.mark.parametrize("by_priority", [False, True])
def test_an_extend_is_wholly_done_or_not_at_all(by_priority):
    seen = set()
    for buffer in interrupted(lambda buffer, _: buffer.extend(frames(6)), by_priority):
        held = sorted(buffer[:]["a"].tolist())
        assert held == sorted(buffer[:]["b"].tolist())
        assert held in ([*range(6)], [*range(4, 12)])
        seen.add(len(held))
        buffer.extend(frames(held[-1] + 1))
        assert sorted(buffer[:]["a"].tolist()) == [*range(held[-1] - 1, held[-1] + 7)]
        sample = buffer.sample()
        assert (sample["a"] == sample["b"]).all()
    assert seen == {6, 8}


def test_priorities_are_all_set_or_none():
    def change(buffer, slots):
        buffer.update_priority(slots[:3], torch.zeros(3))

    for buffer in interrupted(change, True):
        drawn = {index for _ in range(30) for index in buffer.sample()["a"].tolist()}
        assert drawn in ({*range(6)}, {3, 4, 5})
