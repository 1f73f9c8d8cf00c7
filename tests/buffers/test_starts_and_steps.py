"""Slices mark where they begin, so recurrent modules do not carry hidden states over; returns over several steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import funcollect as fc
from funcollect.keys import key_from_seed
from tests.buffers.conftest import filled
from tests.support.frames import STACK, batch_of, frames_of, stacked, streams
from tests.support.running import scaled

LENGTH, IS_FIRST = 5, ("collector", "is_first")
NESTED = [("agents", "is_init"), ("agents", "one", "is_init"), ("next", "is_init")]
STORAGES = {
    "tensors": lambda: fc.LazyTensorStorage(100, ndim=2),
    "file": lambda: fc.LazyMemmapStorage(100, ndim=2),
    "compact_obs": lambda: fc.LazyTensorStorage(100, ndim=2, compact_obs=True),
    "frame_stack": lambda: fc.LazyTensorStorage(100, ndim=2, frame_stack=STACK),
    "list": lambda: fc.ListStorage(100),
}
SAMPLERS = {
    "slices": lambda **options: fc.SliceSampler(slice_len=LENGTH, **options),
    "windows": lambda **options: fc.SliceSampler(num_slices=8, over="windows", **options),
    "by priority": lambda **options: fc.PrioritizedSliceSampler(100, 1.0, 1.0, slice_len=LENGTH, **options),
}


@pytest.mark.parametrize("returns", [{}, {"n_steps": 3, "gamma": 0.9}])
@pytest.mark.parametrize("left_out", [[], ["traj_ids"], ["traj_ids", "step"]])
def test_episodes_within_a_slice_begin_where_they_do_whatever_is_stored(returns, left_out):
    batch = batch_of([frames_of(0, [4, 7, 5])])
    batch["next", "reward"] = torch.ones(*batch.shape, 1)
    starts = batch["collector", "step"][0] == 0
    sampler = fc.SliceSampler(slice_len=16, across_episodes=True, **returns)
    stored = batch.exclude(*(("collector", name) for name in left_out))
    sample = filled(stored, fc.LazyTensorStorage(16, ndim=2), sampler, batch_size=16).sample()
    assert torch.equal(sample[IS_FIRST], starts)


def episodes():
    """Two lanes of episodes; ``is_init`` is True where they begin, as TorchRL's InitTracker sets it."""
    batch = stacked([frames_of(lane, [7, 12, 6]) for lane in range(2)], torch.Generator().manual_seed(0))
    batch["is_init"] = (batch["collector", "step"] == 0)[..., None]
    return batch


def buffer_of(storage, batch, sampler, batch_size):
    """A list holds one lane."""
    return filled(batch[0] if storage == "list" else batch, STORAGES[storage](), sampler, batch_size=batch_size)


def check(sample, first):
    """The marks at the rows `first`, and every other row as it was stored."""
    wanted = torch.zeros(len(sample), dtype=torch.bool)
    wanted[first] = True
    assert sample[IS_FIRST].tolist() == wanted.tolist()
    held = sample.get(("collector", "mask"), torch.ones(len(sample), dtype=torch.bool))
    assert (sample["is_init"][:, 0] == wanted | held & (sample["collector", "step"] == 0)).all()
    assert not sample["is_init"].all()


@pytest.mark.parametrize(("storage", "pad_output"), [("tensors", False), ("tensors", True), ("list", False)])
def test_short_slices(storage, pad_output):
    sampler = fc.SliceSampler(slice_len=10, strict_length=False, pad_output=pad_output)
    sample = buffer_of(storage, episodes(), sampler, 80).sample()
    ends = sample["next", "truncated"][:, 0].nonzero()[:, 0]
    assert (len(sample) < 80) != pad_output
    check(sample, slice(0, None, 10) if pad_output else torch.cat([torch.zeros(1, dtype=torch.int64), ends[:-1] + 1]))


