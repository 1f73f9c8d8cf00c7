"""Where rollouts of Ray actors become batches: one copy out of the object store, into memory that is used again."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from tensordict import TensorDict

from funcollect.collectors.cluster.packed_batch import PackedBatch, PackedLayout, private_memory
from funcollect.collectors.workers.batch_layout import Memory
from funcollect.collectors.workers.transport import Call, PendingBatch, WorkerGroup
from funcollect.errors import WorkerError

_MOST_IDLE = 3  # pieces of a size that wait to be written again: fresh memory costs ten times a copy into warm one


class MemoryPool:
    """Memory of this process that is lent to batches, and taken back once no view of it lives."""

    def __init__(self) -> None:
        self._idle: defaultdict[int, list[Memory]] = defaultdict(list)

    def lend(self, size: int) -> Memory:
        """A piece of so many bytes, with whatever is in it."""
        idle = self._idle[size]
        memory = idle.pop() if idle else private_memory(size)
        lent = np.frombuffer(memory, np.uint8)  # all views refer to this very array
        weakref.finalize(lent, self._take_back, memory).atexit = False
        return lent

    def _take_back(self, memory: Memory) -> None:
        idle = self._idle[len(memory)]
        if len(idle) < _MOST_IDLE:
            idle.append(memory)


class RayAssembler:
    """See `funcollect.collectors.workers.transport.BatchAssembler`. Rollouts of several actors are stacked."""

    copies = 0

    def __init__(self, submit: Callable[[Call], Call], group: WorkerGroup, memory_pool: MemoryPool) -> None:
        self._submit = submit
        self._group = group
        self._memory_pool = memory_pool

    def room(self) -> bool:
        """Whether another batch may be begun."""
        return True

    def begin(self) -> PendingBatch:
        """Have every worker of the group collect one rollout."""
        return PendingBatch([self._submit(Call(worker, "collect")) for worker in self._group.workers])

    def complete(self, pending: PendingBatch) -> bool:
        """Whether the batch is whole."""
        return True

    def deliver(self, pending: PendingBatch) -> TensorDict:
        """The batch, after which the object store is rid of it."""
        packed_batches: list[PackedBatch] = [call.value[0] for call in pending.calls]
        packed_layout = self._packed_layout(pending.calls, packed_batches)
        memory = self._memory_pool.lend(len(packed_batches) * packed_layout.size)
        for part, packed_batch in enumerate(packed_batches):
            np.copyto(memory[part * packed_layout.size : (part + 1) * packed_layout.size], packed_batch.memory)
        batch: TensorDict = packed_layout.batch(memory, None if self._group.join is None else len(packed_batches))
        for call in pending.calls:
            call.value = (None, call.value[1])
        return batch

    def _packed_layout(self, calls: Sequence[Call], packed_batches: Sequence[PackedBatch]) -> PackedLayout:
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

    def restarted(self, worker: int) -> Sequence[Call]:
        """Nothing is needed."""
        return ()

    def close(self) -> None:
        """Batches keep their memory."""
