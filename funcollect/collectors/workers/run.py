"""The workers of one run, their weights, and the batches gathered from them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from funcollect.collectors.runner_timer import RolloutTimes
from funcollect.collectors.workers.batch_layout import Join
from funcollect.collectors.workers.gathering import AsyncGathering, Gathering, ReadyBatch, SyncGathering
from funcollect.collectors.workers.jobs import check_alike, masks_of
from funcollect.collectors.workers.pool import FailurePolicy, WorkerPool
from funcollect.collectors.workers.transport import BatchAssembler, Transport, WorkerGroup
from funcollect.collectors.workers.weights import Weights, share_weights
from funcollect.collectors.workers.worker import Job, Progress, WorkerInfo, progress_of, runners_of, saved_workers
from funcollect.core.env_params import part_of_lanes
from funcollect.core.saving import Episodes
from funcollect.keys import seed_of
from funcollect.messages import shown
from funcollect.policies.torch_modules.sending import dumps
from funcollect.trajectories.final_observations import FinalObservations
from funcollect.tree import flatten, to_batch


class WorkerRun:
    """The workers of one run, one for each of `jobs`, held by collectors and by workers that have workers themselves.

    It does not refer to its collector, so that it is closed once the collector is no longer used. The workers act
    with the parameters of `policy`; for None they build their own. Batches are of all workers, put together by `join`;
    for None each is of one worker. If a worker cannot be built, `WorkerError` is raised, and no worker is left.

    Attributes:
        next: `Gathering.next`, itself: a method would cost every batch another call.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        transport: Transport,
        failure_policy: FailurePolicy,
        policy: Any,
        join: Join | None,
        *,
        prefetch: bool,
    ) -> None:
        self._transport = transport
        self.seed = jobs[0].seed
        self.pool = WorkerPool(transport, jobs, failure_policy, lambda worker: self.gathering.restarted(worker))
        self._weight_store = transport.weight_store(len(jobs))
        try:
            self.infos: dict[int, WorkerInfo] = dict(enumerate(self.pool.call_all("describe")))
            check_alike(self.infos)
            self.pool.begin()
            self.weights = Weights(self.pool, self._weight_store, policy)
            parts = (self.pool, self.weights, self._assembler)
            self.gathering: Gathering = (
                AsyncGathering(*parts) if join is None else SyncGathering(*parts, join=join, prefetch=prefetch)
            )
            self.next = self.gathering.next
        except BaseException:
            self.pool.close()
            self._weight_store.close()
            raise

    def close(self) -> None:
        """End the workers and release the memory; batches stay. Does nothing the second time."""
        self.pool.close()
        self._weight_store.close()
        self.gathering.close()

    @property
    def workers(self) -> list[int]:
        """The indices of the workers at work."""
        return self.pool.workers

    @property
    def jobs(self) -> list[Job]:
        """The jobs of all workers by their indices, also of those that have been removed."""
        return [record.job for record in self.pool.records]

    @property
    def info(self) -> WorkerInfo:
        """The description of the first worker; all have equal spaces and as many environments."""
        return self.infos[0]

    @property
    def lanes(self) -> list[int]:
        """The number of lanes of each worker at work."""
        return [self.infos[worker].lanes for worker in self.workers]

    @property
    def frames(self) -> list[int]:
        """The frames in one rollout of each worker at work."""
        return [self.infos[worker].frames for worker in self.workers]

    def _assembler(self, workers: Sequence[int], join: Join | None) -> BatchAssembler:
        """An assembler for batches of these workers' rollouts."""
        lengths = tuple(self.infos[worker].length for worker in workers)
        if len({*lengths}) > 1 and (join == "stack" or (join == 0 and self.info.num_envs)):
            raise ValueError(
                f"the workers' rollouts have {[*lengths]} steps, which cat_results={join!r} cannot put together: pass "
                "cat_results=-1, or equal frames"
            )
        group = WorkerGroup(workers, lengths, join, self.info.num_envs is None)
        return self._transport.assembler(self.pool.submit, group)

    def reset(self, mask: Tensor | None) -> None:
        """Begin new episodes in the lanes of `mask` [L], or in all."""
        self._call_each("reset", masks_of(mask, self.lanes))

    def apply(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        """Call a function with every lane's environment, after the rollouts that have been begun."""
        try:
            packed = dumps((function, args))
        except Exception as error:
            raise TypeError(
                f"function or its arguments cannot be sent to the workers ({shown(error, 200)}): pass a function of a "
                "module, and plain arguments"
            ) from error
        return [result for results in self.pool.call_all("apply", packed) for result in results]

    def set_env_params(self, params: Any, *, at_once: bool) -> None:
        """Change the parameters of every lane's environment, after the rollouts that have been begun."""
        shapes = self.info.param_shapes
        if shapes is None:
            raise TypeError(f"{self.info.label} has no parameters that can be set, expected an environment in JAX")
        ends = [0, *itertools.accumulate(self.lanes)]
        parts = [part_of_lanes(params, shapes, ends[-1], slice(*both)) for both in itertools.pairwise(ends)]
        self._call_each("set_env_params", [dumps((part, at_once)) for part in parts])

    def set_seed(self, seed: int) -> None:
        """Begin new episodes, seeded by `seed`."""
        self.pool.call_all("set_seed", seed)
        self.pool.go_on_from(seed)
        self.seed = seed

    def go_on(self, progress: Progress) -> None:
        """Begin new episodes as if every worker had made this progress."""
        self.pool.call_all("go_on", progress)
        self.pool.go_on_from(self.seed, [progress] * len(self.workers))

    def chosen(self, worker_ids: int | Sequence[int] | None) -> list[int]:
        """The workers with these indices, all for None; ValueError for one that is not at work."""
        at_work = self.workers
        workers = at_work if worker_ids is None else [worker_ids] if isinstance(worker_ids, int) else [*worker_ids]
        if wrong := [worker for worker in workers if worker not in at_work]:
            raise ValueError(f"worker_ids holds {wrong}, expected numbers of {at_work}: pass those")
        return [*dict.fromkeys(workers)]

    def progress(self, batches: int, frames: int) -> Progress:
        """How far the run has come after so many batches and frames: no worker has used a higher id."""
        each = [record.progress for record in self.pool.records]
        return Progress(max(one.steps for one in each), max(one.episode for one in each), batches, frames)

    def add(self, jobs: Sequence[Job], check: Callable[[WorkerInfo], None]) -> list[int]:
        """Start workers beside the others, and return their indices. If one of them fails, the others continue.

        `check` raises if a new worker does not suit the run.
        """
        workers = self.pool.add(jobs)
        try:
            calls = [self.pool.call(worker, "describe") for worker in workers]
            infos: dict[int, WorkerInfo] = dict(zip(workers, self.pool.finish(calls), strict=True))
            check_alike({0: self.info, **infos})
            for info in infos.values():
                check(info)
        except BaseException:
            for worker in {*workers} & {*self.workers}:
                self.pool.retire(worker)
            raise
        self.pool.admit(workers)
        self.infos |= infos
        for worker in workers:
            self.weights.join(worker)
        self.gathering.set_workers(self.workers)
        return workers

    def remove(self, workers: Sequence[int]) -> None:
        """End these workers. The batches that they have begun are delivered."""
        self.gathering.set_workers([worker for worker in self.workers if worker not in workers])
        for worker in workers:
            self.pool.retire(worker)
            self.weights.leave(worker)

    def state_dict(self) -> dict[str, Any]:
        """The states of the workers, and which weights they act with."""
        self.weights.flush()
        return self._with_weights(self.pool.call_all("state_dict"))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of as many workers; batches that the workers have ready are dropped."""
        saved = saved_workers(state_dict, len(self.workers))
        self.gathering.discard()
        self._call_each("load_state_dict", saved)
        self.pool.have_loaded(saved, new_envs=False)
        self._go_on_from(state_dict, saved)

    def saved_run(self, episodes: Episodes) -> dict[str, Any]:
        """Plain data for `continue_run`, including the batches that the workers have ready."""
        gathering = self.gathering
        gathering.settle()
        self.weights.flush()
        saved = self.pool.call_all("saved_run", episodes)
        share_weights([runner for worker in saved for runner in runners_of(worker)])
        return {
            **self._with_weights(saved),
            "lanes_of_workers": self.lanes,
            "frames_of_workers": self.frames,
            "ready": [
                [flatten(batch), [*batch.shape], *which, final and final.plain]
                for batch, *which, final in gathering.ready
            ],
            "gathered": [gathering.version, list(gathering.workers)],
        }

    def continue_run(self, data: Mapping[str, Any], episodes: Episodes) -> None:
        """Continue from the result of `saved_run`."""
        saved = saved_workers(data, len(self.workers))
        for name, own in (("lanes", self.lanes), ("frames", self.frames)):
            if data[f"{name}_of_workers"] != own:
                raise ValueError(
                    f"the saved workers have {data[f'{name}_of_workers']} {name} in a batch, these have {own}: build "
                    "the collector with as many environments and frames_per_batch"
                )
        self.gathering.discard()
        self._call_each("continue_run", saved, episodes)
        self.pool.have_loaded(saved, new_envs=True)
        self._go_on_from(data, saved)
        for leaves, shape, version, workers, final in data["ready"]:
            batch = to_batch(leaves, tuple(shape))
            ready = ReadyBatch(batch, version, workers, final and FinalObservations(*final))
            self.gathering.ready.append(ready)
        self.gathering.version, self.gathering.workers = data["gathered"]

    def _with_weights(self, saved: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The states of the workers, with the version of their weights."""
        return {
            "workers": {str(worker): each for worker, each in enumerate(saved)},
            "policy_version": self.weights.version,
            "own_weights": self.weights.own,
            "own_workers": self.weights.own_workers(),
        }

    def _go_on_from(self, state_dict: Mapping[str, Any], saved: Sequence[Mapping[str, Any]]) -> None:
        """Continue from states that the workers have loaded."""
        runners = {worker: runners_of(each)[0] for worker, each in zip(self.workers, saved, strict=True)}
        self.seed = seed_of(runners_of(saved[0])[0]["key"].numpy())
        self.pool.go_on_from(self.seed, [progress_of(each) for each in saved])
        own, own_workers = state_dict["own_weights"], state_dict["own_workers"]
        self.weights.go_on_from(state_dict["policy_version"], runners, own=own, own_workers=own_workers)

    def _call_each(self, name: str, arguments: Sequence[Any], *others: Any) -> None:
        """Call a method of every worker, each with its own first argument."""
        calls = [
            self.pool.call(worker, name, each, *others) for worker, each in zip(self.workers, arguments, strict=True)
        ]
        self.pool.finish(calls)

    def start_timers(self) -> None:
        """Let every worker time its rollouts, after those that have been begun."""
        self.pool.call_all("start_timer")

    def stop_timers(self) -> list[RolloutTimes]:
        """Return the times of the workers since `start_timers`; one that was replaced meanwhile has none."""
        return [times for answer in self.pool.call_all("stop_timer") for times in answer]

    def stats(self) -> dict[str, float]:
        """Counts over all workers."""
        return {
            "policy_version": self.weights.version,
            "reader_waited": self.pool.waited,
            "workers_waited": sum(record.idle for record in self.pool.records),
            "restarts": self.pool.restarts,
            "lost_frames": self.pool.lost,
            "copies": self.gathering.copies,
        }
