"""`ReplayBuffer` as TorchRL's users know it: frames, lists of items, and transforms."""

import copy
import pickle
import tempfile
import threading

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict, tensorclass

import funcollect as fc
from tests.buffers.conftest import filled, numbers
from tests.support.compare import assert_same


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


@pytest.mark.parametrize("slice_len", [None, 2])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [4, 4, 2]), (True, [4, 4])])
def test_each_frame_and_each_trajectory_comes_once_per_round(drop_last, sizes, prefetch, slice_len):
    options, width = {"replacement": False, "drop_last": drop_last}, slice_len or 1
    if slice_len is None:
        sampler, frames = fc.RandomSampler(**options), numbers(10)
        assert type(sampler) is fc.SamplerWithoutReplacement
    else:
        sampler = fc.SliceSampler(slice_len=slice_len, traj_key="x", **options)
        frames = TensorDict({"x": torch.arange(30) // 3}, [30])
        assert type(sampler) is fc.SliceSamplerWithoutReplacement
    memory = filled(frames, 30, sampler, batch_size=4 * width, prefetch=prefetch)
    rounds = [[batch["x"][::width] for batch in memory] for _ in range(2)]
    for batches in rounds:
        assert [len(batch) for batch in batches] == sizes
        assert len(set(torch.cat(batches).tolist())) == sum(sizes)
    assert torch.cat(rounds[0]).tolist() != torch.cat(rounds[1]).tolist()


def test_a_new_round_begins_with_an_extend_and_may_be_in_order():
    memory = ten(fc.SamplerWithoutReplacement())
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
        with pytest.raises(
            AttributeError, match=f"{name} is None, expected what the buffer was built with: make another"
        ):
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


def sliced(batch, storage=9, ndim=1, **options):
    return filled(batch, storage, fc.SliceSampler(**{"slice_len": 3} | options), ndim=ndim).sample(6)


def unlinked():
    state, _ = fc.ring.extend(fc.ring.init(9), ENDED)
    fc.ring.sample(state, np.zeros(2, np.uint32), fc.ring.Slices(num_slices=1, slice_len=1))


BAD_VALUES = {  # by the messages
    "both of num_slices and slice_len": lambda: fc.SliceSampler(num_slices=2, slice_len=3),
    "neither of num_slices and slice_len": lambda: fc.SliceSampler(),
    "no slice is short: pass strict_length": lambda: fc.SliceSampler(slice_len=2, pad_output=True),
    "there are 10 frames": lambda: ten(fc.SamplerWithoutReplacement(drop_last=True)).sample(11),
    "two names of one": lambda: fc.SliceSampler(slice_len=2, traj_key="a", trajectory_key="b"),
    "end_key and end_keys are exclusive": lambda: fc.SliceSampler(slice_len=3, end_key="a", end_keys=["b"]),
    "writer is 'max', expected": lambda: fc.ReplayBuffer(writer="max"),
    "cannot pad slices": lambda: sliced(ENDED, fc.ListStorage(9), strict_length=False, pad_output=True),
    "no batch_size is given": lambda: fc.ReplayBuffer().sample(),
    "the buffer is empty: extend it before": lambda: fc.ReplayBuffer(batch_size=3).sample(),
    "batch_size is 10, slice_len 4, expected a positive multiple: sample for example 8 frames": (
        lambda: fc.ReplayBuffer(sampler=fc.SliceSampler(slice_len=4)).sample(10)),
    r"dimensions \[3\], .* takes 2 \(ndim=2\).* ndim=1": lambda: filled(numbers(3), ndim=2),
    "no leaves": lambda: filled(TensorDict({}, [3])),
    "stack single frames, or give them to add": lambda: filled(numbers(1)[0]),
    "the list has no items": lambda: filled([]),
    "span is .* with burn_in or bootstrap, expected one": lambda: fc.SliceSampler(slice_len=4, burn_in=2, span=1),
    r"span is \(5, 5\)": lambda: fc.SliceSampler(slice_len=5, span=5),
    r"span is \(-1, -1\)": lambda: fc.SliceSampler(slice_len=5, span=-1),
    "are 3 frames long, the longest trajectory held has 2: ask": lambda: sliced(ENDED),
    r"no tensor run, .* it has \['next.done', 'x'\]: name one": lambda: sliced(ENDED, traj_key="run"),
    "no tensor end": lambda: sliced(ENDED, end_key="end"),
    r"no collector.traj_ids, episode or next.done.* it has \['x'\]": lambda: sliced(ENDED.select("x")),
    r"next.done has shape \[2, 2, 1\], .* one number per frame, \[2\].*ndim=2": lambda: sliced(ENDED.reshape(2, 2)),
    # Samples would be rows [T], which losses broadcast without an error.
    r"for each of \[3, 2, 4\], .* 2 dimensions .* build it with ndim=3": lambda: sliced(RUNS, ndim=2),
    r"make it with trajectories=ring\.Trajectories": unlinked,
    "end_key is given with across_episodes=True, which has no ends": (
        lambda: fc.SliceSampler(slice_len=2, across_episodes=True, end_key="done")),
    "compact_obs is for storages on the host": lambda: fc.LazyTensorStorage(9, device="cuda", compact_obs=True),
    "frame_stack is for .* device is cuda": lambda: fc.LazyTensorStorage(9, device="cuda", frame_stack=4),
}  # fmt: skip
BAD_TYPES = {
    r"0 is TensorDict, expected a tensor: .* torch\.stack": lambda: filled((numbers(1),)),
    r"note is NonTensorData, expected a tensor: leave it out \(batch.exclude": (
        lambda: filled(TensorDict({"x": torch.zeros(4), "note": NonTensorData("hello", batch_size=[4])}, [4]))),
    "the data is ndarray, expected a TensorDict": lambda: filled(np.array(["a"])),
    "expected a sequence of items": lambda: fc.ReplayBuffer().extend(5),
    "dict, expected a sequence of items": lambda: fc.ReplayBuffer().extend({"x": torch.zeros(3)}),
    "str, expected a sequence of items": lambda: fc.ReplayBuffer().extend("abc"),
    "end_keys is 'done', expected a list of keys": lambda: fc.SliceSampler(slice_len=3, end_keys="done"),
    r"end_keys is \[\], expected a list of keys": lambda: fc.SliceSampler(slice_len=3, end_keys=[]),
}  # fmt: skip


@pytest.mark.parametrize("message", [*BAD_VALUES, *BAD_TYPES])
def test_bad_input(message):
    with pytest.raises(ValueError if message in BAD_VALUES else TypeError, match=message):
        (BAD_VALUES | BAD_TYPES)[message]()


def test_a_first_batch_that_is_refused_leaves_nothing_behind():
    memory = fc.ReplayBuffer(storage=fc.LazyTensorStorage(9), sampler=fc.SliceSampler(slice_len=2))
    with pytest.raises(ValueError, match=r"episode or next\.done, which slices need"):
        memory.extend(ENDED.select("x"))
    with pytest.raises(TypeError, match="the data is dict, expected a TensorDict"):
        memory.extend({"x": torch.zeros(3)})
    memory.extend(ENDED)
    assert len(memory.sample(4)) == 4


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


def test_its_length_and_its_text_are_read_beside_a_thread_that_fills_it():
    buffer, filling = filled(torch.arange(5)), threading.Event()

    def fill():
        while not filling.is_set():
            buffer.extend(torch.arange(7))

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        for _ in range(300):
            assert 5 <= len(buffer) <= buffer.storage.max_size
            assert repr(buffer)
            assert buffer[:3].shape == (3,)
    finally:
        filling.set()
        thread.join()


# Lists of items, as TorchRL's buffers take them, and transforms, which do not change the caller's data.


@pytest.mark.parametrize("storage", [fc.LazyTensorStorage, fc.ListStorage])
def test_a_list_of_trees_is_stacked(storage):
    buffer = filled(
        [{"x": torch.full((3,), float(n)), "y": {"z": [n, torch.tensor(-n)]}} for n in range(9)], storage(20)
    )
    assert buffer[:]["x"][:, 0].tolist() == [*range(9)]
    assert [leaf.shape for leaf in buffer.sample(4)["y"]["z"]] == [(4,)] * 2
    assert buffer[:]["y"]["z"][1].tolist() == [*range(0, -9, -1)]
    if storage is fc.LazyTensorStorage:
        buffer.extend({"x": torch.zeros(2, 3), "y": {"z": [torch.ones(2, dtype=torch.int64)] * 2}})
        assert len(buffer) == 11


@tensorclass
class Pair:
    x: torch.Tensor


def test_tensorclasses_are_refused_in_every_way():
    buffer, item = fc.ReplayBuffer(storage=fc.LazyTensorStorage(9)), Pair(x=torch.ones(3), batch_size=[])
    for call, fix in (
        (lambda: buffer.add(item), "give its to_tensordict"),
        (lambda: buffer.extend(item[None]), "give its to_tensordict"),
        (lambda: buffer.extend([item, item]), r"give \[item.to_tensordict\(\) for item in items\]"),
        (lambda: buffer.add({"a": item}), "a is Pair, expected a tensor"),
        (lambda: buffer.extend([{"a": item}, {"a": item}]), "a is Pair, expected a tensor"),
    ):
        with pytest.raises(TypeError, match=fix):
            call()
    assert len(buffer) == 0


def test_items_that_do_not_stack():
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(9))
    for items in (
        [torch.ones(2), torch.ones(3)],
        [{"pair": [torch.tensor(1), torch.tensor(1)]}, {"other": torch.tensor(1)}],
        [TensorDict({f"a key {n}": torch.ones(3) for n in range(9)}), {"other": torch.ones(3)}],
    ):
        with pytest.raises(ValueError, match=r"cannot be stacked .* in a buffer with collate_fn=") as raised:
            buffer.extend(items)
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 300
    for items in ([torch.ones(2), torch.ones(3)], [{"a": 1}, {"b": 1}], [[1], [1, 2]], [np.ones(2), np.ones(3)],
                  [TensorDict({n: 1}) for n in "ab"]):  # fmt: skip
        with pytest.raises(ValueError, match=r"the items cannot be stacked .* build the buffer with a collate_fn="):
            filled(items, fc.ListStorage(9)).sample(40)
        assert len(filled(items, fc.ListStorage(9), collate_fn=list).sample(40)) == 40


def test_a_list_of_lanes():
    batch = TensorDict({"x": torch.arange(10).view(2, 5)}, [2, 5])
    assert_same(*(filled(data, ndim=2)[:] for data in (batch, list(batch.unbind(0)))))
    _, slots = fc.ring.extend(fc.ring.init(20), list(batch[0].unbind(0)))
    assert slots.tolist() == list(range(5))


@pytest.mark.parametrize("storage", [fc.ListStorage, fc.LazyTensorStorage])
def test_add_transforms_the_item(storage):
    shapes = []
    buffer = fc.ReplayBuffer(storage=storage(9), transform=lambda item: shapes.append(item.batch_size) or item * 2)
    buffer.add(TensorDict({"x": torch.tensor(3)}))
    assert shapes == [()]
    assert int(buffer[0]["x"]) == 6


CHANGES = {
    "set_": lambda td: td.set_("x", torch.zeros(3, 2)),
    "key": lambda td: td.set("x", torch.zeros(3, 2)),
    "new key": lambda td: td.set("more", torch.zeros(3)),
    "mul_": lambda td: td.apply_(lambda leaf: leaf.mul_(2)),
    "nested": lambda td: td.set_(("next", "x"), td["next", "x"].add_(1)),
    "removed": lambda td: td.exclude("x", inplace=True),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("storage", [fc.LazyTensorStorage, fc.ListStorage])
def test_a_transform_in_place_leaves_the_callers_batch(change, storage):
    batch = TensorDict({"x": torch.ones(3, 2), "next": {"x": torch.ones(3, 2)}}, [3])
    before, leaf = batch.clone(), batch["x"]
    buffer = filled(batch, storage(9), transform=CHANGES[change])
    buffer.extend(batch.lock_())
    if change not in ("key", "new key", "set_"):
        buffer.add(batch[0])
    assert_same(batch, before)
    assert batch["x"] is leaf
    assert_same(buffer[:3], CHANGES[change](before))


def test_a_transform_in_place_of_trees_and_arrays():
    def emptied(tree):
        for leaf in (tree["a"], tree["b"][0]):
            leaf[:] = 0
        return {"a": torch.as_tensor(tree["a"]), "b": tree["b"]}

    tree = {"a": np.ones(3), "b": (torch.ones(3, 2),)}
    buffer = filled(tree, transform=emptied)
    assert tree["a"].all()
    assert tree["b"][0].all()
    assert not buffer[:]["a"].any()
