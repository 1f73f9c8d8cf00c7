"""Samples from several buffers, and of frames by age: what is drawn, and what goes back to where it came from."""

from collections import Counter

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import funcollect as fc
from tests.buffers.conftest import filled, numbers
from tests.support.compare import implausible
from tests.support.running import scaled


def prioritized(size=8):
    return fc.PrioritizedSampler(size, alpha=1.0, beta=1.0, eps=0.0)


def weights(buffer):
    return buffer.sampler.state()["weights"].tolist()


@pytest.mark.parametrize("prefetch", [None, 2])
def test_one_sample_from_several_and_what_goes_back(prefetch):
    offline = filled(numbers(8), 8, prioritized, prefetch=prefetch)
    plain = filled(numbers(20, 100).set("further", torch.ones(20)), 20)
    online = filled(numbers(8, 200), 8, prioritized)
    mixed = fc.mix(offline, plain, online, fractions=(0.25, 0.3, 0.45), batch_size=10)
    sample, info = mixed.sample(return_info=True)
    assert (
        sample["x"].div(100, rounding_mode="floor").tolist() == info["buffer"].tolist() == [0] * 2 + [1] * 4 + [2] * 4
    )
    assert {*sample.keys()} == {"x"}
    assert len(mixed) == 36
    begin = torch.tensor([0, 8, 28])[info["buffer"]]
    assert torch.equal(info["index"] - begin, sample["x"] % 100)
    assert (info["priority_weight"] == 1).all()
    mixed.update_priority(info["index"], torch.arange(10.0) + 5)
    for buffer, rows in ((offline, range(2)), (online, range(6, 10))):
        last = {int(info["index"][row] - begin[row]): row + 5.0 for row in rows}
        assert weights(buffer) == [last.get(slot, 1.0) for slot in range(8)]
    copied, written = info["index"].clone(), mixed.written_at(info["index"])
    online.extend(numbers(8, 300))
    assert mixed.update(info["index"], {"x": sample["x"] + 50}) == 4
    assert mixed.update(copied[:3], {"x": sample["x"][:3] + 50}, written=written) == 0
    mixed.update_priority(copied, 1000.0, written=written)
    assert {*online[:]["x"].tolist()} == {*range(300, 308)}
    assert 1000.0 not in weights(online)
    assert 1000.0 in weights(offline)
    assert {*plain[:]["x"].tolist()} >= {*(sample["x"][2:6] + 50).tolist()}
    weight = mixed.sample(400, return_info=True)[1]["priority_weight"]
    assert weight.min() < 1


def test_priorities_in_a_sample_go_back_to_keyed_buffers():
    buffers = [fc.TensorDictReplayBuffer(storage=fc.LazyTensorStorage(8), sampler=prioritized()) for _ in range(2)]
    buffers.insert(1, fc.TensorDictReplayBuffer(storage=fc.LazyTensorStorage(8)))
    for buffer in buffers:
        buffer.extend(numbers(8))
    mixed = fc.mix(*buffers, batch_size=30)
    sample, info = mixed.sample(return_info=True)
    mixed.update_tensordict_priority(sample.set("td_error", info["index"] + 100.0))
    for number in (0, 2):
        drawn = {*info["index"][info["buffer"] == number].tolist()}
        wanted = [slot + 100.0 if slot in drawn else 1.0 for slot in range(8 * number, 8 * number + 8)]
        assert weights(buffers[number]) == wanted


