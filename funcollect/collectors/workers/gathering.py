"""Gathers batches from workers, over any transport: one of all workers together, or of each as it arrives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tensordict import TensorDict
from typing_extensions import override

from funcollect.collectors.workers.batch_layout import Join
from funcollect.collectors.workers.weights import Weights
from funcollect.collectors.workers.worker import RolloutReport
from funcollect.processes.pool import Call, WorkerPool
from funcollect.trajectories.final_observations import FinalObservations, attach

_AHEAD = 2  # batches that an asynchronous worker may have begun, or have ready, beyond the one the reader holds


class WorkerGroup(NamedTuple):
    """Workers whose rollouts make one batch."""

    workers: Sequence[int]  # their indices
    lengths: tuple[int, ...]  # T of each
    join: Join | None  # how their rollouts make one batch; None for one worker alone
    single: bool  # whether their environments have no batch dimension


@dataclass(eq=False)
class PendingBatch:
    """A batch that is being collected: one call per worker, in the order of the workers, and the slot it goes into."""

    calls: list[Call]
    slot: int = 0


class BatchAssembler(ABC):
    """Decides where the workers of a group write their rollouts, and makes one batch of them.

    `submit` sends a call to its worker.
    """

    def __init__(self, submit: Callable[[Call], Call], group: WorkerGroup) -> None:
        self._submit = submit
        self._group = group
        self.copies = 0  # batches that were delivered as copies, since the reader held views of every slot

    def room(self) -> bool:
        """Whether another batch may be begun."""
        return True

    def begin(self) -> PendingBatch:
        """Make every worker of the group collect one rollout."""
        return PendingBatch([self._submit(Call(worker, "collect")) for worker in self._group.workers])

    def complete(self, pending: PendingBatch) -> bool:
        """Whether a batch is complete once its calls are done; if not, `pending` has other calls afterwards."""
        return True

    @abstractmethod
    def deliver(self, pending: PendingBatch) -> TensorDict:
        """The batch, unlocked, for the caller to keep."""

    def restarted(self, worker: int) -> Sequence[Call]:
        """The calls that a new process of this worker needs before the unanswered ones."""
        return ()

    def close(self) -> None:  # noqa: B027 - most hold none
        """Release the memory; batches that were delivered keep theirs."""


OpenAssembler = Callable[[Sequence[int], Join | None], BatchAssembler]


class ReadyBatch(NamedTuple):
    """A batch that has been collected and not been asked for yet."""

    batch: TensorDict
    version: int  # of the oldest weights in it
    workers: Sequence[int]  # whose rollouts it holds
    final: FinalObservations | None  # of a compact batch


class Gathering(ABC):
    """Collects batches from the workers of `pool`, after sending them the latest `weights`."""

    version: int  # of the weights in the last batch; the oldest, if its workers had different ones
    workers: Sequence[int]  # whose rollouts are in the last batch

    def __init__(self, pool: WorkerPool, weights: Weights, open_assembler: OpenAssembler) -> None:
        self._pool = pool
        self._weights = weights
        self._open_assembler = open_assembler
        self._assemblers: dict[int, BatchAssembler] = {}  # also of removed workers, whose batches may still wait
        self.version, self.workers = 0, ()
        self.ready: deque[ReadyBatch] = deque()  # delivered before all others
        self.set_workers(pool.workers)

    @property
    @abstractmethod
    def copies(self) -> int:
        """Batches that were delivered as copies."""

    @abstractmethod
    def next(self, *, more: bool) -> TensorDict:
        """The next batch; `more` is whether another one will be asked for."""

    @abstractmethod
    def settle(self) -> None:
        """Complete the batches that have been begun, and keep them in `ready`: no worker is at work then."""

    def discard(self) -> None:
        """Drop the batches that have been begun and not delivered."""
        self.settle()
        self.ready.clear()

    @abstractmethod
    def set_workers(self, workers: Sequence[int]) -> None:
        """Collect from these workers from now on. Batches that have been begun are completed, and delivered."""

    def restarted(self, worker: int) -> Sequence[Call]:
        """The calls that the new process of a replaced worker needs first."""
        assembler = self._assemblers.get(worker)  # None for a worker that was just added
        return [*(assembler.restarted(worker) if assembler else ()), *self._weights.restarted(worker)]

    def close(self) -> None:
        """Release the memory."""
        for assembler in {*self._assemblers.values()}:
            assembler.close()

    def _hand_over(self, ready: ReadyBatch) -> TensorDict:
        """The batch, for the reader."""
        self.version, self.workers = ready.version, ready.workers
        if ready.final is not None:
            attach(ready.batch, ready.final)
        return ready.batch

    def _complete(self, assembler: BatchAssembler, pending: PendingBatch) -> None:
        """Wait until a batch is complete."""
        self._pool.finish(pending.calls)
        while not assembler.complete(pending):
            self._pool.finish(pending.calls)


class SyncGathering(Gathering):
    """One rollout of every worker makes a batch.

    An exception (Ctrl-C, for example) loses nothing: the batch that was waited for is the next one.

    Args:
        join: how the rollouts make a batch.
        prefetch: begin the next batch when one is delivered. It then lags one update of the weights behind.
    """

    def __init__(
        self, pool: WorkerPool, weights: Weights, open_assembler: OpenAssembler, *, join: Join, prefetch: bool
    ) -> None:
        self._join: Join = join
        self._prefetch = prefetch
        self._under_way: tuple[BatchAssembler, PendingBatch] | None = None
        super().__init__(pool, weights, open_assembler)

    @property
    @override
    def copies(self) -> int:
        return self._assembler.copies

    @override
    def next(self, *, more: bool) -> TensorDict:
        ready = self.ready.popleft() if self.ready else self._collected(*(self._under_way or self._begin()))
        if self._prefetch and more:
            self._begin()
        return self._hand_over(ready)

    def _collected(self, assembler: BatchAssembler, pending: PendingBatch) -> ReadyBatch:
        """Wait for the batch under way."""
        self._complete(assembler, pending)
        batch = assembler.deliver(pending)
        self._under_way = None
        return ready_batch(batch, pending)

    @override
    def settle(self) -> None:
        if self._under_way is not None:
            self.ready.append(self._collected(*self._under_way))

    def _begin(self) -> tuple[BatchAssembler, PendingBatch]:
        """Make the workers collect a batch with the latest weights."""
        self._weights.flush()
        self._under_way = self._assembler, self._assembler.begin()
        return self._under_way

    @override
    def set_workers(self, workers: Sequence[int]) -> None:
        if self._under_way is not None:
            self._complete(*self._under_way)
        self._assembler = self._open_assembler(workers, self._join)
        self._assemblers = dict.fromkeys(workers, self._assembler)


class AsyncGathering(Gathering):
    """Each worker's rollouts are batches, delivered in the order of their arrival.

    A worker continues while its batches wait for the reader, up to two of them; none is ever dropped.
    """

    def __init__(self, pool: WorkerPool, weights: Weights, open_assembler: OpenAssembler) -> None:
        self._under_way: dict[int, deque[PendingBatch]] = {}
        self._arrived: deque[tuple[int, PendingBatch]] = deque()
        super().__init__(pool, weights, open_assembler)

    @property
    @override
    def copies(self) -> int:
        return sum(assembler.copies for assembler in self._assemblers.values())

    @override
    def next(self, *, more: bool) -> TensorDict:
        if self.ready:
            ready = self.ready.popleft()
        else:
            if not self._arrived:
                self._pool.poll()
                self._go_on()
            while not self._arrived:
                self._pool.wait()
                self._go_on()
            ready = self._first()
        self._go_on()
        return self._hand_over(ready)

    def _first(self) -> ReadyBatch:
        """The batch that arrived first."""
        worker, pending = self._arrived[0]
        batch = self._assemblers[worker].deliver(pending)
        self._arrived.popleft()
        return ready_batch(batch, pending)

    @override
    def settle(self) -> None:
        for worker, under_way in self._under_way.items():
            while under_way:
                self._complete(self._assemblers[worker], under_way[0])
                self._arrived.append((worker, under_way.popleft()))
        copies = {assembler: assembler.copies for assembler in self._assemblers.values()}
        while self._arrived:
            self.ready.append(self._first())
        for assembler, count in copies.items():
            assembler.copies = count  # it is not the reader that holds these batches

    def _go_on(self) -> None:
        """Queue the batches that have arrived, and keep every worker busy."""
        self._weights.send()
        for worker, under_way in self._under_way.items():
            assembler = self._assemblers[worker]
            while under_way and all(call.done for call in under_way[0].calls) and assembler.complete(under_way[0]):
                self._arrived.append((worker, under_way.popleft()))
            if len(under_way) < _AHEAD:
                ready = [each for each, _ in self._arrived].count(worker)
                ready += sum(worker in each.workers for each in self.ready)
                while len(under_way) + ready < _AHEAD and assembler.room():
                    under_way.append(assembler.begin())

    @override
    def set_workers(self, workers: Sequence[int]) -> None:
        for worker in self._under_way.keys() - {*workers}:
            for pending in self._under_way.pop(worker):
                self._complete(self._assemblers[worker], pending)
                self._arrived.append((worker, pending))
        for worker in workers:
            if worker not in self._assemblers:
                self._assemblers[worker], self._under_way[worker] = self._open_assembler([worker], None), deque()


def ready_batch(batch: TensorDict, pending: PendingBatch) -> ReadyBatch:
    """A delivered batch, with the version of the oldest weights in it."""
    reports: list[RolloutReport] = [call.value[-1] for call in pending.calls]
    final = [report.final for report in reports if report.final is not None]
    return ReadyBatch(
        batch,
        min(report.version for report in reports),
        [call.worker for call in pending.calls],
        FinalObservations.joined(final) if final else None,
    )
