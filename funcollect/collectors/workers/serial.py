"""Workers in the collector's own process, one after another: for debuggers, and as a reference."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import cloudpickle
from tensordict import TensorDict
from torch import Tensor
from typing_extensions import override

from funcollect.collectors.workers.batch_layout import joined
from funcollect.collectors.workers.gathering import BatchAssembler, PendingBatch
from funcollect.collectors.workers.run import Means
from funcollect.collectors.workers.weights import WeightStore
from funcollect.collectors.workers.worker import Worker
from funcollect.processes.pool import Answer, Call, Loss, Transport, WorkerHandle, WorkerJob
from funcollect.processes.serving import Answering


class SerialHandle(WorkerHandle):
    """A worker that runs a call when its answer is asked for."""

    def __init__(self) -> None:
        self._calls: deque[Call] = deque()
        self._answering = Answering(lambda packed: Worker(cloudpickle.loads(packed)), catches=Exception)

    @override
    def send(self, call: Call) -> None:
        self._calls.append(call)

    @override
    def receive(self) -> Answer | Loss | None:
        if not self._calls:
            return None
        call = self._calls.popleft()
        return Answer(call.number, self._answering.answer(call.name, call.args))

    @override
    def kill(self) -> None:
        self._calls.clear()
        self._answering.close()


class SerialAssembler(BatchAssembler):
    """Joins the rollouts as the workers made them."""

    @override
    def deliver(self, pending: PendingBatch) -> TensorDict:
        batch: TensorDict = joined([call.value[0] for call in pending.calls], self._group.join)
        return batch


class SerialWeightStore(WeightStore):
    """Passes weights on by reference."""

    @override
    def put(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return weights

    @override
    def call(self, worker: int, held: Mapping[str, Tensor], version: int, policy: bytes | None) -> Call:
        return Call(worker, "adopt", (held, version, policy))


class SerialTransport(Transport):
    """Workers in this process, each with its own environment and policy, as in another process."""

    patient = False

    @override
    def start(self, job: WorkerJob) -> SerialHandle:
        return SerialHandle()

    @override
    def ready(self, handles: Mapping[int, WorkerHandle], timeout: float) -> Iterable[int]:
        return handles  # a worker answers as soon as it is asked

    @override
    def close(self, handles: Sequence[WorkerHandle]) -> None:
        for handle in handles:
            handle.kill()


def in_this_process() -> Means:
    """Workers that run one after another, whenever an answer is asked for."""
    return Means(SerialTransport(), SerialAssembler, SerialWeightStore())
