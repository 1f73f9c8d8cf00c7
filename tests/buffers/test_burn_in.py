"""Slices with frames around them: by hand, and as an R2D2-like learner uses them."""

import numpy as np
import pytest
import torch
from torch import nn

import funcollect as fc
from tests.buffers.conftest import filled
from tests.support.frames import batch_of, frames_of
from tests.support.running import scaled

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


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", SAMPLERS)
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


@pytest.mark.parametrize(("options", "message"), [
    ({"burn_in": 2, "span": 1}, "span is .* with burn_in or bootstrap, expected one of them"),
    ({"pad_output": True}, "no slice is short: pass strict_length=False"),
])  # fmt: skip
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        fc.SliceSampler(slice_len=4, **options)


class Network(nn.Module):
    """Values of two actions, and a recurrent state."""

    def __init__(self):
        super().__init__()
        self.cell, self.values = nn.GRUCell(4, 8), nn.Linear(8, 2)

    def forward(self, x, hidden):
        hidden = self.cell(x, hidden)
        return {"logits": self.values(hidden)}, hidden


def targets(network, batch, hidden):
    """Double-Q-like targets ``[S, T - 1]`` and the values of actions ``[S, T]`` along rows ``[S, T]``."""
    values = []
    for step in range(batch.shape[1]):
        out, hidden = network(batch["observation"][:, step], hidden)
        values.append(out["logits"])
    values = torch.stack(values, 1)
    following = values[:, 1:].max(-1).values * ~batch["next", "terminated"][:, :-1, 0]
    chosen = values.gather(-1, batch["action"].long()[..., None])[..., 0]
    return batch["next", "reward"][:, :-1, 0] + 0.99 * following, chosen


@pytest.mark.parametrize("stale", [False, True])
def test_a_recurrent_learner_against_whole_episodes(stale):
    """Errors and gradients of the rows to learn from are those of unrolling each episode from its beginning.

    Stored states begin a slice; if the weights have changed since, the burn-in has to reach back to the beginning.
    """
    torch.manual_seed(0)
    network = Network()
    options = {"initial_state": torch.zeros(8), "record_state": True}
    policy = fc.torch_policy(network, head=fc.heads.categorical, **options)
    env = fc.make_env("CartPole-v1", num_envs=4)
    state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 120)
    fc.close(state)
    lengths = fc.split_trajectories(batch)["collector", "mask"].sum(1)
    burn_in = int(lengths.max()) if stale else 6
    sampler = fc.SliceSampler(slice_len=8, burn_in=burn_in, bootstrap=1, pad_output=True)
    buffer = filled(batch, 480, sampler, ndim=2, batch_size=8 * 16, generator=torch.Generator().manual_seed(0))
    if stale:
        with torch.no_grad():
            for parameter in network.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
    slices = buffer.sample().reshape(16, -1)

    def gradients_of(rows, learn, hidden):
        target, value = targets(network, rows, hidden)
        error = torch.where(learn[:, :-1], target.detach() - value[:, :-1], 0.0)
        error.square().sum().backward()
        found = [parameter.grad.clone() for parameter in network.parameters()]
        network.zero_grad()
        return error, found

    learn = slices["collector", "learn"].clone()
    learn[:, :-1] &= ~(slices["collector", "mask"][:, :-1] & slices["next", "truncated"][:, :-1, 0])  # no value after
    assert learn.any()
    error, _ = gradients_of(slices, learn, slices["recurrent"][:, 0])
    whole = fc.split_trajectories(batch)
    everything, _ = targets(network, whole, whole["recurrent"][:, 0])
    _, chosen = targets(network, whole, whole["recurrent"][:, 0])
    known = {int(ids): row for row, ids in enumerate(whole["collector", "traj_ids"][:, 0])}
    wanted = everything - chosen[:, :-1]
    at = np.array([known[int(ids)] for ids in slices["collector", "traj_ids"][learn]])
    step = slices["collector", "step"][learn]
    inner = step < wanted.shape[1]
    torch.testing.assert_close(error[learn[:, :-1]][inner], wanted[at, step][inner], atol=1e-5, rtol=1e-4)
    if stale:  # unrolled from the beginning, gradients are those of the whole episodes, too
        chosen_rows = torch.tensor([known[int(ids)] for ids in slices["collector", "traj_ids"][:, 0]])
        marks = torch.zeros(len(slices), whole.shape[1], dtype=torch.bool)
        marks[learn.nonzero()[:, 0], step] = True
        _, ours = gradients_of(slices, learn, slices["recurrent"][:, 0])
        _, theirs = gradients_of(whole[chosen_rows], marks, whole["recurrent"][chosen_rows, 0])
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


def test_new_recurrent_states_are_written_back():
    """What a learner computes on its way becomes the stored states, unless frames have gone meanwhile."""
    network = Network()
    policy = fc.torch_policy(network, head=fc.heads.categorical, initial_state=torch.zeros(8), record_state=True)
    env = fc.make_env("CartPole-v1", num_envs=2)
    state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 40)
    fc.close(state)
    sampler = fc.SliceSampler(slice_len=4, burn_in=40, strict_length=False, pad_output=True)
    buffer = filled(batch, 80, sampler, ndim=2, batch_size=4 * 8)
    with torch.no_grad():
        network.cell.weight_ih += 0.5
    sample, info = buffer.sample(return_info=True)
    rows, hidden, states = sample.reshape(8, -1), sample["recurrent"].view(8, -1, 8)[:, 0], []
    for step in range(rows.shape[1]):
        states.append(hidden)
        _, hidden = network(rows["observation"][:, step], hidden)
    new = torch.stack(states, 1).detach()
    assert buffer.update(info["index"].view(8, -1), {"recurrent": new}) == 0
    held = rows["collector", "mask"]
    stored = buffer[info["index"].view(8, -1)[held]]["recurrent"]
    torch.testing.assert_close(stored, new[held], atol=1e-6, rtol=1e-5)
    assert not torch.allclose(stored, rows["recurrent"][held])
