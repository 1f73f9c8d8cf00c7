"""Batches gathered from workers: of all of them together, or of each as it comes; over any transport."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from tensordict import TensorDict

from funcollect.collectors.crew import Crew
from funcollect.collectors.transport import Call, Dock, Shipment
from funcollect.collectors.weights import Weights

_AHEAD = 2  # batches that an asynchronous worker may have begun, or have ready, beyond the one the reader holds


class Gathering(Protocol):
    """Where batches come from.

    Attributes:
        version: of the weights in the last batch; the oldest, where workers had different ones.
    """

    version: int

    @property
    def copies(self) -> int:
        """Batches that were handed over as copies."""
        ...

    def next(self, *, more: bool) -> TensorDict:
        """The next batch; `more` says whether another one will be wanted."""
        ...

    def discard(self) -> None:
        """Drop the batches that have been begun and not handed over."""
        ...

    def restarted(self, worker: int) -> Sequence[Call]:
        """What a worker that has been replaced has to be told first."""
        ...

    def close(self) -> None:
        """Let go of the memory."""
        ...


class SyncGathering:
    """One rollout of every worker makes a batch.

    Args:
        dock: of all workers.
        prefetch: begin the next batch as one is handed over. It is then one update of the weights behind.

    An exception (Ctrl-C, say) loses nothing: the batch that was waited for is the next one.
    """

    def __init__(self, crew: Crew, dock: Dock, weights: Weights, *, prefetch: bool) -> None:
        self._crew = crew
        self._dock = dock
        self._weights = weights
        self._prefetch = prefetch
        self._under_way: Shipment | None = None
        self.version = 0

    @property
    def copies(self) -> int:
        """Batches that were handed over as copies."""
        return self._dock.copies

    def next(self, *, more: bool) -> TensorDict:
        """The next batch."""
        shipment = self._under_way or self._begin()
        settle(self._crew, self._dock, shipment)
        batch = self._dock.deliver(shipment)
        self._under_way = None
        self.version = version_of(shipment)
        if self._prefetch and more:
            self._begin()
        return batch

    def discard(self) -> None:
        """Drop the batch that has been begun."""
        if self._under_way is not None:
            self.next(more=False)

    def _begin(self) -> Shipment:
        self._weights.settle()
        self._under_way = self._dock.begin()
        return self._under_way

    def restarted(self, worker: int) -> Sequence[Call]:
        """What a worker that has been replaced has to be told first."""
        return [*self._dock.restarted(worker), *self._weights.restarted(worker)]

    def close(self) -> None:
        """Let go of the memory."""
        self._dock.close()


class AsyncGathering:
    """Each worker's rollouts are batches, handed over in the order in which they came.

    A worker goes on while its batches wait for the reader, up to two of them; none is ever dropped.

    Args:
        docks: one per worker.
    """

    def __init__(self, crew: Crew, docks: Sequence[Dock], weights: Weights) -> None:
        self._crew = crew
        self._docks = docks
        self._weights = weights
        self._under_way: list[deque[Shipment]] = [deque() for _ in docks]
        self._arrived: deque[tuple[int, Shipment]] = deque()
        self.version = 0

    @property
    def copies(self) -> int:
        """Batches that were handed over as copies."""
        return sum(dock.copies for dock in self._docks)

    def next(self, *, more: bool) -> TensorDict:
        """The next batch."""
        if not self._arrived:
            self._crew.drain()
            self._go_on()
        while not self._arrived:
            self._crew.pump()
            self._go_on()
        worker, shipment = self._arrived[0]
        batch = self._docks[worker].deliver(shipment)
        self._arrived.popleft()
        self.version = version_of(shipment)
        self._go_on()
        return batch

    def discard(self) -> None:
        """Drop the batches that have been begun and not handed over."""
        for dock, under_way in zip(self._docks, self._under_way, strict=True):
            while under_way:
                settle(self._crew, dock, under_way[0])
                dock.deliver(under_way.popleft())
        while self._arrived:
            worker, shipment = self._arrived.popleft()
            self._docks[worker].deliver(shipment)

    def _go_on(self) -> None:
        """Put what has arrived in line, and give every worker something to do."""
        self._weights.send()
        for worker, (dock, under_way) in enumerate(zip(self._docks, self._under_way, strict=True)):
            while under_way and all(call.done for call in under_way[0].calls) and dock.settle(under_way[0]):
                self._arrived.append((worker, under_way.popleft()))
            if len(under_way) < _AHEAD:
                ready = [each for each, _ in self._arrived].count(worker)
                while len(under_way) + ready < _AHEAD and dock.room():
                    under_way.append(dock.begin())

    def restarted(self, worker: int) -> Sequence[Call]:
        """What a worker that has been replaced has to be told first."""
        return [*self._docks[worker].restarted(worker), *self._weights.restarted(worker)]

    def close(self) -> None:
        """Let go of the memory."""
        for dock in self._docks:
            dock.close()


def settle(crew: Crew, dock: Dock, shipment: Shipment) -> None:
    """Wait until a batch is whole."""
    crew.finish(shipment.calls)
    while not dock.settle(shipment):
        crew.finish(shipment.calls)


def version_of(shipment: Shipment) -> int:
    """The oldest weights in a batch."""
    versions: list[int] = [call.value[-1].version for call in shipment.calls]
    return min(versions)
