"""Batches gathered from workers: of all of them together, or of each as it comes; over any transport."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from tensordict import TensorDict

from funcollect.collectors.workers.pool import Crew
from funcollect.collectors.workers.transport import Call, Dock, Shipment
from funcollect.collectors.workers.weights import Weights

_AHEAD = 2  # batches that an asynchronous worker may have begun, or have ready, beyond the one the reader holds


OpenDock = Callable[[Sequence[int]], Dock]


class Gathering(Protocol):
    """Where batches come from.

    Attributes:
        version: of the weights in the last batch; the oldest, where workers had different ones.
        workers: whose rollouts the last batch has.
    """

    version: int
    workers: Sequence[int]

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

    def staff(self, workers: Sequence[int], open_dock: OpenDock) -> None:
        """Let these workers collect from here on. What has been begun is whole afterwards, and is delivered."""
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
        workers: all of them.
        open_dock: makes the dock of a group.
        prefetch: begin the next batch as one is handed over. It is then one update of the weights behind.

    An exception (Ctrl-C, say) loses nothing: the batch that was waited for is the next one.
    """

    def __init__(
        self, crew: Crew, workers: Sequence[int], open_dock: OpenDock, weights: Weights, *, prefetch: bool
    ) -> None:
        self._crew = crew
        self.workers = workers
        self._dock = open_dock(workers)
        self._weights = weights
        self._prefetch = prefetch
        self._under_way: tuple[Dock, Shipment] | None = None
        self.version = 0

    @property
    def copies(self) -> int:
        """Batches that were handed over as copies."""
        return self._dock.copies

    def next(self, *, more: bool) -> TensorDict:
        """The next batch."""
        dock, shipment = self._under_way or self._begin()
        settle(self._crew, dock, shipment)
        batch = dock.deliver(shipment)
        self._under_way = None
        self.workers = [call.worker for call in shipment.calls]
        self.version = version_of(shipment)
        if self._prefetch and more:
            self._begin()
        return batch

    def discard(self) -> None:
        """Drop the batch that has been begun."""
        if self._under_way is not None:
            self.next(more=False)

    def _begin(self) -> tuple[Dock, Shipment]:
        self._weights.settle()
        self._under_way = self._dock, self._dock.begin()
        return self._under_way

    def staff(self, workers: Sequence[int], open_dock: OpenDock) -> None:
        """Let these workers collect from the next batch on that is begun."""
        if self._under_way is not None:
            settle(self._crew, *self._under_way)
        self._dock = open_dock(workers)

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
        workers: all of them.
        open_dock: makes the dock of one.
    """

    def __init__(self, crew: Crew, workers: Sequence[int], open_dock: OpenDock, weights: Weights) -> None:
        self._crew = crew
        self._weights = weights
        self._docks: dict[int, Dock] = {}  # of those that have left, too: they may have something in line
        self._under_way: dict[int, deque[Shipment]] = {}
        self._arrived: deque[tuple[int, Shipment]] = deque()
        self.version = 0
        self.workers: Sequence[int] = ()
        self.staff(workers, open_dock)

    @property
    def copies(self) -> int:
        """Batches that were handed over as copies."""
        return sum(dock.copies for dock in self._docks.values())

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
        self.version, self.workers = version_of(shipment), (worker,)
        self._go_on()
        return batch

    def discard(self) -> None:
        """Drop the batches that have been begun and not handed over."""
        for worker, under_way in self._under_way.items():
            while under_way:
                settle(self._crew, self._docks[worker], under_way[0])
                self._docks[worker].deliver(under_way.popleft())
        while self._arrived:
            worker, shipment = self._arrived.popleft()
            self._docks[worker].deliver(shipment)

    def _go_on(self) -> None:
        """Put what has arrived in line, and give every worker something to do."""
        self._weights.send()
        for worker, under_way in self._under_way.items():
            dock = self._docks[worker]
            while under_way and all(call.done for call in under_way[0].calls) and dock.settle(under_way[0]):
                self._arrived.append((worker, under_way.popleft()))
            if len(under_way) < _AHEAD:
                ready = [each for each, _ in self._arrived].count(worker)
                while len(under_way) + ready < _AHEAD and dock.room():
                    under_way.append(dock.begin())

    def staff(self, workers: Sequence[int], open_dock: OpenDock) -> None:
        """Let these workers collect from here on; those that leave end what they have begun."""
        for worker in self._under_way.keys() - {*workers}:
            for shipment in self._under_way.pop(worker):
                settle(self._crew, self._docks[worker], shipment)
                self._arrived.append((worker, shipment))
        for worker in workers:
            if worker not in self._docks:
                self._docks[worker], self._under_way[worker] = open_dock([worker]), deque()

    def restarted(self, worker: int) -> Sequence[Call]:
        """What a worker that has been replaced has to be told first."""
        return [*self._docks[worker].restarted(worker), *self._weights.restarted(worker)]

    def close(self) -> None:
        """Let go of the memory."""
        for dock in self._docks.values():
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
