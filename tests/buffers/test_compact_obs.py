"""Observations stored once: the same frames come out as of a storage that holds both."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import funcollect as fc
from funcollect.keys import key_from_seed
from tests.support.compare import assert_same
from tests.support.frames.streams_of_frames import batch_of, frames_of, streams
from tests.support.running import scaled


def rich(lanes, generator):
    """A batch with a nested observation, in which a few next observations are not what follows."""
    batch = batch_of(lanes)
    pixels = batch["observation"].to(torch.uint8)[..., None] + torch.arange(3, dtype=torch.uint8)
    batch["camera"] = {"pixels": pixels, "empty": torch.zeros(*batch.shape, 0)}
    batch["next", "camera", "pixels"] = pixels + (torch.tensor([0, 0, 1]).byte())[:, None]
    batch["next", "camera", "empty"] = torch.zeros(*batch.shape, 0)
    odd = torch.rand(batch.shape, generator=generator) < 0.1
    batch["next", "observation"][odd] += 0.5
    return batch


def everything(state):
    return state.memory.read(np.arange(len(state))).clone()


@settings(max_examples=scaled(60), deadline=None)
@given(streams(), st.integers(1, 60), st.integers(0, 9))
def test_the_same_frames_come_out(batches, capacity, seed):
    generator = torch.Generator().manual_seed(seed)
    plain, compact = (
        fc.ring.init(
            fc.LazyTensorStorage(capacity, ndim=2, compact_obs=compact_obs), trajectories=fc.ring.Trajectories()
        )
        for compact_obs in (False, True)
    )
    for lanes in batches:
        batch = rich(lanes, generator)
        (plain, one), (compact, two) = fc.ring.extend(plain, batch), fc.ring.extend(compact, batch)
        assert one.tolist() == two.tolist()
        assert_same(everything(plain), everything(compact))
        aside = compact.memory.storage._next
        frames, index = everything(plain), plain.memory.index
        slots = np.arange(len(plain))
        after = index.following(slots)
        differs = (frames["next", "observation"] != frames["observation"][after]).any(-1).numpy()
        assert ((aside.place[slots] >= 0) == ((after == slots) | differs)).all()
        in_use = aside.place[aside.place >= 0].tolist()
        assert sorted([*in_use, *aside._free.tolist()]) == list(range(len(aside._aside)))
    spec = fc.ring.Slices(num_slices=4, slice_len=3, strict_length=False)
    key = key_from_seed(seed)
    assert_same(fc.ring.sample(compact, key, spec).clone(), fc.ring.sample(plain, key, spec).clone())
    assert_same(everything(fc.ring.snapshot(compact)), everything(plain))


@pytest.mark.parametrize("storage", [fc.LazyTensorStorage, fc.LazyMemmapStorage])
@pytest.mark.parametrize("length", [1, 25])
def test_half_the_memory_also_frame_by_frame(storage, length):
    """Whole batches and single frames; samplers that know nothing of trajectories too."""
    buffers = [fc.ReplayBuffer(storage=storage(1000, compact_obs=compact), batch_size=20) for compact in (True, False)]
    screen = torch.randint(256, (1001, 20, 20), dtype=torch.uint8)
    step = torch.arange(1000)
    batch = TensorDict(
        {"screen": screen[:-1], "episode": step // 250, "next": {"screen": screen[1:], "reward": torch.ones(1000, 1)}},
        [1000],
    )
    for start in range(0, 1000, length):
        for buffer in buffers:
            buffer.extend(batch[start : start + length])
    assert_same(buffers[0][:].clone(), batch.clone())
    assert buffers[0].storage.nbytes < 0.55 * buffers[1].storage.nbytes
    sample, info = buffers[0].sample(return_info=True)
    assert_same(sample.clone(), batch[info["index"]].clone())


def test_bad_input():
    with pytest.raises(ValueError, match="compact_obs is for storages on the host, device is cuda"):
        fc.LazyTensorStorage(9, device="cuda", compact_obs=True)
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(9, compact_obs=True))
    batch = batch_of([frames_of(0, [4])])[0]
    with pytest.raises(ValueError, match=r"no next observation of the same shape .* leave compact_obs out"):
        buffer.extend(batch.exclude("observation"))
    buffer.extend(batch)
    batch["next", "observation"] = batch["next", "observation"].double()
    with pytest.raises(ValueError, match=r"next\.observation is \[3\] torch\.float64 in each frame"):
        buffer.extend(batch)
    with pytest.raises(ValueError, match=r"lacks \['next\.observation'\]"):
        buffer.extend(batch.exclude(("next", "observation")))
    assert len(buffer) == 4