@pytest.mark.parametrize(("storage", "sampler"), [*zip(STORAGES, [*SAMPLERS, *SAMPLERS], strict=False)])
def test_samples_and_nested_flags(storage, sampler):
    """Every ``is_init`` is marked, except those of next frames; the stored ones stay as they were."""
    batch = episodes()
    for path in NESTED:
        batch[path] = batch["is_init"].clone()
    for init_key, marked in (
        ("is_init", {"is_init", *NESTED[:2]}), (("agents", "is_init"), {("agents", "is_init")}), (None, set()),
    ):  # fmt: skip
        buffer = buffer_of(storage, batch, SAMPLERS[sampler](init_key=init_key), 8 * LENGTH)
        sample = buffer.sample()
        assert sample[IS_FIRST].view(8, LENGTH).tolist() == [[True] + [False] * (LENGTH - 1)] * 8
        stored = (sample["collector", "step"] == 0)[:, None]
        for path in ("is_init", *NESTED):
            assert torch.equal(sample[path], stored | (sample[IS_FIRST][:, None] if path in marked else False))
        everything = buffer[torch.arange(len(buffer))]
        assert (everything["is_init"][:, 0] == (everything["collector", "step"] == 0)).all()
        assert IS_FIRST not in everything.keys(True)


@pytest.mark.parametrize("init_key", ["is_inti", ("agents", "is_init")])
def test_flags_that_are_not_there(init_key):
    buffer = buffer_of("tensors", episodes(), fc.SliceSampler(slice_len=LENGTH, init_key=init_key), LENGTH)
    with pytest.raises(ValueError, match=r"init_key is .*, but frames have no such tensor"):
        buffer.sample()


def test_a_ring_and_a_reader(tmp_path):
    state = fc.ring.init(fc.LazyTensorStorage(100, ndim=2), trajectories=fc.ring.Trajectories())
    state, _ = fc.ring.extend(state, episodes())
    check(fc.ring.sample(state, key_from_seed(0), fc.ring.Slices(num_slices=8, slice_len=5)), slice(0, None, 5))
    filled(episodes(), fc.LazyMemmapStorage(100, ndim=2, scratch_dir=tmp_path))
    reader = fc.ReplayReader(tmp_path, sampler=fc.SliceSampler(slice_len=5), batch_size=40)
    check(reader.sample(), slice(0, None, 5))


def test_frames_without_marks():
    frames = TensorDict({"end": torch.zeros(9, dtype=torch.bool)}, [9])
    sample = filled(frames, 9, fc.SliceSampler(slice_len=3, end_key="end"), batch_size=6).sample()
    assert sample[IS_FIRST].tolist() == [True, False, False] * 2
    assert "is_init" not in sample
    other = filled(sample.exclude("collector"), 9, fc.SliceSampler(slice_len=2), batch_size=2)
    other.extend(sample.exclude("collector"))
    assert other.sample()[IS_FIRST].tolist() == [True, False]


def test_in_jax():
    batch = batch_of([frames_of(lane, [7, 12, 6]) for lane in range(2)]).transpose(0, 1)
    step = jnp.asarray(batch["collector", "step"].numpy())
    arrays = {"collector": {"step": step}, "next": {"done": jnp.asarray(batch["next", "done"][..., 0].numpy())}}
    arrays["is_init"] = (step == 0)[..., None]
    arrays["agents"], arrays["next"]["is_init"] = {"is_init": arrays["is_init"]}, arrays["is_init"]

    @jax.jit
    def drawn(arrays):
        ring = fc.jax_ring.extend(fc.jax_ring.init(arrays, steps=30), arrays)
        return fc.jax_ring.sample_slices(ring, jax.random.PRNGKey(0), num_slices=8, slice_len=LENGTH)

    sampled, found = drawn(arrays)
    assert bool(found)
    first = np.arange(LENGTH)[:, None] == np.zeros(8)
    assert (np.asarray(sampled["collector"]["is_first"]) == first).all()
    assert (np.asarray(sampled["is_init"])[..., 0] == first | (np.asarray(sampled["collector"]["step"]) == 0)).all()
    assert (sampled["agents"]["is_init"] == sampled["is_init"]).all()
    assert (sampled["next"]["is_init"][..., 0] == (sampled["collector"]["step"] == 0)).all()
    assert set(jax.eval_shape(drawn, {"next": arrays["next"]})[0]) == {"next", "collector"}


