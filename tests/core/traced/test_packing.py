"""Rows in few arrays: every leaf comes back, whatever its dtype and shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from funcollect.core.traced_step import columns
from funcollect.core.traced_step.columns import PackedRows, write_row
from funcollect.interop import words
from funcollect.interop.bridge import torch_view

DTYPES = ["bool", "uint8", "int8", "float16", "bfloat16", "int16", "uint16", "int32", "uint32", "float32", "complex64"]
SHAPES = [(3,), (3, 2), (3, 1, 5), (0,), (3, 0), ()]


def rows_of(length):
    random = np.random.default_rng(0)
    return [
        {
            (name, str(shape)): jnp.asarray(random.integers(0, 2, shape)).astype(name)
            for name in DTYPES
            for shape in SHAPES
        }
        for _ in range(length)
    ]


@pytest.mark.parametrize("large", [1 << 22, 12, 0])
@pytest.mark.parametrize("length", [1, 4])
def test_every_leaf_comes_back(length, large, monkeypatch):
    monkeypatch.setattr(columns, "_LARGE", large)
    rows = rows_of(length)
    layout = PackedRows(rows[0])
    packed = layout.zeros(length)
    for t, row in enumerate(rows):
        packed = jax.jit(lambda packed, row, t: write_row(packed, layout.pack(row), t))(packed, row, t)
    shared = {"int8", "int16", "int32", "complex64"} if large else set()
    assert shared == {name for name in packed if not name.startswith("large")}
    assert len(packed) - len(shared) == sum(leaf.nbytes >= large for leaf in rows[0].values())
    leaves = layout.unpack({name: torch_view(array) for name, array in packed.items()})
    assert leaves.keys() == rows[0].keys()
    for path, leaf in leaves.items():
        wanted = torch.stack([torch_view(row[path]) for row in rows])
        assert leaf.dtype == wanted.dtype
        assert torch.equal(leaf, wanted)


def test_words_of_an_odd_number_of_lanes_become_int64_without_a_copy():
    row = {("a",): jnp.ones(3, jnp.int32), ("b",): jnp.array([[7, 1], [8, 0], [-1, -1]], jnp.int32)}
    layout = PackedRows(row)
    column = torch_view(layout.pack(row)["int32"][None])
    leaf = words.as_int64(layout.unpack({"int32": column})["b",])
    assert leaf.tolist() == [[2**32 + 7, 8, -1]]
    assert leaf.untyped_storage().data_ptr() == column.data_ptr()
