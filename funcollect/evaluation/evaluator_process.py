"""The process of an `Evaluator`: it evaluates weights, one after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
from torch import Tensor

from funcollect.collectors.options import Options, RunnerSpec
from funcollect.core.api import check_pair
from funcollect.core.evaluate import evaluate
from funcollect.keys import key_from_seed, seed_of
from funcollect.messages import shown
from funcollect.plots.recording import check_filmed, record
from funcollect.policies.torch_modules.sending import dumps
from funcollect.processes.failures import Failure
from funcollect.processes.serving import serve
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

    @property
    def place(self) -> int:
        """0: it is the only one."""
        return 0

    def pack(self) -> bytes:
        """The job as bytes, everything in it on the CPU; TypeError if it cannot be sent."""
        try:
            return dumps(self, on_cpu=True)
        except Exception as error:
            raise TypeError(
                f"the environment or the policy cannot be sent to another process ({shown(error, 200)}): pass "
                "functions that build them, create_env_fn and policy_factory"
            ) from error


class Evaluating:
    """The environment and the policy, built from a packed job."""

    def __init__(self, packed: bytes) -> None:
        job: EvaluatorJob = cloudpickle.loads(packed)
        self._job = job
        self._env, self._policy = job.source.build(Options(frames_per_batch=1, policy_device="cpu"))
        check_pair(self._env, self._policy)
        if job.film is not None:  # an error after the episodes would lose their statistics
            check_filmed(self._env, self._policy)

    def describe(self) -> None:
        """Nothing; from here on the process works only while a core has nothing else to do."""
        run_as_batch_work(idle=True)

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

    def failure(self, error: BaseException) -> Failure:
        """The `Failure` to send."""
        return Failure.of(error)

    def close(self) -> None:
        """Do nothing: the process is ended at once, see `Evaluator`."""


def main(fds: Sequence[int]) -> None:
    """Serve the process that has started this one."""
    serve(fds, Evaluating)
