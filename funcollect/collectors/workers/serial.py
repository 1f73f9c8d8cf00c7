"""Workers in the collector's own process, one after another: for debuggers, and as a reference."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import cloudpickle
from tensordict import TensorDict
from torch import Tensor
from typing_extensions import override

from funcollect.collectors.workers.batch_layout import joined
from funcollect.collectors.workers.transport import (
    Answer,
    BatchAssembler,
    Call,
    PendingBatch,
    Transport,
    WeightStore,
    WorkerExited,
    WorkerGroup,
    WorkerHandle,
)
from funcollect.collectors.workers.worker import Job, Worker
from funcollect.processes.failures import Failure


class SerialHandle(WorkerHandle):
    """A worker that runs a call when its answer is asked for."""

    def __init__(self, job: bytes) -> None:
        self._job = job
        self._calls: deque[Call] = deque()
        self._worker: Worker | None = None

    @override
    def send(self, call: Call) -> None:
        self._calls.append(call)

    @override
    def receive(self) -> Answer | WorkerExited | None:
        if not self._calls:
            return None
        call = self._calls.popleft()
        try:
            if self._worker is None:
                self._worker = Worker(cloudpickle.loads(self._job))
            return Answer(call.number, getattr(self._worker, call.name)(*call.args))
        except Exception as error:
            return Answer(call.number, Failure.of(error) if self._worker is None else self._worker.failure(error))

    @override
    def kill(self) -> None:
        self._calls.clear()
        if self._worker is not None:
            self._worker.close()


class SerialAssembler(BatchAssembler):
    """Joins the rollouts as the workers made them."""

    @override
    def deliver(self, pending: PendingBatch) -> TensorDict:
        batch: TensorDict = joined([call.value[0] for call in pending.calls], self._group.join)
        return batch


class SerialWeightStore(WeightStore):
    """Passes weights on by reference."""

    def __init__(self) -> None:
        self._slots: dict[int, Mapping[str, Tensor]] = {}

    @override
    def put(self, weights: Mapping[str, Tensor], taken: set[int]) -> int:
        slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        self._slots[slot] = weights
        return slot

    @override
    def call(self, worker: int, slot: int, version: int, policy: bytes | None) -> Call:
        return Call(worker, "adopt", (self._slots[slot], version, policy))

    @override
    def close(self) -> None:
        self._slots.clear()


class SerialTransport(Transport):
    """Workers in this process, each with its own environment and policy, as in another process."""

    patient = False

    @override
    def start(self, job: Job, packed: bytes) -> SerialHandle:
        return SerialHandle(packed)

    @override
    def ready(self, handles: Mapping[int, WorkerHandle], timeout: float) -> Iterable[int]:
        return handles  # a worker answers as soon as it is asked

    @override
    def close(self, handles: Sequence[WorkerHandle]) -> None:
        for handle in handles:
            handle.kill()

    @override
    def assembler(self, submit: Callable[[Call], Call], group: WorkerGroup) -> SerialAssembler:
        return SerialAssembler(submit, group)

    @override
    def weight_store(self, workers: int) -> SerialWeightStore:
        return SerialWeightStore()
