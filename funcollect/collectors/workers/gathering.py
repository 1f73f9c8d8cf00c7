"""Gathers batches from workers, over any transport: of all workers together, or of each as they arrive."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import cloudpickle
import torch
from tensordict import TensorDict

from funcollect.collectors.workers.weights import Weights, WeightStore
from funcollect.collectors.workers.worker import Job, RolloutReport, Worker, WorkerInfo
from funcollect.errors import WorkerError
from funcollect.processes.pool import Call, FailurePolicy, Transport, WorkerPool
from funcollect.processes.serving import InProcessTransport
from funcollect.trajectories.final_observations import FinalObservations, attach
from funcollect.tree import flatten, to_batch

Join = Literal["stack", 0, -1]

_ALIKE = {"num_envs": "num_envs", "leaves": "the observation", "action": "the action"}


class WorkerGroup(NamedTuple):
    """Workers whose rollouts make one batch."""

    workers: tuple[int, ...]  # their indices
    lengths: tuple[int, ...]  # T of each
    join: Join | None  # how their rollouts make one batch; None for one worker alone
    single: bool  # whether their environments have no batch dimension
    slots: int = 3  # for their batches: one that the reader holds, one that is ready, one that is being written


@dataclass(eq=False)
class PendingBatch:
    """A batch that is being collected: one call per worker, in the order of the workers, and the slot it goes into."""

    calls: list[Call]
    slot: int = 0
    version: int = 0  # of the weights: at first what it has at least, then the oldest in it


class BatchAssembler:
    """Makes batches of the rollouts of a group of workers: here as they come, over other transports in their memory."""

    def __init__(self, submit: Callable[[Call], Call], group: WorkerGroup) -> None:
        self._submit, self.group = submit, group
        self.under_way: deque[PendingBatch] = deque()  # the batches that the workers have begun
        self.begun = 0  # batches, in all
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
        return _joined([call.value[0] for call in pending.calls], self.group.join)

    def restarted(self, worker: int) -> Sequence[Call]:
        """The calls that a new process of this worker needs before the unanswered ones."""
        return ()

    def close(self) -> None:
        """Release the memory; batches that were delivered keep theirs."""


def _joined(parts: Sequence[TensorDict], join: Join | None) -> TensorDict:
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


class LagBound:
    """Bounds the versions of the weights by which batches are behind when they are delivered.

    It counts on as many updates between two batches as there have been at most; one waits alone before that is known.
    """

    def __init__(self, most: int) -> None:
        self._most, self._updates = most, 0
        self._latest: int | None = None

    def asked(self, latest: int) -> None:
        """Note the latest version, as the reader asks for a batch."""
        if self._latest is not None:
            self._updates = max(1, self._updates, latest - self._latest)
        self._latest = latest

    def holds(self, versions: Iterable[int], held: int = 0) -> bool:
        """Whether batches of these versions can be delivered in time, after `held` others."""
        between, latest = self._updates or math.inf, self._latest or 0
        places = enumerate(sorted(versions), held)
        return all(latest - version + (place and place * between) <= self._most for place, version in places)


class Gathering(WorkerPool):
    """The workers of one run, one for each of `jobs`, from which batches are collected.

    They act with the parameters of `policy`; for None they build their own. Batches are of all workers, put together by
    `join`; for None each is of one worker, in the order of their arrival, unless `lag` asks for another. None is
    dropped, and an exception (Ctrl-C, for example) loses none.

    When a batch is delivered, `ahead` others of the same workers may have been begun, or be ready. That many updates
    of the weights they are behind, if the reader makes one for each batch of these workers; `lag` bounds that.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        means: Means,
        failures: FailurePolicy,
        policy: Any,
        join: Join | None,
        ahead: int,
        lag: int | None = None,
    ) -> None:
        self._means, self._join, self.together = means, join, join is not None
        self._ahead, self._lag = ahead, None if lag is None else LagBound(lag)
        self.assemblers: dict[tuple[int, ...], BatchAssembler] = {}  # by the workers whose rollouts make a batch
        self._arrived: deque[tuple[BatchAssembler, PendingBatch]] = deque()
        self.ready: deque[ReadyBatch] = deque()  # batches that are delivered before all others
        self.version = 0  # of the weights in the last batch; the oldest, if its workers had different ones
        self.gathered: Sequence[int] = ()  # the workers whose rollouts are in the last batch
        try:
            super().__init__(means.transport, jobs, failures)
            self.infos: dict[int, WorkerInfo] = dict(enumerate(self.described))  # also of those that were removed
            self.check_alike(self.infos)
            self.weights = Weights(self, means.weight_store, policy)
            self.set_workers(self.workers)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """End the workers and release the memory; batches stay. Does nothing the second time."""
        self.stop()
        self._means.weight_store.close()
        for assembler in self.assemblers.values():
            assembler.close()

    def check_alike(self, infos: Mapping[int, WorkerInfo]) -> None:
        """Raise WorkerError unless the workers' environments fit into one batch: equal spaces, as many lanes."""
        for worker, info in infos.items():
            for name, words in _ALIKE.items():
                own, wanted = getattr(info, name), getattr(self.info, name)
                if own != wanted:
                    raise WorkerError(
                        f"worker {worker}: {info.label} has {words} {own}, worker 0 has {wanted}: give all workers "
                        "environments with equal spaces and as many lanes",
                        worker,
                    )

    @property
    def info(self) -> WorkerInfo:
        """The description of the first worker; all are alike."""
        return self.infos[0]

    @property
    def lanes(self) -> list[int]:
        """The number of lanes of each worker at work."""
        return [self.infos[worker].lanes for worker in self.workers]

    @property
    def frames(self) -> list[int]:
        """The frames in one rollout of each worker at work."""
        return [self.infos[worker].frames for worker in self.workers]

    @property
    def copies(self) -> int:
        """Batches that were delivered as copies."""
        return sum(assembler.copies for assembler in self.assemblers.values())

    def next(self, *, more: bool) -> TensorDict:
        """The next batch; `more` is whether another one will be asked for."""
        if self._lag is not None:
            self._lag.asked(self.weights.version)
        if self.ready:
            ready = self.ready.popleft()
        else:
            most = max(self._ahead, 1)
            if self._in_time() is None:
                self._go_on(most)
            while (place := self._in_time()) is None:
                self.wait()
                self._go_on(most)
            ready = self._taken(place)
        if more and self._ahead:
            self._go_on(self._ahead, held=1)
        self.version, self.gathered = ready.version, ready.workers
        if ready.final is not None:
            attach(ready.batch, ready.final)
        return ready.batch

    def _in_time(self) -> int | None:
        """The place of a batch that has arrived and may be delivered: the oldest, or one for which others can wait."""
        for place, (_, pending) in enumerate(self._arrived):
            if self._lag is None:
                return place
            others = self._waiting()
            others.remove(pending.version)
            if pending.version <= min(others, default=pending.version) or self._lag.holds(others, held=1):
                return place
        return None

    def _waiting(self) -> list[int]:
        """The versions of all batches that have been begun and not been delivered."""
        begun = [pending for assembler in self.assemblers.values() for pending in assembler.under_way]
        begun += [pending for _, pending in self._arrived]
        return [each.version for each in self.ready] + [each.version for each in begun]

    def _taken(self, place: int = 0) -> ReadyBatch:
        assembler, pending = self._arrived[place]
        batch = assembler.deliver(pending)
        del self._arrived[place]
        reports: list[RolloutReport] = [call.value[-1] for call in pending.calls]
        parts = [report.final for report in reports if report.final is not None]
        final = FinalObservations.joined(parts) if parts else None
        return ReadyBatch(batch, pending.version, [*assembler.group.workers], final)

    def _go_on(self, most: int, held: int = 0) -> None:
        """Queue the batches that have arrived, and let workers begin others, until each group has so many."""
        self.weights.send()
        for assembler in self.assemblers.values():
            under_way = assembler.under_way
            while under_way and all(call.done for call in under_way[0].calls) and assembler.complete(under_way[0]):
                self._arrive(assembler)
        turns, groups = [most], [*self.assemblers.items()]
        if self._lag is not None:  # not all may begin
            turns = [*range(1, most + 1)]
            groups.sort(key=lambda group: group[1].begun)
        for count, (workers, assembler) in itertools.product(turns, groups):
            under_way = assembler.under_way
            if len(under_way) < count:
                ready = sum(each.group.workers == workers for each, _ in self._arrived)
                ready += sum(workers[0] in each.workers for each in self.ready)
                while len(under_way) + ready < count and (self.together or assembler.room()):
                    if self.together:
                        self.weights.flush()  # all of them act with the latest weights
                    version = 0 if self._lag is None else self.weights.sent_to(workers[0])
                    if self._lag is not None and not self._lag.holds([*self._waiting(), version], held):
                        break
                    under_way.append(assembler.begin())
                    under_way[-1].version = version
                    assembler.begun += 1

    def _arrive(self, assembler: BatchAssembler) -> None:
        pending = assembler.under_way.popleft()
        pending.version = min(call.value[-1].version for call in pending.calls)
        self._arrived.append((assembler, pending))

    def settle(self) -> None:
        """Complete the batches that have been begun, and keep them in `ready`: no worker is at work then."""
        for assembler in self.assemblers.values():
            self._complete(assembler)
        copies = {assembler: assembler.copies for assembler, _ in self._arrived}
        while self._arrived:
            self.ready.append(self._taken())
        if self._lag is not None:
            self.ready = deque(sorted(self.ready, key=lambda each: each.version))
        for assembler, count in copies.items():
            assembler.copies = count  # it is not the reader that holds these batches

    def _complete(self, assembler: BatchAssembler) -> None:
        """Wait until the batches that a group of workers has begun are complete."""
        while assembler.under_way:
            self.finish((pending := assembler.under_way[0]).calls)
            while not assembler.complete(pending):
                self.finish(pending.calls)
            self._arrive(assembler)

    def set_workers(self, workers: Sequence[int]) -> None:
        """Collect from these workers from now on. Batches that have been begun are completed, and delivered."""
        wanted = [tuple(workers)] if self.together else [(worker,) for worker in workers]
        for each, assembler in self.assemblers.items():
            if each not in wanted:
                self._complete(assembler)
        self.assemblers = {each: self.assemblers.get(each) or self._open_assembler(each) for each in wanted}

    def _open_assembler(self, workers: tuple[int, ...]) -> BatchAssembler:
        join, lengths = self._join, tuple(self.infos[worker].length for worker in workers)
        if len({*lengths}) > 1 and (join == "stack" or (join == 0 and self.info.num_envs)):
            raise ValueError(
                f"the workers' rollouts have {[*lengths]} steps, which cat_results={join!r} cannot put together: pass "
                "cat_results=-1, or equal frames"
            )
        group = WorkerGroup(workers, lengths, join, self.info.num_envs is None, max(3, self._ahead + 1))
        return self._means.assembler(self.submit, group)
