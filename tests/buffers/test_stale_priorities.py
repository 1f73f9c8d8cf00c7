"""Priorities belong to frames, not to slots: those for frames that are gone are ignored."""

import pickle

import pytest
import torch
from tensordict import TensorDict

import funcollect as fc

SIZE = 8


def made(count=SIZE, **options):
    sampler = fc.PrioritizedSampler(SIZE, alpha=1.0, beta=1.0, eps=0)
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(SIZE), sampler=sampler, batch_size=4, **options)
    return buffer, buffer.extend(torch.arange(count))


def frames(count):
    return TensorDict({"x": torch.arange(count)}, [count])


def priorities(buffer):
    return buffer.sampler.state()["weights"][: len(buffer)].tolist()


def test_the_frames_of_a_sample_that_were_overwritten_meanwhile():
    buffer, _ = made()
    slots = torch.arange(SIZE)
    for ask in (lambda: buffer.sample(64, return_info=True)[1]["index"], lambda: buffer.extend(slots)):
        buffer.update_priority(slots, 1.0)  # without a note of its own, for the frames that are there now
        index = ask()
        buffer.extend(torch.arange(3))
        first = int(buffer.state.memory.written) % SIZE - 3
        buffer.update_priority(index, 0.5)
        fresh = {(first + n) % SIZE for n in range(3)}
        assert [weight != 0.5 for weight in priorities(buffer)] == [slot in fresh for slot in range(SIZE)]


def test_what_extend_returned_is_new():
    buffer, _ = made()
    index = buffer.extend(torch.arange(3))
    buffer.update_priority(index, torch.tensor([2.0, 3.0, 4.0]))
    assert priorities(buffer) == [2.0, 3.0, 4.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    buffer.update_priority(index[1:], 7.0)  # a view
    assert priorities(buffer)[:3] == [2.0, 7.0, 7.0]
    buffer.update_priority(buffer.add(torch.tensor(1)), 0.5)
    assert priorities(buffer)[3] == 0.5


@pytest.mark.parametrize("prefetch", [None, 2])
def test_copies_of_the_index(prefetch):
    buffer, _ = made(prefetch=prefetch)
    _, info = buffer.sample(return_info=True)
    kept = pickle.loads(pickle.dumps(info["index"]))
    copied, written = info["index"].clone(), buffer.written_at(info["index"])
    assert buffer.written_at(copied) is None
    buffer.extend(torch.arange(SIZE))
    for index, given in ((info["index"], None), (info["index"].view(2, 2), None), (kept, written), (copied, written),
                         (copied.numpy(), written), (copied, torch.full((4,), written))):  # fmt: skip
        buffer.update_priority(index, 5.0, written=given)
        assert priorities(buffer) == [1.0] * SIZE
    buffer.update_priority(copied, 5.0)
    assert 5.0 in priorities(buffer)


VIEWS = [lambda i: i, lambda i: i.detach(), lambda i: i.data, lambda i: i.view(2, 2)[0], lambda i: i.detach()[:2].data]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("ask", ["sample", "extend", "add"])
def test_views_share_the_note(ask, view, inference):
    sampler = fc.PrioritizedSampler(SIZE, alpha=1.0, beta=1.0, eps=0)
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(SIZE, ndim=2), sampler=sampler, batch_size=4)
    lanes = TensorDict({"x": torch.arange(SIZE).view(4, 2)}, [4, 2])
    buffer.extend(lanes)
    with torch.inference_mode(inference):
        if ask == "sample":
            index = buffer.sample(return_info=True)[1]["index"]
        else:
            index = buffer.extend(lanes[:, :1]).squeeze(-1) if ask == "extend" else buffer.add(lanes[:, 0])
        buffer.extend(lanes)
        buffer.update_priority(view(index), 0.5)
    assert priorities(buffer) == [1.0] * SIZE


def test_an_index_of_something_else():
    buffer, index = made(5)
    buffer.update_priority(index, 2.0, written=5)
    _, info = buffer.sample(return_info=True)
    assert all(value.shape == (4,) for value in info.values())  # so that they can be set in the sample
    with pytest.raises(ValueError, match=r"written is 500, expected 0 to 5, .* pass what written_at"):
        buffer.update_priority(index, 3.0, written=500)
    with pytest.raises(TypeError, match="index is TensorDict, expected integers"):
        buffer.update_priority(frames(3), 3.0)
    assert priorities(buffer) == [2.0] * 5


@pytest.mark.parametrize("how", ["empty", "loads"])
@pytest.mark.parametrize("again", [3, SIZE])
def test_frames_of_an_earlier_life(how, again, tmp_path):
    sampler = fc.PrioritizedSampler(SIZE, alpha=1.0, beta=1.0, eps=0)
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(SIZE), sampler=sampler)
    index = buffer.extend(frames(5))
    buffer.dumps(tmp_path)
    buffer.empty() if how == "empty" else buffer.loads(tmp_path)
    buffer.update_priority(index, 5.0)
    assert set(priorities(buffer)) <= {1.0}
    fresh = buffer.extend(frames(again))
    buffer.update_priority(index, 5.0)
    assert set(priorities(buffer)) == {1.0}
    buffer.update_priority(fresh, 2.0)
    assert priorities(buffer).count(2.0) == again


def test_frames_that_did_not_fit():
    buffer, index = made(SIZE + 3)
    assert index[:3].tolist() == [-1] * 3
    buffer.update_priority(index, torch.arange(SIZE + 3.0))
    assert sorted(priorities(buffer)) == list(range(3, SIZE + 3))
    buffer.update_priority(index[:3], 0.5)
    assert 0.5 not in priorities(buffer)


def test_a_priority_of_zero_does_not_remove_a_frame():
    sampler = fc.PrioritizedSampler(SIZE, alpha=0.5, beta=1.0, eps=1e-2)
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(SIZE), sampler=sampler, batch_size=2000)
    index = buffer.extend(torch.arange(SIZE))
    buffer.update_priority(index, 0.0)
    assert buffer.sample().unique().tolist() == list(range(SIZE))
    buffer.update_priority(index, torch.arange(SIZE) * 1.0)
    torch.testing.assert_close(torch.tensor(priorities(buffer)), (torch.arange(SIZE) + 1e-2).sqrt())
