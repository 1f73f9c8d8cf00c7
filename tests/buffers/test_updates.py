"""Samples are transformed where they are made, and values are written back to frames that are still there."""

import operator
import pickle
import threading

import pytest
import torch
from tensordict import TensorDict

import funcollect as fc
from tests.buffers.conftest import filled, numbers
from tests.support.compare import assert_same
from tests.support.frames import batch_of, frames_of
from tests.support.running import pairwise

SLICES = lambda: fc.SliceSampler(slice_len=4)  # noqa: E731
DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.uint16, torch.float8_e5m2, torch.complex128)


def doubled(sample):
    return sample.set("y", 2 * sample["x"])


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("kind", [fc.ReplayBuffer, fc.TensorDictReplayBuffer])
def test_samples_are_transformed_where_they_are_made(kind, prefetch):
    threads = set()

    def transform(sample):
        threads.add(threading.current_thread().name.startswith("funcollect-replay"))
        return doubled(sample).reshape(2, 2)

    buffer = kind(storage=fc.LazyTensorStorage(10), batch_size=4, prefetch=prefetch, sample_transform=transform)
    buffer.extend(numbers(10))
    for _ in range(4):
        sample, info = buffer.sample(return_info=True)
        assert sample.shape == (2, 2)
        assert (sample["y"] == 2 * info["index"].view(2, 2)).all()
        if kind is fc.TensorDictReplayBuffer:
            assert torch.equal(sample["index"].view(-1), info["index"])
            assert buffer.written_at(sample["index"]) == 10
            assert "index" not in buffer.sample(include_info=False).to_dict()
    assert threads == {prefetch is not None}
    assert "y" not in buffer[:].to_dict()


def test_the_last_value_of_a_frame_that_is_still_there_counts():
    """Though an older frame of the same slot comes after it."""
    buffer = filled(numbers(4), 4)
    old = torch.arange(2)
    new = buffer.extend(numbers(2, 10))
    index, written = torch.cat([new, old]), torch.tensor([6, 6, 4, 4])
    assert buffer.update(index, {"x": torch.tensor([70, 71, 98, 99])}, written=written) == 2
    assert buffer[:]["x"].tolist() == [70, 71, 2, 3]
    assert buffer.update(torch.cat([new, new]), {"x": torch.arange(4)}) == 0
    assert buffer[:]["x"].tolist() == [2, 3, 2, 3]


@pytest.mark.needs("torchrl")
@pytest.mark.parametrize("prefetch", [None, 2])
def test_transforms_of_torchrl(prefetch, tmp_path):
    """The same after a dump, whose loader has a transform of its own."""
    from torchrl.envs.transforms import Compose, ObservationNorm, RewardScaling, ToTensorImage

    scaled = [RewardScaling(loc=1.0, scale=2.0, in_keys=[("next", "reward")]), ToTensorImage(in_keys=["pixels"])]
    transform = Compose(*scaled, ObservationNorm(loc=0.5, scale=3.0, in_keys=["observation"]))
    batch = TensorDict(
        {"pixels": torch.arange(10 * 12).view(10, 2, 2, 3).byte(), "observation": torch.rand(10, 3)}, [10]
    )
    batch["next", "reward"] = torch.rand(10, 1)

    def made(**options):
        generator = torch.Generator().manual_seed(0)
        return filled(batch, 10, batch_size=4, generator=generator, prefetch=prefetch, **options)

    plain, buffer, other = made(), made(sample_transform=transform), made(sample_transform=transform)
    buffer.dumps(tmp_path)
    other.loads(tmp_path)
    for _ in range(3):
        wanted = transform(plain.sample())
        assert wanted["pixels"].shape == (4, 3, 2, 2)
        assert_same(buffer.sample(), wanted)
        assert_same(other.sample(), wanted)


def test_readers_transform_too(tmp_path):
    storage = fc.LazyMemmapStorage(10, scratch_dir=tmp_path)
    buffer = filled(numbers(10), storage, batch_size=4, shared=True, sample_transform=doubled)
    sample = pickle.loads(pickle.dumps(buffer)).sample()
    assert (sample["y"] == 2 * sample["x"]).all()
    buffer.collate_fn, buffer.sample_transform = operator.itemgetter("x"), operator.invert
    sample = pickle.loads(pickle.dumps(buffer)).sample()
    assert isinstance(sample, torch.Tensor)
    assert (sample < 0).all()


def frames(count):
    """Frames with a recurrent state and leaves of all kinds, of one trajectory."""
    batch = batch_of([frames_of(0, [count])])[0]
    leaves = {str(dtype): torch.zeros(count, 2).to(dtype) for dtype in DTYPES}
    return batch.update({"recurrent": torch.zeros(count, 3), "other": leaves, "x": torch.arange(count)})


