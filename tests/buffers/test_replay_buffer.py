"""`ReplayBuffer` as TorchRL's users know it."""

import copy
import pickle
import tempfile
import threading

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import funcollect as fc
from tests.buffers.conftest import filled, numbers
from tests.support.compare import assert_same
from tests.support.frames import batch_of, frames_of


def test_single_transitions_from_flattened_batches():
    batches = [batch_of([frames_of(lane, [5, 9, 7]) for lane in some]) for some in ((0, 1), (2, 3))]
    memory = filled(batches[0], 500, transform=lambda data: data.reshape(-1))
    memory.extend(batches[1])
    assert_same(memory[:].clone(), torch.cat([batch.reshape(-1) for batch in batches]).clone())


def ten(sampler=None, **options):
    return filled(numbers(10), 10, sampler, batch_size=4, **options)


def test_add_and_indexing():
    memory = fc.ReplayBuffer(storage=fc.LazyTensorStorage(3), batch_size=4)
    assert [int(memory.add(numbers(1, start)[0])) for start in range(4)] == [0, 1, 2, 0]
    assert memory[:]["x"].tolist() == [3, 1, 2]
    assert memory[0]["x"] == 3
    assert memory[torch.tensor([2, 0])]["x"].tolist() == [2, 3]
    assert memory[torch.tensor([[2, 0], [1, 1]])]["x"].tolist() == [[2, 3], [1, 1]]
    assert memory[-1]["x"] == 2
    assert memory[torch.tensor([True, False, True])]["x"].tolist() == [3, 2]
    lanes = fc.ReplayBuffer(storage=fc.LazyTensorStorage(9, ndim=2), batch_size=4)
    assert lanes.add(numbers(2)).tolist() == [0, 1]  # one step of two lanes
    assert lanes.add(numbers(2)).tolist() == [2, 3]


def test_a_generator_repeats_exactly_also_with_samples_made_ahead():
    made = [ten(generator=torch.Generator().manual_seed(n), prefetch=ahead) for n, ahead in ((1, 0), (1, 2), (2, 0))]
    samples = [[memory.sample(50)["x"].tolist() for _ in range(4)] for memory in made]
    assert samples[0] == samples[1] != samples[2]
    seeded = []
    for _ in range(2):
        torch.manual_seed(0)
        seeded.append(ten().sample(50)["x"].tolist())
    assert seeded[0] == seeded[1]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [4, 4, 2]), (True, [4, 4])])
def test_without_replacement_every_frame_comes_once(drop_last, sizes, prefetch):
    memory = ten(fc.SamplerWithoutReplacement(drop_last=drop_last), prefetch=prefetch)
    rounds = [[batch["x"] for batch in memory] for _ in range(2)]
    for batches in rounds:
        assert [len(batch) for batch in batches] == sizes
        assert len(set(torch.cat(batches).tolist())) == sum(sizes)
    assert torch.cat(rounds[0]).tolist() != torch.cat(rounds[1]).tolist()
    memory.sample()
    memory.extend(numbers(10, 10))
    assert set(torch.cat([memory.sample()["x"], memory.sample()["x"]]).tolist()) <= set(range(10, 20))
    in_order = ten(fc.SamplerWithoutReplacement(shuffle=False))
    assert torch.cat([batch["x"] for batch in in_order]).tolist() == list(range(10))


def test_samples_made_ahead_are_never_of_frames_that_are_gone():
    memory, still = ten(prefetch=3, generator=torch.Generator().manual_seed(0)), 0
    for start in range(10, 400, 10):
        for _ in range(4):
            batch, info = memory.sample(return_info=True)
            assert (batch["x"] >= start - 10).all()
            assert (memory[info["index"]]["x"] == batch["x"]).all()
            still += len(memory._ahead)
        memory.extend(numbers(10, start))
    assert still  # some were made ahead
    memory.empty()
    with pytest.raises(ValueError, match="the buffer is empty"):
        memory.sample()
    memory.extend(numbers(2, 5))
    assert set(memory.sample()["x"].tolist()) <= {5, 6}


def test_lists_hold_anything():
    memory = fc.ReplayBuffer(batch_size=5)
    assert memory.extend(range(10)).tolist() == list(range(10))
    assert memory.sample().dtype == torch.int64
    assert filled(["a", 1, None], fc.ListStorage(2), collate_fn=list)[:] == [None, 1]
    tensordicts = filled(numbers(4), fc.ListStorage(20))
    tensordicts.add(numbers(1, 9)[0])
    assert tensordicts[:]["x"].tolist() == [0, 1, 2, 3, 9]


