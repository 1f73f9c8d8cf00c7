"""Slots of shared memory into which workers write whole rollouts, and batches that are views of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDict
from typing_extensions import override

from funcollect.collectors.processes.shared_memory import mapped, shared_memory
from funcollect.collectors.workers.batch_layout import BatchColumn, BatchLayout, Memory
from funcollect.collectors.workers.transport import BatchAssembler, Call, PendingBatch, WorkerGroup
from funcollect.errors import WorkerError
from funcollect.tree import aliased, nest

_SLOTS = 3  # one that the reader holds, one that is ready, one that is being written


class BatchSlot:
    """A piece of memory for one batch. It belongs to the reader as long as a view of it lives.

    Each batch is made of aliases of the same tensors. So everything that a reader may keep (slices, arrays, an autograd
    graph) refers to one storage, and the reference counts of that storage show whether any of it lives.
    """

    def __init__(self, layout: BatchLayout, memory: Memory) -> None:
        self._layout = layout
        self._memory = memory
        self._open()

    def _open(self) -> None:
        leaves = self._layout.packed.leaves(self._memory)
        self._leaves, self._size = nest(leaves), torch.Size(self._layout.packed.batch_size)
        self._first = next(iter(leaves.values()))
        self._address = self._first.data_ptr()
        self._storage = self._first.untyped_storage()
        self._own = self._references()

    def _references(self) -> tuple[int, int]:
        """The reference counts of the storage: from tensors and arrays, and from Python."""
        return torch._C._storage_Use_Count(self._storage._cdata), sys.getrefcount(self._storage)

    @property
    def lent(self) -> bool:
        """Whether a view of it lives."""
        return self._references() != self._own

    def batch(self) -> TensorDict:
        """The batch that is in the slot."""
        if self._first.data_ptr() != self._address:  # `share_memory_` has given the storage other memory
            self._open()
        return aliased(self._leaves, self._size)


class SharedSlots:
    """Slots of one layout in one shared memory."""

    def __init__(self, layout: BatchLayout) -> None:
        self.layout = layout
        self.fd = shared_memory(_SLOTS * layout.size)
        self._slots = [BatchSlot(layout, memory) for memory in mapped(self.fd, _SLOTS, layout.size)]

    def __getitem__(self, slot: int) -> BatchSlot:
        return self._slots[slot]

    def close(self) -> None:
        """Release the memory; batches keep theirs."""
        os.close(self.fd)


class SlotAssembler(BatchAssembler):
    """Workers write into slots of shared memory, and a batch is a view of its slot.

    The layout follows from the first rollouts. The workers keep these until they have attached the slots.
    """

    def __init__(self, submit: Callable[[Call], Call], group: WorkerGroup) -> None:
        super().__init__(submit, group)
        self._slots: SharedSlots | None = None
        self._lent: set[int] = set()
        self._written: set[int] = set()

    @property
    def lent(self) -> set[int]:
        """The slots that the reader holds views of."""
        self._lent = {slot for slot in self._lent if self._slots is not None and self._slots[slot].lent}
        return self._lent

    def _free(self) -> list[int]:
        taken = self.lent | self._written
        return [slot for slot in range(_SLOTS) if slot not in taken]

    @override
    def room(self) -> bool:
        return bool(self._free()) and (self._slots is not None or not self._written)  # only one before there are slots

    @override
    def begin(self) -> PendingBatch:
        slot = self._free()[0]
        self._written.add(slot)
        return PendingBatch([self._collect(worker, slot) for worker in self._group.workers], slot)

    def _collect(self, worker: int, slot: int) -> Call:
        return self._submit(Call(worker, "collect", (slot,)))

    @override
    def complete(self, pending: PendingBatch) -> bool:
        if all(call.value is not None and call.value[0] is None for call in pending.calls):
            return True
        if self._slots is None:
            self._slots = self._allocated([call.value[0] for call in pending.calls])
        for part, call in enumerate(pending.calls):
            if call.value is None:  # its worker was replaced before it could write
                pending.calls[part] = self._collect(call.worker, pending.slot)
            elif call.value[0] is not None:
                pending.calls[part] = self._submit(self._attach(part))
        return False

    def _allocated(self, columns: Sequence[tuple[BatchColumn, ...]]) -> SharedSlots:
        first = self._group.workers[0]
        for worker, own in zip(self._group.workers, columns, strict=True):
            if own != columns[0]:
                one, other = (sorted(".".join(column.path) for column in set(each)) for each in (own, columns[0]))
                raise WorkerError(
                    f"worker {worker}: its batch has other leaves than that of worker {first}, {one} and "
                    f"{other} with their dtypes and shapes: give all workers equal spaces and policies",
                    worker,
                )
        layout = BatchLayout(columns[0], self._group.lengths, self._group.join, self._group.single)
        try:
            return SharedSlots(layout)
        except MemoryError as error:
            raise WorkerError(
                f"worker {first}: {error} as {_SLOTS} slots for rollouts: collect fewer frames at once, or "
                "let the machine have more memory",
                first,
            ) from error

    def _attach(self, part: int) -> Call:
        assert self._slots is not None
        return Call(self._group.workers[part], "attach", (self._slots.layout, part, _SLOTS), (self._slots.fd,))

    @override
    def deliver(self, pending: PendingBatch) -> TensorDict:
        assert self._slots is not None
        batch = self._slots[pending.slot].batch()
        if len(self.lent) < _SLOTS - 1:
            self._lent.add(pending.slot)
        else:
            self.copies += 1
            batch = batch.clone()
        self._written.discard(pending.slot)
        return batch

    @override
    def restarted(self, worker: int) -> Sequence[Call]:
        return [] if self._slots is None else [self._attach(list(self._group.workers).index(worker))]

    @override
    def close(self) -> None:
        if self._slots is not None:
            self._slots.close()
            self._slots = None
