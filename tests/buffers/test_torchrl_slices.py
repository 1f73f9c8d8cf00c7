"""Slices that span the ends of trajectories, without replacement, with other flags, and of lanes with equal ids."""

import pytest
import torch
from tensordict import TensorDict

import funcollect as fc
from tests.buffers.conftest import filled

LENGTHS = (7, 3, 9)
IDS = torch.tensor(LENGTHS).new_tensor([i for i, length in enumerate(LENGTHS) for _ in range(length)])
STEPS = torch.cat([torch.arange(length) for length in LENGTHS])
DATA = TensorDict({"episode": IDS, "t": STEPS, "next": {"x": STEPS + 1}}, [19])


def slices_of(sample):
    """The ids and steps of each slice, by the marks of their beginnings."""
    number = sample["collector", "is_first"].cumsum(0) - 1
    return [sample[number == n] for n in range(int(number[-1]) + 1)]


@pytest.mark.parametrize("over", ["trajectories", "windows"])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("span", [2, (False, True), (0, 1), (True, False), (1, 3)])
def test_slices_span_the_ends_of_trajectories(span, strict, over):
    options = {"slice_len": 5, "strict_length": strict, "span": span}
    both = span if isinstance(span, tuple) else (span if over == "trajectories" else 0, span)
    left, right = (4 if each is True else int(each) for each in both)
    if over == "windows" and left:
        with pytest.raises(ValueError, match="windows begin in their trajectory"):
            fc.SliceSampler(over=over, **options)
        return
    shortest = {True: set(), False: set()}
    for one in slices_of(filled(DATA, 30, fc.SliceSampler(over=over, **options)).sample(5 * 600)):
        length, whole = len(one), LENGTHS[int(one["episode"][0])]
        assert (one["episode"] == one["episode"][0]).all()
        assert one["t"].tolist() == [*range(int(one["t"][0]), int(one["t"][0]) + length)]
        assert one["next", "truncated"].flatten().tolist() == [False] * (length - 1) + [True]
        if whole >= 5 and length < 5:
            assert one["t"][0] == 0 or one["t"][-1] == whole - 1
            shortest[bool(one["t"][0] == 0)].add(length)
        elif whole < 5:
            assert not strict or over == "windows"
    assert shortest[True] == {*range(5 - left, 5)}
    assert shortest[False] == {*range(5 - right, 5)}


def test_slices_that_span_are_padded_and_read_by_others(tmp_path):
    sampler = fc.SliceSampler(slice_len=5, span=4, pad_output=True)
    sample = filled(DATA, 30, sampler).sample(5 * 40)
    mask = sample["collector", "mask"].view(40, 5)
    assert (mask[:, 1:] <= mask[:, :-1]).all()
    assert not mask.all()
    storage = fc.LazyMemmapStorage(30, scratch_dir=tmp_path)
    buffer = filled(DATA, storage, fc.RandomSampler())
    reader = fc.ReplayReader(tmp_path, sampler=fc.SliceSampler(slice_len=5, span=(0, 4)), batch_size=200)
    assert {len(one) for one in slices_of(reader.sample())} == {1, 2, 3, 4, 5}
    assert len(buffer) == 19


@pytest.mark.parametrize(
    ("span", "error"), [(5, ValueError), (-1, ValueError), ("2", TypeError), ((1, 2, 3), TypeError)]
)
def test_a_span_is_less_than_a_slice(span, error):
    with pytest.raises(error, match="span is"):
        fc.SliceSampler(slice_len=5, span=span)


def test_where_slices_are_marked():
    for key, other in (("cut", "done"), (("next", "cut"), ("next", "done"))):
        sample = filled(DATA, 30, fc.SliceSampler(slice_len=3, truncated_key=key)).sample(6)
        assert sample[key].flatten().tolist() == sample[other].flatten().tolist() == [False, False, True] * 2
    sample = filled(DATA, 30, fc.SliceSampler(slice_len=3, truncated_key=None)).sample(6)
    assert ("next", "truncated") not in sample.keys(True)


def test_any_of_several_flags_ends_a_trajectory():
    flags = TensorDict({name: torch.arange(9) == at for name, at in (("a", 2), ("b", 5))}, [9])
    sampler = fc.SliceSampler(slice_len=3, end_keys=["a", ("no", "such"), "b"])
    buffer = filled(flags.set("t", torch.arange(9)), 9, sampler)
    assert {*buffer.sample(300)["t"].view(-1, 3)[:, 0].tolist()} == {0, 3, 6}
    with pytest.raises(ValueError, match=r"no tensor no\.such"):
        filled(flags, 9, fc.SliceSampler(slice_len=3, end_keys=["no.such"]))
    with pytest.raises(ValueError, match="end_key and end_keys are exclusive"):
        fc.SliceSampler(slice_len=3, end_key="a", end_keys=["b"])
    for keys in ("done", []):
        with pytest.raises(TypeError, match=r"end_keys is .*, expected a list of keys"):
            fc.SliceSampler(slice_len=3, end_keys=keys)


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize(("drop_last", "rounds"), [(False, [4, 4, 2]), (True, [4, 4])])
def test_each_trajectory_once_per_round(drop_last, rounds, prefetch, tmp_path):
    data = TensorDict({"episode": torch.arange(30) // 3, "t": torch.arange(30) % 3}, [30])

    def made():
        sampler = fc.SliceSampler(slice_len=2, replacement=False, drop_last=drop_last)
        assert type(sampler) is fc.SliceSamplerWithoutReplacement
        generator = torch.Generator().manual_seed(0)
        return filled(data, 30, sampler, batch_size=8, prefetch=prefetch, generator=generator)

    buffer, other = made(), made()
    for _ in range(2):
        episodes = [batch["episode"][::2].tolist() for batch in buffer]
        assert [*map(len, episodes)] == rounds
        assert len({episode for each in episodes for episode in each}) == sum(rounds)
    buffer.sample()
    buffer.dumps(tmp_path)
    other.loads(tmp_path)
    for _ in range(3):
        assert (buffer.sample() == other.sample()).all()
    assert type(fc.RandomSampler(replacement=False, drop_last=True)) is fc.SamplerWithoutReplacement
    with pytest.raises(TypeError, match="PrioritizedSampler has no without-replacement variant"):
        fc.PrioritizedSampler(9, 1, 1, replacement=False)


def runs(first, steps=4):
    """Lanes with the same ids, as the runs of a vmap have them; `lane` tells them apart."""
    t = torch.arange(first, first + steps).expand(3, steps)
    return TensorDict({"episode": t // 6, "t": t, "lane": torch.arange(3)[:, None].expand(3, steps)}, [3, steps])


def test_equal_ids_are_told_apart_by_lane(tmp_path):
    def made():
        return fc.ReplayBuffer(storage=fc.LazyTensorStorage(60, ndim=2), sampler=fc.SliceSampler(slice_len=6))

    buffer = made()
    for first in (0, 4, 8):  # in the second batch, no two lanes have an id in common that is new
        buffer.extend(runs(first))
        buffer.dumps(tmp_path)
        buffer = made()
        buffer.loads(tmp_path)
    sample = buffer.sample(6 * 100).view(100, 6)
    assert (sample["lane"] == sample["lane"][:, :1]).all()
    assert (sample["t"].diff(dim=1) == 1).all()
    assert len({*zip(sample["t"][:, 0].tolist(), sample["lane"][:, 0].tolist(), strict=True)}) == 6
