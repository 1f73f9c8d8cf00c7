"""The ring against a list of frames; and what is drawn is uniform, by a chi-square test that a biased draw fails."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import funcollect as fc
from funcollect.buffers import trajectory_index
from funcollect.keys import key_from_seed
from tests.buffers.conftest import filled, numbers
from tests.support.compare import assert_same, implausible
from tests.support.frames import Oracle, batch_of, frames_of, streams
from tests.support.running import scaled

TRAJECTORIES = fc.ring.Trajectories()
ROW_ORDER = fc.ring.Trajectories(end_key=("next", "done"))


def ring_of(batches, capacity, ndim=2, looks=()):
    """The ring and the oracle after these batches; its trajectory index is looked at after some of the extends."""
    storage = fc.LazyTensorStorage(capacity, ndim=ndim)
    state, oracle = fc.ring.init(storage, trajectories=TRAJECTORIES), Oracle(capacity)
    for number, lanes in enumerate(batches):
        if ndim == 1:  # as users of TorchRL flatten: lane after lane
            lanes = [[frame for lane in lanes for frame in lane]]
        oracle.extend(lanes)
        batch = batch_of(lanes)
        state, _ = fc.ring.extend(state, {1: batch[0], 2: batch, 3: batch[None]}[ndim])
        if number in looks:
            assert state.memory.index is not None
    return state, oracle


def held(state):
    """The frames of a ring, oldest first."""
    memory = state.memory
    numbers = np.arange(memory.written - len(memory), memory.written)
    return memory.storage.read(numbers % memory.capacity)


def lengths_in(state):
    """How many frames are held of each trajectory, in order of length."""
    index = state.memory.index
    return sorted((index.stop - index.first)[index.stop > index.first].tolist())


def observed(frames):
    return [[lane, trajectory, step] for lane, trajectory, step, _ in frames]


@settings(max_examples=scaled(60), deadline=None)
@given(streams(), st.integers(1, 80), st.integers(1, 3), st.sets(st.integers(0, 20)), st.sampled_from([1, 7, 1000]))
def test_the_newest_frames_are_held_and_linked(batches, capacity, ndim, looks, most):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trajectory_index, "_MOST_SEGMENTS", 3 * most)
        patched.setattr(trajectory_index, "_FRAMES_AT_ONCE", most)
        state, oracle = ring_of(batches, capacity, ndim, looks)
        assert state.memory.index is not None
    assert held(state)["observation"].int().tolist() == observed(oracle.frames)
    index = state.memory.index
    found = {}
    for trajectory in np.flatnonzero(index.stop > index.first):
        positions = np.arange(index.first[trajectory], index.stop[trajectory])
        rows = state.memory.storage.read(index.get(trajectory, positions))["observation"].int()
        assert (rows[:, :2] == rows[0, :2]).all()
        found[tuple(rows[0, :2].tolist())] = rows[:, 2].tolist()
    assert found == oracle.trajectories()


@settings(max_examples=scaled(40), deadline=None)
@given(
    streams(), st.integers(1, 80), st.integers(2, 3), st.integers(1, 6),
    st.sampled_from(["strict", "shortened", "padded"]), st.sampled_from(["trajectories", "windows"]),
    st.integers(0, 99),
)  # fmt: skip
def test_slices_are_contiguous(batches, capacity, ndim, slice_len, lengths, over, seed):
    state, oracle = ring_of(batches, capacity, ndim)
    strict, padded = lengths == "strict", lengths == "padded"
    spec = fc.ring.Slices(num_slices=5, slice_len=slice_len, strict_length=strict, pad_output=padded, over=over)
    trajectories = oracle.trajectories()
    if strict and max(map(len, trajectories.values())) < slice_len:
        with pytest.raises(ValueError, match=f"slices are {slice_len} frames long, the longest trajectory held has"):
            fc.ring.sample(state, key_from_seed(seed), spec)
        return
    batch = fc.ring.sample(state, key_from_seed(seed), spec)
    first = batch["collector", "is_first"]
    assert int(first.sum()) == 5
    if lengths != "shortened":
        assert first.view(5, slice_len)[:, 0].all()
    mask = batch.get(("collector", "mask"), torch.ones(len(batch), dtype=torch.bool))
    assert (("collector", "mask") in batch.keys(True)) == padded
    for piece, real in zip(*(each.split((*_lengths(first),)) for each in (batch, mask)), strict=True):
        length = int(real.sum())
        assert real[:length].all()
        assert not any(leaf[length:].any() for leaf in piece.exclude(("collector", "mask")).values(True, True))
        slice_ = piece[:length]
        here = trajectories[tuple(slice_["observation"][0, :2].int().tolist())]
        steps = slice_["collector", "step"].tolist()
        assert steps == list(range(steps[0], steps[0] + length))
        assert set(steps) <= set(here)
        assert length == min(slice_len, len(here))
        assert (slice_["observation"][1:] == slice_["next", "observation"][:-1]).all()
        assert (slice_["observation"][:, :2] == slice_["observation"][0, :2]).all()
        assert slice_["next", "truncated"][:, 0].tolist() == [False] * (length - 1) + [True]
        assert slice_["next", "done"][:, 0].tolist() == [False] * (length - 1) + [True]
    assert not held(state)["next", "truncated"].any()


def _lengths(first):
    """The number of rows from each True to the next [N]."""
    return torch.cat([first.nonzero()[:, 0], torch.tensor([len(first)])]).diff().tolist()


@settings(max_examples=scaled(20), deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=9), st.integers(1, 40), st.data())
def test_lanes_without_ids_go_on_by_row(lengths, capacity, data):
    lanes = [frames_of(lane, lengths) for lane in range(2)]
    state, oracle = fc.ring.init(fc.LazyTensorStorage(capacity, ndim=2), trajectories=ROW_ORDER), Oracle(capacity)
    while lanes[0]:
        size = data.draw(st.integers(1, 6))
        oracle.extend([lane[:size] for lane in lanes])
        state, _ = fc.ring.extend(state, batch_of([lane[:size] for lane in lanes]).exclude("collector"))
        lanes = [lane[size:] for lane in lanes]
    assert lengths_in(state) == sorted(map(len, oracle.trajectories().values()))


@settings(max_examples=scaled(20), deadline=None)
@given(streams(), st.integers(1, 40))
def test_the_index_does_not_leak(batches, capacity):
    state, _ = ring_of(batches, capacity)
    index = state.memory.index
    live = index.stop > index.first
    assert len(index._free) == (~live).sum()
    assert len(set(index._free.tolist())) == len(index._free)
    in_use = {(begin, bits) for begin, bits in zip(index._begin[live], index._bits[live], strict=True)}
    idle = [(begin, bits) for bits, begins in index._idle.items() for begin in begins]
    assert len(in_use) == live.sum()
    assert sum(1 << int(bits) for _, bits in [*in_use, *idle]) == index._used  # every entry has one place


def test_indices_say_where_frames_lie():
    state, first = fc.ring.init(5), 0
    for slots in ([0, 1, 2], [3, 4, 0, 1], [-1, -1, 4, 0, 1, 2, 3]):
        state, indices = fc.ring.extend(state, numbers(len(slots), first))
        assert indices.tolist() == slots
        first += len(slots)
    assert held(state)["x"].tolist() == [9, 10, 11, 12, 13]
    state, indices = fc.ring.extend(fc.ring.init(fc.LazyTensorStorage(9, ndim=2)), numbers(6).reshape(2, 3))
    assert indices.tolist() == [[0, 2, 4], [1, 3, 5]]
    assert held(state)["x"].tolist() == [0, 3, 1, 4, 2, 5]


def test_an_old_state_is_stale_and_a_snapshot_is_not():
    old, _ = fc.ring.extend(fc.ring.init(3, trajectories=ROW_ORDER), batch_of([frames_of(0, [3])])[0])
    copy = fc.ring.snapshot(old)
    with pytest.raises(ValueError, match="the sampler follows the trajectories, so no frame can be overwritten"):
        copy.memory.storage.set(0, held(copy)[0])
    new, _ = fc.ring.extend(old, batch_of([frames_of(1, [2])])[0])
    for use in (lambda: len(old), lambda: fc.ring.extend(old, numbers(1)), lambda: fc.ring.snapshot(old)):
        with pytest.raises(fc.StaleStateError, match="Use the state that extend returned"):
            use()
    assert held(copy)["observation"][:, 0].tolist() == [0, 0, 0]
    assert held(new)["observation"][:, 0].tolist() == [0, 1, 1]
    spec = fc.ring.Slices(num_slices=2, slice_len=3)
    assert fc.ring.sample(copy, key_from_seed(0), spec)["collector", "step"].tolist() == [0, 1, 2] * 2
    copy, _ = fc.ring.extend(copy, batch_of([frames_of(2, [1])])[0])
    assert held(new)["observation"][:, 0].tolist() == [0, 1, 1]


def test_equal_keys_give_equal_samples_in_memory_of_their_own():
    state, _ = ring_of([[frames_of(lane, [5, 4]) for lane in range(3)]], 50)
    for spec in (fc.ring.Flat(7), fc.ring.Slices(num_slices=2, slice_len=3, over="windows")):
        first = fc.ring.sample(state, key_from_seed(3), spec)
        kept = first.clone()
        first.zero_()
        assert_same(fc.ring.sample(state, key_from_seed(3), spec), kept)
        other = fc.ring.sample(state, key_from_seed(4), spec)
        assert (other["observation"] != kept["observation"]).any()


def test_a_hole_in_a_trajectory_parts_it():
    lane = frames_of(0, [9])
    state = fc.ring.init(20, trajectories=TRAJECTORIES)
    for part in (lane[:3], lane[4:6], lane[6:]):
        state, _ = fc.ring.extend(state, batch_of([part])[0])
    assert lengths_in(state) == [3, 5]
    with pytest.raises(ValueError, match="the longest trajectory held has 5"):
        fc.ring.sample(state, key_from_seed(0), fc.ring.Slices(num_slices=1, slice_len=6))


def test_the_index_follows_each_batch_as_it_was_given():
    batch = batch_of([frames_of(0, [3, 4])])[0]
    state, _ = fc.ring.extend(fc.ring.init(20, trajectories=TRAJECTORIES), batch)
    batch["collector"].zero_()
    batch["next", "done"].zero_()
    assert lengths_in(state) == [3, 4]


def test_batches_with_and_without_steps_in_a_list():
    state = fc.ring.init(fc.ListStorage(20), trajectories=TRAJECTORIES)
    batch = batch_of([frames_of(0, [9])])[0]
    for part in (batch[:3], batch[3:5].exclude(("collector", "step")), batch[5:]):
        state, _ = fc.ring.extend(state, part)
    assert lengths_in(state)[-1] >= 5


def test_a_batch_without_frames_changes_nothing():
    state = fc.ring.init(20, trajectories=TRAJECTORIES)
    batch = batch_of([frames_of(0, [9])])[0]
    for part in (batch[:0], batch, batch[:0]):
        state, indices = fc.ring.extend(state, part)
        assert len(indices) == len(part)
    assert (held(state)["observation"] == batch["observation"]).all()


# Chances.

LENGTHS = [3, 40, 5, 1, 8, 2, 17]
SLICE = 4


def full_ring(short_ones=0):
    """A full ring whose oldest trajectory is cut at the write head; many that are too short, where asked for."""
    lanes = [frames_of(0, [6, *LENGTHS]), frames_of(1, [6, *reversed(LENGTHS)])]
    capacity = sum(map(len, lanes)) - 8 + short_ones
    state = fc.ring.init(fc.LazyTensorStorage(capacity, ndim=2), trajectories=fc.ring.Trajectories())
    for lane in range(2, 2 + short_ones):
        state, _ = fc.ring.extend(state, batch_of([frames_of(lane, [1], open_ended=True)]))
    return fc.ring.extend(state, batch_of(lanes))[0]


def chances_of(state, over, strict):
    """How likely a slice begins at each (lane, trajectory, step)."""
    steps = {}
    for lane, trajectory, step in state.memory.storage.read(np.arange(len(state)))["observation"].int().tolist():
        steps.setdefault((lane, trajectory), []).append(step)
    windows = {
        key: range(min(held), max(min(held) + 1, max(held) + 2 - SLICE))
        for key, held in steps.items()
        if len(held) >= SLICE or not strict
    }
    total = sum(map(len, windows.values()))
    each = {
        key: 1 / (len(windows) * len(places) if over == "trajectories" else total) for key, places in windows.items()
    }
    return {(*key, place): each[key] for key, places in windows.items() for place in places}


def disagrees(state, over, strict, chances):
    count = scaled(40) * len(chances)
    spec = fc.ring.Slices(num_slices=count, slice_len=SLICE, strict_length=strict, over=over)
    batch = fc.ring.sample(state, key_from_seed(0), spec)
    starts = Counter(map(tuple, batch["observation"][batch["collector", "is_first"]].int().tolist()))
    assert starts.keys() <= chances.keys()
    return implausible([starts[start] for start in chances], [count * chance for chance in chances.values()])


@pytest.mark.parametrize("short_ones", [0, 300], ids=["tried", "looked through"])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("over", ["trajectories", "windows"])
def test_slices_are_uniform(over, strict, short_ones):
    state = full_ring(short_ones if strict else 0)
    for each in ("trajectories", "windows"):  # the chances of the other one would be found out
        assert disagrees(state, over, strict, chances_of(state, each, strict)) == (each != over)


@pytest.mark.parametrize("sampler", [fc.RandomSampler(), fc.SamplerWithoutReplacement()])
def test_frames_are_uniform(sampler):
    memory = filled(torch.arange(70), 30, sampler, generator=torch.Generator().manual_seed(0))
    firsts = [int(memory.sample(1)) for _ in range(scaled(30) * 50)]
    counts = np.bincount(firsts, minlength=70)[40:]
    assert sum(counts) == len(firsts)
    if isinstance(sampler, fc.SamplerWithoutReplacement):
        assert counts.tolist() == [len(firsts) // 30] * 30
    else:
        assert not implausible(counts, np.full(30, len(firsts) / 30))
    skewed = counts + np.arange(30) * counts.mean() / 30
    assert implausible(skewed, np.full(30, skewed.sum() / 30))
