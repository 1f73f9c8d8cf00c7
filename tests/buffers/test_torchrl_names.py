"""What TorchRL's buffers, storages and samplers have by the same names: access, keywords, priorities in TensorDicts."""

import io
import pickle

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

import funcollect as fc
from funcollect.buffers.keywords import FOREIGN
from tests.buffers.conftest import filled

KINDS = [fc.LazyTensorStorage, fc.LazyMemmapStorage, fc.ListStorage]


def frames(count, first=0):
    return TensorDict({"x": torch.arange(first, first + count), "y": {"z": torch.zeros(count, 2)}}, [count])


def made(kind=fc.LazyTensorStorage, count=6, size=8, **options):
    return filled(frames(count), kind(size), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_frames_are_read_from_the_storage(kind):
    storage = made(kind).storage
    assert len(storage) == 6
    assert storage[:4]["x"].tolist() == storage.get(range(4))["x"].tolist() == [0, 1, 2, 3]
    assert storage[-1]["x"] == 5
    assert [int(frame["x"]) for frame in storage] == [*range(6)]
    with pytest.raises(IndexError, match="index is 6, expected one into"):
        storage[6]
    buffer = made(kind, count=11)
    assert len(buffer.storage) == 8
    buffer.empty()
    assert len(buffer.storage) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_frames_are_overwritten(kind):
    buffer = made(kind)
    buffer[1] = frames(1, 70)[0]
    buffer[2:4] = frames(2, 80)
    buffer.storage.set(torch.tensor([5, 4]), frames(2, 90))
    assert buffer["x"].tolist() == [0, 70, 80, 81, 91, 90]
    buffer.set_at_("x", torch.tensor([7, 8]), [0, 1]).update_({"y": {"z": torch.ones(6, 2)}})
    buffer["x"] = buffer["x"] + 1
    assert buffer[:]["x"].tolist() == [8, 9, 81, 82, 92, 91]
    assert buffer["y", "z"].sum() == 12
    assert buffer.write_count == 6


def test_lanes_are_overwritten_and_one_step_is_broadcast():
    buffer = filled(frames(10).view(2, 5), 20, ndim=2)
    buffer[0, 1:3] = frames(2, 70)
    buffer[:, 4:5] = frames(1, 90)
    assert buffer["x"].tolist() == [[0, 70, 71, 3, 90], [5, 6, 7, 8, 90]]
    one, two = torch.tensor([1]), torch.tensor([2])
    buffer[one, two] = frames(1, 60)
    assert buffer[one, two]["x"].tolist() == buffer[one, 2]["x"].tolist() == [60]
    assert buffer[None].shape == (1, 2, 5)
    tree = filled(torch.arange(3), 4, transform=lambda leaf: leaf * 2)
    tree[1:] = torch.arange(2) + 10
    assert tree[:].tolist() == [0, 20, 22]
    with pytest.raises(TypeError, match="the frames are Tensor, expected TensorDicts"):
        tree.set_("x", 1)


REFUSED = {
    "trajectories": (lambda path: {"sampler": fc.SliceSampler(slice_len=1, traj_key="x")}, "follows the trajectories"),
    "readers": (lambda path: {"storage": fc.LazyMemmapStorage(8, scratch_dir=path)}, "other processes may read"),
    "shared": (lambda path: {"storage": fc.LazyTensorStorage(8, frame_stack=3)}, "frames share memory"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_frames_on_which_others_depend_are_not_overwritten(case, tmp_path):
    options, message = REFUSED[case]
    buffer = fc.ReplayBuffer(**{"storage": fc.LazyTensorStorage(8), **options(tmp_path)})
    batch = frames(4).set("pixels", torch.zeros(4, 3, 5))
    buffer.extend(batch)
    with pytest.raises(ValueError, match=message):
        buffer.storage.set(0, batch[0])


@pytest.mark.parametrize(("index", "data", "message"), [
    ([1, 1], frames(2), "expected each slot once"),
    (slice(0, 2), frames(2).select("x"), r"lacks \['y.z'\]"),
    (slice(0, 2), frames(2).set("x", torch.zeros(2)), r"x is \[\] torch.float32 in each frame"),
    (slice(0, 2), frames(2).to_dict() | {"x": torch.arange(3)}, r"expected \[2\] frames, or ones that broadcast"),
    ("x", torch.zeros(5), r"do not match the \[6\] frames .*: give one for each"),
])  # fmt: skip
def test_data_that_do_not_match_change_nothing(index, data, message):
    buffer = made()
    with pytest.raises(ValueError, match=message):
        buffer[index] = data
    assert (buffer[:] == frames(6)).all()


def test_samples_and_dumps_have_the_new_frames(tmp_path):
    buffer, other = made(batch_size=4, prefetch=2), made()
    buffer.sample()
    buffer.dumps(tmp_path)
    buffer.storage.set(slice(None), frames(6, 100))
    assert (buffer.sample()["x"] >= 100).all()
    buffer.save(tmp_path)
    other.load(tmp_path)
    assert (other[:] == buffer[:]).all()


def test_numbers_of_a_buffer_and_its_next_sample():
    buffer = made(batch_size=3, sampler=fc.RandomSampler(replacement=False))
    assert sorted(torch.cat([buffer.next()["x"], buffer.next()["x"]]).tolist()) == [*range(6)]
    assert buffer.next() is None
    assert len(buffer.next()) == 3
    numbers = {"size": 6, "write_count": 6, "prefetch_queue_size": 0, "initialized": True, "capacity": 8}
    assert buffer.stats() == numbers | {"utilization": 0.75}
    buffer.empty(empty_write_count=False)
    buffer.extend(frames(3))
    assert (buffer.write_count, len(buffer)) == (9, 3)
    other = made(sampler=fc.SamplerWithoutReplacement())
    other.load_state_dict(buffer.state_dict())
    assert (other.write_count, len(other)) == (9, 3)
    buffer.empty()
    assert buffer.write_count == 0


MAKE = {
    "buffer": lambda **given: fc.ReplayBuffer(storage=fc.LazyTensorStorage(8), **given),
    "storage": lambda **given: fc.ListStorage(8, **given),
    "sampler": lambda **given: fc.RandomSampler(**given),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in FOREIGN.items() for name in names])
def test_keywords_of_torchrl(kind, name):
    foreign = FOREIGN[kind][name]
    accepted = [value for value in (None, False, True, "cpu") if foreign.ignored(value, {})]
    assert accepted
    for value in accepted:
        MAKE[kind](**{name: value})
    for value in ("cuda", 3):
        if not foreign.ignored(value, {}):
            with pytest.raises(TypeError, match=rf"does not take {name}={value!r} \(.*: leave it out"):
                MAKE[kind](**{name: value})


def test_parts_may_be_made_by_functions():
    parts = {"storage": lambda: fc.LazyTensorStorage(4), "sampler": lambda: fc.SliceSampler(slice_len=2)}
    buffer = fc.ReplayBuffer(**parts, dim_extend=0)
    assert isinstance(buffer.sampler, fc.SliceSampler)
    assert buffer.storage.max_size == 4


@pytest.mark.parametrize("prefetch", [None, 2])
def test_collate_fn_is_applied_to_samples_of_tensor_storages(prefetch):
    buffer = made(batch_size=4, prefetch=prefetch, collate_fn=lambda batch: batch["x"] * 2)
    assert buffer.sample().shape == (4,)
    batch, info = buffer.sample(return_info=True)
    assert (batch == info["index"] * 2).all()


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("data", [torch.arange(5), {"a": [torch.rand(5), (torch.rand(5, 2),)], 3: torch.ones(5)}])
def test_dumps_of_trees(kind, data, tmp_path):
    buffer, other = (fc.ReplayBuffer(storage=kind(8)) for _ in range(2))
    buffer.extend(data)
    buffer.dumps(tmp_path)
    other.loads(tmp_path)
    torch.testing.assert_close(other[:], data)
    other.extend(data)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_as_a_dict(kind):
    def fresh():
        sampler, generator = fc.SamplerWithoutReplacement(), torch.Generator().manual_seed(0)
        return fc.ReplayBuffer(storage=kind(8), sampler=sampler, batch_size=3, generator=generator)

    buffer, other, file = fresh(), fresh(), io.BytesIO()
    buffer.extend(frames(11))
    buffer.sample()
    torch.save(buffer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    for _ in range(4):
        assert (buffer.sample() == other.sample()).all()


@pytest.mark.parametrize("state", [None, {"../x": torch.zeros(1, dtype=torch.uint8)}, {"meta.json": "{}"}])
def test_another_dict_is_refused(state):
    buffer = made()
    with pytest.raises(TypeError, match="expected what state_dict returned"):
        buffer.load_state_dict(state)
    assert (buffer[:] == frames(6)).all()


def test_ragged_items_are_stacked_lazily():
    buffer = fc.ReplayBuffer(storage=fc.ListStorage(4), batch_size=50)
    ragged = LazyStackedTensorDict(*(TensorDict({"a": torch.full((n,), n)}) for n in (1, 2)), stack_dim=0)
    buffer.extend(ragged)
    with pytest.raises(ValueError, match="expected one shape for each key: store it in a ListStorage"):
        fc.ReplayBuffer(storage=fc.LazyTensorStorage(4)).extend(ragged)
    sample = buffer.sample()
    assert {tuple(item["a"].tolist()) for item in sample.unbind(0)} == {(1,), (2, 2)}


@pytest.mark.parametrize("key", ["a", ("b", "a")])
def test_samples_of_ragged_items_are_copies(key):
    buffer = fc.TensorDictReplayBuffer(storage=fc.ListStorage(4), batch_size=50)
    buffer.extend([TensorDict({key: torch.ones(n)}) for n in (1, 2)])
    for item in buffer.sample().unbind(0):
        item[key].zero_()
    assert "index" not in buffer[0]
    buffer.extend([TensorDict({key: torch.ones(3)})])
    assert all(item[key].all() for item in buffer.sample().unbind(0))


@pytest.mark.parametrize("nested", [False, True])
def test_dumps_of_items_that_are_lazy_stacks(nested, tmp_path):
    buffer, other = (fc.ReplayBuffer(storage=fc.ListStorage(4)) for _ in range(2))
    lazy = LazyStackedTensorDict(*(TensorDict({"a": torch.ones(n)}) for n in (1, 2)), stack_dim=0)
    buffer.extend([TensorDict({"agents": lazy}) if nested else lazy])
    buffer.dumps(tmp_path)
    other.loads(tmp_path, allow_pickle=True)
    assert ((other[0]["agents"] if nested else other[0])[1]["a"] == 1).all()


def keyed(reduction="max", within=False, **options):
    sampler = fc.PrioritizedSampler(8, 1.0, 1.0, 0, reduction=reduction, max_priority_within_buffer=within)
    return fc.TensorDictReplayBuffer(storage=fc.LazyTensorStorage(8), sampler=sampler, batch_size=20, **options)


def drawn(buffer):
    return {*buffer.sample(200)["index"].tolist()}


def test_samples_of_tensordicts_know_their_slots_and_priorities():
    buffer = keyed(priority_key="p")
    buffer.extend(frames(4).set("p", torch.tensor([0.0, 1.0, 0.0, 1.0])))
    sample, info = buffer.sample(return_info=True)
    assert (sample["x"] == sample["index"]).all()
    assert (sample["priority_weight"] == info["priority_weight"]).all()
    assert "index" not in buffer.sample(include_info=False)
    buffer.update_tensordict_priority(sample.set("p", (sample["x"] == 1).float()))
    assert drawn(buffer) == {1}
    buffer.add(frames(1)[0].set("p", torch.tensor(1.0)))
    assert drawn(buffer) == {1, 4}
    buffer.extend(frames(1).set("p", torch.zeros(1)), update_priority=False)
    assert drawn(buffer) == {1, 4, 5}
    buffer.extend(frames(8).set("p", torch.ones(8)))
    buffer.update_tensordict_priority(sample.set("p", torch.zeros(20)))  # of frames that were overwritten
    assert drawn(buffer) == {*range(8)}


@pytest.mark.parametrize(("reduction", "wanted"), [("max", {0, 1}), ("min", {1}), ("mean", {0, 1}), ("median", {1})])
def test_priorities_are_reduced(reduction, wanted):
    buffer = keyed(reduction)
    buffer.extend(frames(2).set("td_error", torch.tensor([[0.0, 0.0, 9.0], [1.0, 1.0, 1.0]])))
    assert drawn(buffer) == wanted
    with pytest.raises(ValueError, match=r"td_error has shape \[3\] for 2 frames"):
        buffer.update_tensordict_priority(TensorDict({"index": torch.arange(2), "td_error": torch.ones(3)}))


@pytest.mark.parametrize("priority", [[1.0, float("nan")], [1.0, -1.0]])
@pytest.mark.parametrize("kind", [fc.LazyTensorStorage, fc.ListStorage])
def test_frames_with_bad_priorities_are_not_stored(kind, priority):
    buffer = fc.TensorDictPrioritizedReplayBuffer(alpha=1, beta=1, storage=kind(8))
    buffer.extend(frames(2))
    with pytest.raises(ValueError, match="expected finite numbers of at least 0"):
        buffer.extend(frames(2).set("td_error", torch.tensor(priority)))
    assert (len(buffer), buffer.write_count) == (2, 2)


def test_an_exponent_changes_stored_priorities_and_is_dumped(tmp_path):
    buffer, other = keyed(), keyed()
    buffer.extend(frames(3).set("td_error", torch.tensor([0.0, 4.0, 9.0])))
    for alpha, weights in ((0.5, [0, 2, 3]), (torch.tensor(1.0), [0, 4, 9])):
        buffer.sampler.alpha = alpha
        assert buffer.sampler.state()["weights"][:3].tolist() == weights
    buffer.sampler.alpha, buffer.sampler.beta = 0.5, 0.25
    buffer.dumps(tmp_path)
    other.loads(tmp_path)
    assert (other.sampler.alpha, other.sampler.beta) == (0.5, 0.25)
    with pytest.raises(ValueError, match="alpha is -1, expected"):
        buffer.sampler.alpha = -1


def test_a_tensor_of_an_exponent_may_be_changed_in_place():
    alpha = torch.tensor(1.0)
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(8), sampler=fc.PrioritizedSampler(8, alpha, 1.0, 0))
    buffer.update_priority(buffer.extend(frames(2)), torch.tensor([4.0, 9.0]))
    alpha.fill_(0.5)
    assert buffer.sample(99, return_info=True)[1]["priority_weight"].min() == torch.tensor(2 / 3)
    buffer.update_priority(buffer.extend(frames(1)), 16)
    assert buffer.sampler.state()["weights"][:3].tolist() == [2, 3, 4]


def test_samplers_name_what_they_were_built_with():
    options = {"traj_key": "x", "strict_length": False, "pad_output": True, "span": (False, 2), "truncated_key": "cut"}
    for sampler in (
        fc.SliceSampler(slice_len=4, **options),
        fc.PrioritizedSliceSampler(8, 1, 1, slice_len=4, **options),
    ):
        assert {name: getattr(sampler, name) for name in options} == options
        assert sampler.replacement
    assert not fc.SliceSampler(slice_len=4, replacement=False).replacement


def test_sequences_have_one_priority():
    buffer = fc.TensorDictPrioritizedReplayBuffer(alpha=1, beta=1, eps=0, storage=fc.ListStorage(3), batch_size=60)
    buffer.extend(TensorDict({"x": torch.arange(12).view(3, 4)}, [3, 4]))
    sample = buffer.sample()
    assert (sample["index"] == sample["x"] // 4).all()
    buffer.update_tensordict_priority(sample.set("td_error", (sample["x"] == 6).float()))
    assert {*buffer.sample()["index"].flatten().tolist()} == {1}


def test_exponents_may_be_tensors_and_new_frames_get_the_highest_priority_held():
    weights = []
    for exponent in (0.5, torch.tensor(0.5)):
        buffer = made(sampler=fc.PrioritizedSampler(8, exponent, exponent), generator=torch.Generator().manual_seed(0))
        buffer.update_priority(torch.arange(6), torch.arange(6.0))
        weights.append(buffer.sample(9, return_info=True)[1])
    torch.testing.assert_close(*weights)
    for within, most in ((True, 2.0), (False, 100.0)):
        buffer = keyed(within=within)
        buffer.update_priority(buffer.extend(frames(8)), torch.tensor([100.0, *[2.0] * 7]))
        buffer.extend(frames(1))
        assert buffer.sampler.state()["weights"].tolist() == [most, *[2.0] * 7]


def test_a_shared_buffer_is_unpickled_as_a_reader(tmp_path):
    storage, sampler = fc.LazyMemmapStorage(8, scratch_dir=tmp_path), fc.SliceSampler(slice_len=2, traj_key="x")
    buffer = filled(frames(6).set("x", torch.zeros(6)), storage, sampler, batch_size=4, shared=True)
    reader = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(buffer))))  # which pass it on
    buffer.extend(frames(1).set("x", torch.ones(1)))
    assert (len(reader), reader.sample().shape) == (7, (4,))
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        pickle.dumps(buffer.share(False))
    with pytest.raises(ValueError, match="pass storage=LazyMemmapStorage"):
        made(shared=True)
    storage, sampler = fc.LazyMemmapStorage(8, scratch_dir=tmp_path), fc.PrioritizedSampler(8, 1, 1)
    other = fc.ReplayBuffer(storage=storage, sampler=sampler)
    with pytest.raises(TypeError, match="the reader's sampler is PrioritizedSampler"):
        other.share()
