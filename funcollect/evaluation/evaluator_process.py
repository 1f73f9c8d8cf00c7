"""The process of an `Evaluator`: it evaluates weights, one after another."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
from torch import Tensor

from funcollect.collectors.options import Options
from funcollect.collectors.source import RunnerSpec
from funcollect.core.api import check_pair
from funcollect.core.evaluate import evaluate
from funcollect.keys import key_from_seed, seed_of
from funcollect.plots.recording import check_filmed, record
from funcollect.processes.child import enter_child
from funcollect.processes.failures import Failure
from funcollect.processes.system import run_as_batch_work
from funcollect.specs import ExplorationType
from funcollect.trajectories.stats import EpisodeStats


@dataclass(frozen=True, kw_only=True)
class EvaluatorJob:
    """What is evaluated, and how; see `Evaluator`."""

    source: RunnerSpec
    episodes: int
    seed: int | None
    max_frames: int
    exploration_type: ExplorationType
    film: str | None


def main(fds: Sequence[int]) -> None:
    """Serve the process that has started this one, until that ends or closes the connection."""
    channel = enter_child(fds)
    with contextlib.suppress(EOFError, OSError):  # that process has ended
        message = channel.receive()
        assert message is not None
        setup, packed = message[0]
        setup.apply()
        try:
            served = _Served(cloudpickle.loads(packed))
        except BaseException as error:
            channel.send(Failure.of(error))
            return
        run_as_batch_work(idle=True)
        channel.send(None)
        while (message := channel.receive()) is not None:
            step, weights, packed = message[0]
            try:
                channel.send((step, served.evaluate(step, weights, packed)))
            except Exception as error:
                channel.send((step, Failure.of(error)))


class _Served:
    """The environment and the policy."""

    def __init__(self, job: EvaluatorJob) -> None:
        self._job = job
        self._env, self._policy = job.source.build(Options(frames_per_batch=1, policy_device="cpu"))
        check_pair(self._env, self._policy)
        if job.film is not None:  # an error after the episodes would lose their statistics
            check_filmed(self._env, self._policy)

    def evaluate(
        self, step: int, weights: Mapping[str, Tensor], packed: bytes | None
    ) -> tuple[EpisodeStats, str | None]:
        """The statistics of the episodes, and the path of the film if there is one."""
        job, params = self._job, None if packed is None else cloudpickle.loads(packed)
        if weights:
            self._policy.load(dict(weights))
        seed = seed_of(key_from_seed(job.seed))  # one for the episodes and for the film
        given: dict[str, Any] = {"seed": seed, "params": params, "exploration_type": job.exploration_type}
        stats = evaluate(self._env, self._policy, episodes=job.episodes, max_frames=job.max_frames, **given)
        if job.film is None:
            return stats, None
        path = job.film.format(step=step)
        record(self._env, self._policy, path, **given)
        return stats, path