# Returns over several steps, against a loop over frames.


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


def check_row(row, total, steps, following, gamma):
    torch.testing.assert_close(float(row["next", "reward"]), total, rtol=1e-6, atol=1e-6)  # a sum in float32
    torch.testing.assert_close(float(row["gamma"]), gamma**steps)
    assert int(row["steps_to_next_obs"]) == steps
    for key in ("observation", "done", "terminated", "truncated"):
        assert (row["next", key] == following[key]).all()


@settings(max_examples=scaled(15), deadline=None)
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
                check_row(frame, *values, gamma)
                assert (frame["observation"][:2] == frame["next", "observation"][:2]).all()


@settings(max_examples=scaled(15), deadline=None)
@given(streams(most_lanes=3), st.integers(1, 5), st.integers(1, 60), st.integers(0, 9))
def test_frames_of_a_buffer(batches, n_steps, capacity, seed):
    generator = torch.Generator().manual_seed(seed)
    parts = [rewarded(batch_of(lanes), generator) for lanes in batches]
    memory = filled(parts[0], capacity, fc.MultiStepSampler(gamma=0.9, n_steps=n_steps), ndim=2, generator=generator)
    for part in parts[1:]:
        memory.extend(part)
    everything = memory[torch.arange(len(memory))]
    batch, info = memory.sample(8, return_info=True)
    assert batch.shape == (8,)
    for row, index in zip(batch, info["index"], strict=True):
        frame = everything[index]
        mine = everything[everything["collector", "traj_ids"] == frame["collector", "traj_ids"]]
        mine = mine[mine["collector", "step"].argsort()]
        position = int(frame["collector", "step"] - mine["collector", "step"][0])
        check_row(row, *expected(list(mine), 0.9, n_steps)[position], 0.9)
        assert (row.exclude("next", "original_reward", "steps_to_next_obs", "gamma") == frame.exclude("next")).all()


def test_frames_without_other_keys():
    batch = batch_of([frames_of(0, [4])])[0].exclude("collector")
    batch["next", "reward"] = torch.ones(4, 1)
    memory = filled(batch, 9, fc.MultiStepSampler(gamma=0.5, n_steps=2))
    assert set(memory.sample(20).keys()) == {*batch.keys(), "original_reward", "steps_to_next_obs", "gamma"}


LOOKING_AHEAD = {
    "frames": lambda **steps: fc.MultiStepSampler(**steps),
    "by priority": lambda **steps: fc.PrioritizedSampler(100, 1.0, 1.0, **steps),
    "slices": lambda **steps: fc.SliceSampler(slice_len=LENGTH, **steps),
    "padded slices": lambda **steps: fc.SliceSampler(slice_len=10, strict_length=False, pad_output=True, **steps),
    "slices by priority": lambda **steps: fc.PrioritizedSliceSampler(100, 1.0, 1.0, slice_len=LENGTH, **steps),
    "slices across": lambda **steps: fc.SliceSampler(slice_len=LENGTH, across_episodes=True, **steps),
    "each once": lambda **steps: fc.SliceSamplerWithoutReplacement(slice_len=LENGTH, **steps),
}


