"""Frames packed in rows and out again, bit for bit."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict

import funcollect as fc
from funcollect.buffers.storages.packed_rows import RowLayout, ViewedRows, leaves_of
from tests.buffers.conftest import filled
from tests.support.compare import assert_same
from tests.support.running import entered, scaled

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e5m2,
]  # fmt: skip


def noise(dtype, shape):
    """Any bits that the dtype can hold, but for bool."""
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return bits.view(dtype)[..., 0]


@settings(max_examples=scaled(25), deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)), min_size=1, max_size=6),
    st.integers(1, 3),
    st.booleans(),
)
def test_any_dtypes_and_shapes(columns, ndim, time_major):
    lead = [2, 3, 5][-ndim:]
    leaves = {}
    for index, (dtype, shape) in enumerate(columns):
        leaf = noise(dtype, (*lead, *shape))
        if time_major:
            leaf = leaf.movedim(ndim - 1, 0).clone(memory_format=torch.contiguous_format).movedim(0, ndim - 1)
        leaves[f"k{index}"] = leaf
    batch = TensorDict({"deep": leaves, "k": leaves["k0"]}, lead)
    layout, rows = packed(batch, ndim)
    layout.check(leaves_of(batch), ndim)
    frames = layout.unpack(layout.records(rows.numpy())).reshape(lead[-1], *lead[:-1])
    assert_same(frames.apply(lambda leaf: leaf.movedim(0, ndim - 1), batch_size=batch.batch_size), batch)
    assert layout.nbytes <= sum(column.element.itemsize for column in layout.columns) + 16


def test_rows_on_a_device_are_laid_out_alike():
    """There, leaves are written and read by strided views; NumPy's way must agree with them."""
    leaves = {"a": torch.randn(2, 3, 2), "b": torch.rand(2, 3, 1) < 0.5, "c": torch.randn(2, 3).double()}
    batch = TensorDict(leaves, [2, 3])
    layout, rows = packed(batch, 2)
    for view, leaf in zip(layout.views(rows), batch.values(), strict=True):
        assert (view == leaf.movedim(1, 0).reshape(view.shape)).all()


@pytest.mark.gpu
def test_storages_on_a_gpu():
    batch = TensorDict({"x": torch.randn(30, 2), "episode": torch.arange(30) // 10}, [30])
    for source in ("cpu", "cuda"):
        memory = filled(batch.to(source), fc.LazyTensorStorage(20, device="cuda"), fc.SliceSampler(slice_len=3))
        assert (memory[:].cpu() == torch.cat([batch[20:], batch[10:20]])).all()
        slices = memory.sample(30).reshape(10, 3)
        assert slices["x"].is_cuda
        assert (slices["episode"] == slices["episode"][:, :1]).all()
    sample, info = filled(batch, fc.LazyMemmapStorage(30, device="cuda")).sample(12, return_info=True)
    assert sample["x"].is_cuda
    assert (sample.cpu() == batch[info["index"]]).all()


def packed(batch, ndim):
    """The layout of a batch, and its rows."""
    layout = RowLayout.of(batch, ndim)
    rows = torch.zeros(batch.numel(), layout.words, dtype=torch.int64)
    ViewedRows(layout, rows).write(0, len(rows), leaves_of(batch), ndim)
    return layout, rows


@pytest.mark.parametrize("leaf", [
    torch.ones(3, requires_grad=True) * 2, torch.tensor([1 + 2j, 3j, 1]).conj(), torch.tensor(5.0).expand(3),
    torch.arange(6)[::2], torch.arange(12).reshape(4, 3).T[:, ::2],
])  # fmt: skip
def test_leaves_that_are_not_plain_memory(leaf):
    layout, rows = packed(TensorDict({"x": leaf}, [3]), 1)
    assert (layout.unpack(rows)["x"] == leaf).all()
    layout.unpack(rows)["x"].zero_()  # a view of the rows
    assert not rows.any()


BATCH = TensorDict({"x": torch.zeros(4, 2), "next": {"reward": torch.zeros(4, 1)}}, [4])


@pytest.mark.parametrize(("other", "message"), [
    (BATCH.exclude("x"), r"the batch lacks \['x'\], expected the keys"),
    (BATCH.clone().set("y", torch.zeros(4)), r"the batch adds \['y'\], expected the keys"),
    (BATCH.clone().set("x", torch.zeros(4, 3)), r"x is \[3\] torch.float32 .* holds \[2\] torch.float32"),
    (BATCH.clone().set(("next", "reward"), torch.zeros(4, 1).double()), r"next.reward is \[1\] torch.float64"),
    (TensorDict({"x": BATCH["x"], "next": {}, "reward": BATCH["next", "reward"]}, [4]), r"lacks \['next.reward'\] and"),
])  # fmt: skip
def test_batches_that_do_not_fit_name_key_and_shapes(other, message):
    buffer = filled(BATCH + 1)
    with pytest.raises(ValueError, match=message):
        buffer.extend(other)
    assert len(buffer) == 4
    assert (buffer[:] == BATCH + 1).all()


def noisy(*lead):
    return noise(torch.int64, (*lead, 2))


def noisy_batch(*lead):
    return TensorDict({"a": noisy(*lead), "next": {"b": noisy(*lead), "c": noisy(*lead)}}, lead)


@pytest.mark.parametrize("other", [
    lambda: noisy_batch(2, 3), lambda: noisy_batch(3, 2), lambda: noisy_batch(2, 1), lambda: noisy_batch(1, 3),
    lambda: noisy_batch(2, 0), lambda: noisy_batch(5, 4), lambda: noisy_batch(3, 2).transpose(0, 1),
    lambda: TensorDict({"next": {"c": noisy(2, 3), "b": noisy(2, 3)}, "a": noisy(2, 3)}, [2, 3]),
    lambda: TensorDict({"a": noisy(2, 3), "next": TensorDict({"c": noisy(2, 3), "b": noisy(2, 3)}, [2])}, [2, 3]),
    lambda: LazyStackedTensorDict(*noisy_batch(2, 3)),
])  # fmt: skip
def test_batches_that_change_their_form_and_batches_that_keep_it(other):
    """One with the form of the batch before it is not checked again."""
    buffer, usual = fc.ReplayBuffer(storage=fc.LazyTensorStorage(19, ndim=2)), lambda: noisy_batch(2, 3)
    for make in (usual, usual, other, other, usual, usual):
        batch = make()
        slots = buffer.extend(batch)
        stored = slots >= 0
        assert slots.shape == batch.shape
        assert (buffer[slots[stored]] == batch[stored]).all()


def test_a_frame_and_a_sample_cost_few_calls():
    """What depends on the form of a batch is prepared at the first one."""
    buffer, frame = filled(BATCH[:1], 9, batch_size=4), BATCH[1:2]
    buffer.sample()
    assert len(entered(buffer.extend, frame)) <= 25
    assert len(entered(buffer.sample)) <= 25


def test_a_copy_of_rows_is_written_and_read_as_one():
    storage = copy.deepcopy(filled(BATCH).storage)
    storage.write(storage.admit(BATCH + 1), 2)
    assert (storage.read(np.arange(6)) == torch.cat([BATCH[:2], BATCH + 1])).all()
