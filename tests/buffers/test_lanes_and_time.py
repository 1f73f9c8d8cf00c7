"""Buffers with lanes are indexed by lane and time, and short slices shorten a sample, both as in TorchRL."""

import numpy as np
import pytest
import torch
import torchrl.data
from tensordict import TensorDict

import funcollect as fc

LIBRARIES = pytest.mark.parametrize("data", [fc, torchrl.data], ids=["ours", "TorchRL's"])


def batch_of(start, lanes=2, steps=5):
    """Each frame holds its lane and step: ``100 * lane + step``."""
    return TensorDict({"x": 100 * torch.arange(lanes)[:, None] + torch.arange(start, start + steps)}, [lanes, steps])


@LIBRARIES
def test_views_of_lanes_and_time(data):
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(100, ndim=2))
    buffer.extend(batch_of(0))
    assert buffer[:].shape == (2, 5)
    buffer.extend(batch_of(5))
    whole = batch_of(0, steps=10)["x"]
    for index in (
        slice(None), slice(0, 1), ..., (..., -1), (0, 3), (0, slice(1, 3)), (slice(None), slice(-4, None)),
        (torch.tensor([0, 1]), torch.tensor([3, 4])),
    ):  # fmt: skip
        found = buffer[index]
        assert found.shape == whole[index].shape
        assert torch.equal(found["x"], whole[index])
    if data is fc:
        workers = fc.ReplayBuffer(storage=fc.LazyTensorStorage(100, ndim=3))
        batch = TensorDict({"x": torch.arange(24).view(2, 3, 4)}, [2, 3, 4])
        workers.extend(batch)
        assert torch.equal(workers[:, 1:, 2]["x"], batch[:, 1:, 2]["x"])
        assert [buffer[index].names[-1:] for index in (slice(None), ..., 0, (0, slice(1, 3)))] == [["time"]] * 4
        assert [buffer[index].names for index in ((slice(None), -1), (..., -1))] == [[None]] * 2


def made(capacity, starts, **options):
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(capacity, ndim=2))
    slots = [buffer.extend(batch_of(start, **options)) for start in starts]
    return buffer, slots


def test_lanes_and_steps():
    buffer, (slots,) = made(100, [0])
    assert buffer[1]["x"].tolist() == [100, 101, 102, 103, 104]
    assert buffer[-1, -1]["x"] == 104
    assert buffer[np.int64(0)].shape == (5,)
    # Arrays, tensors and lists are slots.
    assert torch.equal(buffer[slots]["x"], batch_of(0)["x"])
    assert buffer[[0, 1, 2]]["x"].tolist() == [0, 100, 1]
    assert buffer[torch.tensor(3)]["x"] == 101
    assert len(buffer[np.arange(10) % 2 == 0]) == 5
    for index in (2, (0, 5), (0, 0, 0)):
        with pytest.raises(IndexError, match=r"expected one into \[2, 5\] frames: give ints below these sizes"):
            buffer[index]
    for index in ("x", ("x",), 1.5, (0, 1.5), torch.tensor(0.5), {}):
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
    wanted = batch_of(30 - capacity // 2, steps=capacity // 2)["x"]  # of 15 frames, one lane has lost its oldest step
    assert torch.equal(buffer[:]["x"], wanted)
    buffer.dumps(tmp_path)
    other, _ = made(capacity, [])
    other.loads(tmp_path)
    assert torch.equal(other[:, -3:]["x"], wanted[:, -3:])
    buffer.empty()
    assert buffer[:].shape == (0, 0)


def test_batches_of_different_lanes():
    buffer, _ = made(12, [0])
    buffer.extend(batch_of(0, lanes=3, steps=1))
    with pytest.raises(ValueError, match="different dimensions before time, so they have no common lanes"):
        buffer[:]
    assert len(buffer[torch.arange(len(buffer))]) == 12
    for start in range(1, 6):
        buffer.extend(batch_of(start, lanes=3, steps=1))
    assert torch.equal(buffer[:]["x"], batch_of(2, lanes=3, steps=4)["x"])


@pytest.mark.parametrize(
    ("data", "storage"),
    [(torchrl.data, "LazyTensorStorage"), (fc, "LazyTensorStorage"), (fc, "ListStorage")],
    ids=["TorchRL's", "ours", "our list"],
)
def test_short_slices_shorten_the_sample(data, storage):
    sampler = data.SliceSampler(slice_len=4, strict_length=False, traj_key="episode")
    buffer = data.ReplayBuffer(storage=getattr(data, storage)(20), sampler=sampler, batch_size=40)
    buffer.extend(TensorDict({"x": torch.ones(6), "episode": torch.arange(6) // 2}, [6]))
    sample = buffer.sample()
    assert (len(sample), float(sample["x"].mean())) == (20, 1.0)
    assert ("collector", "mask") not in sample.keys(True)


def test_weights_and_slots_of_short_slices():
    frames = TensorDict({"x": torch.arange(7), "episode": torch.tensor([0, 0, 1, 1, 1, 1, 1])}, [7])

    def made(**options):
        sampler = fc.PrioritizedSliceSampler(
            20, 1.0, 1.0, slice_len=4, strict_length=False, traj_key="episode", **options
        )
        buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(20), sampler=sampler, batch_size=40)
        buffer.extend(frames)
        return buffer

    sample, info = made().sample(return_info=True)
    assert torch.equal(sample["x"], info["index"])
    assert info["priority_weight"].shape == sample.shape
    assert len(sample) < 40
    buffer = made(pad_output=True)
    sample, info = buffer.sample(return_info=True)
    mask = sample["collector", "mask"]
    assert torch.equal(torch.where(mask, sample["x"], -1), info["index"])
    buffer.update_priority(info["index"], torch.where(mask, 2.0, 9.0))  # which the padding does not get
    assert 9.0 not in buffer.sampler.state()["weights"]