def test_values_go_to_all_buffers_or_to_none():
    buffers = [filled(numbers(9).set("h", torch.zeros(9)), 9, prioritized(9)), filled(numbers(9), 9, prioritized(9))]
    mixed = fc.mix(*buffers, batch_size=4)
    index = mixed.sample(return_info=True)[1]["index"]
    before, edits = [buffer[:].clone() for buffer in buffers], [buffer.storage.edits for buffer in buffers]
    bad = torch.tensor([1.0, 1.0, -1.0, 1.0])
    for call, words in (
        (lambda: mixed.update(index, {"h": torch.ones(4)}), "values has h, which frames lack"),
        (lambda: mixed.update_priority(index, bad), "priorit.*-1"),
        (lambda: mixed.update(torch.tensor([0, -5]), {"x": torch.ones(2)}), "index holds -5 to 0"),
        (lambda: mixed.update(index, {"x": index}, written=5), r"written is 5.*expected numbers for 2 buffers"),
        (lambda: mixed.update_priority(index, 1.0, written=np.ones(4)), "expected numbers for 2 buffers"),
        (lambda: buffers[0].update(index, {"x": index}), "index is one of mix.*method of the mixture"),
        (lambda: buffers[0].update_priority(index, 1.0), "index is one of mix"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    assert all((buffer[:] == frames).all() for buffer, frames in zip(buffers, before, strict=True))
    assert all({*weights(buffer)} == {1.0} for buffer in buffers)
    assert [buffer.storage.edits for buffer in buffers] == edits  # samples made ahead, and dumps, stay good
    mixed.update(index[:2], {"h": torch.ones(2)})  # of the first buffer alone
    assert buffers[0][:]["h"].sum() in (1, 2)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("key", ["td_error", ("a", "td")])
def test_priorities_are_values_that_are_written_back_however_their_key_is_spelled(key, stored):
    path = key if isinstance(key, tuple) else (key,)
    frames = numbers(8).set(path, torch.ones(8)) if stored else numbers(8)
    buffers = [
        fc.TensorDictReplayBuffer(storage=fc.LazyTensorStorage(8), sampler=prioritized(), priority_key=key)
        for _ in range(2)
    ]
    for buffer in buffers:
        buffer.extend(frames)
    index = torch.arange(8)
    spellings = [{path: index + 2.0}, TensorDict({path: index + 2.0}, [8])]
    spellings.append({"a": {"td": index + 2.0}} if path[1:] else {"td_error": index + 2.0})
    for values in spellings:
        buffers[0].update_priority(index, 1.0)
        buffers[0].update(index, values)
        assert weights(buffers[0]) == (index + 2.0).tolist()
    fc.mix(*buffers).update(torch.arange(16), {path: torch.arange(16) + 3.0})
    assert [*map(weights, buffers)] == [(index + 3.0).tolist(), (index + 11.0).tolist()]


@pytest.mark.parametrize("max_age", [None, 1])
def test_a_loop_over_frames_that_are_used_once_ends(max_age):
    buffer = filled(versioned(0, [2] * 6), 8, lambda: fc.RecentSampler(once=True, max_age=max_age), batch_size=4)
    assert [len(sample) for sample in buffer] == [4, 2]
    assert [*buffer] == []
    buffer.extend(versioned(6, [2] * 3))
    assert [len(sample) for sample in buffer] == [3]
    buffer.extend(versioned(9, [2] * 3))
    buffer.sampler.policy_version = 9
    assert [len(sample) for sample in buffer] == ([3] if max_age is None else [])


def test_keyed_buffers_and_trees():
    for frames in (numbers(4), torch.stack([numbers(4)] * 2, 1)):  # the latter are sequences
        buffers = [fc.TensorDictReplayBuffer(storage=fc.LazyTensorStorage(4), batch_size=2) for _ in range(2)]
        for buffer in buffers:
            buffer.extend(frames)
        mixed = fc.mix(*buffers)
        sample, info = mixed.sample(6, return_info=True)
        assert torch.equal(sample["index"].reshape(6, -1).T, info["index"].expand(frames.ndim, -1))
        assert mixed.written_at(sample["index"]) == (4, 4)
        assert info["buffer"].tolist() == [0] * 3 + [1] * 3
    trees = fc.mix(
        filled({"x": (torch.zeros(4),)}), filled({"x": (torch.ones(4),)}), fractions=[0.5, 0.5], batch_size=4
    )
    assert next(iter(trees))["x"][0].tolist() == [0, 0, 1, 1]


def mixture(second, **options):
    return fc.mix(filled(numbers(4)), second, **options)


BAD = {
    "1 buffers are given, expected two or more, each once": lambda: fc.mix(filled(numbers(4))),
    "buffers is 3, expected ReplayBuffer": lambda: mixture(3),
    "expected 2 numbers with the sum 1: pass one for each": lambda: mixture(filled(numbers(4)), fractions=(0.5, 0.4)),
    "fractions is 0.5, expected a number for each buffer": lambda: mixture(filled(numbers(4)), fractions=0.5),
    "fractions is 2.0, expected a number in": lambda: mixture(filled(numbers(4)), fractions=(2.0, -1.0)),
    "no batch_size is given": lambda: mixture(filled(numbers(4))).sample(),
    "the buffer is empty": lambda: mixture(fc.ReplayBuffer()).sample(4),
    "torch.float32.*expected the same keys, shapes, dtypes and devices": lambda: mixture(
        filled({"x": torch.ones(3)})
    ).sample(4),
    r"frames of the buffers have \[{}, {}\], expected": lambda: mixture(
        filled(TensorDict({"y": torch.ones(3)}, [3]))
    ).sample(4),
    "index holds 20 to 20, expected slots below 20": lambda: mixture(filled(numbers(4))).update_priority([20], 1.0),
    "2 priorities are given for 3 frames: give one each": lambda: mixture(
        filled(numbers(8), 8, prioritized)
    ).update_priority([4, 5, 6], [1.0, 2.0]),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_mixtures(message):
    with pytest.raises((TypeError, ValueError), match=message):
        BAD[message]()


def versioned(start, versions):
    batch = numbers(len(versions), start)
    return batch.set(("collector", "policy_version"), torch.tensor(versions))


@pytest.mark.parametrize("rare", [False, True])
def test_frames_are_young(rare):
    """Batches of asynchronous workers do not come in the order of their versions."""
    buffer = filled(versioned(0, [3, 5, 4, 1] * 5 + [0] * 60), 70 if rare else 20, fc.RecentSampler(max_age=1))
    if rare:
        buffer.extend(versioned(80, [2, 5, 4, 1] * 2))  # over the first eight of the frames
    versions = buffer[:]["collector", "policy_version"]
    if not rare:
        assert (versions == 0).all()
        buffer.extend(versioned(80, [3, 5, 4, 1] * 5))
        versions = buffer[:]["collector", "policy_version"]
    count = scaled(2000)
    _, info = buffer.sample(count, return_info=True)
    young = (versions >= 4).nonzero()[:, 0]
    counts = torch.bincount(info["index"], minlength=len(versions))
    assert counts.sum() == counts[young].sum() == count
    assert not implausible(counts[young], [count / len(young)] * len(young))
    buffer.sampler.policy_version = 6
    assert {*buffer.sample(count)["collector", "policy_version"].tolist()} == {5}
    buffer.sampler.policy_version = 9
    with pytest.raises(ValueError, match="no frame is at most 1 versions old"):
        buffer.sample(4)


@pytest.mark.parametrize("max_age", [None, 1])
@pytest.mark.parametrize("prefetch", [None, 3])
def test_each_frame_is_consumed_once(prefetch, max_age, tmp_path):
    """Whatever was prepared when a batch comes in or a dump is made is drawn later, unless it was overwritten."""

    def made():
        sampler = fc.RecentSampler(max_age=max_age, once=True)
        return fc.ReplayBuffer(storage=fc.LazyTensorStorage(60), sampler=sampler, batch_size=7, prefetch=prefetch)

    buffer, seen = made(), Counter()
    for turn in range(6):
        buffer.extend(versioned(20 * turn, [turn] * 20))
        for _ in range(2):
            seen.update(buffer.sample()["x"].tolist())
    buffer.dumps(tmp_path)
    other, rest = made(), Counter(seen)
    other.loads(tmp_path)
    for each, found in ((buffer, seen), (other, rest)):
        sizes = [len(sample) for sample in each if not found.update(sample["x"].tolist())]
        assert set(sizes[:-1]) <= {7}
        assert {*found.values()} == {1}
        assert {*found} >= {*range(60 if max_age is None else 80, 120)}
        assert each.sampler.ran_out(1)
        with pytest.raises(ValueError, match="has no frame left"):
            each.sample()
        each.extend(versioned(200, [9]))
        assert each.sample()["x"].tolist() == [200]


ONCE = {
    "recent": lambda: fc.RecentSampler(once=True),
    "rounds": fc.SamplerWithoutReplacement,
    "rounds of slices": lambda: fc.SliceSamplerWithoutReplacement(slice_len=1, traj_key="x"),
}


@pytest.mark.parametrize("prefetch", [None, 3])
@pytest.mark.parametrize("name", ONCE)
def test_frames_of_a_sample_that_fails_are_drawn_again(name, prefetch):
    failures = iter([True, False, True] * 20)

    def sometimes(batch):
        if next(failures):
            raise ArithmeticError
        return batch

    def until_the_end(sampled):
        seen = []
        while len(seen) < 12:
            try:
                seen += sampled.sample()["x"].tolist()
            except (ArithmeticError, ValueError):
                online.extend(numbers(1, 50))
        return [x for x in seen if x < 50]

    online = filled(numbers(0), 20)
    options = {"batch_size": 4, "prefetch": prefetch}
    for transform, mixes in ((sometimes, False), (sometimes, True), (None, True)):  # `online` is empty at first
        buffer = filled(numbers(12), 12, ONCE[name], sample_transform=transform, **options)
        found = until_the_end(fc.mix(buffer, online, batch_size=8) if mixes else buffer)
        assert sorted(found) == sorted({*found})
        assert mixes or len(found) == 12
        online.empty()


def test_frames_that_came_while_a_sample_failed_are_drawn_once():
    def fails(batch):
        buffer.extend(numbers(5, 10))  # by another thread
        found.extend(buffer.storage[buffer.sampler.draw(buffer._memory, 5, buffer._random_source).slots]["x"].tolist())
        raise ArithmeticError

    found = []
    buffer = filled(numbers(5), 5, fc.RecentSampler(once=True), batch_size=5, sample_transform=fails)
    with pytest.raises(ArithmeticError):
        buffer.sample()
    assert sorted(found) == [*range(10, 15)]
    assert buffer.sampler.ran_out(1)


def test_versions_that_an_update_changes():
    buffer = filled(versioned(0, [0, 0, 1, 1, 2, 2]), 6, fc.RecentSampler(max_age=0), batch_size=20)
    for change, young in (([2, 0], {0, 4, 5}), ([3, 3], {0, 1})):
        assert {*buffer.sample()["x"].tolist()} <= {0, 1, 4, 5}
        buffer.update(torch.tensor([0, 1]), {("collector", "policy_version"): torch.tensor(change)})
        assert {*buffer.sample(200)["x"].tolist()} == young


def test_frames_without_versions():
    buffer = filled(numbers(4), 4, fc.RecentSampler(max_age=0))
    with pytest.raises(ValueError, match=r"numbers \['x'\], expected collector.policy_version"):
        buffer.sample(2)
    assert len(filled(numbers(4), 4, fc.RecentSampler(once=True)).sample(9)) == 4


def test_collectors_of_several_workers():
    sampler = fc.RecentSampler(max_age=0, once=True)
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(1_000, ndim=2), sampler=sampler, batch_size=16)
    env = fc.make_env("CartPole-v1", num_envs=2)
    with fc.SyncDataCollector(env, None, frames_per_batch=32, total_frames=96, seed=0) as collector:
        for batch in collector:
            buffer.extend(batch)
            assert sum(len(sample) for sample in buffer) == 32
