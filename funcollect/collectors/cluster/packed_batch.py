"""Packs a batch as one piece of memory and its layout, as it is sent from one machine to another."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from tensordict import TensorDictBase
from torch import Tensor

from funcollect.collectors.workers.batch_layout import BatchLayout, Memory, PackedLayout, columns_of, copy_into
from funcollect.core.request import NOWHERE, OwnColumns
from funcollect.tree import Path, flatten


def private_memory(size: int) -> Memory:
    """`size` bytes that only this process has, aligned to a page."""
    return np.frombuffer(mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


class PackedBatch(NamedTuple):
    """A batch as it is sent: its memory, and its layout, which only a worker's first batch has."""

    packed_layout: PackedLayout | None
    memory: Memory


class Packer:
    """Packs each batch into the same memory, from where it has to be copied before the next one.

    Attributes:
        columns: views of the memory, [T, P, ...] each. A rollout that is recorded there is packed without a copy.
    """

    def __init__(self) -> None:
        self._packed_layout: PackedLayout | None = None
        self._memory = private_memory(0)
        self._leaves: Mapping[Path, Tensor] = {}
        self.columns: OwnColumns = NOWHERE

    def pack(self, batch: TensorDictBase, single: bool | None) -> PackedBatch:
        """Pack a batch.

        Args:
            batch: a worker's batch.
            single: for a rollout, whether its environment has no batch dimension; None for a batch of several workers.

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
        return layout.packed


def packed(leaves: Mapping[Path, Tensor]) -> PackedBatch:
    """Pack copies of tensors."""
    packed_layout = PackedLayout.packed(leaves)
    memory = private_memory(packed_layout.size)
    copy_into(packed_layout.leaves(memory), leaves)
    return PackedBatch(packed_layout, memory)
