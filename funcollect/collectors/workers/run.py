"""The workers of one run, their weights, and the batches gathered from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from typing_extensions import override

from funcollect.collectors.sync import RolloutTimes, check_saved
from funcollect.collectors.workers.gathering import BatchAssembler, Gathering, Join, Means, ReadyBatch, WorkerGroup
from funcollect.collectors.workers.weights import Weights
from funcollect.collectors.workers.worker import SAVED, Job, Progress, RolloutReport, WorkerInfo, restored, runners_of
from funcollect.core.saving import Episodes
from funcollect.envs.host.host_env import without_advice
from funcollect.errors import EnvError, ReplayError, WorkerError
from funcollect.keys import seed_of
from funcollect.processes.failures import Failure, UnsentResultError
from funcollect.processes.pool import Call, FailurePolicy, Loss, WorkerPool, WorkerRecord
from funcollect.trajectories.final_observations import FinalObservations
from funcollect.tree import flatten, to_batch

_AHEAD = 2  # batches that an asynchronous worker may have begun, or have ready, beyond the one the reader holds
_ROLLOUTS = ("collect", "attach")  # the calls whose answers are rollouts
# The errors by which a worker refuses a call: it is as it was before, or begins new episodes by itself.
_BAD: tuple[type[Exception], ...] = (TypeError, ValueError, ReplayError)
_REFUSALS = dict.fromkeys(("reset", "set_seed", "set_env_params", "take_params", "save"), _BAD)
_REFUSALS |= {"load": (*_BAD, EnvError), "apply": (TypeError, EnvError)}
_ALIKE = {"num_envs": "num_envs", "leaves": "the observation", "action": "the action"}


class WorkerRun(WorkerPool):
    """The workers of one run, one for each of `jobs`, held by collectors and by workers that have workers themselves.

    It does not refer to its collector, so that it ends once that is no longer used. The workers act with the parameters
    of `policy`; for None they build their own. Batches are of all workers, put together by `join`, and with `prefetch`
    begun ahead; for None each is of one worker.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        means: Means,
        failure_policy: FailurePolicy,
        policy: Any,
        join: Join | None,
        *,
        prefetch: bool,
    ) -> None:
        self.seed = jobs[0].seed
        self.lost = 0  # frames of rollouts that ended with their worker; as `restarts`, also of workers of workers
        self.idle = 0.0  # seconds that workers have spent between two rollouts
        self._means, self._join = means, join
        try:
            super().__init__(means.transport, jobs, failure_policy)
            # The descriptions of all workers, also of those that have been removed.
            self.infos: dict[int, WorkerInfo] = dict(enumerate(self.described))
            self._check_alike(self.infos)
            self.weights = Weights(self, means.weight_store, policy)
            together = join is not None
            ahead = int(prefetch) if together else _AHEAD
            self.gathering = Gathering(self, self.weights, self._open_assembler, together=together, ahead=ahead)
            self.next = self.gathering.next  # a method would cost every batch another call
        except BaseException:
            self.stop()
            means.weight_store.close()
            raise

    def end(self) -> None:
        """End the workers and release the memory; batches stay. Does nothing the second time."""
        self.stop()
        self._means.weight_store.close()
        self.gathering.close()

    def _check_alike(self, infos: Mapping[int, WorkerInfo]) -> None:
        """Raise WorkerError unless the workers' environments fit into one batch: equal spaces, as many lanes."""
        for worker, info in infos.items():
            for name, words in _ALIKE.items():
                own, wanted = getattr(info, name), getattr(self.info, name)
                if own != wanted:
                    raise WorkerError(
                        f"worker {worker}: {info.label} has {words} {own}, worker 0 has {wanted}: give all workers "
                        "environments with equal spaces and as many lanes",
                        worker,
                    )

    @override
    def _answered(self, record: WorkerRecord, call: Call, value: Any) -> Any:
        if call.name in ("apply", "set_env_params"):
            _note_applied(record, call)
        if call.name not in _ROLLOUTS or value is None:
            return value
        batch, report = value
        if not isinstance(report, RolloutReport):
            report = RolloutReport(Progress(*report[0]), *report[1:])
        record.progress, record.failures = report.progress, 0
        record.tasks += 1
        self.idle += report.idle
        self.restarts += report.restarts
        self.lost += report.lost
        return batch, report

    @override
    def _refusal(self, record: WorkerRecord, call: Call, failure: Failure) -> BaseException | None:
        refusal = failure.error()
        if not isinstance(refusal, _REFUSALS.get(call.name, ())):
            return None
        if isinstance(refusal, UnsentResultError):
            _note_applied(record, call)
        return refusal

    @override
    def _words(self, worker: int, loss: Loss) -> str:
        return super()._words(worker, loss._replace(what=without_advice(loss.what)))

    @override
    def _error(self, worker: int, loss: Loss) -> WorkerError:
        record, restart = self.records[worker], self._failure_policy.on_failure == "restart"
        advice = "look at its traceback" if loss.traceback else "look at what it wrote on standard error"
        again = f" {record.failures} times in a row" if restart and record.failures > 1 else ""
        rest = "the others continue" if record.newcomer else "all workers were ended, so build another collector"
        if not restart:
            rest += ", or pass on_failure='restart'"
        message = f"{self._words(worker, loss)}{again}: {advice}; {rest}"
        return WorkerError(message, worker, loss.lane, loss.traceback)

    @override
    def _continued(self, worker: int, pending: Sequence[Call]) -> tuple[Job, Sequence[Call]]:
        record = self.records[worker]
        job: Job = record.job
        progress: Progress = record.progress or Progress()
        if any(call.name == "collect" for call in pending):
            self.lost += progress.frames // max(progress.batches, 1) or job.options.frames_per_batch
        return replace(job, progress=progress), self.gathering.restarted(worker)

    @property
    def info(self) -> WorkerInfo:
        """The description of the first worker; all are alike."""
        return self.infos[0]

    @property
    def lanes(self) -> list[int]:
        """The number of lanes of each worker at work."""
        return [self.infos[worker].lanes for worker in self.workers]

    @property
    def frames(self) -> list[int]:
        """The frames in one rollout of each worker at work."""
        return [self.infos[worker].frames for worker in self.workers]

    def _open_assembler(self, workers: tuple[int, ...]) -> BatchAssembler:
        join, lengths = self._join, tuple(self.infos[worker].length for worker in workers)
        if len({*lengths}) > 1 and (join == "stack" or (join == 0 and self.info.num_envs)):
            raise ValueError(
                f"the workers' rollouts have {[*lengths]} steps, which cat_results={join!r} cannot put together: pass "
                "cat_results=-1, or equal frames"
            )
        return self._means.assembler(self.submit, WorkerGroup(workers, lengths, join, self.info.num_envs is None))

    def set_seed(self, seed: int) -> None:
        """Begin new episodes, seeded by `seed`."""
        self.call_all("set_seed", seed)
        self.seed = seed
        with self.lock:
            for worker in self.workers:
                self.records[worker].job = replace(self.records[worker].job, seed=seed)

    def go_on(self, progress: Progress) -> None:
        """Begin new episodes as if every worker had made this progress."""
        self.call_all("go_on", progress)
        with self.lock:
            for worker in self.workers:
                self.records[worker].progress = progress

    def chosen(self, worker_ids: int | Sequence[int] | None) -> list[int]:
        """The workers with these indices, all for None; ValueError for one that is not at work."""
        at_work = self.workers
        workers = at_work if worker_ids is None else [worker_ids] if isinstance(worker_ids, int) else [*worker_ids]
        if wrong := [worker for worker in workers if worker not in at_work]:
            raise ValueError(f"worker_ids holds {wrong}, expected numbers of {at_work}: pass those")
        return [*dict.fromkeys(workers)]

    def progress(self, batches: int, frames: int) -> Progress:
        """How far the run has come after so many batches and frames: no worker has used a higher id."""
        each = [record.progress or Progress() for record in self.records]
        return Progress(max(one.steps for one in each), max(one.episode for one in each), batches, frames)

    def add(self, jobs: Sequence[Job], check: Callable[[WorkerInfo], None]) -> list[int]:
        """Start workers that `check` accepts, and return their indices. If one of them fails, the others continue."""
        calls = self.start(jobs, newcomers=True)
        workers = [call.worker for call in calls]
        try:
            infos: dict[int, WorkerInfo] = dict(zip(workers, self.finish(calls), strict=True))
            self._check_alike(infos)
            for info in infos.values():
                check(info)
        except BaseException:
            for worker in {*workers} & {*self.workers}:
                self.retire(worker)
            raise
        self.infos |= infos
        for worker in workers:
            self.records[worker].newcomer = False
        self.weights.set_workers(self.workers)
        self.gathering.set_workers(self.workers)
        return workers

    def remove(self, workers: Sequence[int]) -> None:
        """End these workers. The batches that they have begun are delivered."""
        self.gathering.set_workers([worker for worker in self.workers if worker not in workers])
        for worker in workers:
            self.retire(worker)
        self.weights.set_workers(self.workers)

    def save(self, episodes: Episodes | None) -> dict[str, Any]:
        """Plain data for `load`, including the batches that the workers have ready; for None a `state_dict` without."""
        gathering = self.gathering
        if episodes is not None:
            gathering.settle()
        self.weights.flush()
        saved = self.call_all("save", episodes)
        states = {"workers": {str(worker): each for worker, each in enumerate(saved)}, **self.weights.plain}
        if episodes is None:
            return states
        firsts: dict[int, Any] = {}
        runners: list[Any] = [runner for each in saved for runner in runners_of(each)]
        for state in runners:  # a file holds equal weights once
            own = state["policy_state_dict"]
            first = firsts.setdefault(state["policy_version"], own)
            if first.keys() == own.keys() and all(torch.equal(first[name], own[name]) for name in own):
                state["policy_state_dict"] = first
        ready = [
            [flatten(batch), [*batch.shape], *which, final and final.plain] for batch, *which, final in gathering.ready
        ]
        gathered = [gathering.version, list(gathering.workers)]
        sizes = {"lanes_of_workers": self.lanes, "frames_of_workers": self.frames}
        return {**states, **sizes, "ready": ready, "gathered": gathered}

    def load(self, data: Mapping[str, Any], episodes: Episodes | None) -> None:
        """Continue from the result of `save`; batches that the workers have ready are dropped."""
        check_saved(data, SAVED)
        saved, count = runners_of(data), len(self.workers)
        if len(saved) != count:
            raise ValueError(f"the state_dict has {len(saved)} workers, this collector {count}: build it with as many")
        for name, own in (("lanes", self.lanes), ("frames", self.frames)) if episodes is not None else ():
            if (was := data[f"{name}_of_workers"]) != own:
                raise ValueError(
                    f"the saved workers have {was} {name} in a batch, these have {own}: build the collector with as "
                    "many environments and frames_per_batch"
                )
        self.gathering.settle()
        self.gathering.ready.clear()
        self.call_each("load", saved, episodes)
        self.seed = seed_of(runners_of(saved[0])[0]["key"].numpy())
        with self.lock:
            for worker, loaded in zip(self.workers, saved, strict=True):
                record = self.records[worker]
                # With `episodes` the environments are new ones, to which no function has been applied.
                applied = [call for call in record.job.applied if call[0] == "apply" and episodes is None]
                record.progress, env_calls = restored(loaded)
                record.job = replace(record.job, seed=self.seed, applied=(*applied, *env_calls))
        self.weights.go_on_from(
            data, {worker: runners_of(each)[0] for worker, each in zip(self.workers, saved, strict=True)}
        )
        if episodes is not None:
            for leaves, shape, version, workers, final in data["ready"]:
                batch, whole = to_batch(leaves, tuple(shape)), final and FinalObservations(*final)
                self.gathering.ready.append(ReadyBatch(batch, version, workers, whole))
            self.gathering.version, self.gathering.workers = data["gathered"]

    def timers(self, on: bool) -> list[RolloutTimes]:
        """Let workers time their rollouts; or return the times since that, none of one that was replaced meanwhile."""
        return [times for answer in self.call_all("timer", on) for times in answer]


def _note_applied(record: WorkerRecord, call: Call) -> None:
    """Let a replacement of the worker repeat a call that has changed its environments."""
    kept = record.job.applied
    if call.name == "set_env_params":  # all of them at once, so earlier ones do not matter
        kept = tuple(each for each in kept if each[0] == "apply")
    record.job = replace(record.job, applied=(*kept, (call.name, *call.args)))
