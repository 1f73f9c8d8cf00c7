"""Code for TorchRL's replay buffers with nothing but the imports changed, run with either library; and its slices."""

import pickle

import pytest
import torch
import torchrl.data
from tensordict import TensorDict

import funcollect as fc
from tests.buffers.conftest import filled
from tests.support.running import pairwise

LIBRARIES = pytest.mark.parametrize("data", [fc, torchrl.data], ids=["ours", "TorchRL's"])


def transitions(count, start=0):
    index = torch.arange(start, start + count)
    following = {"observation": index[:, None] + 1.0, "done": (index % 50 == 49)[:, None]}
    frames = {"observation": index[:, None].float(), "episode": index // 50, "next": following}
    return TensorDict(frames, [count])


@LIBRARIES
@pytest.mark.parametrize("storage", ["ListStorage", "LazyTensorStorage", "LazyMemmapStorage"])
def test_transitions(data, storage):
    buffer = data.ReplayBuffer(storage=getattr(data, storage)(max_size=300), batch_size=32)
    assert buffer.extend(transitions(200)).tolist() == list(range(200))
    assert buffer.extend(transitions(200, 200)).tolist() == [*range(200, 300), *range(100)]
    assert len(buffer) == 300
    sample, info = buffer.sample(return_info=True)
    assert sample.shape == (32,)
    assert (buffer[torch.as_tensor(info["index"])]["observation"] == sample["observation"]).all()
    assert int(sample["observation"].min()) >= 100
    assert [batch.shape for batch, _ in zip(buffer, range(4), strict=False)] == [(32,)] * 4
    buffer.empty()
    assert len(buffer) == 0


@LIBRARIES
@pytest.mark.parametrize(("ndim", "options"), [
    (1, {"num_slices": 10}), (1, {"slice_len": 5, "end_key": ("next", "done")}),
    (2, {"slice_len": 5, "traj_key": "episode"}),
])  # fmt: skip
def test_slices(data, ndim, options):
    storage, sampler = data.LazyTensorStorage(max_size=1000, ndim=ndim), data.SliceSampler(**options)
    buffer = data.ReplayBuffer(storage=storage, sampler=sampler, batch_size=50)
    for start in (0, 100):
        lanes = [transitions(100, start), transitions(100, 1000 + start)]
        buffer.extend(lanes[0] if ndim == 1 else torch.stack(lanes))
    assert len(buffer) == 200 * ndim
    slices = buffer.sample().reshape(10, 5)
    assert (slices["observation"].diff(dim=1) == 1).all()
    assert (slices["episode"] == slices["episode"][:, :1]).all()


@LIBRARIES
def test_without_replacement_ahead_and_lists(data):
    storage, sampler = data.LazyTensorStorage(max_size=10), data.SamplerWithoutReplacement(drop_last=False)
    buffer = data.ReplayBuffer(storage=storage, sampler=sampler, batch_size=5)
    buffer.extend(transitions(10))
    seen = torch.cat([batch["observation"] for batch in buffer])
    assert sorted(seen[:, 0].tolist()) == list(range(10))
    storage = data.LazyTensorStorage(max_size=100)
    buffer = data.ReplayBuffer(storage=storage, batch_size=5, prefetch=2, generator=torch.Generator())
    buffer.extend(transitions(60))
    assert [buffer.sample().shape for _ in range(5)] == [(5,)] * 5
    buffer = data.ReplayBuffer(storage=data.ListStorage(100), collate_fn=lambda x: x)
    buffer.extend(["a", 1, None])
    assert all(item in ("a", 1, None) for item in buffer.sample(3))


@LIBRARIES
def test_an_iteration_goes_on_after_an_extend(data):
    storage, sampler = data.LazyTensorStorage(max_size=100), data.SamplerWithoutReplacement()
    prefetch = 2 if data is fc else None  # TorchRL's ends
    buffer = data.ReplayBuffer(storage=storage, sampler=sampler, batch_size=4, prefetch=prefetch)
    for start in (0, 8, 16):
        buffer.extend(transitions(8, start))
        assert buffer.next().shape == (4,)


def lanes_of(start, lanes=2, steps=5):
    """Each frame holds its lane and step: ``100 * lane + step``."""
    return TensorDict({"x": 100 * torch.arange(lanes)[:, None] + torch.arange(start, start + steps)}, [lanes, steps])


@LIBRARIES
def test_views_of_lanes_and_time(data):
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(100, ndim=2))
    buffer.extend(lanes_of(0))
    assert buffer[:].shape == (2, 5)
    buffer.extend(lanes_of(5))
    whole = lanes_of(0, steps=10)["x"]
    for index in (
        slice(None), slice(0, 1), ..., (..., -1), (0, 3), (0, slice(1, 3)), (slice(None), slice(-4, None)),
        (torch.tensor([0, 1]), torch.tensor([3, 4])),
    ):  # fmt: skip
        found = buffer[index]
        assert found.shape == whole[index].shape
        assert torch.equal(found["x"], whole[index])


