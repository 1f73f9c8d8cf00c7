"""From the arguments of a `RayCollector` to the jobs of its actors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

from typing_extensions import override

from funcollect.arguments import check_not_given, check_positive
from funcollect.collectors.collector import CollectorBase
from funcollect.collectors.multi import MultiaSyncDataCollector, MultiSyncDataCollector
from funcollect.collectors.runner import Runner, Shard
from funcollect.collectors.sync import SyncDataCollector
from funcollect.collectors.worker_collector import WorkerCollector
from funcollect.collectors.workers.jobs import job_of, one_each, rows
from funcollect.collectors.workers.worker import Job
from funcollect.messages import shown

CLASSES = (SyncDataCollector, MultiSyncDataCollector, MultiaSyncDataCollector)
_OF_ALL = "it holds for the whole run: give it to RayCollector itself"
_NOT_FOR_ACTORS = dict.fromkeys(
    (
        "create_env_fn", "policy", "policy_factory", "frames_per_batch", "total_frames", "max_frames_per_traj",
        "init_random_frames", "reset_at_each_iter", "split_trajs", "postproc", "exploration_type", "seed",
        "update_at_each_batch",
    ),
    _OF_ALL,
) | {
    "num_workers": "num_workers_per_collector says it",
    "shard": "RayCollector gives it",
    "in_process": "its workers are processes beside the actor",
}  # fmt: skip
NOT_HERE = {
    "in_process": "MultiSyncDataCollector has it",
    "update_at_each_batch": "it is update_after_each_batch here, as TorchRL calls it",
    "cat_results": "collectors are stacked; their own workers follow collector_kwargs",
}
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


@dataclass(frozen=True, kw_only=True)
class RayJob(Job):
    """Everything that the worker in an actor is built from."""

    kind: type[Any]  # the class of the collector in the actor
    workers: int  # of that collector, if it has workers
    keywords: Mapping[str, Any]  # further ones of that collector

    def collector(self) -> CollectorBase:
        """Build the collector in the actor."""
        source = self.source
        made = [source.create_env_fn] * self.workers if issubclass(self.kind, WorkerCollector) else source.create_env_fn
        from_factory = {} if source.policy_factory is None else {"policy_factory": source.policy_factory}
        collector: CollectorBase = self.kind(
            made,
            source.policy,
            frames_per_batch=self.options.frames_per_batch,
            create_env_kwargs=source.create_env_kwargs,
            seed=self.seed,
            shard=self.shard,
            **from_factory,
            **self.keywords,
        )
        return collector

    @override
    def runner(self) -> Runner:
        collector = self.collector()
        assert isinstance(collector, Runner)
        return collector


def actor_jobs(
    kind: type[Any],
    made: Sequence[Any],
    columns: Mapping[str, Any],
    *,
    policy: Any,
    seed: int,
    shard: Shard,
    count: int,
) -> list[RayJob]:
    """One checked job per actor, each with `count` workers and the environments of one entry in `made`.

    Lists in `columns`, which includes `collector_kwargs`, have a value for each actor. `shard` is that of the first
    worker of the first actor.

    Raises:
        TypeError, ValueError: for arguments that no actor would take.
    """
    made = one_each([each for each in made for _ in range(count)])[::count]
    jobs = []
    for index, row in enumerate(rows(len(made), {**columns, "create_env_fn": made})):
        own = dict(row.pop("collector_kwargs") or {})
        check_not_given("collector_kwargs", own, _NOT_FOR_ACTORS)
        _check_known(kind, own)
        (row,) = rows(1, row | own)
        plain = vars(job_of(row, policy=policy, seed=seed, shard=Shard(shard.index + index * count, shard.count)))
        keywords = {name: value for name, value in row.items() if name not in _BY_POSITION}
        jobs.append(RayJob(**plain, kind=kind, workers=count, keywords=keywords))
    return jobs


_BY_POSITION = ("create_env_fn", "create_env_kwargs", "policy_factory", "frames_per_batch")


def _check_known(kind: type[Any], own: Mapping[str, Any]) -> None:
    """Raise TypeError for keywords that a class of ours lacks; a derived class checks its own."""
    if kind not in CLASSES:
        return
    known = signature(kind).parameters.keys() - _NOT_FOR_ACTORS.keys()
    if unknown := sorted(own.keys() - known):
        raise TypeError(
            f"collector_kwargs has {unknown}, which {kind.__name__} lacks, expected some of {sorted(known)}: check the "
            "spelling, or pass another collector_class"
        )


def for_all(given: Any) -> Any:
    """The value for a collector that joins later: a list holds the values of the first ones only."""
    return None if isinstance(given, (list, tuple)) else given


def check_class(kind: Any) -> None:
    """Raise TypeError unless it is a collector that an actor may run."""
    if not isinstance(kind, type) or not issubclass(kind, CLASSES):
        names = ", ".join(each.__name__ for each in CLASSES)
        raise TypeError(f"collector_class is {shown(kind)}, expected {names} or a class derived from one: pass that")


def environments_of(create_env_fn: Any, num_collectors: int | None, columns: Mapping[str, Any]) -> list[Any]:
    """What each collector's environments are made from. Lists among the columns say how many collectors there are.

    Raises:
        ValueError: for lists of different lengths.
    """
    columns = {"create_env_fn": create_env_fn, **columns}
    counts = {name: len(value) for name, value in columns.items() if isinstance(value, (list, tuple))}
    if num_collectors is not None:
        check_positive("num_collectors", num_collectors)
        counts["num_collectors"] = num_collectors
    if len({*counts.values()}) > 1 or 0 in counts.values():
        raise ValueError(
            f"the numbers of collectors differ, or are 0: {counts}: pass lists with an entry for each collector"
        )
    return [row["made"] for row in rows(next(iter(counts.values()), 1), {"made": create_env_fn})]


def remote_options(remote_configs: Any, count: int, *, accelerators: bool) -> list[dict[str, Any]]:
    """The resources of each actor: those given, else one CPU, and a fifth of a GPU if a device names one.

    Raises:
        ValueError: for an option that the collector sets itself.
    """
    default = {"num_cpus": 1} | ({"num_gpus": 0.2} if accelerators else {})
    configs = [default | dict(row["remote_configs"] or {}) for row in rows(count, {"remote_configs": remote_configs})]
    for config in configs:
        check_not_given("remote_configs", config, _NOT_REMOTE)
    return configs
