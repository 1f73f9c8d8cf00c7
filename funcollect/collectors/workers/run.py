"""The workers of one run: interprets their answers and failures, adds and removes workers, saves and loads."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from funcollect.collectors.sync import RolloutTimes, check_saved
from funcollect.collectors.workers.gathering import Gathering, ReadyBatch
from funcollect.collectors.workers.worker import SAVED, Job, Progress, RolloutReport, WorkerInfo, restored, runners_of
from funcollect.core.saving import Episodes
from funcollect.envs.host.host_env import without_advice
from funcollect.errors import EnvError, ReplayError, WorkerError
from funcollect.keys import seed_of
from funcollect.policies.torch_modules.settings import dumps
from funcollect.processes.failures import Failure, UnsentResultError, sending
from funcollect.processes.pool import Call, Loss, WorkerRecord
from funcollect.trajectories.final_observations import FinalObservations
from funcollect.tree import flatten, to_batch

# The errors by which a worker refuses a call, after which it is unchanged, or begins new episodes by itself.
_BAD: tuple[type[Exception], ...] = (TypeError, ValueError, ReplayError)
_REFUSALS = dict.fromkeys(("reset", "set_seed", "set_env_params", "take_params", "save"), _BAD)
_REFUSALS |= {"load": (*_BAD, EnvError), "apply": (TypeError, EnvError)}


class WorkerRun(Gathering):
    """The workers of one run, held by collectors and by workers that have workers themselves.

    It does not refer to its collector, so it ends once the collector is freed.
    """

    lost = 0  # frames of rollouts lost with their worker; like `restarts`, also of workers of workers
    idle = 0.0  # seconds that workers have spent between two rollouts

    @override
    def _answered(self, record: WorkerRecord, call: Call, value: Any) -> Any:
        if call.name in ("apply", "set_env_params"):
            _note_applied(record, call)
        if call.name != "collect":
            return value
        batch, (progress, *others) = value
        report = RolloutReport(Progress(*progress), *others)
        record.progress, record.failures = report.progress, 0
        record.tasks += 1
        self.idle += report.idle
        self.restarts += report.restarts
        self.lost += report.lost
        return batch, report

    @override
    def _refusal(self, record: WorkerRecord, call: Call, failure: Failure) -> BaseException | None:
        refusal = failure.error()
        if isinstance(refusal, UnsentResultError):
            _note_applied(record, call)
        return refusal if isinstance(refusal, _REFUSALS.get(call.name, ())) else None

    @override
    def _words(self, worker: int, loss: Loss) -> str:
        return super()._words(worker, loss._replace(what=without_advice(loss.what)))

    @override
    def _error(self, worker: int, loss: Loss) -> WorkerError:
        record, restart = self.records[worker], self._failure_policy.on_failure == "restart"
        advice = "look at its traceback" if loss.traceback else "look at what it wrote on standard error"
        again = f" {record.failures} times in a row" if restart and record.failures > 1 else ""
        rest = "the others continue" if record.newcomer else "all workers were ended, so build another collector"
        rest += "" if restart else ", or pass on_failure='restart'"
        message = f"{self._words(worker, loss)}{again}: {advice}; {rest}"
        return WorkerError(message, worker, loss.lane, loss.traceback)

    @override
    def _continued(self, worker: int, pending: Sequence[Call]) -> tuple[Job, Sequence[Call]]:
        job: Job = self.records[worker].job
        progress: Progress = self.records[worker].progress or Progress()
        if any(call.name == "collect" for call in pending):
            self.lost += progress.frames // max(progress.batches, 1) or job.options.frames_per_batch
        first = [each.restarted(worker) for group, each in self.assemblers.items() if worker in group]
        return replace(job, progress=progress), [*itertools.chain(*first), *self.weights.restarted(worker)]

    def set_seed(self, seed: int) -> None:
        """Begin new episodes, seeded by `seed`."""
        self.call_all("set_seed", seed)
        with self.lock:
            for worker in self.workers:
                self.records[worker].job = replace(self.records[worker].job, seed=seed)

    def set_hook(self, name: str, hook: Any) -> None:
        """Set the keyword of a hook in every worker, and in those that replace them."""
        with sending(name, "the workers", "pass a function of a module"):
            packed = dumps(hook)
        self.call_all("set_hook", name, packed)
        with self.lock:
            for record in self.records:
                options = copy.copy(record.job.options)
                setattr(options, name, hook)
                keywords = {**record.job.keywords, name: hook}  # of the collector in an actor
                record.job = replace(record.job, options=options, keywords=keywords)

    def go_on(self, progress: Progress) -> None:
        """Begin new episodes as if every worker had made this progress."""
        self.call_all("go_on", progress)
        with self.lock:
            for worker in self.workers:
                self.records[worker].progress = progress

    def chosen(self, worker_ids: int | Sequence[int] | None) -> list[int]:
        """The workers with these indices, or all for None; ValueError for one that is not at work."""
        at_work = self.workers
        if isinstance(worker_ids, int | np.integer):
            worker_ids = [worker_ids]
        workers = at_work if worker_ids is None else [*worker_ids]
        if wrong := [worker for worker in workers if worker not in at_work]:
            raise ValueError(f"worker_ids holds {wrong}, expected numbers of {at_work}: pass those")
        return [*dict.fromkeys(workers)]

    def progress(self, batches: int, frames: int) -> Progress:
        """The progress of the run after so many batches and frames: the furthest of all workers."""
        workers = [record.progress or Progress() for record in self.records]
        return Progress(max(each.steps for each in workers), max(each.episode for each in workers), batches, frames)

    def add(self, jobs: Sequence[Job], check: Callable[[WorkerInfo], None]) -> list[int]:
        """Start workers that `check` accepts, and return their indices. If one of them fails, the others continue."""
        calls = self.start(jobs, newcomers=True)
        workers = [call.worker for call in calls]
        try:
            infos: dict[int, WorkerInfo] = dict(zip(workers, self.finish(calls), strict=True))
            self.check_alike(infos)
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
        self.set_workers(self.workers)
        return workers

    def remove(self, workers: Sequence[int]) -> None:
        """End these workers. The batches that they have begun are delivered."""
        self.set_workers([worker for worker in self.workers if worker not in workers])
        for worker in workers:
            self.retire(worker)
        self.weights.set_workers(self.workers)

    def save(self, episodes: Episodes | None) -> dict[str, Any]:
        """Plain data for `load`, including the batches that the workers have ready; for None a `state_dict` without."""
        if episodes is not None:
            self.settle()
        self.weights.flush()
        saved = self.call_all("save", episodes)
        states = {"workers": {str(worker): each for worker, each in enumerate(saved)}, **self.weights.plain}
        if episodes is None:
            return states
        firsts: dict[int, Any] = {}
        runners: list[Any] = [runner for each in saved for runner in runners_of(each)]
        for state in runners:  # a file holds equal weights once
            weights = state["policy_state_dict"]
            first = firsts.setdefault(state["policy_version"], weights)
            if first.keys() == weights.keys() and all(torch.equal(first[name], weights[name]) for name in weights):
                state["policy_state_dict"] = first
        taken = [(take(), *others, final and final.plain) for take, *others, final in self.ready]
        ready = [[flatten(batch), [*batch.shape], *others] for batch, *others in taken]
        gathered = [self.version, list(self.gathered)]
        sizes = {"lanes_of_workers": self.lanes, "frames_of_workers": self.frames}
        return {**states, **sizes, "ready": ready, "gathered": gathered}

    def load(self, data: Mapping[str, Any], episodes: Episodes | None) -> int:
        """Continue from the result of `save`, and return its seed; batches that the workers have ready are dropped."""
        check_saved(data, SAVED)
        saved, count = runners_of(data), len(self.workers)
        if len(saved) != count:
            raise ValueError(f"the state_dict has {len(saved)} workers, this collector {count}: build it with as many")
        for name, now in (("lanes", self.lanes), ("frames", self.frames)) if episodes is not None else ():
            if (was := data[f"{name}_of_workers"]) != now:
                mend = "build the collector with as many environments and frames_per_batch"
                raise ValueError(f"the saved workers have {was} {name} in a batch, these have {now}: {mend}")
        self.settle()
        self.ready.clear()
        self.call_each("load", saved, episodes)
        runners = {worker: runners_of(each)[0] for worker, each in zip(self.workers, saved, strict=True)}
        seed = seed_of(runners[self.workers[0]]["key"].numpy())
        with self.lock:
            for worker, loaded in zip(self.workers, saved, strict=True):
                record = self.records[worker]
                # With `episodes` the environments are new ones, to which no function has been applied.
                applied = [call for call in record.job.applied if call[0] == "apply" and episodes is None]
                record.progress, env_calls = restored(loaded, episodes)
                record.job = replace(record.job, seed=seed, applied=(*applied, *env_calls))
        self.weights.go_on_from(data, runners)
        if episodes is not None:
            for leaves, shape, version, workers, final in data["ready"]:
                batch, whole = to_batch(leaves, tuple(shape)), final and FinalObservations(*final)
                self.ready.append(ReadyBatch(itertools.repeat(batch).__next__, version, workers, whole))
            self.version, self.gathered = data["gathered"]
        return seed

    def timers(self, on: bool) -> list[RolloutTimes]:
        """Let workers time their rollouts, or return the times since then, without those of replaced workers."""
        return [times for answer in self.call_all("timer", on) for times in answer]


def _note_applied(record: WorkerRecord, call: Call) -> None:
    """Record a call that has changed the worker's environments, for a replacement to repeat."""
    kept = record.job.applied
    if call.name == "set_env_params":  # all of them at once, so earlier ones do not matter
        kept = tuple(each for each in kept if each[0] == "apply")
    record.job = replace(record.job, applied=(*kept, (call.name, *call.args)))
