"""Gathers batches from workers, over any transport: of all workers together, or of each as they arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import cloudpickle
import torch
from tensordict import TensorDict, TensorDictBase

from funcollect.collectors.workers.weights import Weights, WeightStore
from funcollect.collectors.workers.worker import RolloutReport, Worker
from funcollect.processes.pool import Call, Transport, WorkerPool
from funcollect.processes.serving import InProcessTransport
from funcollect.trajectories.final_observations import FinalObservations, attach
from funcollect.tree import flatten, to_batch

Join = Literal["stack", 0, -1]


class WorkerGroup(NamedTuple):
    """Workers whose rollouts make one batch."""

    workers: tuple[int, ...]  # their indices
    lengths: tuple[int, ...]  # T of each
    join: Join | None  # how their rollouts make one batch; None for one worker alone
    single: bool  # whether their environments have no batch dimension


@dataclass(eq=False)
class PendingBatch:
    """A batch that is being collected: one call per worker, in the order of the workers, and the slot it goes into."""

    calls: list[Call]
    slot: int = 0


class BatchAssembler:
    """Makes batches of the rollouts of a group of workers: here as they come, over other transports in their memory."""

    def __init__(self, submit: Callable[[Call], Call], group: WorkerGroup) -> None:
        self._submit, self.group = submit, group
        self.under_way: deque[PendingBatch] = deque()  # the batches that the workers have begun
        self.copies = 0  # batches that were delivered as copies, since the reader held views of every slot

    def room(self) -> bool:
        """Whether another batch may be begun."""
        return True

    def begin(self) -> PendingBatch:
        """Make every worker of the group collect one rollout."""
        return PendingBatch([self._submit(Call(worker, "collect")) for worker in self.group.workers])

    def complete(self, pending: PendingBatch) -> bool:
        """Whether a batch is complete once its calls are done; if not, `pending` has other calls afterwards."""
        return True

    def deliver(self, pending: PendingBatch) -> TensorDict:
        """The batch, unlocked, for the caller to keep."""
        batch: TensorDict = joined([call.value[0] for call in pending.calls], self.group.join)
        return batch

    def restarted(self, worker: int) -> Sequence[Call]:
        """The calls that a new process of this worker needs before the unanswered ones."""
        return ()

    def close(self) -> None:
        """Release the memory; batches that were delivered keep theirs."""


def joined(parts: Sequence[TensorDictBase], join: Join | None) -> Any:
    """Join several workers' batches in new memory; the batch of one worker is returned as it is."""
    if join is None:
        (batch,) = parts
        return batch
    leaves, dims = [flatten(part) for part in parts], parts[0].batch_dims
    if join == "stack":
        whole, dims = {path: torch.stack([each[path] for each in leaves]) for path in leaves[0]}, dims + 1
    else:
        dim = 0 if join == 0 else dims - 1
        whole = {path: torch.cat([each[path] for each in leaves], dim) for path in leaves[0]}
    return to_batch(whole, tuple(whole["next", "done"].shape[:dims]))


class Means(NamedTuple):
    """How workers are reached, and how rollouts and weights travel: in this process, over processes, or over Ray."""

    transport: Transport
    assembler: Callable[[Callable[[Call], Call], WorkerGroup], BatchAssembler]  # makes that of a group of workers
    weight_store: WeightStore


def in_this_process() -> Means:
    """Workers that run one after another, whenever an answer is asked for, each with its own environment and policy."""
    return Means(InProcessTransport(lambda packed: Worker(cloudpickle.loads(packed))), BatchAssembler, WeightStore())


class ReadyBatch(NamedTuple):
    """A batch that has been collected and not been asked for yet."""

    batch: TensorDict
    version: int  # of the oldest weights in it
    workers: Sequence[int]  # whose rollouts it holds
    final: FinalObservations | None  # of a compact batch


