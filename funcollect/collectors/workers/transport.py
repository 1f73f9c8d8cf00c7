"""The base classes of a transport: handles to workers, each of which answers its calls in the order they were sent.

A `Transport` starts workers and reports when one has answered. A `BatchAssembler` decides where the workers of a group
write their rollouts, and makes batches of these. A `WeightStore` holds weights until every worker has copied them.
There are three implementations: serial, processes with shared memory, and Ray actors with Ray's object store.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tensordict import TensorDict
from torch import Tensor

from funcollect.collectors.workers.batch_layout import Join
from funcollect.collectors.workers.worker import Job

WITH_WEIGHTS = ("fetch", "adopt", "take_params")  # the calls that bring new weights


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
    """The answer of a worker that has ended, and why it has."""

    reason: str


@dataclass(eq=False)
class Call:
    """A call to a worker, and its result."""

    worker: int  # its index
    name: str  # of the method
    args: tuple[Any, ...] = ()
    fds: tuple[int, ...] = ()  # file descriptors that a transport between processes sends with the call
    number: int = field(default_factory=itertools.count().__next__)  # identifies the call
    done: bool = False  # whether `value` or `error` is set
    value: Any = None
    error: BaseException | None = None

    def resolve(self, value: Any = None, error: BaseException | None = None) -> None:
        """Mark the call as finished, with a value or an error."""
        self.done, self.value, self.error = True, value, error


class WorkerHandle(ABC):
    """Sends calls to one worker, and receives its answers."""

    @property
    def label(self) -> str:
        """The kind and place of the worker, for error messages; empty if its index says enough."""
        return ""

    @abstractmethod
    def send(self, call: Call) -> None:
        """Queue a call after those that were sent before. Never waits for the worker, never raises if it has died."""

    @abstractmethod
    def receive(self) -> Answer | WorkerExited | None:
        """The worker's next answer; None if there is none yet."""

    def signs(self) -> int:
        """A number that changes if the worker has shown a sign of life, as far as is known."""
        return 0

    def where(self) -> str:
        """Where the worker hangs: its Python stack, if it can be had."""
        return ""

    @abstractmethod
    def kill(self) -> None:
        """End the worker at once, whatever it does. Does nothing the second time."""


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


class WeightStore(ABC):
    """Holds weights until every worker has copied them."""

    @abstractmethod
    def put(self, weights: Mapping[str, Tensor], taken: set[int]) -> int | None:
        """Write the weights into a slot that is not among `taken`; return the slot, or None if all are taken."""

    @abstractmethod
    def call(self, worker: int, slot: int, version: int, policy: bytes | None) -> Call:
        """The call that makes a worker copy the weights in `slot`, together with the packed `policy` if it changed."""

    def encode_params(self, params: Any) -> Any:
        """What a call holds in place of `params`, for parameters that are not named weights."""
        return params

    def restarted(self, worker: int) -> None:  # noqa: B027 - most remember none
        """Forget which calls this worker was sent: another process has replaced it."""

    @abstractmethod
    def close(self) -> None:
        """Release the memory."""


class Transport(ABC):
    """Starts workers, and reports which of them have answered."""

    patient = True  # whether waiting for a worker takes time; if so, one that takes too long counts as hung

    @abstractmethod
    def start(self, job: Job, packed: bytes) -> WorkerHandle:
        """A handle to a new worker that builds itself from the packed job; the first call to it is ``"describe"``."""

    def check_room(self, jobs: Sequence[Job], first: int, present: Sequence[Job]) -> None:  # noqa: B027 - most have room
        """Raise WorkerError if there is no room for new workers, with indices from `first`, beside the present ones."""

    @abstractmethod
    def ready(self, handles: Mapping[int, WorkerHandle], timeout: float) -> Iterable[int]:
        """The keys of the handles that may have an answer; waits for the first one, at most `timeout` seconds."""

    @abstractmethod
    def close(self, handles: Sequence[WorkerHandle]) -> None:
        """Let the workers close their environments, then end them."""

    def leave(self) -> None:  # noqa: B027 - most need nothing
        """Release the workers' resources, once all of them have ended."""

    @abstractmethod
    def assembler(self, submit: Callable[[Call], Call], group: WorkerGroup) -> BatchAssembler:
        """An assembler for these workers; `submit` sends a call."""

    @abstractmethod
    def weight_store(self, workers: int) -> WeightStore:
        """A store for the weights of this number of workers."""
