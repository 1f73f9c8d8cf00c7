"""Slots of shared memory into which workers write whole rollouts, and batches that are views of them."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Sequence

import numpy as np
from tensordict import TensorDict

from funcollect.collectors.layout import Column, Layout
from funcollect.collectors.memory import MAPPING, shared_memory
from funcollect.collectors.transport import Call, Group, Shipment
from funcollect.errors import WorkerError

_SLOTS = 3  # one that the reader looks at, one that is ready, one that is written


class Slots:
    """Pieces of memory of one layout; each is lent to a reader until no view of it lives."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.fd = shared_memory(_SLOTS * layout.size)
        self._memory = mmap.mmap(self.fd, _SLOTS * layout.size, flags=MAPPING)

    def batch(self, place: int, released: Callable[[int], object] | None) -> TensorDict:
        """The batch that stands in a slot; `released` is called with the slot when its last view is gone."""
        size = self.layout.size
        memory = np.frombuffer(self._memory, np.uint8, size, place * size)  # all views refer to this very array
        if released is not None:
            weakref.finalize(memory, released, place).atexit = False
        batch: TensorDict = self.layout.batch(memory)
        return batch

    def close(self) -> None:
        """Let go of the memory; batches keep what they show."""
        os.close(self.fd)


class SlotDock:
    """See `funcollect.collectors.transport.Dock`.

    The layout follows from the first rollouts, which their workers keep until they are told of the slots.
    """

    def __init__(self, submit: Callable[[Call], Call], group: Group) -> None:
        self._submit = submit
        self._group = group
        self._slots: Slots | None = None
        self._lent: set[int] = set()
        self._written: set[int] = set()
        self.copies = 0

    def _free(self) -> list[int]:
        return [place for place in range(_SLOTS) if place not in self._lent and place not in self._written]

    def room(self) -> bool:
        """Whether another batch may be begun; before there are slots, only one."""
        return bool(self._free()) and (self._slots is not None or not self._written)

    def begin(self) -> Shipment:
        """Have every worker of the group collect one rollout into a slot of its batch."""
        place = self._free()[0]
        self._written.add(place)
        return Shipment([self._collect(worker, place) for worker in self._group.workers], place)

    def _collect(self, worker: int, place: int) -> Call:
        return self._submit(Call(worker, "collect", (place,)))

    def settle(self, shipment: Shipment) -> bool:
        """Whether every part lies in its slot; where not, its worker is told of the slots, or collects again."""
        if all(call.value is not None and call.value[0] is None for call in shipment.calls):
            return True
        if self._slots is None:
            self._slots = self._allocated([call.value[0] for call in shipment.calls])
        for part, call in enumerate(shipment.calls):
            if call.value is None:  # it was replaced before it could write
                shipment.calls[part] = self._collect(call.worker, shipment.place)
            elif call.value[0] is not None:
                shipment.calls[part] = self._submit(self._attach(part))
        return False

    def _allocated(self, columns: Sequence[tuple[Column, ...]]) -> Slots:
        first = self._group.workers[0]
        for worker, own in zip(self._group.workers, columns, strict=True):
            if own != columns[0]:
                one, other = (sorted(".".join(column.path) for column in set(each)) for each in (own, columns[0]))
                raise WorkerError(
                    f"worker {worker}: its batch has other leaves than that of worker {first}, {one} and "
                    f"{other} with their dtypes and shapes: give all workers equal spaces and policies",
                    worker,
                )
        layout = Layout(columns[0], self._group.lengths, self._group.join, self._group.single)
        try:
            return Slots(layout)
        except MemoryError as error:
            raise WorkerError(
                f"worker {first}: {error} as {_SLOTS} slots for rollouts: collect fewer frames at once, or "
                "let the machine have more memory",
                first,
            ) from error

    def _attach(self, part: int) -> Call:
        assert self._slots is not None
        return Call(self._group.workers[part], "attach", (self._slots.layout, part, _SLOTS), (self._slots.fd,))

    def deliver(self, shipment: Shipment) -> TensorDict:
        """The batch: views of its slot, or a copy where the reader looks at all others."""
        assert self._slots is not None
        place = shipment.place
        if len(self._lent) < _SLOTS - 1:
            self._lent.add(place)
            self._written.discard(place)
            return self._slots.batch(place, self._lent.discard)
        self.copies += 1
        batch = self._slots.batch(place, None).clone()
        self._written.discard(place)
        return batch

    def restarted(self, worker: int) -> Sequence[Call]:
        """What a new worker has to know."""
        return [] if self._slots is None else [self._attach(list(self._group.workers).index(worker))]

    def close(self) -> None:
        """Let go of the memory."""
        if self._slots is not None:
            self._slots.close()
            self._slots = None