@LIBRARIES
def test_lists_are_stacked_and_starts_of_slices_are_marked(data):
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(20), batch_size=4)
    items = [TensorDict({"x": torch.full((3,), float(n)), "y": {"z": torch.tensor(n)}}) for n in range(10)]
    assert buffer.extend(items).tolist() == list(range(10))
    assert buffer[:]["x"][:, 0].tolist() == list(range(10))
    assert buffer.sample()["y"]["z"].shape == (4,)
    buffer[0:2] = items[5:7]
    assert buffer[:]["x"][:3, 0].tolist() == [5, 6, 2]
    kind = data.ReplayBuffer if data is fc else data.TensorDictReplayBuffer
    storage, sampler = data.LazyTensorStorage(100), data.SliceSampler(slice_len=5, traj_key="episode")
    buffer = kind(storage=storage, sampler=sampler, batch_size=20)
    buffer.extend(transitions(100).set("is_init", torch.zeros(100, 1, dtype=torch.bool)))
    assert buffer.sample()["is_init"].view(4, 5)[:, 0].all()


# What only ours does with lanes and time.


def made(capacity, starts, **options):
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(capacity, ndim=2))
    slots = [buffer.extend(lanes_of(start, **options)) for start in starts]
    return buffer, slots


def test_names_of_views():
    batch = TensorDict({"x": torch.arange(24).view(2, 3, 4)}, [2, 3, 4])
    workers = filled(batch, 100, ndim=3)
    assert torch.equal(workers[:, 1:, 2]["x"], batch[:, 1:, 2]["x"])
    assert [workers[index].names[-1:] for index in (slice(None), ..., 0, (0, slice(1, 3)))] == [["time"]] * 4
    lanes, _ = made(100, [0])
    assert [lanes[index].names for index in ((slice(None), -1), (..., -1))] == [[None]] * 2


def test_lanes_and_steps():
    buffer, (slots,) = made(100, [0])
    assert buffer[1]["x"].tolist() == [100, 101, 102, 103, 104]
    assert buffer[-1, -1]["x"] == 104
    assert buffer[slots.numpy()[0, 0]].shape == (5,)
    # Arrays, tensors and lists are slots.
    assert torch.equal(buffer[slots]["x"], lanes_of(0)["x"])
    assert buffer[[0, 1, 2]]["x"].tolist() == [0, 100, 1]
    assert buffer[torch.tensor(3)]["x"] == 101
    assert len(buffer[slots.numpy().reshape(-1) % 2 == 0]) == 5
    for index in (2, (0, 5), (0, 0, 0)):
        with pytest.raises(IndexError, match=r"expected one into \[2, 5\] frames: give ints below these sizes"):
            buffer[index]
    for index in (1.5, (0, 1.5), torch.tensor(0.5), {}):
        with pytest.raises(TypeError, match=r"index is .*, expected ints, slices or a mask: give slots"):
            buffer[index]


@pytest.mark.parametrize("storage", [fc.LazyTensorStorage, fc.ListStorage])
def test_an_empty_buffer(storage):
    buffer = fc.ReplayBuffer(storage=storage(9))
    with pytest.raises(IndexError, match="the buffer is empty: extend it first"):
        buffer[0]
    with pytest.raises(ValueError, match=r"extend .* first"):
        buffer[:]