@pytest.mark.parametrize("name", LOOKING_AHEAD)
def test_any_sample_may_have_n_step_returns(name):
    """The sums are cut at the ends of episodes only, not at those of slices."""
    batch, gamma, wanted = episodes().reshape(-1), 0.5, {}
    for trajectory in batch["collector", "traj_ids"].unique():
        rows = expected(list(batch[batch["collector", "traj_ids"] == trajectory]), gamma, 3)
        wanted |= {(int(trajectory), step): total for step, (total, *_) in enumerate(rows)}
    batch, sampler = episodes(), LOOKING_AHEAD[name](n_steps=3, gamma=gamma)
    sample, info = buffer_of("tensors", batch, sampler, 4 * (10 if "padded" in name else LENGTH)).sample(
        return_info=True
    )
    held = sample.get(("collector", "mask"), torch.ones(len(sample), dtype=torch.bool))
    columns = (sample["collector", key][held].tolist() for key in ("traj_ids", "step"))
    for ids, step, found in zip(*columns, sample["next", "reward"][held, 0].tolist(), strict=True):
        assert found == pytest.approx(wanted[ids, step])
    assert not sample["next", "reward"][~held].any()
    assert len(info["index"]) == len(sample)
    if "slices" in name:
        assert sample[IS_FIRST].any()


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float64])
def test_sums_of_rewards_of_any_dtype(dtype):
    reward = (torch.arange(20) % 3).to(dtype)[:, None]
    frames = TensorDict({"next": {"reward": reward, "done": torch.zeros(20, 1, dtype=torch.bool)}}, [20])
    found = fc.MultiStep(gamma=0.5, n_steps=3)(frames)["next", "reward"]
    assert found.dtype == (dtype if dtype == torch.float64 else torch.float32)
    values = [*reward[:, 0].double().tolist(), 0.0, 0.0]
    assert found[:, 0].tolist() == [values[t] + values[t + 1] / 2 + values[t + 2] / 4 for t in range(20)]


@pytest.mark.parametrize("ids", [True, False])
def test_slices_go_on_across_episodes(ids):
    batch = episodes() if ids else episodes().exclude("collector")
    number = torch.arange(batch.numel()).reshape(batch.shape)
    buffer = buffer_of("tensors", batch.set("number", number), fc.SliceSampler(slice_len=12, across_episodes=True), 96)
    sample = buffer.sample().view(8, 12)
    assert (sample["number"].diff() == 1).all()
    starts = sample["is_init"][..., 0]
    assert torch.equal(sample[IS_FIRST], starts)
    assert starts[:, 0].all()
    assert 0 < starts[:, 1:].sum() < 16
    assert torch.equal(sample["next", "truncated"][..., 0].nonzero()[:, 1], torch.full((8,), 11))


def test_slices_across_episodes_mark_the_frames_of_another_run():
    """Two runs have the same lanes and ids. Padding begins nothing."""
    run = batch_of([frames_of(lane, [30]) for lane in range(2)])
    sampler = fc.SliceSampler(slice_len=70, across_episodes=True, strict_length=False, pad_output=True)
    buffer = buffer_of("tensors", torch.cat([run[:, :10], run[:, :20], run[:, 10:]], 1), sampler, 140)
    sample = buffer.sample().view(2, 70)
    assert sample[IS_FIRST].nonzero()[:, 1].tolist() == [0, 10, 30] * 2
    assert not sample["collector", "mask"].all()


def test_arrays_are_stored_as_tensors():
    buffer = filled({"a": np.arange(4.0), "b": {"c": np.zeros((4, 2), np.uint8)}})
    assert buffer[:]["a"].tolist() == [0, 1, 2, 3]
    assert buffer[0]["b"]["c"].dtype == torch.uint8
    buffer.extend(
        {"a": np.arange(2.0, dtype=">f8"), "b": {"c": np.arange(4, dtype=np.uint8).reshape(2, 2)[::-1, ::-1]}}
    )
    assert (buffer[4:]["a"].tolist(), buffer[4:]["b"]["c"].tolist()) == ([0, 1], [[3, 2], [1, 0]])
    with pytest.raises(TypeError, match="a is ndarray, expected a tensor"):
        buffer.extend({"a": np.array(["x"]), "b": {"c": np.zeros((1, 2), np.uint8)}})
