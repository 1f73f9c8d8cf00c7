"""Workers in processes. Rollouts and weights lie in slots of shared memory, and batches are views of slots."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from sys import getrefcount
from typing import Any

import cloudpickle
import torch
from tensordict import TensorDict
from torch import Tensor
from typing_extensions import override

from funcollect.collectors.workers.gathering import BatchAssembler, Means, PendingBatch, WorkerGroup, check_same_leaves
from funcollect.collectors.workers.weights import WITH_WEIGHTS, FetchCall, WeightStore
from funcollect.collectors.workers.worker import Job, Worker, copy_into, turned
from funcollect.core.request import NOWHERE
from funcollect.errors import WorkerError
from funcollect.processes.memory import LeafPlace, Memory, MemoryLayout, mapped, shared_memory
from funcollect.processes.pool import Call
from funcollect.processes.serving import ProcessTransport, serve
from funcollect.tree import Path, form_of

_NUMBERS = itertools.count()  # one for each memory for weights, by which workers know it


@dataclass(frozen=True)
class BatchLayout:
    """The places of a worker group's rollouts in one memory, such that the batch is a view of it."""

    columns: tuple[LeafPlace, ...]  # the leaves of each worker's rollout, without T: [P, ...]
    group: WorkerGroup

    @property
    def _side_by_side(self) -> bool:
        """Whether the workers' rows of one step lie side by side, [T, W, P, ...], not one worker after another."""
        return self.group.join == 0 and not self.group.single

    @cached_property
    def whole(self) -> MemoryLayout:
        """Every column of all workers: [T, W, P, ...], or [sum of T, P, ...]."""
        lengths = self.group.lengths
        lead = (lengths[0], len(lengths)) if self._side_by_side else (sum(lengths),)
        return MemoryLayout(tuple(column._replace(shape=(*lead, *column.shape)) for column in self.columns))

    def part(self, memory: Memory, index: int) -> dict[Path, Tensor]:
        """One worker's columns, each [T, P, ...]."""
        first, length = sum(self.group.lengths[:index]), self.group.lengths[index]
        rows = (slice(None), index) if self._side_by_side else slice(first, first + length)
        return {path: column[rows] for path, column in self.whole.leaves(memory).items()}

    def leaves(self, memory: Memory) -> dict[Path, Tensor]:
        """The leaves of the whole batch, views of one storage."""
        return {path: self._joined(column) for path, column in self.whole.leaves(memory).items()}

    def _joined(self, column: Tensor) -> Tensor:  # from the shape in `whole` to that of a batch
        _, lengths, join, single, _ = self.group
        if self._side_by_side:
            return column.flatten(1, 2).transpose(0, 1)
        if join == "stack":
            column = column.view(len(lengths), lengths[0], *column.shape[1:])
            return column.squeeze(2) if single else column.transpose(1, 2)
        return column.squeeze(1) if single else column.transpose(0, 1)


class BatchSlot:
    """Memory for one batch. It belongs to the reader for as long as a view of it is alive.

    Each batch is made of aliases of the same tensors. So everything that a reader may keep (slices, arrays, an autograd
    graph) refers to one storage, and the reference counts of that storage show whether any of it is alive.
    """

    def __init__(self, layout: BatchLayout, memory: Memory) -> None:
        self.memory, self._layout = memory, layout
        self._open()

    def _open(self) -> None:
        """Make the tensors of the slot, and record the reference counts that they have by themselves."""
        leaves = self._layout.leaves(self.memory)
        self._form = form_of(tuple(leaves), leaves["next", "done"].shape[:-1], with_time=True, locked=False)
        self._leaves = [*leaves.values()]
        self._first = self._leaves[0]
        self._address = self._first.data_ptr()
        self._storage = self._first.untyped_storage()
        self._own_references = self._references()

    def _references(self) -> tuple[int, int]:
        """The reference counts of the storage: from tensors and arrays, and from Python."""
        return torch._C._storage_Use_Count(self._storage._cdata), getrefcount(self._storage)

    @property
    def lent(self) -> bool:
        """Whether a view of the memory is alive."""
        return self._references() != self._own_references

    def batch(self) -> TensorDict:
        """The batch that is in the slot."""
        if self._first.data_ptr() != self._address:  # `share_memory_` has given the storage other memory
            self._open()
        return self._form.filled([leaf.data for leaf in self._leaves])


