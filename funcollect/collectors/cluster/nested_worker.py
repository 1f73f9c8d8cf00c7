"""A worker that has workers itself: a collector of processes that is one of several in a larger run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from funcollect.collectors.worker_collector import WorkerCollector
from funcollect.collectors.workers.worker import Failure, Progress, RolloutReport, WorkerBase, WorkerInfo, failure_of
from funcollect.core.request import OwnColumns
from funcollect.errors import WorkerError


class NestedWorker(WorkerBase):
    """A collector with workers of its own, at the disposal of a larger run.

    Args:
        progress: where it continues from.
        collector: that of its workers, whose lanes are a shard of the larger run.
    """

    def __init__(self, progress: Progress, collector: WorkerCollector) -> None:
        self._collector = collector
        self._run = collector.run
        self._counted = (0, 0)  # restarts and lost frames, as last reported
        super().__init__(progress, collector)

    @override
    def describe(self) -> WorkerInfo:
        return self._run.info._replace(lanes=sum(self._run.lanes), frames=self._collector.frames_of_batch)

    @override
    def _rollout(self, columns: OwnColumns) -> TensorDictBase:
        return next(self._collector)

    @override
    def _report(self, seconds: float, idle: float) -> RolloutReport:
        pool = self._run.pool
        before, self._counted = self._counted, (pool.restarts, pool.lost)
        restarts, lost = (now - then for now, then in zip(self._counted, before, strict=True))
        return RolloutReport(self._progress(), self._run.gathering.version, seconds, idle, restarts, lost)

    def _progress(self) -> Progress:
        """How far the workers have come: none of them has used an id beyond."""
        all_progress = [record.progress for record in self._run.pool.records]
        return Progress(
            steps=max(progress.steps for progress in all_progress),
            episode=max(progress.episode for progress in all_progress),
            batches=self._batches,
            frames=self._frames,
        )

    @override
    def adopt(self, weights: Mapping[str, Tensor], version: int, policy: bytes | None = None) -> None:
        self._run.weights.adopt(weights, version, policy)

    @override
    def take_params(self, params: Any, version: int, policy: bytes | None = None) -> None:
        self._run.weights.publish(params, version, policy)

    @override
    def reset(self, mask: Tensor | None) -> None:
        self._collector.reset(mask)

    @override
    def set_seed(self, seed: int) -> None:
        self._collector.set_seed(seed, static_seed=True)

    @override
    def go_on(self, progress: Progress) -> None:
        self._run.go_on(progress)

    @override
    def state_dict(self) -> dict[str, Any]:
        saved: dict[str, Any] = self._collector.state_dict()
        return saved

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._collector.load_state_dict(state_dict)
        super().load_state_dict(state_dict)

    @override
    def close(self) -> None:
        self._collector.shutdown()

    @override
    def failure(self, error: BaseException) -> Failure:
        failure = failure_of(error)
        return failure._replace(lane=error.lane) if isinstance(error, WorkerError) else failure
