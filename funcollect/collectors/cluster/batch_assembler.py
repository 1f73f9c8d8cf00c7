"""Where rollouts of Ray actors become batches: one copy out of the object store, into memory that is used again."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from tensordict import TensorDict

from funcollect.collectors.cluster.packed_batch import Form, Parcel, private_memory
from funcollect.collectors.workers.batch_layout import Memory
from funcollect.collectors.workers.transport import Call, Group, Shipment
from funcollect.errors import WorkerError

_SPARE = 3  # pieces of a size that wait to be written again: fresh memory costs ten times a copy into warm one


class Pool:
    """Memory of this process that is lent to batches, and taken back once no view of it lives."""

    def __init__(self) -> None:
        self._spare: defaultdict[int, list[Memory]] = defaultdict(list)

    def lend(self, size: int) -> Memory:
        """A piece of so many bytes, with whatever is in it."""
        spare = self._spare[size]
        memory = spare.pop() if spare else private_memory(size)
        lent = np.frombuffer(memory, np.uint8)  # all views refer to this very array
        weakref.finalize(lent, self._take_back, memory).atexit = False
        return lent

    def _take_back(self, memory: Memory) -> None:
        spare = self._spare[len(memory)]
        if len(spare) < _SPARE:
            spare.append(memory)


class RayDock:
    """See `funcollect.collectors.workers.transport.Dock`. Rollouts of several actors are stacked."""

    copies = 0

    def __init__(self, submit: Callable[[Call], Call], group: Group, pool: Pool) -> None:
        self._submit = submit
        self._group = group
        self._pool = pool

    def room(self) -> bool:
        """Whether another batch may be begun."""
        return True

    def begin(self) -> Shipment:
        """Have every worker of the group collect one rollout."""
        return Shipment([self._submit(Call(worker, "collect")) for worker in self._group.workers])

    def settle(self, shipment: Shipment) -> bool:
        """Whether the batch is whole."""
        return True

    def deliver(self, shipment: Shipment) -> TensorDict:
        """The batch, after which the object store is rid of it."""
        parcels: list[Parcel] = [call.value[0] for call in shipment.calls]
        form = self._form(shipment.calls, parcels)
        memory = self._pool.lend(len(parcels) * form.size)
        for part, parcel in enumerate(parcels):
            np.copyto(memory[part * form.size : (part + 1) * form.size], parcel.memory)
        batch: TensorDict = form.batch(memory, None if self._group.join is None else len(parcels))
        for call in shipment.calls:
            call.value = (None, call.value[1])
        return batch

    def _form(self, calls: Sequence[Call], parcels: Sequence[Parcel]) -> Form:
        first = parcels[0].form
        assert first is not None
        for call, parcel in zip(calls, parcels, strict=True):
            if parcel.form != first:
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
