"""Workers in the collector's own process, one after another: for a debugger, and to compare other transports with."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import cloudpickle
from tensordict import TensorDict
from torch import Tensor

from funcollect.collectors.workers.batch_layout import Join, joined
from funcollect.collectors.workers.transport import Answer, Call, PendingBatch, WorkerExited, WorkerGroup, WorkerHandle
from funcollect.collectors.workers.worker import Worker, failure_of


class SerialHandle:
    """A worker that works when its answer is asked for."""

    label = ""

    def __init__(self, job: bytes) -> None:
        self._job = job
        self._calls: deque[Call] = deque()
        self._worker: Worker | None = None

    def send(self, call: Call) -> None:
        """Remember it."""
        self._calls.append(call)

    def receive(self) -> Answer | WorkerExited | None:
        """Do what it was told."""
        if not self._calls:
            return None
        call = self._calls.popleft()
        try:
            if self._worker is None:
                self._worker = Worker(cloudpickle.loads(self._job))
            return Answer(call.number, getattr(self._worker, call.name)(*call.args))
        except Exception as error:
            return Answer(call.number, failure_of(error) if self._worker is None else self._worker.failure(error))

    def where(self) -> str:
        """It cannot hang unseen."""
        return ""

    def kill(self) -> None:
        """Close it."""
        self._calls.clear()
        if self._worker is not None:
            self._worker.close()


class SerialAssembler:
    """Rollouts as the workers made them."""

    copies = 0

    def __init__(self, submit: Callable[[Call], Call], workers: Sequence[int], join: Join | None) -> None:
        self._submit = submit
        self._workers = workers
        self._join = join

    def room(self) -> bool:
        """Whether another batch may be begun."""
        return True

    def begin(self) -> PendingBatch:
        """Have every worker of the group collect one rollout."""
        return PendingBatch([self._submit(Call(worker, "collect")) for worker in self._workers])

    def complete(self, pending: PendingBatch) -> bool:
        """Whether the batch is whole."""
        return True

    def deliver(self, pending: PendingBatch) -> TensorDict:
        """The batch."""
        batch: TensorDict = joined([call.value[0] for call in pending.calls], self._join)
        return batch

    def restarted(self, worker: int) -> Sequence[Call]:
        """Nothing is needed."""
        return ()

    def close(self) -> None:
        """Nothing is held."""


class SerialWeightStore:
    """Weights handed on as they are."""

    def __init__(self) -> None:
        self._slots: dict[int, Mapping[str, Tensor]] = {}

    def put(self, weights: Mapping[str, Tensor], taken: set[int]) -> int:
        """Keep them, and what is still to be taken."""
        slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        self._slots[slot] = weights
        return slot

    def call(self, worker: int, slot: int, version: int, policy: bytes | None) -> Call:
        """The weights themselves."""
        return Call(worker, "adopt", (self._slots[slot], version, policy))

    def encode_params(self, params: Any) -> Any:
        """They go as they are."""
        return params

    def restarted(self, worker: int) -> None:
        """Nothing is remembered."""

    def close(self) -> None:
        """Let go of them."""
        self._slots.clear()


class SerialTransport:
    """See `funcollect.collectors.workers.transport.Transport`."""

    patient = False

    def start(self, worker: int, job: bytes) -> SerialHandle:
        """A worker of its own environment and policy, as one in another process would have."""
        return SerialHandle(job)

    def ready(self, handles: Mapping[int, WorkerHandle], timeout: float) -> Iterable[int]:
        """An answer is there as soon as it is asked for."""
        return handles

    def close(self, handles: Sequence[WorkerHandle]) -> None:
        """Close every worker."""
        for handle in handles:
            handle.kill()

    def leave(self) -> None:
        """Nothing is held."""

    def assembler(self, submit: Callable[[Call], Call], group: WorkerGroup) -> SerialAssembler:
        """An assembler for these workers."""
        return SerialAssembler(submit, group.workers, group.join)

    def weight_store(self, workers: int) -> SerialWeightStore:
        """A weight store."""
        return SerialWeightStore()
