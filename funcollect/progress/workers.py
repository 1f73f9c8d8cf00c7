"""The entries of a progress bar about workers: waiting times, age of weights, failures."""

from __future__ import annotations

import time
from typing import Any

_COUNTS = {"lag": "policy_lag", "restarts": "restarts", "copies": "copies"}


class WorkersSummary:
    """Watches the workers of a collector from now on; empty for a collector without workers.

    >>> import funcollect as fc
    >>> collector = fc.SyncDataCollector("CartPole-v1", frames_per_batch=100, total_frames=300, seed=0)
    >>> WorkersSummary(collector).shown()
    {}
    """

    def __init__(self, collector: Any) -> None:
        self._collector = collector
        self._workers = getattr(collector, "num_workers", 0)
        self._before = collector.stats() if self._workers else {}
        self._began = time.monotonic()

    def shown(self) -> dict[str, str]:
        """The entries by name; zeros are omitted."""
        if not self._workers:
            return {}
        stats = self._collector.stats()
        seconds = time.monotonic() - self._began
        spans = {
            "reader_waits": ("reader_waited", seconds),
            "workers_wait": ("workers_waited", seconds * self._workers),
        }
        shares = {
            name: (stats.get(key, 0.0) - self._before.get(key, 0.0)) / span for name, (key, span) in spans.items()
        }
        waits = {name: f"{share:.0%}" for name, share in shares.items() if share >= 0.005}
        return waits | {name: str(stats[key]) for name, key in _COUNTS.items() if stats.get(key)}
