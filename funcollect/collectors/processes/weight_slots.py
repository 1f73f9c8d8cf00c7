"""Weights in shared memory: as many slots as can be in use, and one to write."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from funcollect.collectors.processes.shared_memory import mapped, shared_memory
from funcollect.collectors.workers.batch_layout import BatchColumn, BatchLayout
from funcollect.collectors.workers.transport import Call


class SharedWeightStore:
    """See `funcollect.collectors.workers.transport.WeightStore`; the first weights determine its layout.

    Args:
        workers: how many there are: each may read one slot while the latest weights lie in another.
    """

    def __init__(self, workers: int) -> None:
        self._count = workers + 2
        self._fd = -1
        self._layout = BatchLayout((), (1,), None, False)
        self._slots: list[dict[str, Tensor]] = []
        self._attached: set[int] = set()

    def put(self, weights: Mapping[str, Tensor], taken: set[int]) -> int | None:
        """Copy them into a slot that is not among `taken`; return the slot, or None if all are taken."""
        slot = next((slot for slot in range(self._count) if slot not in taken), None)
        if slot is None:
            return None
        if not self._slots:
            self._open(weights)
        for name, rows in self._slots[slot].items():
            rows.copy_(weights[name])
        return slot

    def _open(self, weights: Mapping[str, Tensor]) -> None:
        columns = tuple(BatchColumn((name,), weight.dtype, tuple(weight.shape)) for name, weight in weights.items())
        self._layout = BatchLayout(columns, (1,), None, False)
        self._fd = shared_memory(self._count * self._layout.size)
        memories = [self._layout.part(memory, 0) for memory in mapped(self._fd, self._count, self._layout.size)]
        self._slots = [{path[0]: rows[0] for path, rows in each.items()} for each in memories]

    def call(self, worker: int, slot: int, version: int) -> Call:
        """A message that names the slot to read; the first one brings the memory."""
        fds = () if worker in self._attached else (self._fd,)
        self._attached.add(worker)
        return Call(worker, "fetch", (slot, version, self._layout, self._count), fds)

    def encode_params(self, params: Any) -> Any:
        """They go as they are."""
        return params

    def restarted(self, worker: int) -> None:
        """Send the memory again with the next call: another process has replaced this worker."""
        self._attached.discard(worker)

    def close(self) -> None:
        """Let go of the memory."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd, self._slots = -1, []