class SlotAssembler(BatchAssembler):
    """Makes batches in slots that workers write into. The first rollouts are sent whole, and determine the layout."""

    _layout: BatchLayout
    _fd: int

    def __init__(self, submit: Callable[[Call], Call], group: WorkerGroup) -> None:
        super().__init__(submit, group)
        self._slots: list[BatchSlot] = []  # none before the first rollouts have shown the layout
        self._written: set[int] = set()  # slots with a batch that is being collected, or not delivered

    def _free(self) -> Iterator[int]:
        """The slots that neither the reader nor a worker uses."""
        unwritten = (slot for slot in range(self.group.slots) if slot not in self._written)
        return (slot for slot in unwritten if not self._slots or not self._slots[slot].lent)

    @override
    def room(self) -> bool:
        only_one = not self._slots  # batch, before there are slots
        return not (only_one and self._written) and next(self._free(), None) is not None

    @override
    def begin(self, version: int) -> PendingBatch:
        slot = next(self._free())
        self._written.add(slot)
        calls = [self._submit(Call(worker, "collect", (slot,), plain=True)) for worker in self.group.workers]
        return PendingBatch(calls, version, slot)

    @override
    def complete(self, pending: PendingBatch) -> None:
        if self._slots:
            return
        rollouts: list[Mapping[Path, Tensor]] = [call.value[0] for call in pending.calls]
        slots = self._allocate(rollouts)
        for part, rollout in enumerate(rollouts):
            copy_into(self._layout.part(slots[pending.slot].memory, part), rollout)
            self._submit(self._attach(part))
        self._slots = slots

    def _allocate(self, rollouts: Sequence[Mapping[Path, Tensor]]) -> list[BatchSlot]:
        """Slots for rollouts like these, [T, P, ...]; WorkerError if they differ, or there is no memory."""
        workers, count = self.group.workers, self.group.slots
        columns = [MemoryLayout.of({path: leaf[0] for path, leaf in each.items()}).columns for each in rollouts]
        check_same_leaves(workers, [{*each} for each in columns])
        self._layout = BatchLayout(columns[0], self.group)
        try:
            self._fd, memories = shared_memory(count, self._layout.whole.size)
        except MemoryError as error:
            what = f"worker {workers[0]}: {error} as {count} slots for rollouts"
            mend = "collect fewer frames at once, or let the machine have more memory"
            raise WorkerError(f"{what}: {mend}", workers[0]) from error
        return [BatchSlot(self._layout, memory) for memory in memories]

    def _attach(self, part: int) -> Call:
        return Call(self.group.workers[part], "attach", (self._layout, part), (self._fd,))

    @override
    def deliver(self, pending: PendingBatch) -> TensorDict:
        copied = all(slot.lent for number, slot in enumerate(self._slots) if number != pending.slot)
        batch = self._slots[pending.slot].batch()
        if copied:
            self.copies += 1
            batch = batch.clone()
        self._written.discard(pending.slot)
        return batch

    @override
    def restarted(self, worker: int) -> Sequence[Call]:
        return [self._attach(self.group.workers.index(worker))] if self._slots else []

    @override
    def close(self) -> None:
        if self._slots:
            os.close(self._fd)
            self._slots = []


