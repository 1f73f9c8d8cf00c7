"""A batch as one piece of memory and a description of it, which is how it goes from one machine to another."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from funcollect.collectors.workers.batch_layout import BatchLayout, LeafView, Memory, columns_of, copy_into
from funcollect.core.request import NOWHERE, OwnColumns
from funcollect.tree import Path, aliased, flatten, nest

_ALIGNMENT = 64  # bytes


def private_memory(size: int) -> Memory:
    """So many bytes of this process alone, which begin with a page."""
    return np.frombuffer(mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


@dataclass(frozen=True)
class PackedLayout:
    """How leaves lie in one piece of memory.

    Attributes:
        views: one per leaf.
        batch_size: of the batch that they make.
        size: bytes, a multiple of every leaf's alignment.
    """

    views: tuple[LeafView, ...]
    batch_size: tuple[int, ...]
    size: int

    @classmethod
    def packed(cls, leaves: Mapping[Path, Tensor], batch_size: tuple[int, ...] = ()) -> PackedLayout:
        """One leaf after another, each contiguous."""
        views, size = [], 0
        for path, leaf in leaves.items():
            strides = torch.empty(leaf.shape, device="meta").stride()
            views.append(LeafView(path, leaf.dtype, tuple(leaf.shape), strides, size // leaf.dtype.itemsize))
            size += _aligned(leaf.numel() * leaf.dtype.itemsize)
        return cls(tuple(views), batch_size, size)

    @classmethod
    def of(cls, leaves: Mapping[Path, Tensor], batch_size: tuple[int, ...], memory: Memory) -> PackedLayout:
        """That of a batch whose leaves are views of `memory`."""
        start = memory.ctypes.data
        views = tuple(
            LeafView(
                path, leaf.dtype, tuple(leaf.shape), leaf.stride(), (leaf.data_ptr() - start) // leaf.dtype.itemsize
            )
            for path, leaf in leaves.items()
        )
        return cls(views, batch_size, len(memory))

    def leaves(self, memory: Memory, count: int | None = None) -> dict[Path, Tensor]:
        """The leaves by path, views of `memory`; with `count`, of so many batches one after another: [count, ...]."""
        flat = torch.from_numpy(memory)
        typed = {dtype: flat.view(dtype) for dtype in {view.dtype for view in self.views}}
        lead = () if count is None else (count,)
        return {
            view.path: typed[view.dtype].as_strided(
                (*lead, *view.size), (*[self.size // view.dtype.itemsize for _ in lead], *view.stride), view.offset
            )
            for view in self.views
        }

    def batch(self, memory: Memory, count: int | None = None) -> Any:
        """The batch, whose leaves hold on to `memory` itself; with `count`, that of as many packed batches, stacked."""
        lead = () if count is None else (count,)
        return aliased(nest(self.leaves(memory, count)), torch.Size((*lead, *self.batch_size)))


class PackedBatch(NamedTuple):
    """A batch as it travels: its memory, and its layout unless the worker's batch before had the same."""

    packed_layout: PackedLayout | None
    memory: Memory


class Packer:
    """Puts one batch after another into the same memory, from which each has to be copied before the next.

    Attributes:
        columns: where a rollout may be recorded so that packing does not copy it: [T, P, ...] each, of the memory.
    """

    def __init__(self) -> None:
        self._packed_layout: PackedLayout | None = None
        self._memory = private_memory(0)
        self._leaves: Mapping[Path, Tensor] = {}
        self.columns: OwnColumns = NOWHERE

    def pack(self, batch: TensorDictBase, single: bool | None) -> PackedBatch:
        """A batch, packed.

        Args:
            batch: of the worker.
            single: of a rollout whether its environment has no batch dimension; None for a batch of several workers.

        Raises:
            ValueError: for a batch with other keys or shapes than the first one.
        """
        packed_layout = None
        if self._packed_layout is None:
            packed_layout = self._packed_layout = self._open(batch, single)
            self._leaves = packed_layout.leaves(self._memory)
        copy_into(self._leaves, flatten(batch))
        return PackedBatch(packed_layout, self._memory)

    def _open(self, batch: TensorDictBase, single: bool | None) -> PackedLayout:
        if single is None:
            packed_layout = PackedLayout.packed(flatten(batch), tuple(batch.batch_size))
            self._memory = private_memory(packed_layout.size)
            return packed_layout
        layout = BatchLayout(columns_of(batch, single), (batch.batch_size[-1],), None, single)
        self._memory = private_memory(layout.size)
        self.columns = layout.part(self._memory, 0)
        return PackedLayout.of(*layout.batch(self._memory), self._memory)


def packed(leaves: Mapping[Path, Tensor]) -> PackedBatch:
    """Copies of tensors, packed."""
    packed_layout = PackedLayout.packed(leaves)
    memory = private_memory(packed_layout.size)
    copy_into(packed_layout.leaves(memory), leaves)
    return PackedBatch(packed_layout, memory)


def _aligned(size: int) -> int:
    return math.ceil(size / _ALIGNMENT) * _ALIGNMENT
