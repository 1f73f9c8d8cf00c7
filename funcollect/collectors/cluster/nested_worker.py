"""A worker that has workers itself: a collector of processes that is one of several in a larger run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from funcollect.collectors.worker_collector import WorkerCollector
from funcollect.collectors.workers.worker import START, Failure, Job, Progress, RolloutReport, WorkerInfo, failure_of
from funcollect.core.request import NOWHERE, OwnColumns
from funcollect.errors import WorkerError


class NestedWorker:
    """What `funcollect.collectors.workers.worker.Worker` is, over a collector with workers of its own.

    Args:
        job: where it goes on from.
        collector: that of its workers, which are a shard of the larger run.
    """

    def __init__(self, job: Job, collector: WorkerCollector) -> None:
        self._collector = collector
        self._pool, self._weights, self._gathering, self._info = collector.inside()
        self._before = job.progress
        self._batches = job.progress.batches
        if job.progress.batches:
            self.go_on(job.progress)
        self._ended = time.monotonic()
        self._counted = (0, 0)  # restarts and lost frames, as last reported

    def describe(self) -> WorkerInfo:
        """What the larger run's collector has to know."""
        lanes = self._collector.num_workers * self._info.lanes
        return self._info._replace(lanes=lanes, frames=self._collector.frames_of_batch)

    def collect(self, columns: OwnColumns = NOWHERE) -> tuple[TensorDictBase, RolloutReport]:
        """The next batch."""
        began = time.monotonic()
        idle = began - self._ended
        batch = next(self._collector)
        self._batches += 1
        self._ended = time.monotonic()
        before, self._counted = self._counted, (self._pool.restarts, self._pool.lost)
        restarts, lost = (now - then for now, then in zip(self._counted, before, strict=True))
        return batch, RolloutReport(
            self._progress(), self._gathering.version, self._ended - began, idle, restarts, lost
        )

    def _progress(self) -> Progress:
        """How far the workers have come: no id that any of them has used lies beyond."""
        all_progress = [record.progress for record in self._pool.records]
        return Progress(
            steps=max(progress.steps for progress in all_progress),
            episode=max(progress.episode for progress in all_progress),
            batches=self._batches,
            frames=self._before.frames + self._collector.frames,
        )

    def adopt(self, weights: Mapping[str, Tensor], version: int, policy: bytes | None = None) -> None:
        """Act with these weights of the policy, or of another one, packed, from now on."""
        self._weights.adopt(weights, version, policy)

    def take_params(self, params: Any, version: int, policy: bytes | None = None) -> None:
        """Act with `params` from now on; None for the policy's own."""
        self._weights.publish(params, version, policy)

    def reset(self, mask: Tensor | None) -> None:
        """Begin new episodes in the lanes of `mask`, or in all."""
        self._collector.reset(mask)

    def set_seed(self, seed: int) -> None:
        """Begin new episodes, seeded by `seed`."""
        self._collector.set_seed(seed, static_seed=True)

    def go_on(self, progress: Progress) -> None:
        """Begin new episodes as if every worker had come so far."""
        self._pool.call_all("go_on", progress)
        self._pool.go_on_from(self._collector.seed, [progress] * self._collector.num_workers)

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs."""
        saved: dict[str, Any] = self._collector.state_dict()
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self._collector.load_state_dict(state_dict)
        self._before, self._batches = START, state_dict["iter"]

    def close(self) -> None:
        """End the workers."""
        self._collector.shutdown()

    def failure(self, error: BaseException) -> Failure:
        """How the larger run's collector is told of an exception: of one in a lane, in which."""
        failure = failure_of(error)
        return failure._replace(lane=error.lane) if isinstance(error, WorkerError) else failure
