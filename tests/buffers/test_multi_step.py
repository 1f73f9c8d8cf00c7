"""Returns over several steps, against a loop over frames."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import funcollect as fc
from tests.support.envs.counting import make_counting
from tests.support.frames.streams_of_frames import batch_of, frames_of, streams
from tests.support.running import scaled


def rewarded(batch, generator):
    """A batch whose rewards are any, and some of whose ends are terminations."""
    done = batch["next", "done"]
    batch["next", "reward"] = torch.rand(done.shape, generator=generator)
    batch["next", "terminated"] = done & (torch.rand(done.shape, generator=generator) < 0.5)
    return batch


def expected(frames, gamma, n_steps):
    """What `MultiStep` makes of each of the frames of one trajectory, in time."""
    rows = []
    for index in range(len(frames)):
        ahead = frames[index : index + n_steps]
        total = sum(gamma**k * float(frame["next", "reward"]) for k, frame in enumerate(ahead))
        rows.append((total, len(ahead), ahead[-1]["next"]))
    return rows


def check(row, total, steps, following, gamma):
    torch.testing.assert_close(float(row["next", "reward"]), total, rtol=1e-6, atol=1e-6)  # a sum in float32
    torch.testing.assert_close(float(row["gamma"]), gamma**steps)
    assert int(row["steps_to_next_obs"]) == steps
    for key in ("observation", "done", "terminated", "truncated"):
        assert (row["next", key] == following[key]).all()


@settings(max_examples=scaled(40), deadline=None)
@given(streams(most_lanes=2), st.integers(1, 5), st.sampled_from([0.0, 0.9, 1.0]), st.integers(0, 9))
def test_a_batch(batches, n_steps, gamma, seed):
    batch = rewarded(batch_of(batches[0]), torch.Generator().manual_seed(seed))
    before = batch.clone()
    result = fc.MultiStep(gamma, n_steps)(batch)
    assert (batch == before).all()
    assert (result["original_reward"] == batch["next", "reward"]).all()
    for lane, row in zip(batch, result, strict=True):
        for trajectory in lane["collector", "traj_ids"].unique():
            mine = lane["collector", "traj_ids"] == trajectory
            for frame, values in zip(row[mine], expected(list(lane[mine]), gamma, n_steps), strict=True):
                check(frame, *values, gamma)
                assert (frame["observation"][:2] == frame["next", "observation"][:2]).all()


@settings(max_examples=scaled(40), deadline=None)
@given(streams(most_lanes=3), st.integers(1, 5), st.integers(1, 60), st.integers(0, 9))
def test_frames_of_a_buffer(batches, n_steps, capacity, seed):
    generator = torch.Generator().manual_seed(seed)
    memory = fc.ReplayBuffer(
        storage=fc.LazyTensorStorage(capacity, ndim=2),
        sampler=fc.MultiStepSampler(gamma=0.9, n_steps=n_steps),
        generator=generator,
    )
    for lanes in batches:
        memory.extend(rewarded(batch_of(lanes), generator))
    everything = memory[torch.arange(len(memory))]
    batch, info = memory.sample(8, return_info=True)
    assert batch.shape == (8,)
    for row, index in zip(batch, info["index"], strict=True):
        frame = everything[index]
        mine = everything[everything["collector", "traj_ids"] == frame["collector", "traj_ids"]]
        mine = mine[mine["collector", "step"].argsort()]
        position = int(frame["collector", "step"] - mine["collector", "step"][0])
        check(row, *expected(list(mine), 0.9, n_steps)[position], 0.9)
        assert (row.exclude("next", "original_reward", "steps_to_next_obs", "gamma") == frame.exclude("next")).all()


def test_as_a_postproc_also_of_split_batches():
    env = make_counting("torch", {"lengths": (3, 5)}, {"lengths": (4,), "truncated": (0, 1)})
    plain, split = (
        next(fc.SyncDataCollector(
            env, frames_per_batch=20, seed=0, split_trajs=split_trajs, postproc=fc.MultiStep(gamma=0.5, n_steps=3)
        ))
        for split_trajs in (False, True)
    )  # fmt: skip
    mask = split["collector", "mask"]
    assert (split[mask]["next", "reward"] == plain.reshape(-1)["next", "reward"]).all()
    assert (split[mask]["gamma"] == plain.reshape(-1)["gamma"]).all()
    truncated = plain["next", "truncated"][1]
    assert truncated.any()
    assert not plain["next", "terminated"][1, truncated[:, 0]].any()


def test_frames_without_other_keys():
    memory = fc.ReplayBuffer(storage=fc.LazyTensorStorage(9), sampler=fc.MultiStepSampler(gamma=0.5, n_steps=2))
    batch = batch_of([frames_of(0, [4])])[0].exclude("collector")
    batch["next", "reward"] = torch.ones(4, 1)
    memory.extend(batch)
    assert set(memory.sample(20).keys()) == {*batch.keys(), "original_reward", "steps_to_next_obs", "gamma"}
