"""Workers in the collector's own process, one after another: for a debugger, and to compare other transports with."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import cloudpickle
from tensordict import TensorDict
from torch import Tensor

from funcollect.collectors.workers.batch_layout import Join, joined
from funcollect.collectors.workers.transport import Answer, Call, Gone, Group, Link, Shipment
from funcollect.collectors.workers.worker import Worker, failure_of


class SerialLink:
    """A worker that works when its answer is asked for."""

    label = ""

    def __init__(self, job: bytes) -> None:
        self._job = job
        self._calls: deque[Call] = deque()
        self._worker: Worker | None = None

    def send(self, call: Call) -> None:
        """Remember it."""
        self._calls.append(call)

    def receive(self) -> Answer | Gone | None:
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


class SerialDock:
    """Rollouts as the workers made them."""

    copies = 0

    def __init__(self, submit: Callable[[Call], Call], workers: Sequence[int], join: Join | None) -> None:
        self._submit = submit
        self._workers = workers
        self._join = join

    def room(self) -> bool:
        """Whether another batch may be begun."""
        return True

    def begin(self) -> Shipment:
        """Have every worker of the group collect one rollout."""
        return Shipment([self._submit(Call(worker, "collect")) for worker in self._workers])

    def settle(self, shipment: Shipment) -> bool:
        """Whether the batch is whole."""
        return True

    def deliver(self, shipment: Shipment) -> TensorDict:
        """The batch."""
        batch: TensorDict = joined([call.value[0] for call in shipment.calls], self._join)
        return batch

    def restarted(self, worker: int) -> Sequence[Call]:
        """Nothing is needed."""
        return ()

    def close(self) -> None:
        """Nothing is held."""


class SerialBoard:
    """Weights handed on as they are."""

    def __init__(self) -> None:
        self._places: dict[int, Mapping[str, Tensor]] = {}

    def put(self, weights: Mapping[str, Tensor], taken: set[int]) -> int:
        """Keep them, and what is still to be taken."""
        place = next(place for place in range(len(taken) + 1) if place not in taken)
        self._places[place] = weights
        return place

    def call(self, worker: int, place: int, version: int) -> Call:
        """The weights themselves."""
        return Call(worker, "adopt", (self._places[place], version))

    def carried(self, params: Any) -> Any:
        """They go as they are."""
        return params

    def restarted(self, worker: int) -> None:
        """Nothing is remembered."""

    def close(self) -> None:
        """Let go of them."""
        self._places.clear()


class SerialTransport:
    """See `funcollect.collectors.workers.transport.Transport`."""

    patient = False

    def start(self, worker: int, job: bytes) -> SerialLink:
        """A worker of its own environment and policy, as one in another process would have."""
        return SerialLink(job)

    def ready(self, links: Mapping[int, Link], timeout: float) -> Iterable[int]:
        """An answer is there as soon as it is asked for."""
        return links

    def close(self, links: Sequence[Link]) -> None:
        """Close every worker."""
        for link in links:
            link.kill()

    def leave(self) -> None:
        """Nothing is held."""

    def dock(self, submit: Callable[[Call], Call], group: Group) -> SerialDock:
        """A dock for these workers."""
        return SerialDock(submit, group.workers, group.join)

    def board(self, workers: int) -> SerialBoard:
        """A board."""
        return SerialBoard()