def test_trees_of_tensors():
    memory = fc.ReplayBuffer(storage=fc.LazyTensorStorage(10))
    memory.add({"a": torch.ones(3), "b": {"c": (torch.zeros(2), [torch.ones(1)])}})
    memory.extend({"a": torch.zeros(2, 3), "b": {"c": (torch.ones(2, 2), [torch.ones(2, 1)])}})
    sample = memory.sample(6)
    assert sample["b"]["c"][0].shape == (6, 2)
    assert memory[:]["a"][:, 0].tolist() == [1, 0, 0]
    assert filled(torch.arange(4))[:].tolist() == [0, 1, 2, 3]
    sequences = filled(TensorDict({"x": torch.arange(12).reshape(3, 4)}, [3, 4]))
    assert sequences.sample(5).batch_size == torch.Size([5, 4])  # dimensions after the first belong to the item


def test_memmap_lies_where_it_is_told(tmp_path):
    for options in ({}, {"existsok": True}):
        filled(numbers(10), fc.LazyMemmapStorage(10, scratch_dir=tmp_path, **options))
        assert (tmp_path / "rows.bin").stat().st_size == 4096 + 10 * 8  # a header, then the rows
    with pytest.raises(FileExistsError, match="existsok=True"):
        filled(numbers(10), fc.LazyMemmapStorage(10, scratch_dir=tmp_path))


def test_two_buffers_with_one_storage_or_sampler():
    storage, sampler = fc.LazyTensorStorage(10), fc.PrioritizedSampler(10, alpha=0.6, beta=0.4)
    memory = fc.ReplayBuffer(storage=storage, sampler=sampler, batch_size=4)
    with pytest.raises(ValueError, match=r"storage LazyTensorStorage.* belongs to another buffer"):
        fc.ReplayBuffer(storage=storage)
    with pytest.raises(ValueError, match=r"sampler PrioritizedSampler.* belongs to another buffer"):
        fc.ReplayBuffer(storage=fc.LazyTensorStorage(10), sampler=sampler)
    memory.extend(numbers(10))
    del memory
    fc.ReplayBuffer(storage=storage, sampler=sampler)


def test_a_buffer_is_not_copied_nor_its_parts_exchanged():
    buffer = fc.ReplayBuffer(batch_size=2)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"ReplayBuffer.* cannot be copied or pickled: dumps\(path\) writes it"):
            copied(buffer)
    for name in ("storage", "sampler", "generator"):
        with pytest.raises(AttributeError, match=f"expected what the buffer was built with: pass {name}="):
            setattr(buffer, name, None)
    buffer.batch_size = 3
    buffer.extend([1, 2, 3])
    assert len(buffer.sample()) == 3


def test_a_storage_larger_than_memory():
    memory = fc.ReplayBuffer(storage=fc.LazyTensorStorage(2**31 - 1))
    with pytest.raises(MemoryError, match="this machine has no memory for a storage of 2,147,483,647 frames"):
        memory.extend({"x": torch.zeros(1, 10**6)})
    assert not len(memory)


