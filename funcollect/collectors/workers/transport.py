"""What a transport is: links to workers, each of which answers the calls that it is sent, in their order.

A transport starts workers and tells when one has answered; a dock says where a group of workers puts its rollouts and
makes batches of them; a board is where weights lie until every worker has taken them. There are serial ones, those
over processes with shared memory, and those over Ray's actors and object store. All else is written once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tensordict import TensorDict
from torch import Tensor

from funcollect.collectors.workers.batch_layout import Join

WITH_WEIGHTS = ("fetch", "adopt", "take_params")  # the calls that bring a worker new ones


class WorkerGroup(NamedTuple):
    """Workers whose rollouts make one batch."""

    workers: Sequence[int]  # their indices
    lengths: tuple[int, ...]  # T of each
    join: Join | None  # how their rollouts make one batch; None for one worker alone
    single: bool  # whether their environments have no batch dimension


class Answer(NamedTuple):
    """A worker's answer to a call: what came of it, or how it failed."""

    number: int  # the call's
    value: Any


class WorkerExited(NamedTuple):
    """A worker that will not answer any more, and why."""

    reason: str


@dataclass(eq=False)
class Call:
    """A call of a worker, and what has come of it.

    Attributes:
        worker: the index.
        name: what is called.
        args: its arguments.
        fds: file descriptors that go with it, where a transport has them.
        number: which of all calls it is.
        done: whether `value` or `error` stands.
    """

    worker: int
    name: str
    args: tuple[Any, ...] = ()
    fds: tuple[int, ...] = ()
    number: int = field(default_factory=itertools.count().__next__)
    done: bool = False
    value: Any = None
    error: BaseException | None = None

    def resolve(self, value: Any = None, error: BaseException | None = None) -> None:
        """Let it have come to its end."""
        self.done, self.value, self.error = True, value, error


class WorkerHandle(Protocol):
    """The way to one worker."""

    @property
    def label(self) -> str:
        """What and where the worker is, for a message; empty where its index says all."""
        ...

    def send(self, call: Call) -> None:
        """Have it do this after what it was sent before. Never waits for the worker, never raises for its death."""
        ...

    def receive(self) -> Answer | WorkerExited | None:
        """The next of its answers; None where there is none yet."""
        ...

    def where(self) -> str:
        """Where it hangs, in words: a Python stack, if it can be had."""
        ...

    def kill(self) -> None:
        """End it at once, whatever it does."""
        ...


@dataclass(eq=False)
class PendingBatch:
    """A batch on its way: the calls that bring its parts, in the order of the workers, and its place in the dock."""

    calls: list[Call]
    slot: int = 0


class BatchAssembler(Protocol):
    """Where the workers of a group put their rollouts, which become one batch."""

    copies: int  # batches that were handed over as copies, since the reader held all places

    def room(self) -> bool:
        """Whether another batch may be begun."""
        ...

    def begin(self) -> PendingBatch:
        """Have every worker of the group collect one rollout."""
        ...

    def complete(self, pending: PendingBatch) -> bool:
        """Whether a batch is whole whose calls are all done; where not, it has other calls afterwards."""
        ...

    def deliver(self, pending: PendingBatch) -> TensorDict:
        """The batch, unlocked and the caller's own."""
        ...

    def restarted(self, worker: int) -> Sequence[Call]:
        """What a worker of the group has to be told before it is sent the calls that it has not answered."""
        ...

    def close(self) -> None:
        """Let go of the memory; batches keep what they show."""
        ...


class WeightStore(Protocol):
    """Where weights lie until every worker has taken them."""

    def put(self, weights: Mapping[str, Tensor], taken: set[int]) -> int | None:
        """Lay them down in a place that is not among `taken`: which; None where all are."""
        ...

    def call(self, worker: int, slot: int, version: int) -> Call:
        """What tells a worker to take them."""
        ...

    def encode_params(self, params: Any) -> Any:
        """What stands in a call for parameters that are no weights by name: what the worker gets is `params`."""
        ...

    def restarted(self, worker: int) -> None:
        """Forget what this worker has been told."""
        ...

    def close(self) -> None:
        """Let go of the memory."""
        ...


class Transport(Protocol):
    """Where workers live."""

    patient: bool  # whether to wait for a worker costs time: then one that takes too long hangs

    def start(self, worker: int, job: bytes) -> WorkerHandle:
        """A link to a new worker that builds itself from `job`; its first answer is that to ``"describe"``."""
        ...

    def ready(self, handles: Mapping[int, WorkerHandle], timeout: float) -> Iterable[int]:
        """The keys of the links that may have something to receive: as soon as there is one, or `timeout` seconds."""
        ...

    def close(self, handles: Sequence[WorkerHandle]) -> None:
        """End the workers: politely, then at once."""
        ...

    def leave(self) -> None:
        """Let go of what the workers have run on, once all of them have ended."""
        ...

    def assembler(self, submit: Callable[[Call], Call], group: WorkerGroup) -> BatchAssembler:
        """A dock for these workers; `submit` sends a call."""
        ...

    def weight_store(self, workers: int) -> WeightStore:
        """A board for so many workers."""
        ...
