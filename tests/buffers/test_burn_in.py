"""Slices with frames around them, by hand."""

import numpy as np
import pytest
import torch
from torch import nn

import funcollect as fc
from tests.buffers.conftest import filled
from tests.support.frames import batch_of, frames_of
from tests.support.running import pairwise, scaled

SAMPLERS = {
    "trajectories": lambda **options: fc.SliceSampler(**options),
    "windows": lambda **options: fc.SliceSampler(over="windows", **options),
    "by priority": lambda **options: fc.PrioritizedSliceSampler(60, 1.0, 1.0, **options),
    "each once": lambda **options: fc.SliceSamplerWithoutReplacement(**options),
    "n steps": lambda **options: fc.SliceSampler(n_steps=2, gamma=0.5, **options),
}
LENGTHS = [3, 9, 14, 6]


def batches():
    batch = batch_of([frames_of(lane, LENGTHS) for lane in range(2)])
    batch["next", "reward"] = torch.ones(*batch.shape, 1)
    return batch


def rows_of(sample, width):
    """The rows of each slice as lists by key, padding removed."""
    keys = ("traj_ids", "step", "learn", "burn_in", "is_first")
    columns = {key: sample["collector", key].numpy() for key in keys}
    columns["truncated"] = sample["next", "truncated"][:, 0].numpy()
    starts = np.flatnonzero(columns["is_first"])
    stops = np.append(starts[1:], len(sample))
    if ("collector", "mask") in sample.keys(True):
        assert starts.tolist() == [*range(0, len(sample), width)]
        stops = starts + sample["collector", "mask"].view(-1, width).sum(1).numpy()
    return [{key: column[i:j] for key, column in columns.items()} for i, j in zip(starts, stops, strict=True)]


@pytest.mark.parametrize(("name", "strict", "padded"), pairwise(SAMPLERS, (False, True), (False, True)))
def test_what_comes_with_a_slice(name, strict, padded):
    before, length, after = 4, 5, 2
    options = {"burn_in": before, "bootstrap": after, "strict_length": strict, "pad_output": padded}
    count = 2 if name == "each once" else 16
    options |= {"slice_len": length}
    buffer = filled(
        batches(), 60, SAMPLERS[name](**options), ndim=2, batch_size=count * length,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    first = dict[int, int]()  # the oldest step held of each trajectory
    for frame in buffer[:].reshape(-1):
        ids, step = (int(frame["collector", key]) for key in ("traj_ids", "step"))
        first[ids] = min(first.get(ids, step), step)
    whole, begins = dict(zip(range(4), LENGTHS, strict=True)), set()
    for _ in range(scaled(60)):
        sample, info = buffer.sample(return_info=True)
        assert all(len(leaf) == len(sample) for leaf in info.values())
        if padded:
            assert len(sample) == count * (before + length + after)
            assert torch.equal(info["index"] < 0, ~sample["collector", "mask"])
            assert not sample["collector", "learn"][info["index"] < 0].any()
        rows = rows_of(sample, before + length + after)
        assert len(rows) == count
        for row in rows:
            ids, steps = int(row["traj_ids"][0]), row["step"]
            assert (row["traj_ids"] == ids).all()
            total, begin = whole[ids & 7], int(steps[row["learn"]][0])
            stop = min(begin + length, total)
            assert steps.tolist() == [*range(max(begin - before, first[ids]), min(stop + after, total))]
            assert row["learn"].tolist() == [begin <= step < stop for step in steps]
            assert row["burn_in"].tolist() == [step < begin for step in steps]
            assert stop - begin == length or not strict
            assert row["truncated"].tolist() == [False] * (len(steps) - 1) + [True]
            begins.add((ids, begin))
    wanted = {
        (ids, begin)
        for ids, oldest in first.items()
        for begin in range(oldest, whole[ids & 7])
        if begin + length <= whole[ids & 7] or (begin == oldest and not strict)
    }
    assert begins <= wanted if name == "each once" else begins == wanted


def test_readers_take_them(tmp_path):
    sampler = fc.SliceSampler(slice_len=5, burn_in=4, bootstrap=2)
    buffer = filled(batches(), fc.LazyMemmapStorage(60, ndim=2, scratch_dir=tmp_path), sampler, batch_size=20)
    reader = fc.ReplayReader(tmp_path, sampler=fc.SliceSampler(slice_len=5, burn_in=4, bootstrap=2), batch_size=20)
    for each in (buffer, reader):
        sample = each.sample()
        assert sample["collector", "learn"].sum() == 20
        assert len(rows_of(sample, 11)) == 4


class Values(nn.Module):
    """The action values of an R2D2-like learner."""

    def __init__(self):
        super().__init__()
        self.cell, self.values = nn.GRUCell(4, 8), nn.Linear(8, 2)

    def forward(self, observation, hidden):
        hidden = self.cell(observation, hidden)
        return self.values(hidden), hidden

    def over(self, rows, hidden):
        """Values [S, T, 2] of sequences [S, T], from the recurrent states [S, 8] before them."""
        found = []
        for step in range(rows.shape[1]):
            value, hidden = self(rows["observation"][:, step], hidden)
            found.append(value)
        return torch.stack(found, 1)


@pytest.mark.parametrize(("burn_in", "learned"), [(0, False), (4, False), (60, True)])
def test_values_are_those_of_unrolling_whole_episodes(burn_in, learned):
    """From recorded states while the weights are the same; after learning, if the burn-in reaches the first frame."""
    env, values = fc.make_env("CartPole-v1", num_envs=3), Values()
    policy = fc.torch_policy(values, head=fc.heads.epsilon_greedy(0.3), initial_state=torch.zeros(8), record_state=True)
    _, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 200, max_frames_per_traj=50)
    sampler = fc.SliceSampler(slice_len=6, burn_in=burn_in, bootstrap=1, strict_length=False, pad_output=True)
    buffer = filled(batch, 600, sampler, ndim=2, batch_size=32 * 6)
    if learned:
        for parameter in values.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    wanted = {}
    with torch.no_grad():
        for episode in whole_episodes(batch):
            found = values.over(episode[None], torch.zeros(1, 8))[0]
            wanted |= {(int(ids), int(step)): row for ids, step, row in zip(*numbers_of(episode), found, strict=True)}
        for _ in range(scaled(10)):
            rows = buffer.sample().reshape(32, -1)
            found, mask = values.over(rows, rows["recurrent"][:, 0]), rows["collector", "mask"]
            whole = [wanted[int(ids), int(step)] for ids, step in zip(*numbers_of(rows[mask]), strict=True)]
            torch.testing.assert_close(found[mask], torch.stack(whole))


def numbers_of(rows):
    return rows["collector", "traj_ids"], rows["collector", "step"]


def whole_episodes(batch):
    """The rows of each trajectory of a batch [P, T]."""
    for lane in batch:
        for ids in lane["collector", "traj_ids"].unique():
            yield lane[lane["collector", "traj_ids"] == ids]
