"""What is drawn is uniform, by a chi-square test that a biased draw is shown to fail."""

import numpy as np
import pytest
import torch

import funcollect as fc
from funcollect.buffers.samplers import indices
from funcollect.keys import key_from_seed
from tests.support.frames.streams_of_frames import batch_of, frames_of
from tests.support.running import scaled
from tests.support.statistics import implausible

LENGTHS = [3, 40, 5, 1, 8, 2, 17]
SLICE = 4


def ring_of(short_ones=0):
    """A full ring whose oldest trajectory is cut at the write head; many that are too short, where asked for."""
    lanes = [frames_of(0, [6, *LENGTHS]), frames_of(1, [6, *reversed(LENGTHS)])]
    capacity = sum(map(len, lanes)) - 8 + short_ones
    state = fc.ring.init(fc.LazyTensorStorage(capacity, ndim=2), trajectories=fc.ring.Trajectories())
    for lane in range(2, 2 + short_ones):
        state, _ = fc.ring.extend(state, batch_of([frames_of(lane, [1], open_ended=True)]))
    return fc.ring.extend(state, batch_of(lanes))[0]


def starts_of(state, over, strict, count):
    """The (lane, trajectory, step) at which `count` slices begin."""
    spec = fc.ring.Slices(num_slices=count, slice_len=SLICE, strict_length=strict, over=over)
    batch = fc.ring.sample(state, key_from_seed(0), spec)
    return [tuple(start) for start in batch["observation"][batch["collector", "is_first"]].int().tolist()]


def windows_of(state, strict):
    """Where a slice can begin, by trajectory."""
    frames = state.memory.storage.read(np.arange(len(state)))["observation"].int().tolist()
    steps = {}
    for lane, trajectory, step in frames:
        steps.setdefault((lane, trajectory), []).append(step)
    found = {}
    for key, held in steps.items():
        if len(held) >= SLICE or not strict:
            found[key] = range(min(held), max(min(held) + 1, max(held) + 2 - SLICE))
    return found


def chances_of(state, over, strict):
    windows = windows_of(state, strict)
    total = sum(map(len, windows.values()))
    each = {key: 1 / len(windows) / len(places) if over == "trajectories" else 1 / total
            for key, places in windows.items()}  # fmt: skip
    return {(*key, place): each[key] for key, places in windows.items() for place in places}


def disagrees(state, over, strict, chances):
    count = scaled(40) * len(chances)
    starts = starts_of(state, over, strict, count)
    assert set(starts) <= set(chances)
    return implausible([starts.count(start) for start in chances], [count * chance for chance in chances.values()])


@pytest.mark.parametrize("short_ones", [0, 300], ids=["tried", "looked through"])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("over", ["trajectories", "windows"])
def test_slices_are_uniform(over, strict, short_ones):
    state = ring_of(short_ones if strict else 0)
    assert not disagrees(state, over, strict, chances_of(state, over, strict))


@pytest.mark.parametrize("over", ["trajectories", "windows"])
def test_the_one_is_not_the_other(over):
    state = ring_of()
    other = {"trajectories": "windows", "windows": "trajectories"}[over]
    assert disagrees(state, over, True, chances_of(state, other, True))


def test_a_biased_sampler_is_found_out(monkeypatch):
    """One that looks at two candidates in 40 draws of 100, and prefers the later one."""

    def biased(random_source, count, size, valid):
        good = np.flatnonzero(valid(np.arange(size)))
        one, two = random_source.below(len(good), count), random_source.below(len(good), count)
        return good[np.where(random_source.below(100, count) < 40, np.maximum(one, two), one)]

    monkeypatch.setattr(indices, "_draw", biased)
    state = ring_of()
    for over in ("trajectories", "windows"):
        assert disagrees(state, over, True, chances_of(state, over, True))


@pytest.mark.parametrize("sampler", [fc.RandomSampler(), fc.SamplerWithoutReplacement()])
def test_frames_are_uniform(sampler):
    memory = fc.ReplayBuffer(
        storage=fc.LazyTensorStorage(30), sampler=sampler, generator=torch.Generator().manual_seed(0)
    )
    memory.extend(torch.arange(70))
    firsts = [int(memory.sample(1)) for _ in range(scaled(30) * 50)]
    counts = np.bincount(firsts, minlength=70)[40:]
    assert sum(counts) == len(firsts)
    if isinstance(sampler, fc.SamplerWithoutReplacement):
        assert counts.tolist() == [len(firsts) // 30] * 30
    else:
        assert not implausible(counts, np.full(30, len(firsts) / 30))
    skewed = counts + np.arange(30) * counts.mean() / 30
    assert implausible(skewed, np.full(30, skewed.sum() / 30))
