"""Trajectories cut from batches and from samples of slices, against a loop over frames."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack

import funcollect as fc
from funcollect.trajectories.split import split_trajectories
from tests.support import frames as streams
from tests.support.compare import assert_same
from tests.support.running import scaled

SHAPES = st.lists(st.integers(1, 3), max_size=2).flatmap(lambda rows: st.integers(1, 9).map(lambda time: (*rows, time)))

DTYPES = (torch.bool, torch.uint8, torch.int8, torch.uint16, torch.uint32, torch.uint64, torch.bfloat16)


def strided(leaf):
    """The same values in time-major memory, as the loops record them."""
    time = leaf.ndim - 2
    return leaf.movedim(time, 0).contiguous().movedim(0, time)


def batch_of(ids, next_done=None, done=None):
    """Every frame holds its own number, in leaves of several dtypes and shapes."""
    ids = torch.as_tensor(ids)
    number = torch.arange(1, ids.numel() + 1).reshape(ids.shape)
    leaves = {
        "observation": strided(number[..., None].float() * torch.tensor([1.0, -1.0, 0.5])),
        "action": number.to(torch.int32),
        "next": {"info": {str(dtype): number.to(dtype) for dtype in DTYPES}, "reward": number[..., None].double()},
        "collector": {"traj_ids": ids},
    }
    batch = TensorDict(leaves, batch_size=ids.shape)
    if next_done is not None:
        batch["next", "done"] = torch.as_tensor(next_done)[..., None]
    if done is not None:
        batch["done"] = torch.as_tensor(done)[..., None]
    return batch


def oracle(batch):
    """The frames of each trajectory, as lists of (row, time)."""
    rows = batch.reshape(-1, batch.shape[-1])
    next_done = rows.get(("next", "done"), torch.zeros(*rows.shape, 1, dtype=torch.bool))
    done = rows.get("done", torch.zeros(*rows.shape, 1, dtype=torch.bool))
    trajectories = []
    for row in range(rows.shape[0]):
        for time in range(rows.shape[1]):
            ids = rows["collector", "traj_ids"][row]
            same = time > 0 and ids[time] == ids[time - 1]
            if not same or (next_done[row, time - 1] and not done[row, time]):
                trajectories.append([])
            trajectories[-1].append((row, time))
    return trajectories


def check(batch):
    result, expected = split_trajectories(batch), oracle(batch)
    assert result.batch_size == (len(expected), max(map(len, expected)))
    mask = result["collector", "mask"]
    assert mask.dtype == torch.bool
    assert mask.sum(-1).tolist() == [len(frames) for frames in expected]
    assert not (mask[:, 1:] & ~mask[:, :-1]).any()
    rows = batch.reshape(-1, batch.shape[-1])
    assert set(result.keys(True, True)) == {*batch.keys(True, True), ("collector", "mask")}
    for key in batch.keys(True, True):
        assert result[key].dtype == batch[key].dtype
        wanted = torch.zeros(result[key].shape, dtype=batch[key].dtype)
        for index, frames in enumerate(expected):
            for position, frame in enumerate(frames):
                wanted[index, position] = rows[key][frame]
        assert torch.equal(result[key], wanted), key
    return result


@given(shape=SHAPES, data=st.data())
@settings(max_examples=scaled(40), deadline=None)
def test_every_frame_stands_where_a_loop_puts_it(shape, data):
    def draw(values):
        drawn = data.draw(st.lists(values, min_size=torch.Size(shape).numel(), max_size=torch.Size(shape).numel()))
        return torch.tensor(drawn).reshape(shape)

    ids = draw(st.sampled_from([0, 1, 1 << 40]))
    next_done = draw(st.booleans()) if data.draw(st.booleans()) else None
    done = draw(st.booleans()) if data.draw(st.booleans()) else None
    check(batch_of(ids, next_done, done))


def test_ids_under_another_key():
    batch = batch_of([0, 0, 0])
    batch["episode"] = torch.tensor([0, 1, 1], dtype=torch.uint8)
    for each in (batch, batch.exclude("collector")):
        split = split_trajectories(each, trajectory_key="episode")
        assert split["action"].tolist() == [[1, 0], [2, 3]]
        assert split["collector", "mask"].tolist() == [[1, 0], [1, 1]]


def test_the_result_is_unlocked_and_owns_its_memory():
    batch = batch_of([[0, 0], [1, 1]]).lock_()
    before = batch.clone()
    result = split_trajectories(batch)
    assert not result.is_locked
    assert batch.is_locked
    result["next", "more"] = torch.zeros(2, 2)
    for key in batch.keys(True, True):
        result[key].fill_(0)
    assert (batch == before).all()


def test_empty_and_deeper_dicts_lazy_stacks_and_gradients():
    batch = batch_of([0, 1])
    batch["next", "info", "deep"] = TensorDict({"x": torch.ones(2, 3)}, [2, 3])
    batch["empty"], batch["value"] = TensorDict({}, [2]), torch.ones(2, requires_grad=True)
    result = split_trajectories(batch)
    assert result["empty"].is_empty()
    assert result["next", "info", "deep", "x"].shape == (2, 1, 3)
    result["value"].sum().backward()
    assert batch["value"].grad.tolist() == [1, 1]
    rows = [batch_of([0, 0, 1]), batch_of([2, 3, 3])]
    assert (split_trajectories(lazy_stack(rows)) == split_trajectories(torch.stack(rows))).all()


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_a_batch_without_frames(shape):
    result = split_trajectories(batch_of(torch.zeros(shape, dtype=torch.int64)))
    assert result.batch_size == (0, 0)
    assert result["observation"].shape == (0, 0, 3)


@pytest.mark.gpu
def test_on_a_gpu():
    batch = batch_of([[0, 0, 1], [2, 2, 2]], [[False, True, False]] * 2)
    result = split_trajectories(batch.to("cuda"))
    assert result.device.type == "cuda"
    assert (result.cpu() == split_trajectories(batch)).all()


def batch_by_ends():
    """What TorchRL's documents split by ends: no ids, ends under ``next``."""
    done = torch.zeros(2, 6, 1, dtype=torch.bool)
    done[0, 3] = done[1, 1] = done[1, 5] = True
    obs = torch.arange(12.0).reshape(2, 6, 1)
    return TensorDict({"obs": obs, "next": {"obs": obs + 1, "over": done, "done": done}}, [2, 6])