@pytest.mark.parametrize("capacity", [16, 15, 20])
def test_the_oldest_step_is_first_and_whole(capacity, tmp_path):
    buffer, _ = made(capacity, range(0, 30, 5))
    wanted = lanes_of(30 - capacity // 2, steps=capacity // 2)["x"]  # of 15 frames, one lane has lost its oldest step
    assert torch.equal(buffer[:]["x"], wanted)
    buffer.dumps(tmp_path)
    other, _ = made(capacity, [])
    other.loads(tmp_path)
    assert torch.equal(other[:, -3:]["x"], wanted[:, -3:])
    buffer.empty()
    assert buffer[:].shape == (0, 0)


def test_batches_of_different_lanes():
    buffer, _ = made(12, [0])
    buffer.extend(lanes_of(0, lanes=3, steps=1))
    with pytest.raises(ValueError, match="different dimensions before time, so they have no common lanes"):
        buffer[:]
    assert len(buffer[torch.arange(len(buffer))]) == 12
    for start in range(1, 6):
        buffer.extend(lanes_of(start, lanes=3, steps=1))
    assert torch.equal(buffer[:]["x"], lanes_of(2, lanes=3, steps=4)["x"])


# Slices that span the ends of trajectories, with other flags, and of lanes with equal ids.


LENGTHS = (7, 3, 9)
IDS = torch.tensor(LENGTHS).new_tensor([i for i, length in enumerate(LENGTHS) for _ in range(length)])
STEPS = torch.cat([torch.arange(length) for length in LENGTHS])
DATA = TensorDict({"episode": IDS, "t": STEPS, "next": {"x": STEPS + 1}}, [19])


def slices_of(sample):
    """The ids and steps of each slice, by the marks of their beginnings."""
    number = sample["collector", "is_first"].cumsum(0) - 1
    return [sample[number == n] for n in range(int(number[-1]) + 1)]


SPANS = [2, (False, True), (0, 1), (True, False), (1, 3)]


@pytest.mark.parametrize(("over", "strict", "span"), pairwise(["trajectories", "windows"], [True, False], SPANS))
def test_slices_span_the_ends_of_trajectories(span, strict, over):
    options = {"slice_len": 5, "strict_length": strict, "span": span}
    both = span if isinstance(span, tuple) else (span if over == "trajectories" else 0, span)
    left, right = (4 if each is True else int(each) for each in both)
    if over == "windows" and left:
        with pytest.raises(ValueError, match="windows begin in their trajectory"):
            fc.SliceSampler(over=over, **options)
        return
    shortest = {True: set(), False: set()}
    for one in slices_of(filled(DATA, 30, fc.SliceSampler(over=over, **options)).sample(5 * 300)):
        length, whole = len(one), LENGTHS[int(one["episode"][0])]
        assert (one["episode"] == one["episode"][0]).all()
        assert one["t"].tolist() == [*range(int(one["t"][0]), int(one["t"][0]) + length)]
        assert one["next", "truncated"].flatten().tolist() == [False] * (length - 1) + [True]
        if whole >= 5 and length < 5:
            assert one["t"][0] == 0 or one["t"][-1] == whole - 1
            shortest[bool(one["t"][0] == 0)].add(length)
        elif whole < 5:
            assert not strict or over == "windows"
    assert shortest[True] == {*range(5 - left, 5)}
    assert shortest[False] == {*range(5 - right, 5)}


def test_slices_that_span_are_padded_and_read_by_others(tmp_path):
    sampler = fc.SliceSampler(slice_len=5, span=4, pad_output=True)
    sample = filled(DATA, 30, sampler).sample(5 * 40)
    mask = sample["collector", "mask"].view(40, 5)
    assert (mask[:, 1:] <= mask[:, :-1]).all()
    assert not mask.all()
    storage = fc.LazyMemmapStorage(30, scratch_dir=tmp_path)
    buffer = filled(DATA, storage, fc.RandomSampler())
    reader = fc.ReplayReader(tmp_path, sampler=fc.SliceSampler(slice_len=5, span=(0, 4)), batch_size=200)
    assert {len(one) for one in slices_of(reader.sample())} == {1, 2, 3, 4, 5}
    assert len(buffer) == 19


def test_where_slices_are_marked():
    for key, other in (("cut", "done"), (("next", "cut"), ("next", "done"))):
        sample = filled(DATA, 30, fc.SliceSampler(slice_len=3, truncated_key=key)).sample(6)
        assert sample[key].flatten().tolist() == sample[other].flatten().tolist() == [False, False, True] * 2
    sample = filled(DATA, 30, fc.SliceSampler(slice_len=3, truncated_key=None)).sample(6)
    assert ("next", "truncated") not in sample.keys(True)


def test_any_of_several_flags_ends_a_trajectory():
    flags = TensorDict({name: torch.arange(9) == at for name, at in (("a", 2), ("b", 5))}, [9])
    sampler = fc.SliceSampler(slice_len=3, end_keys=["a", ("no", "such"), "b"])
    buffer = filled(flags.set("t", torch.arange(9)), 9, sampler)
    assert {*buffer.sample(300)["t"].view(-1, 3)[:, 0].tolist()} == {0, 3, 6}
    with pytest.raises(ValueError, match=r"no tensor no\.such"):
        filled(flags, 9, fc.SliceSampler(slice_len=3, end_keys=["no.such"]))


def runs(first, steps=4):
    """Lanes with the same ids, as the runs of a vmap have them; `lane` tells them apart."""
    t = torch.arange(first, first + steps).expand(3, steps)
    return TensorDict({"episode": t // 6, "t": t, "lane": torch.arange(3)[:, None].expand(3, steps)}, [3, steps])


def test_equal_ids_are_told_apart_by_lane(tmp_path):
    def made():
        return fc.ReplayBuffer(storage=fc.LazyTensorStorage(60, ndim=2), sampler=fc.SliceSampler(slice_len=6))

    buffer = made()
    for first in (0, 4, 8):  # in the second batch, no two lanes have an id in common that is new
        buffer.extend(runs(first))
        buffer.dumps(tmp_path)
        buffer = made()
        buffer.loads(tmp_path)
    sample = buffer.sample(6 * 100).view(100, 6)
    assert (sample["lane"] == sample["lane"][:, :1]).all()
    assert (sample["t"].diff(dim=1) == 1).all()
    assert len({*zip(sample["t"][:, 0].tolist(), sample["lane"][:, 0].tolist(), strict=True)}) == 6


def test_lanes_with_equal_ids_are_not_read_by_others(tmp_path):
    storage = fc.LazyMemmapStorage(60, ndim=2, scratch_dir=tmp_path)
    buffer = filled(runs(0), storage, fc.SliceSampler(slice_len=2), shared=True)
    with pytest.raises(ValueError, match="equal trajectory ids, by which readers would mix them"):
        pickle.dumps(buffer)
