"""From the arguments of a `RayCollector` to the jobs of its actors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from inspect import signature
from typing import Any

from funcollect.arguments import check_not_given, check_positive, without_foreign
from funcollect.collectors.keywords import FOREIGN
from funcollect.collectors.multi import MultiaSyncDataCollector, MultiSyncDataCollector
from funcollect.collectors.options import Shard, WorkerShard
from funcollect.collectors.sync import SyncDataCollector
from funcollect.collectors.worker_collector import WorkerCollector
from funcollect.collectors.workers.jobs import job_of, listed, rows, want_accelerators
from funcollect.collectors.workers.worker import Job
from funcollect.messages import shown

CLASSES = (SyncDataCollector, MultiSyncDataCollector, MultiaSyncDataCollector)
_OF_ALL = "it holds for the whole run: give it to RayCollector itself"
_NOT_FOR_ACTORS = dict.fromkeys(
    (
        "create_env_fn", "policy", "policy_factory", "frames_per_batch", "total_frames", "max_frames_per_traj",
        "init_random_frames", "reset_at_each_iter", "split_trajs", "postproc", "exploration_type", "exploration",
        "seed", "update_at_each_batch", "update_statistics", "trajs_per_batch", "traj_format", "compact_obs",
        "replay_buffer", "trajs_per_write", "pre_collect_hook", "post_collect_hook", "track_traj_ids",
        "track_policy_version",
    ),
    _OF_ALL,
) | {
    "num_workers": "it is num_workers_per_collector of RayCollector",
    "shard": "RayCollector gives it",
    "in_process": "its workers are processes beside the actor",
}  # fmt: skip
_NOT_REMOTE = {
    "lifetime": "an actor ends with its collector",
    "name": "the actor that replaces one would find its name taken",
    "get_if_exists": "each collector has its own actor",
    "max_restarts": "on_failure='restart' replaces actors",
    "max_task_retries": "a rollout cannot be made twice",
    "concurrency_groups": "the collector has its own",
    "max_concurrency": "a worker answers one call at a time",
    "max_pending_calls": "there are never many, and none may be lost",
    "allow_out_of_order_execution": "an actor answers its calls in order",
}


def actor_jobs(
    kind: type[Any], count: int, columns: Mapping[str, Any], shard: Shard, workers: int, *, policy: Any, seed: int
) -> list[Job]:
    """The checked jobs of `count` actors, each with a collector of `workers` workers.

    `columns` are keywords, also of `RayCollector`: one value for all actors, or a list with one for each. `shard` is
    that of the first worker of the first actor. An actor has one CPU unless its `remote_configs` says otherwise, and a
    fifth of a GPU if a device of any of them is one. TypeError or ValueError for arguments that no actor would take.
    """
    jobs, nested = [], issubclass(kind, WorkerCollector)
    for index, row in enumerate(rows(count, columns, copies=workers)):
        config = dict(row.pop("remote_configs", None) or {})
        check_not_given("remote_configs", config, _NOT_REMOTE)
        own = dict(row.pop("collector_kwargs", None) or {})
        every = signature(kind).parameters.keys()
        own = without_foreign("collector_kwargs", {name: FOREIGN[name] for name in FOREIGN.keys() - every}, own)
        check_not_given("collector_kwargs", own, _NOT_FOR_ACTORS)
        known = every - _NOT_FOR_ACTORS.keys()
        if kind in CLASSES and (unknown := sorted(own.keys() - known)):  # a derived class checks its own
            raise TypeError(
                f"collector_kwargs has {unknown}, which {kind.__name__} lacks, expected some of {sorted(known)}: check "
                "the spelling, or pass another collector_class"
            )
        (row,) = rows(1, row | own)
        place = (WorkerShard if nested else Shard)(shard.index + index * workers, shard.count)
        job = job_of(row, place, policy=policy, seed=seed)
        del row["create_env_fn"]
        keywords = row | ({"num_workers": workers} if nested else {})
        jobs.append(replace(job, kind=kind, keywords=keywords, config=config))
    default = {"num_cpus": 1} | ({"num_gpus": 0.2} if want_accelerators(jobs) else {})
    return [replace(job, config={**default, **job.config}) for job in jobs]


def check_class(kind: Any) -> None:
    """Raise TypeError unless it is a collector that an actor may run."""
    if not isinstance(kind, type) or not issubclass(kind, CLASSES):
        names = ", ".join(each.__name__ for each in CLASSES)
        raise TypeError(f"collector_class is {shown(kind)}, expected {names} or a class derived from one: pass that")


def number_of_collectors(columns: Mapping[str, Any], num_collectors: int | None = None) -> int:
    """The number of collectors, from the lists among these keywords, which are of one length; 1 without any."""
    counts = {name: len(values) for name, given in columns.items() if (values := listed(given)) is not None}
    if num_collectors is not None:
        check_positive("num_collectors", num_collectors)
        counts["num_collectors"] = num_collectors
    if len({*counts.values()}) > 1 or 0 in counts.values():
        raise ValueError(f"the numbers of collectors differ, or are 0: {counts}: pass lists with an entry for each")
    return next(iter(counts.values()), 1)
