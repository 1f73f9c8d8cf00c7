"""Rows of a rollout in few arrays: one write for all leaves whose elements have the same size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcollect.core.traced_step.step import Row
from funcollect.interop.jax_setup import import_jax
from funcollect.tree import Path

Packed = dict[str, Any]  # arrays [R] of a row, or [T, R] of columns, by the name of their dtype; and the large leaves

_LARGE = 1 << 22  # bytes of a leaf: to write them takes longer than a kernel does by itself
_ALIGNED = 16  # bytes: each leaf begins at a multiple, so that Torch can view two words as an int64


class _Place(NamedTuple):
    """Where a leaf lies in a row."""

    carrier: str  # the dtype of the array that holds it
    first: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class PackedRows:
    """The places of a row's leaves. All but large ones share an array of integers with others of the same size.

    Args:
        row: arrays, or their shapes and dtypes.
    """

    def __init__(self, row: Row) -> None:
        self._places: dict[Path, _Place] = {}
        self._sizes: dict[str, int] = {}
        self._alone: dict[str, tuple[Path, Any]] = {}  # large leaves
        for path, leaf in row.items():
            dtype = np.dtype(leaf.dtype)
            if math.prod(leaf.shape) * dtype.itemsize >= _LARGE:
                self._alone[f"large {len(self._alone)}"] = path, leaf
                continue
            carrier = str(dtype) if dtype.kind == "c" else f"int{8 * dtype.itemsize}"
            first = self._sizes.get(carrier, 0)
            self._places[path] = _Place(carrier, first, tuple(leaf.shape), dtype)
            self._sizes[carrier] = first + _padded(math.prod(leaf.shape), dtype.itemsize)

    def zeros(self, capacity: int) -> Packed:
        """Trace columns [capacity, R] of zeros."""
        zeros = import_jax().numpy.zeros
        shared = {name: zeros((capacity, size), name) for name, size in self._sizes.items()}
        alone = {name: zeros((capacity, *leaf.shape), leaf.dtype) for name, (_, leaf) in self._alone.items()}
        return shared | alone

    def pack(self, row: Row) -> Packed:
        """Trace the arrays [R] of a row."""
        jax = import_jax()
        parts: dict[str, list[Any]] = {name: [] for name in self._sizes}
        for path, place in self._places.items():
            flat = row[path].reshape(-1)
            if place.dtype.kind == "b":
                flat = flat.astype(place.carrier)
            elif str(place.dtype) != place.carrier:
                flat = jax.lax.bitcast_convert_type(flat, place.carrier)
            missing = _padded(flat.size, place.dtype.itemsize) - flat.size
            parts[place.carrier] += [flat, jax.numpy.zeros(missing, place.carrier)] if missing else [flat]
        shared = {name: jax.numpy.concatenate(each) for name, each in parts.items()}
        return shared | {name: row[path] for name, (path, _) in self._alone.items()}

    def unpack(self, columns: Mapping[str, Tensor]) -> dict[Path, Tensor]:
        """The leaves [T, *shape] over the memory of columns [T, R]."""
        shared = {path: _leaf(columns[place.carrier], place) for path, place in self._places.items()}
        return shared | {path: columns[name] for name, (path, _) in self._alone.items()}


def _padded(count: int, itemsize: int) -> int:
    grain = max(_ALIGNED // itemsize, 1)
    return -(-count // grain) * grain


def _leaf(columns: Tensor, place: _Place) -> Tensor:
    flat = columns.narrow(1, place.first, math.prod(place.shape))
    return flat.view(getattr(torch, place.dtype.name)).view(len(columns), *place.shape)
