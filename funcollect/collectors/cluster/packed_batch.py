"""Packs a worker's batch into one array, and makes batches of such arrays that come from Ray actors.

An array is copied once out of the object store, into memory that is used again.
"""

from __future__ import annotations

import mmap
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import override

from funcollect.collectors.workers.batch_layout import BatchLayout, PackedLayout, columns_of, copy_into
from funcollect.collectors.workers.gathering import BatchAssembler, PendingBatch, WorkerGroup
from funcollect.core.request import NOWHERE, OwnColumns
from funcollect.errors import WorkerError
from funcollect.processes.pool import Call
from funcollect.processes.shared_memory import Memory
from funcollect.tree import Path, flatten

_MOST_IDLE = 3  # pieces of a size that wait to be written again: fresh memory costs ten times a copy into warm one


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
        """Pack a batch. `single`: whether the rollout's environment has no batch dimension; None for several workers.

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
        """Allocate the memory for batches like this one; for a rollout, also the `columns` that the loop writes."""
        if single is None:
            packed_layout = PackedLayout.packed(flatten(batch), tuple(batch.batch_size))
            self._memory = private_memory(packed_layout.size)
            return packed_layout
        layout = BatchLayout(columns_of(batch, single), (batch.batch_size[-1],), None, single)
        self._memory = private_memory(layout.size)
        self.columns = layout.part(self._memory, 0)
        return layout.packed


class MemoryPool:
    """Memory of this process that batches borrow, and return once no view of it lives."""

    def __init__(self) -> None:
        self._idle: defaultdict[int, list[Memory]] = defaultdict(list)

    def lend(self, size: int) -> Memory:
        """A piece of `size` bytes, not cleared."""
        idle = self._idle[size]
        memory = idle.pop() if idle else private_memory(size)
        lent = np.frombuffer(memory, np.uint8)  # all views refer to this very array
        weakref.finalize(lent, self._take_back, memory).atexit = False
        return lent

    def _take_back(self, memory: Memory) -> None:
        idle = self._idle[len(memory)]
        if len(idle) < _MOST_IDLE:
            idle.append(memory)


class RayAssembler(BatchAssembler):
    """Copies rollouts of actors out of the object store; those of several actors are stacked."""

    def __init__(self, submit: Callable[[Call], Call], group: WorkerGroup, memory_pool: MemoryPool) -> None:
        super().__init__(submit, group)
        self._memory_pool = memory_pool

    @override
    def deliver(self, pending: PendingBatch) -> TensorDict:
        packed_batches: list[PackedBatch] = [call.value[0] for call in pending.calls]
        packed_layout = self._packed_layout(pending.calls, packed_batches)
        memory = self._memory_pool.lend(len(packed_batches) * packed_layout.size)
        np.concatenate([packed_batch.memory for packed_batch in packed_batches], out=memory)
        batch: TensorDict = packed_layout.batch(memory, None if self._group.join is None else len(packed_batches))
        for call in pending.calls:
            call.value = (None, call.value[1])  # so that the object store drops the rollout
        return batch

    def _packed_layout(self, calls: Sequence[Call], packed_batches: Sequence[PackedBatch]) -> PackedLayout:
        """The layout of all these batches; `WorkerError` if they differ."""
        first = packed_batches[0].packed_layout
        assert first is not None
        for call, packed_batch in zip(calls, packed_batches, strict=True):
            if packed_batch.packed_layout != first:
                raise WorkerError(
                    f"worker {call.worker}: its batch has other leaves, shapes or dtypes than that of worker "
                    f"{calls[0].worker}: give all workers equal spaces and policies",
                    call.worker,
                )
        return first