def test_runs_with_equal_ids_that_were_joined():
    batch = batch_of([0, 0, 0, 0, 0, 0])
    batch["collector", "step"] = torch.tensor([4, 5, 6, 4, 5, 6])
    assert split_trajectories(batch)["action"].tolist() == [[1, 2, 3], [4, 5, 6]]
    steps = TensorDict({"reward": torch.ones(6, 1), "done": torch.zeros(6, 1, dtype=torch.bool)}, [6])
    returns = fc.MultiStep(gamma=0.5, n_steps=3)(batch.select("collector").set("next", steps))["next", "reward"][:, 0]
    assert returns.tolist() == [1.75, 1.5, 1.0] * 2


@pytest.mark.parametrize("prefix", [None, "other", ("a", "b")])
@pytest.mark.parametrize("done_key", ["done", "over"])
def test_ends_in_the_place_of_ids(prefix, done_key):
    result = split_trajectories(batch_by_ends(), prefix=prefix, done_key=done_key)
    home = ("collector",) if prefix is None else (prefix,) if isinstance(prefix, str) else prefix
    assert result["obs"][..., 0].tolist() == [[0, 1, 2, 3], [4, 5, 0, 0], [6, 7, 0, 0], [8, 9, 10, 11]]
    assert result[(*home, "traj_ids")].tolist() == [[0] * 4, [1, 1, 0, 0], [2, 2, 0, 0], [3] * 4]
    assert result[(*home, "mask")].sum(-1).tolist() == [4, 2, 2, 4]


@pytest.mark.needs("torchrl")
@pytest.mark.filterwarnings("ignore:Creating .* which inherits:DeprecationWarning", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("kwargs", [{"done_key": "over"}, {}, {"as_nested": True}], ids=str)
def test_it_is_torchrls_table(kwargs):
    from torchrl.collectors.utils import split_trajectories as torchrls

    wanted, got = (split(batch_by_ends(), prefix="own", **kwargs) for split in (torchrls, split_trajectories))
    assert got.batch_size == wanted.batch_size
    assert set(got.keys(True, True)) == set(wanted.keys(True, True))
    for key in got.keys(True, True):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(got[key], wanted[key], strict=True)), key


def test_jagged_trajectories_share_their_offsets():
    result = split_trajectories(batch_by_ends(), as_nested=torch.jagged)
    assert result.batch_size == (4,)
    assert result["obs"].shape == result["next", "obs"].shape  # one ragged size
    rows = [row.reshape(-1).tolist() for row in result["obs"].unbind()]
    assert rows == [[0, 1, 2, 3], [4, 5], [6, 7], [8, 9, 10, 11]]


