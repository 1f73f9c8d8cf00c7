"""Sampling by priority: the tree against plain sums, chances by chi-square, frames that are gone, and bad input."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import funcollect as fc
from funcollect.buffers.sum_tree import DeviceSums, SumTree
from tests.buffers.conftest import filled
from tests.support.compare import implausible
from tests.support.devices import each_device, no_waits
from tests.support.frames import batch_of, frames_of
from tests.support.running import scaled

WEIGHTS = st.one_of(st.just(0.0), st.floats(1e-12, 1e12))


@settings(max_examples=scaled(60), deadline=None)
@given(st.integers(1, 600), st.data())
def test_the_tree_against_plain_arrays(capacity, data):
    tree, plain = SumTree(capacity), np.zeros(capacity)
    for _ in range(data.draw(st.integers(1, 4))):
        pairs = data.draw(st.lists(st.tuples(st.integers(0, capacity - 1), WEIGHTS), max_size=40))
        slots, weights = np.array([pair[0] for pair in pairs], int), np.array([pair[1] for pair in pairs], float)
        tree.put(slots, weights)
        plain[slots] = weights
        assert (tree.get(np.arange(capacity)) == plain).all()
        np.testing.assert_allclose(tree._running[-1], plain.sum(), rtol=1e-12)
        assert tree.least == plain[plain > 0].min(initial=np.inf)
        if not plain.any():
            with pytest.raises(ValueError, match="every priority is 0"):
                tree.find(np.zeros(1))
            continue
        places = np.array([*data.draw(st.lists(st.floats(0, 1, exclude_max=True), max_size=9)), 0.0, 1 - 2**-53])
        found = tree.find(places)
        assert (plain[found] > 0).all()
        upto = plain.cumsum() / plain.sum()
        assert (places >= (upto - plain / plain.sum())[found] - 1e-9).all()
        assert (places <= upto[found] + 1e-9).all()


def buffer_of(sampler, count=40):
    frames = batch_of([frames_of(0, [8] * (count // 8))])[0]
    return filled(frames, 40, sampler, generator=torch.Generator().manual_seed(0))


def counts_of(memory, count):
    _, info = memory.sample(count, return_info=True)
    return np.bincount(info["index"], minlength=40), info


def test_chances_follow_priorities():
    memory = buffer_of(fc.PrioritizedSampler(40, alpha=0.7, beta=0.5))
    priorities = torch.arange(40.0)
    memory.update_priority(torch.arange(40), priorities)
    chances = ((priorities + 1e-8) ** 0.7).numpy()
    chances /= chances.sum()
    count = scaled(20_000)
    counts, info = counts_of(memory, count)
    assert counts[0] == 0
    assert not implausible(counts[1:], count * chances[1:])
    assert implausible(counts[1:], count * np.full(39, 1 / 39))
    expected = (chances[info["index"]] / chances[0]) ** -0.5
    torch.testing.assert_close(info["priority_weight"], torch.from_numpy(expected).float())


def test_new_frames_have_the_highest_priority_there_was():
    memory = buffer_of(fc.PrioritizedSampler(40, alpha=1.0, beta=1.0))
    memory.update_priority(torch.arange(40), 1e-9)
    memory.update_priority(3, 5e9)
    memory.extend(batch_of([frames_of(1, [1])])[0])  # over slot 0
    counts, _ = counts_of(memory, 4000)
    assert counts[[0, 3]].sum() == 4000
    assert not implausible(counts[[0, 3]], [2000, 2000])


@pytest.mark.parametrize("rare", [False, True], ids=["tried", "looked through"])
def test_slices_by_priority(rare):
    memory = buffer_of(fc.PrioritizedSliceSampler(40, alpha=1.0, beta=1.0, eps=0, slice_len=3))
    priorities = torch.ones(40)
    if rare:  # nearly all of the weight lies where no slice can begin
        priorities[torch.arange(40) % 8 >= 6] = 1e6
    priorities[[1, 9]] = torch.tensor([0.0, 4.0])
    memory.update_priority(torch.arange(40), priorities)
    batch, info = memory.sample(3 * scaled(3000), return_info=True)
    slices = batch.reshape(-1, 3)
    assert (slices["collector", "step"].diff(dim=-1) == 1).all()
    assert (slices["collector", "traj_ids"] == slices["collector", "traj_ids"][:, :1]).all()
    starts = info["index"].reshape(-1, 3)[:, 0]
    begins = (torch.arange(40) % 8 < 6) & (priorities > 0)
    counts, chances = np.bincount(starts, minlength=40)[begins], priorities[begins] / priorities[begins].sum()
    assert not implausible(counts, len(starts) * chances)
    assert sum(counts) == len(starts)
    torch.testing.assert_close(info["priority_weight"], 1 / priorities[starts].repeat_interleave(3))


def test_priorities_go_with_the_frames():
    memory = buffer_of(fc.PrioritizedSampler(40, alpha=1.0, beta=1.0, eps=0))
    memory.update_priority(torch.arange(40), 0)
    with pytest.raises(ValueError, match="every priority is 0"):
        memory.sample(3)
    memory.empty()
    with pytest.raises(ValueError, match="the buffer is empty"):
        memory.sample(3)
    memory.extend(batch_of([frames_of(0, [2])])[0])
    assert set(memory.sample(50, return_info=True)[1]["index"].tolist()) == {0, 1}


def test_samples_made_ahead_know_the_new_priorities():
    memory = filled(torch.arange(9), 9, fc.PrioritizedSampler(9, 1, 1), prefetch=2)
    memory.sample(5)
    memory.update_priority(torch.arange(9), torch.eye(9)[4])
    assert memory.sample(5).tolist() == [4] * 5
    memory.update_priority(torch.arange(9), torch.arange(9) + 1.0)
    assert memory.sample(50, return_info=True)[1]["priority_weight"].min() < 1
    memory.sampler.beta = 0.0
    assert memory.sample(50, return_info=True)[1]["priority_weight"].min() == 1


BAD = {  # by the messages
    "max_capacity is 9, the storage holds 40 frames": lambda: buffer_of(fc.PrioritizedSampler(9, 1, 1)),
    "between -1.0 and -1.0, expected finite numbers of at least 0": lambda: updated([1], [-1.0]),
    r"between 1.0 and 1.26\d+e\+30, .* and a finite sum": lambda: updated([1, 2], [1.0, 2.0**100], alpha=12),
    "2 priorities are given for 3 frames": lambda: updated([1, 2, 3], [1.0, 2.0]),
    "slots from 1 to 24, the buffer has frames in 0 … 23": lambda: updated([1, 24], 1.0),
    "slices are 9 frames long, the longest trajectory held has 8": lambda: sliced(slice_len=9),
    r"RandomSampler\(\) has no priorities": lambda: fc.ReplayBuffer().update_priority([0], 1.0),
    "Sampler has no without-replacement variant": lambda: fc.PrioritizedSampler(9, 1, 1, replacement=False),
    "n_steps is 3 and gamma None, expected both or neither": lambda: fc.PrioritizedSampler(9, 1, 1, n_steps=3),
    "traj_key='x' and end_key=None are for n_steps: leave": lambda: fc.PrioritizedSampler(9, 1, 1, traj_key="x"),
    "every frame at which a slice can begin has priority 0": lambda: sliced(slice_len=8, zero=True),
}


def updated(index, priority, alpha=1):
    buffer_of(fc.PrioritizedSampler(40, alpha, 1), count=24).update_priority(index, priority)


def sliced(slice_len, zero=False):
    memory = buffer_of(fc.PrioritizedSliceSampler(40, 1, 1, eps=0, slice_len=slice_len))
    memory.update_priority(torch.arange(40), (torch.arange(40) % 8 != 0) if zero else 1)
    memory.sample(slice_len)


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    with pytest.raises((TypeError, ValueError), match=message):
        BAD[message]()


def test_weights_and_slots_of_short_slices():
    frames = TensorDict({"x": torch.arange(7), "episode": torch.tensor([0, 0, 1, 1, 1, 1, 1])}, [7])
    for pad_output in (False, True):
        options = {"slice_len": 4, "strict_length": False, "traj_key": "episode", "pad_output": pad_output}
        buffer = filled(frames, 20, fc.PrioritizedSliceSampler(20, 1.0, 1.0, **options))
        sample, info = buffer.sample(40, return_info=True)
        mask = sample.get(("collector", "mask"), torch.ones(len(sample), dtype=torch.bool))
        assert torch.equal(torch.where(mask, sample["x"], -1), info["index"])
        assert info["priority_weight"].shape == sample.shape
        assert (len(sample) < 40) != pad_output
    buffer.update_priority(info["index"], torch.where(mask, 2.0, 9.0))  # which the padding does not get
    assert 9.0 not in buffer.sampler.state()["weights"]


# Priorities belong to frames, not to slots: those for frames that are gone are ignored.

SIZE = 8


def made(count=SIZE, eps=0, ndim=1, **options):
    sampler = fc.PrioritizedSampler(SIZE, alpha=1.0, beta=1.0, eps=eps)
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(SIZE, ndim=ndim), sampler=sampler, batch_size=4, **options)
    return buffer, buffer.extend(torch.arange(count)) if ndim == 1 else None


def priorities(buffer):
    return buffer.sampler.state()["weights"][: len(buffer)].tolist()


def test_the_frames_of_a_sample_that_were_overwritten_meanwhile():
    buffer, _ = made()
    slots = torch.arange(SIZE)
    for ask in (lambda: buffer.sample(64, return_info=True)[1]["index"], lambda: buffer.extend(slots)):
        buffer.update_priority(slots, 1.0)  # without a note of its own, for the frames that are there now
        index = ask()
        buffer.extend(torch.arange(3))
        first = int(buffer.state.memory.written) % SIZE - 3
        buffer.update_priority(index, 0.5)
        fresh = {(first + n) % SIZE for n in range(3)}
        assert [weight != 0.5 for weight in priorities(buffer)] == [slot in fresh for slot in range(SIZE)]


def test_what_extend_returned_is_new():
    buffer, _ = made()
    index = buffer.extend(torch.arange(3))
    buffer.update_priority(index, torch.tensor([2.0, 3.0, 4.0]))
    assert priorities(buffer) == [2.0, 3.0, 4.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    buffer.update_priority(index[1:], 7.0)  # a view
    assert priorities(buffer)[:3] == [2.0, 7.0, 7.0]
    buffer.update_priority(buffer.add(torch.tensor(1)), 0.5)
    assert priorities(buffer)[3] == 0.5


def test_an_index_that_is_overwritten_loses_its_note():
    buffer, old = made()
    new = buffer.extend(torch.arange(SIZE))
    buffer.update_priority(old.copy_(new), 0.5)
    assert priorities(buffer) == [0.5] * SIZE


@pytest.mark.parametrize("prefetch", [None, 2])
def test_copies_of_the_index(prefetch):
    buffer, _ = made(prefetch=prefetch)
    _, info = buffer.sample(return_info=True)
    kept = pickle.loads(pickle.dumps(info["index"]))
    copied, written = info["index"].clone(), buffer.written_at(info["index"])
    assert buffer.written_at(copied) is None
    buffer.extend(torch.arange(SIZE))
    for index, note in ((info["index"], None), (info["index"].view(2, 2), None), (kept, written), (copied, written),
                         (copied.numpy(), written), (copied, torch.full((4,), written))):  # fmt: skip
        buffer.update_priority(index, 5.0, written=note)
        assert priorities(buffer) == [1.0] * SIZE
    buffer.update_priority(copied, 5.0)
    assert 5.0 in priorities(buffer)


class Copying(TensorDict):
    """Copies what is set, as a sample on another device does."""

    def set(self, key, item, **options):
        return super().set(key, item.clone(), **options)


def test_samples_that_copy_their_index_and_copies_of_samples():
    options = {"storage": fc.LazyTensorStorage(SIZE), "batch_size": 4, "alpha": 1.0, "beta": 1.0, "eps": 0}
    buffer = fc.TensorDictPrioritizedReplayBuffer(collate_fn=lambda x: Copying(x.to_dict(), x.shape), **options)
    frames = TensorDict({"x": torch.arange(SIZE)}, [SIZE])
    buffer.extend(frames)
    sample = buffer.sample().set("td_error", torch.full((4,), 5.0))
    written = buffer.written_at(sample["index"])
    buffer.extend(frames)
    buffer.update_tensordict_priority(sample)
    buffer.update_tensordict_priority(sample.clone(), written=written)
    assert priorities(buffer) == [1.0] * SIZE
    buffer.update_tensordict_priority(sample.clone())
    assert 5.0 in priorities(buffer)


VIEWS = [lambda i: i, lambda i: i.detach(), lambda i: i.data, lambda i: i.view(2, 2)[0], lambda i: i.detach()[:2].data]
ASK = [
    lambda buffer, lanes: buffer.sample(return_info=True)[1]["index"],
    lambda buffer, lanes: buffer.extend(lanes[:, :1]).squeeze(-1),
    lambda buffer, lanes: buffer.add(lanes[:, 0]),
]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("ask", range(3))
def test_views_share_the_note(ask, inference):
    lanes = TensorDict({"x": torch.arange(SIZE).view(4, 2)}, [4, 2])
    for view in VIEWS:
        buffer, _ = made(ndim=2)
        buffer.extend(lanes)
        with torch.inference_mode(inference):
            index = ASK[ask](buffer, lanes)
            buffer.extend(lanes)
            buffer.update_priority(view(index), 0.5)
        assert priorities(buffer) == [1.0] * SIZE


def test_an_index_of_something_else():
    buffer, index = made(5)
    buffer.update_priority(index, 2.0, written=5)
    _, info = buffer.sample(return_info=True)
    assert all(value.shape == (4,) for value in info.values())  # so that they can be set in the sample
    with pytest.raises(ValueError, match=r"written is 500, expected 0 to 5, .* pass written_at"):
        buffer.update_priority(index, 3.0, written=500)
    with pytest.raises(TypeError, match="index is TensorDict, expected integers"):
        buffer.update_priority(TensorDict({"x": torch.arange(3)}, [3]), 3.0)
    assert priorities(buffer) == [2.0] * 5


@pytest.mark.parametrize(("how", "again"), [("empty", 3), ("loads", SIZE)])
def test_frames_of_an_earlier_life(how, again, tmp_path):
    buffer, _ = made(ndim=2)
    index = buffer.extend(TensorDict({"x": torch.arange(5)[None]}, [1, 5]))
    buffer.dumps(tmp_path)
    buffer.empty() if how == "empty" else buffer.loads(tmp_path)
    buffer.update_priority(index, 5.0)
    assert set(priorities(buffer)) <= {1.0}
    fresh = buffer.extend(TensorDict({"x": torch.arange(again)[None]}, [1, again]))
    buffer.update_priority(index, 5.0)
    assert set(priorities(buffer)) == {1.0}
    buffer.update_priority(fresh, 2.0)
    assert priorities(buffer).count(2.0) == again


def test_flattened_slots_of_lanes_of_a_full_buffer():
    buffer, _ = made(ndim=2)
    batch = TensorDict({"x": torch.arange(2 * SIZE).view(2, SIZE)[:, : SIZE // 2]}, [2, SIZE // 2])
    index = buffer.extend(batch).flatten()
    buffer.extend(batch)
    buffer.update_priority(index, 5.0)
    assert set(priorities(buffer)) == {1.0}
    buffer.empty()
    buffer.update_priority(index, 5.0)


def test_frames_that_did_not_fit():
    buffer, index = made(SIZE + 3)
    assert index[:3].tolist() == [-1] * 3
    buffer.update_priority(index, torch.arange(SIZE + 3.0))
    assert sorted(priorities(buffer)) == list(range(3, SIZE + 3))
    buffer.update_priority(index[:3], 0.5)
    assert 0.5 not in priorities(buffer)


def test_a_priority_of_zero_does_not_remove_a_frame():
    buffer, index = made(eps=1e-2)
    buffer.update_priority(index, 0.0)
    assert buffer.sample(2000).unique().tolist() == list(range(SIZE))
    buffer.update_priority(index, torch.arange(SIZE) * 1.0)
    torch.testing.assert_close(torch.tensor(priorities(buffer)), torch.arange(SIZE) + 1e-2)


def twins(device, alpha=0.7, **options):
    """A buffer whose priorities are on the host, and one whose priorities are on a device."""
    for moved in (False, True):
        sampler, generator = fc.PrioritizedSampler(50, alpha, 0.5, **options), torch.Generator().manual_seed(0)
        storage = fc.LazyTensorStorage(40, device=device if moved else "cpu")
        buffer = fc.ReplayBuffer(storage=storage, sampler=sampler, batch_size=12, generator=generator)
        if device == "cpu" and moved:
            sampler.move_to(torch.device("cpu"))
        buffer.extend(TensorDict({"x": torch.arange(30)}, [30]))
        yield buffer


@each_device
@pytest.mark.parametrize("within", [False, True])
def test_priorities_on_a_device_are_those_of_the_host(within, device, tmp_path):
    host, there = twins(device, max_priority_within_buffer=within)
    assert isinstance(there.sampler._priorities, DeviceSums)
    index = None
    for turn in range(12):
        (one, info), (two, other) = (buffer.sample(return_info=True) for buffer in (host, there))
        assert two["x"].device.type == other["index"].device.type == other["priority_weight"].device.type == device
        assert one["x"].tolist() == two["x"].tolist()
        assert info["index"].tolist() == other["index"].tolist()
        torch.testing.assert_close(other["priority_weight"].cpu(), info["priority_weight"])
        priority = torch.rand(12, generator=torch.Generator().manual_seed(turn))[info["index"] % 12]
        if turn % 3 == 2:  # some of the frames go before they get their priorities
            for buffer in (host, there):
                index = buffer.extend(TensorDict({"x": torch.arange(7) + 100 * turn}, [7]))
        host.update_priority(info["index"], priority)
        there.update_priority(other["index"], priority.to(device))
        np.testing.assert_allclose(there.sampler.state()["weights"], host.sampler.state()["weights"], rtol=1e-12)
    for buffer in (host, there):  # padding undoes no update
        buffer.update_priority(torch.tensor([0, -1], device=buffer.storage.device), torch.tensor([9.0, 1.0]))
    np.testing.assert_allclose(there.sampler.state()["weights"], host.sampler.state()["weights"], rtol=1e-12)
    for buffer in (host, there):  # of repeated slots the last priority counts
        buffer.update_priority(torch.tensor([3, 7] * 60, device=buffer.storage.device), torch.arange(120.0) % 59)
        with pytest.raises(TypeError, match="index is float32, expected integers"):
            buffer.update_priority(torch.tensor([1.5]), 1.0)
    np.testing.assert_allclose(there.sampler.state()["weights"], host.sampler.state()["weights"], rtol=1e-12)
    there.update_priority(index, 3.0)
    before = there.sampler.state()["weights"]
    there.update_priority(torch.tensor([0, 1, -1, 45], device=device), torch.tensor([-1.0, torch.nan, 1.0, 1.0]))
    assert (there.sampler.state()["weights"] == before).all()
    with pytest.raises(ValueError, match="3 priorities are given for 2 frames"):
        there.update_priority(torch.arange(2, device=device), torch.ones(3))
    there.sampler.alpha = 0.9
    there.dumps(tmp_path)
    host.loads(tmp_path)
    np.testing.assert_allclose(host.sampler.state()["weights"], there.sampler.state()["weights"])
    assert host.sample()["x"].tolist() == there.sample()["x"].tolist()


@each_device
def test_where_all_priorities_are_0_a_device_draws_a_frame_that_is_there(device):
    _, there = twins(device, eps=0.0)
    there.update_priority(torch.arange(30, device=device), 0.0)
    assert there.sample()["x"].tolist() == [0] * 12


@each_device
def test_priorities_on_a_device_never_wait_for_it(device):
    _, there = twins(device)
    priority, memory = torch.rand(12, device=device), there.state.memory
    source = there._random_source
    with no_waits(device):
        drawn = there.sampler.draw(memory, 12, source)
        there.sampler.update_priority(memory, drawn.slots, priority, 30)
