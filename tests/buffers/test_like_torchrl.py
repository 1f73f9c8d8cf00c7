"""Code for TorchRL's replay buffers with nothing but the imports changed, run with either library."""

import pytest
import torch
import torchrl.data
from tensordict import TensorDict

import funcollect as fc
from tests.buffers.conftest import filled

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