@pytest.mark.parametrize(("sampler", "compact_obs", "prefetch"), pairwise((None, SLICES), (False, True), (None, 2)))
def test_values_are_written_back_to_frames_that_are_there(sampler, compact_obs, prefetch, tmp_path):
    storage = fc.LazyTensorStorage(20, compact_obs=compact_obs)
    buffer = filled(frames(20), storage, sampler, batch_size=40, prefetch=prefetch)
    buffer.dumps(tmp_path)
    before, (sample, info) = buffer[:], buffer.sample(return_info=True)
    buffer.extend(frames(15)[:5])
    index = info["index"].view(4, 10)
    values = {"recurrent": torch.rand(4, 10, 3), ("other", str(DTYPES[1])): torch.rand(4, 10, 2).bfloat16()}
    values |= {"other": {str(dtype): torch.rand(4, 10, 2).round().to(dtype) for dtype in DTYPES[2:]}}
    there = index >= 5
    assert buffer.update(index, values) == int((~there).sum()) > 0
    for path in ("recurrent", *(("other", str(dtype)) for dtype in DTYPES[2:])):
        new = values["other"][path[1]] if path[0] == "other" else values[path]
        last = {int(slot): row for slot, row in zip(index[there], new[there].cfloat(), strict=True)}
        for slot, row in enumerate(buffer[:][path].cfloat()):
            assert torch.equal(row, last.get(slot, 0 * row)), path
    untouched = ["observation", "next", "collector", "x"]
    assert_same(buffer[5:].select(*untouched), before[5:].select(*untouched))
    kept = buffer[:]
    sample, info = buffer.sample(return_info=True)
    assert torch.equal(sample["recurrent"], kept["recurrent"][info["index"]])
    buffer.dumps(tmp_path)
    other = fc.ReplayBuffer(storage=fc.LazyTensorStorage(20, compact_obs=compact_obs), sampler=sampler)
    other.loads(tmp_path)
    assert_same(other[:], kept)


def test_padding_is_not_counted_and_copies_need_a_number():
    sampler = fc.SliceSampler(slice_len=9, strict_length=False, pad_output=True)
    buffer = filled(frames(5), 5, sampler, batch_size=9)
    _, info = buffer.sample(return_info=True)
    assert buffer.update(info["index"], {"x": torch.arange(9) + 10}) == 0
    assert sorted(buffer[:]["x"].tolist()) == list(range(10, 15))
    copied, written = info["index"].clone(), buffer.written_at(info["index"])
    buffer.extend(frames(5))
    assert buffer.update(copied, {"x": torch.zeros(9, dtype=torch.int64)}, written=written) == 5
    assert buffer[:]["x"].tolist() == [0, 1, 2, 3, 4]


def test_priorities_are_written_with_the_values():
    storage, options = fc.LazyTensorStorage(8), {"alpha": 1.0, "beta": 1.0, "eps": 0.0}
    buffer = fc.TensorDictPrioritizedReplayBuffer(storage=storage, batch_size=4, **options)
    index = buffer.extend(numbers(8))
    buffer.extend(numbers(2))
    assert buffer.update(index, {"td_error": torch.arange(8.0) + 2, "x": index + 10}) == 2
    assert buffer.sampler.state()["weights"].tolist() == [1.0, 1.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    with pytest.raises(ValueError, match="expected finite numbers of at least 0"):
        buffer.update(torch.arange(8), {"td_error": -torch.ones(8), "x": torch.zeros(8).long()})
    assert buffer[:]["x"].tolist() == [0, 1, 12, 13, 14, 15, 16, 17]


REFUSED = {
    "by which the sampler follows trajectories": ({"collector": {"step": torch.zeros(5)}}, {}),
    r"next\.done.*by which the sampler follows": ({("next", "done"): torch.zeros(5, 1)}, {}),
    "values has y, which frames lack, expected some of": ({"y": torch.zeros(5)}, {}),
    r"values has \[2\] torch.float32 at recurrent": ({"recurrent": torch.zeros(5, 2)}, {}),
    r"values has \[3\] torch.float64 at recurrent": ({"recurrent": torch.zeros(5, 3).double()}, {}),
    r"of shape \[4, 3\], expected \[5\] first": ({"recurrent": torch.zeros(4, 3)}, {}),
    "values is 3, expected tensors by key": (3, {}),
    "which frames share": ({"big": torch.zeros(5, 40)}, {"compact_obs": True}),
    "keeps objects": ({"x": torch.zeros(5)}, {"list": True}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_values_that_cannot_be_written(message):
    values, options = REFUSED[message]
    batch = frames(5).set("big", torch.rand(5, 40)).set(("next", "big"), torch.rand(5, 40))
    storage = fc.ListStorage(5) if options else fc.LazyTensorStorage(5)
    if "compact_obs" in options:
        storage = fc.LazyTensorStorage(5, compact_obs=True)
    buffer = filled(batch, storage, fc.SliceSampler(slice_len=2))
    with pytest.raises((TypeError, ValueError), match=message):
        buffer.update(torch.arange(5), values)
    assert_same(buffer[:], batch)


def test_what_others_read_is_not_changed(tmp_path):
    buffer = filled(numbers(5), fc.LazyMemmapStorage(5, scratch_dir=tmp_path))
    with pytest.raises(ValueError, match="other processes may read"):
        buffer.update([0], {"x": torch.zeros(1, dtype=torch.int64)})
