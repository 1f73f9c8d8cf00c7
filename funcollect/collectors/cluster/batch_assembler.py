"""Makes batches of the rollouts of Ray actors: one copy out of the object store, into memory that is used again."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from tensordict import TensorDict
from typing_extensions import override

from funcollect.collectors.cluster.packed_batch import PackedBatch, private_memory
from funcollect.collectors.workers.batch_layout import Memory, PackedLayout
from funcollect.collectors.workers.transport import BatchAssembler, Call, PendingBatch, WorkerGroup
from funcollect.errors import WorkerError

_MOST_IDLE = 3  # pieces of a size that wait to be written again: fresh memory costs ten times a copy into warm one


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
        for part, packed_batch in enumerate(packed_batches):
            np.copyto(memory[part * packed_layout.size : (part + 1) * packed_layout.size], packed_batch.memory)
        batch: TensorDict = packed_layout.batch(memory, None if self._group.join is None else len(packed_batches))
        for call in pending.calls:
            call.value = (None, call.value[1])  # so that the object store drops the rollout
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
