"""The protocol of a transport: handles to workers, each of which answers its calls in the order they were sent.

A `Transport` starts workers and reports when one has answered. A `BatchAssembler` decides where the workers of a group
write their rollouts, and makes batches of them. A `WeightStore` holds weights until every worker has copied them.
There are three implementations: serial, processes with shared memory, and Ray actors with Ray's object store.
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
    """A worker's answer to a call: its result, or a `Failure`."""

    number: int  # the call's
    value: Any


class WorkerExited(NamedTuple):
    """A worker that will not answer any more, and why."""

    reason: str


@dataclass(eq=False)
class Call:
    """A call of a worker, and its result.

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
        """Mark the call as finished, with a value or an error."""
        self.done, self.value, self.error = True, value, error


class WorkerHandle(Protocol):
    """Sends calls to one worker, and receives its answers."""

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
    """A batch that is being collected: one call per worker, in the order of the workers, and the slot it goes into."""

    calls: list[Call]
    slot: int = 0


class BatchAssembler(Protocol):
    """Decides where the workers of a group write their rollouts, and makes one batch of them."""

    copies: int  # batches that were handed over as copies, since the reader held every slot

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
    """Holds weights until every worker has copied them."""

    def put(self, weights: Mapping[str, Tensor], taken: set[int]) -> int | None:
        """Write the weights into a slot that is not among `taken`; return the slot, or None if all are taken."""
        ...

    def call(self, worker: int, slot: int, version: int, policy: bytes | None) -> Call:
        """The call that makes a worker copy the weights in `slot`, for the packed `policy` if that is another."""
        ...

    def encode_params(self, params: Any) -> Any:
        """What a call holds in place of `params`, for parameters that are not named weights."""
        ...

    def restarted(self, worker: int) -> None:
        """Forget which calls this worker was sent: another process has replaced it."""
        ...

    def close(self) -> None:
        """Let go of the memory."""
        ...


class Transport(Protocol):
    """Where workers live."""

    patient: bool  # whether to wait for a worker costs time: then one that takes too long hangs

    def start(self, worker: int, job: bytes) -> WorkerHandle:
        """A handle to a new worker that builds itself from `job`; its first answer is to the call ``"describe"``."""
        ...

    def ready(self, handles: Mapping[int, WorkerHandle], timeout: float) -> Iterable[int]:
        """The keys of the handles that may have an answer; waits for the first one, at most `timeout` seconds."""
        ...

    def close(self, handles: Sequence[WorkerHandle]) -> None:
        """End the workers: politely, then at once."""
        ...

    def leave(self) -> None:
        """Let go of what the workers have run on, once all of them have ended."""
        ...

    def assembler(self, submit: Callable[[Call], Call], group: WorkerGroup) -> BatchAssembler:
        """An assembler for these workers; `submit` sends a call."""
        ...

    def weight_store(self, workers: int) -> WeightStore:
        """A store for the weights of so many workers."""
        ...