def test_a_temporary_file_has_no_name_that_a_killed_process_would_leave(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    memory = fc.ReplayBuffer(storage=fc.LazyMemmapStorage(10))
    for _ in range(3):
        memory.extend(numbers(10))
        assert not list(tmp_path.iterdir())
    assert len(memory[:]["x"]) == 10


ENDED = TensorDict({"x": torch.zeros(4), "next": {"done": torch.tensor([[False], [True]] * 2)}}, [4])

RUNS = TensorDict({"collector": {"traj_ids": torch.arange(2)[:, None].expand(3, 2, 4)}}, [3, 2, 4])
PADDING = {"slice_len": 3, "strict_length": False, "pad_output": True}

BAD = {
    "both": (lambda: fc.SliceSampler(num_slices=2, slice_len=3), ValueError, "both of num_slices and slice_len"),
    "neither": (lambda: fc.SliceSampler(), ValueError, "neither of num_slices and slice_len"),
    "padded": (lambda: fc.SliceSampler(slice_len=2, pad_output=True), ValueError, "no slice is short: pass strict_"),
    "dropped": (lambda: ten(fc.SamplerWithoutReplacement(drop_last=True)).sample(11), ValueError, "holds 10 frames"),
    "names": (lambda: fc.SliceSampler(slice_len=2, traj_key="a", trajectory_key="b"), ValueError, "two names of one"),
    "writer": (lambda: fc.ReplayBuffer(writer="max"), ValueError, "writer is 'max', expected"),
    "padding": (
        lambda: filled(ENDED, fc.ListStorage(9), fc.SliceSampler(**PADDING)).sample(6), ValueError, "cannot pad slice"),
    "no size": (lambda: fc.ReplayBuffer().sample(), ValueError, "no batch_size is given"),
    "empty": (lambda: fc.ReplayBuffer(batch_size=3).sample(), ValueError, "the buffer is empty: extend it before"),
    "multiple": (
        lambda: fc.ReplayBuffer(sampler=fc.SliceSampler(slice_len=4)).sample(10), ValueError,
        "batch_size is 10, slice_len 4, expected a positive multiple: sample for example 8 frames"),
    "too few": (lambda: filled(numbers(3), ndim=2), ValueError, r"dimensions \[3\], .* takes 2 \(ndim=2\).* ndim=1"),
    "nothing": (lambda: filled(TensorDict({}, [3])), ValueError, "no leaves"),
    "single frame": (lambda: filled(numbers(1)[0]), ValueError, "stack single frames, or give them to add"),
    "list of none": (lambda: filled([]), ValueError, "the list has no items"),
    "tuple": (lambda: filled((numbers(1),)), TypeError, r"0 is TensorDict, expected a tensor: .* torch\.stack"),
    "arrays of text": (lambda: filled(np.array(["a"])), TypeError, "the data is ndarray, expected a TensorDict"),
    "no items": (lambda: fc.ReplayBuffer().extend(5), TypeError, "expected a sequence of items"),
}  # fmt: skip

BAD_SLICES = {
    "too long": ({}, 1, ENDED, "slices are 3 frames long, the longest trajectory held has 2: ask for shorter"),
    "missing key": ({"traj_key": "run"}, 1, ENDED, r"no tensor run, .* it has \['next.done', 'x'\]: name one of these"),
    "missing end": ({"end_key": "end"}, 1, ENDED, "no tensor end"),
    "no keys": ({}, 1, ENDED.select("x"), r"neither collector.traj_ids, episode nor next.done.* it has \['x'\]"),
    "lanes": ({}, 1, ENDED.reshape(2, 2), r"next.done has shape \[2, 2, 1\], .* one number per frame, \[2\].*ndim=2"),
    # Samples would be rows [T], which losses broadcast without an error.
    "lanes of workers": ({}, 2, RUNS, r"a frame for each of \[3, 2, 4\], .* 2 dimensions .* build it with ndim=3"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    do, error, message = BAD[case]
    with pytest.raises(error, match=message):
        do()


@pytest.mark.parametrize("case", BAD_SLICES)
def test_bad_slices(case):
    options, ndim, batch, message = BAD_SLICES[case]
    with pytest.raises(ValueError, match=message):
        filled(batch, 9, fc.SliceSampler(slice_len=3, **options), ndim=ndim).sample(6)


def test_a_first_batch_that_is_refused_leaves_nothing_behind():
    memory = fc.ReplayBuffer(storage=fc.LazyTensorStorage(9), sampler=fc.SliceSampler(slice_len=2))
    with pytest.raises(ValueError, match="neither"):
        memory.extend(ENDED.select("x"))
    with pytest.raises(TypeError, match="the data is dict, expected a TensorDict"):
        memory.extend({"x": torch.zeros(3)})
    memory.extend(ENDED)
    assert len(memory.sample(4)) == 4


def test_slices_of_a_ring_without_trajectories():
    state, _ = fc.ring.extend(fc.ring.init(9), ENDED)
    with pytest.raises(ValueError, match=r"make it with trajectories=ring\.Trajectories"):
        fc.ring.sample(state, np.zeros(2, np.uint32), fc.ring.Slices(num_slices=1, slice_len=1))


def test_no_thread_comes_between_the_slots_of_an_index_and_their_frames():
    """A buffer may be read at any moment while another thread extends it."""

    def try_lock():
        free.append(buffer._lock.acquire(blocking=False))
        if free[-1]:
            buffer._lock.release()

    class Index(list):
        """An index in whose evaluation another thread tries to change the buffer."""

        def __array__(self, dtype=None, copy=None):
            thread = threading.Thread(target=try_lock)
            thread.start()
            thread.join()
            return torch.tensor([1]).numpy()

    free, buffer = [], filled(torch.arange(5))
    assert buffer[Index([1])].tolist() == [1]
    assert not any(free)
    assert free