def with_leaf(path, leaf):
    return {"batch": batch_of([[0, 0, 1], [2, 2, 2]]).set(path, leaf)}


IDS, DONE, NAME = ("collector", "traj_ids"), ("next", "done"), ("next", "name")
NO_IDS = batch_of([[0, 0, 1], [2, 2, 2]]).exclude("collector")
NAMES = NonTensorStack.from_list([["a", "b", "c"]] * 2)


@pytest.mark.parametrize(("kwargs", "error", "message"), [
    ({"trajectory_key": "episode"}, ValueError, "no tensor episode"),
    ({"done_key": "x"}, ValueError, "no tensor collector.traj_ids"),
    ({"batch": batch_of([0])[:0], "as_nested": True}, ValueError, "no frames"),
    ({"batch": TensorDict({})}, ValueError, r"no batch dimensions, expected \[\*B, T\]"),
    ({"batch": NO_IDS}, ValueError, "no tensor collector.traj_ids.*it has .*next.reward"),
    (with_leaf(IDS, torch.zeros(2, 3)), TypeError, "float32, expected integers"),
    (with_leaf(DONE, torch.zeros(2, 3) > 0), ValueError, r"next.done has shape \[2, 3\], the batch wants \[2, 3, 1\]"),
    (with_leaf(NAME, NonTensorData("x", batch_size=[2, 3])), TypeError, "next.name is NonTensorData, .*exclude"),
    (with_leaf("names", NAMES), TypeError, "names is NonTensorStack, expected a tensor"),
])  # fmt: skip
def test_bad_arguments(kwargs, error, message):
    with pytest.raises(error, match=message):
        split_trajectories(**({"batch": batch_by_ends()} | kwargs))


LENGTHS = [2, 7, 3, 9, 1]


def slices_of(kind, size=60, **options):
    """A buffer's sample of slices of up to 5 frames, among trajectories of LENGTHS."""
    sampler = kind(slice_len=5, **options)
    generator = torch.Generator().manual_seed(0)
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(100), sampler=sampler, generator=generator)
    buffer.extend(streams.batch_of([streams.frames_of(0, LENGTHS)])[0])
    return buffer.sample(size)


def by_priority(**options):
    return fc.PrioritizedSliceSampler(100, 1.0, 1.0, **options)


SHORT = {"strict_length=False": {"strict_length": False}, "padded": {"strict_length": False, "pad_output": True}}


@pytest.mark.parametrize("kind", [fc.SliceSampler, by_priority])
@pytest.mark.parametrize("lengths", ["strict", *SHORT])
@pytest.mark.parametrize("shaped", [False, True], ids=["flat", "[slices, slice_len]"])
def test_each_slice_is_a_trajectory(kind, lengths, shaped):
    sample = slices_of(kind, **SHORT.get(lengths, {}))
    if shaped and lengths == "strict_length=False":
        return  # of no common length
    held = sample.get(("collector", "mask"), torch.ones(len(sample), dtype=torch.bool))
    first = sample["collector", "is_first"][held]
    frames = sample[held].exclude(("collector", "mask"))
    split = split_trajectories(sample.view(-1, 5) if shaped else sample)
    mask = split["collector", "mask"]
    assert len(mask) == int(first.sum()) == 12
    assert (split["collector", "is_first"] == (torch.arange(mask.shape[1]) == 0)).all()
    assert_same(split.exclude(("collector", "mask"))[mask], frames)
    assert not split["observation"][~mask].any()
    assert_same(split_trajectories(split), split)  # again, which changes nothing
    nested = split_trajectories(sample, as_nested=torch.jagged)
    assert [len(each) for each in nested["observation"].unbind()] == mask.sum(-1).tolist()


def test_neighbours_of_one_trajectory_stay_apart():
    """Also where a slice begins with the frame that follows the last one of the slice before."""
    sample = slices_of(fc.SliceSampler, size=10)
    sample["collector", "traj_ids"][:] = 3
    sample["collector", "step"] = torch.arange(10)
    sample["done"] = torch.ones(10, 1, dtype=torch.bool)
    assert split_trajectories(sample)["collector", "step"].tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_numbers_take_the_place_of_ids():
    """Which are those of the trajectories that remain, without the padding."""
    sample = slices_of(fc.SliceSampler, strict_length=False, pad_output=True)
    sample = sample.exclude(("collector", "traj_ids"), ("collector", "step"))
    split = split_trajectories(sample)
    mask, ids = split["collector", "mask"], split["collector", "traj_ids"]
    assert (ids == torch.where(mask, torch.arange(12)[:, None], 0)).all()
