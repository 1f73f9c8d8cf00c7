"""Batches gathered from workers: of all of them together, or of each as it comes; over any transport."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from tensordict import TensorDict

from funcollect.collectors.workers.pool import WorkerPool
from funcollect.collectors.workers.transport import BatchAssembler, Call, PendingBatch
from funcollect.collectors.workers.weights import Weights

_AHEAD = 2  # batches that an asynchronous worker may have begun, or have ready, beyond the one the reader holds


OpenAssembler = Callable[[Sequence[int]], BatchAssembler]


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

    def set_workers(self, workers: Sequence[int], open_assembler: OpenAssembler) -> None:
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
        open_assembler: makes the assembler of a group.
        prefetch: begin the next batch as one is handed over. It is then one update of the weights behind.

    An exception (Ctrl-C, say) loses nothing: the batch that was waited for is the next one.
    """

    def __init__(
        self,
        pool: WorkerPool,
        workers: Sequence[int],
        open_assembler: OpenAssembler,
        weights: Weights,
        *,
        prefetch: bool,
    ) -> None:
        self._pool = pool
        self.workers = workers
        self._assembler = open_assembler(workers)
        self._weights = weights
        self._prefetch = prefetch
        self._under_way: tuple[BatchAssembler, PendingBatch] | None = None
        self.version = 0

    @property
    def copies(self) -> int:
        """Batches that were handed over as copies."""
        return self._assembler.copies

    def next(self, *, more: bool) -> TensorDict:
        """The next batch."""
        assembler, pending = self._under_way or self._begin()
        wait_until_complete(self._pool, assembler, pending)
        batch = assembler.deliver(pending)
        self._under_way = None
        self.workers = [call.worker for call in pending.calls]
        self.version = version_of(pending)
        if self._prefetch and more:
            self._begin()
        return batch

    def discard(self) -> None:
        """Drop the batch that has been begun."""
        if self._under_way is not None:
            self.next(more=False)

    def _begin(self) -> tuple[BatchAssembler, PendingBatch]:
        self._weights.flush()
        self._under_way = self._assembler, self._assembler.begin()
        return self._under_way

    def set_workers(self, workers: Sequence[int], open_assembler: OpenAssembler) -> None:
        """Let these workers collect from the next batch on that is begun."""
        if self._under_way is not None:
            wait_until_complete(self._pool, *self._under_way)
        self._assembler = open_assembler(workers)

    def restarted(self, worker: int) -> Sequence[Call]:
        """What a worker that has been replaced has to be told first."""
        return [*self._assembler.restarted(worker), *self._weights.restarted(worker)]

    def close(self) -> None:
        """Let go of the memory."""
        self._assembler.close()


class AsyncGathering:
    """Each worker's rollouts are batches, handed over in the order in which they came.

    A worker goes on while its batches wait for the reader, up to two of them; none is ever dropped.

    Args:
        workers: all of them.
        open_assembler: makes the assembler of one worker.
    """

    def __init__(
        self, pool: WorkerPool, workers: Sequence[int], open_assembler: OpenAssembler, weights: Weights
    ) -> None:
        self._pool = pool
        self._weights = weights
        self._assemblers: dict[int, BatchAssembler] = {}  # also of workers that left: they may have batches in line
        self._under_way: dict[int, deque[PendingBatch]] = {}
        self._arrived: deque[tuple[int, PendingBatch]] = deque()
        self.version = 0
        self.workers: Sequence[int] = ()
        self.set_workers(workers, open_assembler)

    @property
    def copies(self) -> int:
        """Batches that were handed over as copies."""
        return sum(assembler.copies for assembler in self._assemblers.values())

    def next(self, *, more: bool) -> TensorDict:
        """The next batch."""
        if not self._arrived:
            self._pool.poll()
            self._go_on()
        while not self._arrived:
            self._pool.wait()
            self._go_on()
        worker, pending = self._arrived[0]
        batch = self._assemblers[worker].deliver(pending)
        self._arrived.popleft()
        self.version, self.workers = version_of(pending), (worker,)
        self._go_on()
        return batch

    def discard(self) -> None:
        """Drop the batches that have been begun and not handed over."""
        for worker, under_way in self._under_way.items():
            while under_way:
                wait_until_complete(self._pool, self._assemblers[worker], under_way[0])
                self._assemblers[worker].deliver(under_way.popleft())
        while self._arrived:
            worker, pending = self._arrived.popleft()
            self._assemblers[worker].deliver(pending)

    def _go_on(self) -> None:
        """Put what has arrived in line, and give every worker something to do."""
        self._weights.send()
        for worker, under_way in self._under_way.items():
            assembler = self._assemblers[worker]
            while under_way and all(call.done for call in under_way[0].calls) and assembler.complete(under_way[0]):
                self._arrived.append((worker, under_way.popleft()))
            if len(under_way) < _AHEAD:
                ready = [each for each, _ in self._arrived].count(worker)
                while len(under_way) + ready < _AHEAD and assembler.room():
                    under_way.append(assembler.begin())

    def set_workers(self, workers: Sequence[int], open_assembler: OpenAssembler) -> None:
        """Let these workers collect from here on; those that leave end what they have begun."""
        for worker in self._under_way.keys() - {*workers}:
            for pending in self._under_way.pop(worker):
                wait_until_complete(self._pool, self._assemblers[worker], pending)
                self._arrived.append((worker, pending))
        for worker in workers:
            if worker not in self._assemblers:
                self._assemblers[worker], self._under_way[worker] = open_assembler([worker]), deque()

    def restarted(self, worker: int) -> Sequence[Call]:
        """What a worker that has been replaced has to be told first."""
        return [*self._assemblers[worker].restarted(worker), *self._weights.restarted(worker)]

    def close(self) -> None:
        """Let go of the memory."""
        for assembler in self._assemblers.values():
            assembler.close()


def wait_until_complete(pool: WorkerPool, assembler: BatchAssembler, pending: PendingBatch) -> None:
    """Wait until a batch is whole."""
    pool.finish(pending.calls)
    while not assembler.complete(pending):
        pool.finish(pending.calls)


def version_of(pending: PendingBatch) -> int:
    """The oldest weights in a batch."""
    versions: list[int] = [call.value[-1].version for call in pending.calls]
    return min(versions)
