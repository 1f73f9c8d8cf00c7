"""Gathers batches from workers, over any transport: of all workers together, or of one at a time as they arrive."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import cloudpickle
import torch
from tensordict import TensorDict

from funcollect.collectors.options import Shard
from funcollect.collectors.workers.weights import Weights, WeightStore
from funcollect.collectors.workers.worker import Job, RolloutReport, Worker, WorkerInfo
from funcollect.errors import WorkerError
from funcollect.files import Uninterrupted
from funcollect.processes.pool import Call, FailurePolicy, Transport, WorkerPool
from funcollect.processes.serving import InProcessTransport
from funcollect.trajectories.final_observations import FinalObservations, attach
from funcollect.tree import flatten, to_batch

Join = Literal["stack", 0, -1]

# The fields of `WorkerInfo` that are the same for all workers, with their names in messages.
_ALIKE = {"num_envs": "num_envs", "leaves": "the observation", "action": "the action"}


class WorkerGroup(NamedTuple):
    """Workers whose rollouts make one batch."""

    workers: tuple[int, ...]  # their indices
    lengths: tuple[int, ...]  # T of each
    join: Join | None  # how their rollouts make one batch; None for one worker alone
    single: bool  # whether their environments have no batch dimension
    slots: int = 3  # for their batches: one that the reader holds, one that is ready, one that is being written


class PendingBatch(NamedTuple):
    """A batch that is being collected."""

    calls: Sequence[Call]  # one per worker, in the order of the workers
    version: int  # the lowest that its weights may have
    slot: int = 0  # where it is written, for workers in processes


def check_same_leaves(workers: Sequence[int], columns: Sequence[AbstractSet[Any]]) -> None:
    """Raise WorkerError unless the batches of all workers have the same columns: paths, or `LeafPlace`s."""
    for worker, mine in zip(workers, columns, strict=True):
        if mine != columns[0]:
            sides = mine, columns[0]
            one, other = (sorted(".".join(getattr(each, "path", each)) for each in side) for side in sides)
            what = f"its batch has other leaves than that of worker {workers[0]}, {one} and {other}"
            mend = "give all workers equal spaces and policies"
            raise WorkerError(f"worker {worker}: {what} with their dtypes and shapes: {mend}", worker)


class BatchAssembler:
    """Makes batches of the rollouts of a group of workers, here in this process; other transports have subclasses."""

    def __init__(self, submit: Callable[[Call], Call], group: WorkerGroup) -> None:
        self._submit, self.group = submit, group
        self.under_way: deque[PendingBatch] = deque()  # the batches that the workers have begun
        self.begun = 0  # batches, in all
        self.copies = 0  # batches that were delivered as copies, since the reader held views of every slot

    def room(self) -> bool:
        """Whether another batch may be begun."""
        return True

    def begin(self, version: int) -> PendingBatch:
        """Make every worker of the group collect one rollout, with weights of at least this version."""
        return PendingBatch([self._submit(Call(worker, "collect")) for worker in self.group.workers], version)

    def complete(self, pending: PendingBatch) -> None:
        """Do what is needed once the calls of a batch are done."""

    def deliver(self, pending: PendingBatch) -> TensorDict:
        """The batch, unlocked, for the caller to keep: that of one worker as it is, those of several in new memory."""
        parts: list[TensorDict] = [call.value[0] for call in pending.calls]
        if (join := self.group.join) is None:
            return parts[0]
        leaves, dims = [flatten(part) for part in parts], parts[0].batch_dims
        check_same_leaves(self.group.workers, [{*each} for each in leaves])
        if join == "stack":
            whole, dims = {path: torch.stack([each[path] for each in leaves]) for path in leaves[0]}, dims + 1
        else:
            dim = 0 if join == 0 else dims - 1
            whole = {path: torch.cat([each[path] for each in leaves], dim) for path in leaves[0]}
        return to_batch(whole, tuple(whole["next", "done"].shape[:dims]))

    def restarted(self, worker: int) -> Sequence[Call]:
        """The calls that a new process of this worker needs before the unanswered ones."""
        return ()

    def close(self) -> None:
        """Release the memory; batches that were delivered keep theirs."""


class Means(NamedTuple):
    """How calls, rollouts and weights get to workers and back: in this process, over processes, or over Ray."""

    transport: Transport
    assembler: Callable[[Callable[[Call], Call], WorkerGroup], BatchAssembler]  # for a group of workers
    weight_store: WeightStore


def in_this_process() -> Means:
    """Workers that run one after another, when an answer is requested, each with its own environment and policy."""
    return Means(InProcessTransport(lambda packed: Worker(cloudpickle.loads(packed))), BatchAssembler, WeightStore())


class ReadyBatch(NamedTuple):
    """A batch that has been collected, but not delivered."""

    take: Callable[[], TensorDict]  # returns it, for the caller to keep
    version: int  # of the oldest weights in it
    workers: Sequence[int]  # whose rollouts it holds
    final: FinalObservations | None  # of a compact batch


class LagBound:
    """Bounds how many versions the weights of a batch may be behind when it is delivered.

    It expects as many updates between two batches as there have been at most. Until then, only one batch may wait.
    """

    def __init__(self, most: int) -> None:
        self._most, self._updates = most, 0
        self._latest: int | None = None

    def requested(self, latest: int) -> None:
        """Record the latest version when the reader requests a batch."""
        if self._latest is not None:
            self._updates = max(1, self._updates, latest - self._latest)
        self._latest = latest

    def holds(self, versions: Iterable[int], held: int = 0) -> bool:
        """Whether batches of these versions can be delivered in time, after `held` others."""
        between, latest = self._updates or math.inf, self._latest or 0
        places = enumerate(sorted(versions), held)  # `place and`, since 0 * inf is nan
        return all(latest - version + (place and place * between) <= self._most for place, version in places)


class Gathering(WorkerPool):
    """The workers of one run, one for each of `jobs`, from which batches are collected.

    They act with the parameters of `policy`; for None they build their own. Batches are of all workers, put together by
    `join`; for None each is of one worker, in the order of their arrival, unless `lag` asks for another. None is
    dropped, and an exception (Ctrl-C, for example) loses none.

    When a batch is delivered, `ahead` others of the same workers may have been begun, or be ready. If the reader
    updates the weights once for each batch of these workers, batches are that many versions behind; `lag` bounds that.
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
        self.ready: deque[ReadyBatch] = deque()
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
                got, wanted = getattr(info, name), getattr(self.info, name)
                if got != wanted:
                    what = f"worker {worker}: {info.label} has {words} {got}, worker 0 has {wanted}"
                    mend = "give all workers environments with equal spaces and as many lanes"
                    raise WorkerError(f"{what}: {mend}", worker)

    @property
    def info(self) -> WorkerInfo:
        """The description of the first worker; all are alike."""
        return self.infos[0]

    @property
    def lanes(self) -> list[int]:
        """The number of lanes of each worker at work."""
        return [self.infos[worker].lanes for worker in self.workers]

    @property
    def total_lanes(self) -> int:
        """The number of lanes by which ids count: those of all shards, without workers that were added or removed."""
        shard: Shard = self.records[0].job.options.shard
        return shard.count * (self.info.num_envs or 1)

    @property
    def frames(self) -> list[int]:
        """The frames in one rollout of each worker at work."""
        return [self.infos[worker].frames for worker in self.workers]

    @property
    def copies(self) -> int:
        """Batches that were delivered as copies."""
        return sum(assembler.copies for assembler in self.assemblers.values())

    def next(self, *, more: bool) -> TensorDict:
        """The next batch; `more` is whether another one will be requested."""
        most = max(self._ahead, 1)
        if self._lag is not None:
            self._lag.requested(self.weights.version)
        if self._deliverable() is None:
            with nullcontext() if self.together or not self._transport.patient else Uninterrupted():  # one for all
                self.poll()
                self._advance(most)
        while (place := self._deliverable()) is None:
            self.wait()
            self._advance(most)
        ready = self.ready[place]
        batch = ready.take()
        del self.ready[place]
        try:
            if ready.final is not None:
                attach(batch, ready.final)
            if more and self._ahead:
                self._advance(self._ahead, held=1)
        except BaseException:  # such as Ctrl-C while a worker copies weights
            self.ready.insert(place, ready._replace(take=itertools.repeat(batch).__next__))
            raise
        self.version, self.gathered = ready.version, ready.workers
        return batch

    def _deliverable(self) -> int | None:
        """The place of a batch that is ready and may be delivered: the oldest, or one for which others can wait."""
        for place, ready in enumerate(self.ready):
            if self._lag is None:
                return place
            others = self._waiting()
            others.remove(ready.version)
            if ready.version <= min(others, default=ready.version) or self._lag.holds(others, held=1):
                return place
        return None

    def _waiting(self) -> list[int]:
        """The versions of all batches that have been begun and not been delivered."""
        begun = [pending.version for assembler in self.assemblers.values() for pending in assembler.under_way]
        return [each.version for each in self.ready] + begun

    def _advance(self, most: int, held: int = 0) -> None:
        """Queue the batches that have arrived, and begin others, until each group has `most`; see `LagBound.holds`."""
        self.weights.send()
        for assembler in self.assemblers.values():
            under_way = assembler.under_way
            while under_way and all(call.done for call in under_way[0].calls):
                self._arrive(assembler)
        turns, groups = [most], [*self.assemblers.items()]
        if self._lag is not None:  # which may not let all begin: those with the fewest batches first
            turns = [*range(1, most + 1)]
            groups.sort(key=lambda group: group[1].begun)
        for count, (workers, assembler) in itertools.product(turns, groups):
            under_way = assembler.under_way
            if len(under_way) < count:
                ready = sum(workers[0] in each.workers for each in self.ready)
                while len(under_way) + ready < count and (self.together or assembler.room()):
                    if self.together:
                        self.weights.flush()  # all of them act with the latest weights
                    version = 0 if self._lag is None else self.weights.sent_to(workers[0])
                    if self._lag is not None and not self._lag.holds([*self._waiting(), version], held):
                        break
                    with Uninterrupted():
                        under_way.append(assembler.begin(version))
                        assembler.begun += 1

    def _arrive(self, assembler: BatchAssembler) -> None:
        with Uninterrupted():
            assembler.complete(pending := assembler.under_way[0])
            reports: list[RolloutReport] = [call.value[-1] for call in pending.calls]
            final = FinalObservations.joined([each.final for each in reports if each.final is not None])
            version, workers = min(each.version for each in reports), assembler.group.workers
            assembler.under_way.popleft()
            self.ready.append(ReadyBatch(partial(assembler.deliver, pending), version, [*workers], final))

    def settle(self) -> None:
        """Complete the batches that have been begun, and keep them, so that no worker is at work."""
        for assembler in self.assemblers.values():
            self._complete(assembler)
        copies = {assembler: assembler.copies for assembler in self.assemblers.values()}
        for place, each in enumerate(self.ready):
            self.ready[place] = each._replace(take=itertools.repeat(each.take()).__next__)
        if self._lag is not None:
            self.ready = deque(sorted(self.ready, key=lambda each: each.version))
        for assembler, count in copies.items():
            assembler.copies = count  # the reader does not hold these batches

    def _complete(self, assembler: BatchAssembler) -> None:
        """Block until the batches that a group of workers has begun are complete."""
        while assembler.under_way:
            self.finish(assembler.under_way[0].calls)
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
            what = f"the workers' rollouts have {[*lengths]} steps, which cat_results={join!r} cannot put together"
            raise ValueError(f"{what}: pass cat_results=-1, or equal frames")
        group = WorkerGroup(workers, lengths, join, self.info.num_envs is None, max(3, self._ahead + 1))
        return self._means.assembler(self.submit, group)
