"""Sampling by priority: the tree against plain sums, chances by chi-square, and bad input."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import funcollect as fc
from funcollect.buffers.samplers.prioritized import SumTree
from tests.support.frames.streams_of_frames import batch_of, frames_of
from tests.support.running import scaled
from tests.support.statistics import implausible

WEIGHTS = st.one_of(st.just(0.0), st.floats(1e-12, 1e12))


@settings(max_examples=scaled(150), deadline=None)
@given(st.integers(1, 600), st.data())
def test_the_tree_against_plain_arrays(capacity, data):
    tree, plain = SumTree(capacity), np.zeros(capacity)
    for _ in range(data.draw(st.integers(1, 4))):
        pairs = data.draw(st.lists(st.tuples(st.integers(0, capacity - 1), WEIGHTS), max_size=40))
        slots, weights = np.array([pair[0] for pair in pairs], int), np.array([pair[1] for pair in pairs], float)
        tree.put(slots, weights)
        plain[slots] = weights
        assert (tree.get(np.arange(capacity)) == plain).all()
        np.testing.assert_allclose(tree.total, plain.sum(), rtol=1e-12)
        assert tree.least == plain[plain > 0].min(initial=np.inf)
        if not plain.any():
            continue
        places = np.array([*data.draw(st.lists(st.floats(0, 1, exclude_max=True), max_size=9)), 0.0, 1 - 2**-53])
        found = tree.find(places)
        assert (plain[found] > 0).all()
        upto = plain.cumsum() / plain.sum()
        assert (places >= (upto - plain / plain.sum())[found] - 1e-9).all()
        assert (places <= upto[found] + 1e-9).all()


def buffer_of(sampler, size=40, count=40):
    memory = fc.ReplayBuffer(
        storage=fc.LazyTensorStorage(size), sampler=sampler, generator=torch.Generator().manual_seed(0)
    )
    memory.extend(batch_of([frames_of(0, [8] * (count // 8))])[0])
    return memory


def counts_of(memory, count, size=40):
    _, info = memory.sample(count, return_info=True)
    return np.bincount(info["index"], minlength=size), info


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
    memory = fc.ReplayBuffer(storage=fc.LazyTensorStorage(9), sampler=fc.PrioritizedSampler(9, 1, 1), prefetch=2)
    memory.extend(torch.arange(9))
    memory.sample(5)
    memory.update_priority(torch.arange(9), torch.eye(9)[4])
    assert memory.sample(5).tolist() == [4] * 5


BAD = {
    "alpha": (lambda: fc.PrioritizedSampler(9, -1, 0.5), "alpha is -1, expected a number of at least 0"),
    "no number": (lambda: fc.PrioritizedSampler(9, "much", 0.5), "alpha is 'much', expected a number"),
    "capacity": (lambda: fc.PrioritizedSampler(0, 1, 0.5), "max_capacity is 0"),
    "small": (lambda: buffer_of(fc.PrioritizedSampler(9, 1, 1)), "max_capacity is 9, the storage holds 40 frames"),
    "negative": (lambda: updated([1], [-1.0]), r"between -1.0 and -1.0, expected finite numbers of at least 0"),
    "nan": (lambda: updated([1], [float("nan")]), "expected finite numbers"),
    "count": (lambda: updated([1, 2, 3], [1.0, 2.0]), "2 priorities are given for 3 frames"),
    "outside": (lambda: updated([1, 24], 1.0), "slots from 1 to 24, the buffer has frames in 0 … 23"),
    "below": (lambda: updated([-2], 1.0), "slots from -2 to -2"),
    "too long": (lambda: sliced(slice_len=9), "slices are 9 frames long, the longest trajectory held has 8"),
    "no start": (lambda: sliced(slice_len=8, zero=True), "every frame at which a slice can begin has priority 0"),
}


def updated(index, priority):
    buffer_of(fc.PrioritizedSampler(40, 1, 1), count=24).update_priority(index, priority)


def sliced(slice_len, zero=False):
    memory = buffer_of(fc.PrioritizedSliceSampler(40, 1, 1, eps=0, slice_len=slice_len))
    memory.update_priority(torch.arange(40), (torch.arange(40) % 8 != 0) if zero else 1)
    memory.sample(slice_len)


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    do, message = BAD[case]
    with pytest.raises((TypeError, ValueError), match=message):
        do()


def test_other_samplers_know_no_priorities():
    with pytest.raises(TypeError, match=r"RandomSampler\(\) has no priorities"):
        fc.ReplayBuffer().update_priority([0], 1.0)