class Gathering:
    """Collects batches from the workers of `pool`, after sending them the latest `weights`.

    Batches are of all workers `together`, or of each, in the order of their arrival. None is ever dropped, and an
    exception (Ctrl-C, for example) loses none: the next batch is the one that was awaited. `ahead` is how many batches
    of the same workers may have been begun, or be ready, when one is delivered: as many updates of the weights behind.
    """

    def __init__(
        self,
        pool: WorkerPool,
        weights: Weights,
        open_assembler: Callable[[tuple[int, ...]], BatchAssembler],
        *,
        together: bool,
        ahead: int,
    ) -> None:
        self._pool, self._weights, self._open_assembler = pool, weights, open_assembler
        self.together, self._ahead = together, ahead
        self.assemblers: dict[tuple[int, ...], BatchAssembler] = {}  # by the workers whose rollouts make a batch
        self._arrived: deque[tuple[BatchAssembler, PendingBatch]] = deque()
        self.ready: deque[ReadyBatch] = deque()  # batches that are delivered before all others
        self.version = 0  # of the weights in the last batch; the oldest, if its workers had different ones
        self.workers: Sequence[int] = ()  # whose rollouts are in the last batch
        self.set_workers(pool.workers)

    @property
    def copies(self) -> int:
        """Batches that were delivered as copies."""
        return sum(assembler.copies for assembler in self.assemblers.values())

    def next(self, *, more: bool) -> TensorDict:
        """The next batch; `more` is whether another one will be asked for."""
        if self.ready:
            ready = self.ready.popleft()
        else:
            most = max(self._ahead, 1)
            if not self._arrived:
                self._go_on(most)
            while not self._arrived:
                self._pool.wait()
                self._go_on(most)
            ready = self._first()
        if more and self._ahead:
            self._go_on(self._ahead)
        self.version, self.workers = ready.version, ready.workers
        if ready.final is not None:
            attach(ready.batch, ready.final)
        return ready.batch

    def _first(self) -> ReadyBatch:
        assembler, pending = self._arrived[0]
        batch = assembler.deliver(pending)
        self._arrived.popleft()
        reports: list[RolloutReport] = [call.value[-1] for call in pending.calls]
        parts = [report.final for report in reports if report.final is not None]
        final = FinalObservations.joined(parts) if parts else None
        return ReadyBatch(batch, min(report.version for report in reports), [*assembler.group.workers], final)

    def _go_on(self, most: int) -> None:
        """Queue the batches that have arrived, and let workers begin others, until each group has so many."""
        self._weights.send()
        for workers, assembler in self.assemblers.items():
            under_way = assembler.under_way
            while under_way and all(call.done for call in under_way[0].calls) and assembler.complete(under_way[0]):
                self._arrived.append((assembler, under_way.popleft()))
            if len(under_way) < most:
                ready = sum(each.group.workers == workers for each, _ in self._arrived)
                ready += sum(workers[0] in each.workers for each in self.ready)
                while len(under_way) + ready < most and (self.together or assembler.room()):
                    if self.together:
                        self._weights.flush()  # all of them act with the latest weights
                    under_way.append(assembler.begin())

    def settle(self) -> None:
        """Complete the batches that have been begun, and keep them in `ready`: no worker is at work then."""
        assemblers = self.assemblers.values()
        for assembler in assemblers:
            self._complete(assembler)
        copies = [assembler.copies for assembler in assemblers]
        while self._arrived:
            self.ready.append(self._first())
        for assembler, count in zip(assemblers, copies, strict=True):
            assembler.copies = count  # it is not the reader that holds these batches

    def _complete(self, assembler: BatchAssembler) -> None:
        """Wait until the batches that a group of workers has begun are complete."""
        while assembler.under_way:
            self._pool.finish((pending := assembler.under_way[0]).calls)
            while not assembler.complete(pending):
                self._pool.finish(pending.calls)
            self._arrived.append((assembler, assembler.under_way.popleft()))

    def set_workers(self, workers: Sequence[int]) -> None:
        """Collect from these workers from now on. Batches that have been begun are completed, and delivered."""
        wanted = [tuple(workers)] if self.together else [(worker,) for worker in workers]
        for each, assembler in self.assemblers.items():
            if each not in wanted:
                self._complete(assembler)
        self.assemblers = {each: self.assemblers.get(each) or self._open_assembler(each) for each in wanted}

    def restarted(self, worker: int) -> Sequence[Call]:
        """The calls that the new process of a replaced worker needs first."""
        own = [each.restarted(worker) for workers, each in self.assemblers.items() if worker in workers]
        return [*(call for calls in own for call in calls), *self._weights.restarted(worker)]

    def close(self) -> None:
        """Release the memory."""
        for assembler in self.assemblers.values():
            assembler.close()
