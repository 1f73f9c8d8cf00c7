"""Code for TorchRL's replay buffers with nothing but the imports changed, run with either library."""

import pytest
import torch
import torchrl.data
from tensordict import TensorDict

import funcollect as fc

LIBRARIES = pytest.mark.parametrize("data", [fc, torchrl.data], ids=["ours", "TorchRL's"])


def transitions(count, start=0):
    index = torch.arange(start, start + count)
    return TensorDict(
        {
            "observation": index[:, None].float(),
            "episode": index // 50,
            "next": {"observation": index[:, None] + 1.0, "done": (index % 50 == 49)[:, None]},
        },
        [count],
    )


@LIBRARIES
@pytest.mark.parametrize("storage", ["ListStorage", "LazyTensorStorage", "LazyMemmapStorage"])
def test_transitions(data, storage):
    buffer = data.ReplayBuffer(storage=getattr(data, storage)(max_size=300), batch_size=32)
    indices = buffer.extend(transitions(200))
    assert indices.tolist() == list(range(200))
    assert buffer.extend(transitions(200, 200)).tolist() == [*range(200, 300), *range(100)]
    assert len(buffer) == 300
    sample, info = buffer.sample(return_info=True)
    assert sample.shape == (32,)
    assert (buffer[torch.as_tensor(info["index"])]["observation"] == sample["observation"]).all()
    assert int(sample["observation"].min()) >= 100
    for index, batch in enumerate(buffer):
        assert batch.shape == (32,)
        if index == 3:
            break
    buffer.empty()
    assert len(buffer) == 0


@LIBRARIES
@pytest.mark.parametrize("options", [
    {"num_slices": 10}, {"slice_len": 5, "traj_key": "episode"}, {"slice_len": 5, "end_key": ("next", "done")},
])  # fmt: skip
def test_slices(data, options):
    buffer = data.ReplayBuffer(
        storage=data.LazyTensorStorage(max_size=1000), sampler=data.SliceSampler(**options), batch_size=50
    )
    buffer.extend(transitions(500))
    slices = buffer.sample().reshape(10, 5)
    assert (slices["observation"].diff(dim=1) == 1).all()
    assert (slices["episode"] == slices["episode"][:, :1]).all()


@LIBRARIES
def test_lanes(data):
    buffer = data.ReplayBuffer(
        storage=data.LazyTensorStorage(max_size=1000, ndim=2),
        sampler=data.SliceSampler(slice_len=5, traj_key="episode"),
        batch_size=50,
    )
    for start in (0, 100):
        buffer.extend(torch.stack([transitions(100, start), transitions(100, 1000 + start)]))
    assert len(buffer) == 400
    slices = buffer.sample().reshape(10, 5)
    assert (slices["observation"].diff(dim=1) == 1).all()


@LIBRARIES
def test_without_replacement_ahead_and_lists(data):
    buffer = data.ReplayBuffer(
        storage=data.LazyTensorStorage(max_size=10),
        sampler=data.SamplerWithoutReplacement(drop_last=False),
        batch_size=5,
    )
    buffer.extend(transitions(10))
    seen = torch.cat([batch["observation"] for batch in buffer])
    assert sorted(seen[:, 0].tolist()) == list(range(10))
    buffer = data.ReplayBuffer(
        storage=data.LazyTensorStorage(max_size=100), batch_size=5, prefetch=2, generator=torch.Generator()
    )
    buffer.extend(transitions(60))
    assert [buffer.sample().shape for _ in range(5)] == [(5,)] * 5
    buffer = data.ReplayBuffer(storage=data.ListStorage(100), collate_fn=lambda x: x)
    buffer.extend(["a", 1, None])
    assert all(item in ("a", 1, None) for item in buffer.sample(3))