class _WeightSlots:
    """Slots for weights of one layout. Their memory is freed with this object."""

    def __init__(self, layout: MemoryLayout, count: int) -> None:
        self.layout, self._count, self._number = layout, count, next(_NUMBERS)
        self._fd, memories = shared_memory(count, layout.size)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._weights = [layout.leaves(memory) for memory in memories]
        self._held: weakref.WeakValueDictionary[int, FetchCall] = weakref.WeakValueDictionary()

    def put(self, leaves: Mapping[Path, Tensor]) -> FetchCall | None:
        """Copy weights into a slot, which stays as it is while the result is alive; None if no slot is free."""
        for slot, memory in enumerate(self._weights):
            if slot not in self._held:
                for path, weight in memory.items():
                    weight.copy_(leaves[path])
                held = self._held[slot] = partial(self._call, slot)
                return held
        return None

    def _call(self, slot: int, worker: int, version: int, policy: bytes | None) -> Call:
        arguments = slot, version, policy, self.layout, self._count, self._number
        return Call(worker, "fetch", arguments, (self._fd,))

    def close(self) -> None:
        """Free the memory, whoever holds a slot."""
        self._close()
        self._weights = []


class SharedWeightStore(WeightStore):
    """Weights in slots of shared memory: one for each worker to read, one with the latest weights, and one to write.

    Weights with other names, dtypes or shapes get new slots.
    """

    def __init__(self, workers: int) -> None:
        self._count = workers + 2
        self._slots: _WeightSlots | None = None

    @override
    def put(self, weights: Mapping[str, Tensor]) -> FetchCall | None:
        leaves: dict[Path, Tensor] = {(name,): weight for name, weight in weights.items()}
        layout = MemoryLayout.of(leaves)
        if self._slots is None or self._slots.layout != layout:
            self._slots = _WeightSlots(layout, self._count)
        return self._slots.put(leaves)

    @override
    def close(self) -> None:
        if self._slots is not None:
            self._slots.close()


def over_processes(workers: int, *, num_threads: int, accelerators: bool, eager: bool) -> Means:
    """Workers in processes. If they are `eager`, they take new weights before rollouts that were requested earlier."""
    instead, urgent = "use SyncDataCollector, or in_process=True", WITH_WEIGHTS if eager else ()
    transport = ProcessTransport(__name__, instead, num_threads=num_threads, accelerators=accelerators, urgent=urgent)
    return Means(transport, SlotAssembler, SharedWeightStore(workers))


def main(fds: Sequence[int]) -> None:
    """Serve the collector that has started this process."""
    serve(fds, lambda packed: SlotWorker(cloudpickle.loads(packed)))


class SlotWorker(Worker):
    """A worker whose rollouts and weights lie in shared memory."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._single = self._runner.env.num_envs is None
        self._slots: list[Mapping[Path, Tensor]] = []  # none before the first rollout has shown their layout
        self._weights: Sequence[Mapping[str, Tensor]] = ()  # by slot
        self._number = -1  # of the memory with these slots, see `_NUMBERS`

    @override
    def collect(self, slot: int = 0) -> tuple[Mapping[Path, Tensor] | None, tuple[Any, ...]]:
        """Write a rollout into a slot; while there are no slots, return its columns. Also return its report."""
        columns = self._slots[slot] if self._slots else NOWHERE
        batch, report = self.roll_out(columns)
        leaves = turned(batch, self._single)
        if not self._slots:
            return {path: leaf.to("cpu", copy=True) for path, leaf in leaves.items()}, report
        copy_into(columns, leaves)
        return None, report

    def attach(self, layout: BatchLayout, part: int, fd: int) -> None:
        """Write into these slots from now on."""
        self._slots = [layout.part(memory, part) for memory in mapped(fd, layout.group.slots, layout.whole.size)]

    def fetch(
        self, slot: int, version: int, policy: bytes | None, layout: MemoryLayout, count: int, number: int, fd: int
    ) -> None:
        """Act with a copy of the weights in a slot. The slots of each memory are mapped once."""
        if number != self._number:
            views = (layout.leaves(memory) for memory in mapped(fd, count, layout.size))
            self._weights, self._number = [{path[0]: leaf for path, leaf in each.items()} for each in views], number
        self.adopt(self._weights[slot], version, policy)
