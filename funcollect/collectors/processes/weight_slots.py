"""Weights in shared memory: as many slots as can be in use, and one to write."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor
from typing_extensions import override

from funcollect.collectors.processes.shared_memory import mapped, shared_memory
from funcollect.collectors.workers.batch_layout import BatchColumn, BatchLayout
from funcollect.collectors.workers.transport import Call, WeightStore


class _Slots(NamedTuple):
    """As many slots as the store has, for weights of the same names, shapes and dtypes."""

    first: int  # the number of the first one
    fd: int
    layout: BatchLayout
    rows: list[dict[str, Tensor]]


class SharedWeightStore(WeightStore):
    """Weights in slots of shared memory: as many as can be in use, and one to write.

    The layout is that of the latest weights. When they have other names or shapes, they get new slots.

    Args:
        workers: how many there are: each may read one slot while the latest weights lie in another.
    """

    def __init__(self, workers: int) -> None:
        self._count = workers + 2
        self._slots: list[_Slots] = []  # the latest last, and those before that somebody may still read
        self._attached: dict[int, int] = {}  # by worker: the first of the slots that it has

    @override
    def put(self, weights: Mapping[str, Tensor], taken: set[int]) -> int | None:
        if not self._slots or not _fit(weights, self._slots[-1].rows[0]):
            self._open(weights)
        self._close_before({self._slots[-1].first, *map(self._first_of, taken)})
        latest = self._slots[-1]
        slot = next((slot for slot in range(self._count) if latest.first + slot not in taken), None)
        if slot is None:
            return None
        for name, rows in latest.rows[slot].items():
            rows.copy_(weights[name])
        return latest.first + slot

    def _open(self, weights: Mapping[str, Tensor]) -> None:
        columns = tuple(BatchColumn((name,), weight.dtype, tuple(weight.shape)) for name, weight in weights.items())
        layout = BatchLayout(columns, (1,), None, False)
        fd = shared_memory(self._count * layout.size)
        memories = [layout.part(memory, 0) for memory in mapped(fd, self._count, layout.size)]
        rows = [{path[0]: column[0] for path, column in each.items()} for each in memories]
        first = self._slots[-1].first + self._count if self._slots else 0
        self._slots.append(_Slots(first, fd, layout, rows))

    def _first_of(self, slot: int) -> int:
        return slot - slot % self._count

    def _close_before(self, kept: set[int]) -> None:
        for each in self._slots:
            if each.first not in kept:
                os.close(each.fd)
        self._slots = [each for each in self._slots if each.first in kept]

    @override
    def call(self, worker: int, slot: int, version: int, policy: bytes | None) -> Call:
        first = self._first_of(slot)
        slots = next(each for each in self._slots if each.first == first)
        fds = () if self._attached.get(worker) == first else (slots.fd,)
        self._attached[worker] = first
        return Call(worker, "fetch", (slot - first, version, policy, slots.layout, self._count), fds)

    @override
    def restarted(self, worker: int) -> None:
        self._attached.pop(worker, None)  # so that the next call brings the memory again

    @override
    def close(self) -> None:
        self._close_before(set())


def _fit(weights: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> bool:
    return weights.keys() == rows.keys() and all(
        weight.dtype == rows[name].dtype and weight.shape == rows[name].shape for name, weight in weights.items()
    )
