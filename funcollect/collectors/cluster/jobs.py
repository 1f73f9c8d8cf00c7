"""From the arguments of a `RayCollector` to what each of its actors is to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from typing import Any, Self, TypedDict

from funcollect.arguments import check_not_given, check_positive
from funcollect.collectors.collector import CollectorBase
from funcollect.collectors.multi import MultiaSyncDataCollector, MultiSyncDataCollector
from funcollect.collectors.options import Device, Keywords, OnFailure, Postproc
from funcollect.collectors.runner import Runner, Shard
from funcollect.collectors.sync import SyncDataCollector
from funcollect.collectors.worker_collector import WorkerCollector
from funcollect.collectors.workers.jobs import each, make_jobs, one_each
from funcollect.collectors.workers.worker import Job
from funcollect.messages import shown
from funcollect.specs import ExplorationType

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
    "max_concurrency": "a worker does one thing at a time",
    "max_pending_calls": "there are never many, and none may be lost",
    "allow_out_of_order_execution": "an actor does what it is told in order",
}


class RayKeywords(TypedDict, total=False):
    """What `RayCollector` hands on; the defaults stand in `WorkerOptions`."""

    total_frames: int
    device: Device | Sequence[Device]
    env_device: Device | Sequence[Device]
    policy_device: Device | Sequence[Device]
    max_frames_per_traj: int | None
    init_random_frames: int | None
    split_trajs: bool
    postproc: Postproc | None
    exploration_type: ExplorationType
    reset_when_done: bool
    num_threads: int
    timeout: float
    start_timeout: float
    on_failure: OnFailure


@dataclass(frozen=True, kw_only=True)
class RayJob(Job):
    """What makes the worker in an actor.

    Attributes:
        kind: the class of the collector there.
        workers: how many that one has, where it has workers.
        keywords: what it is given, besides what its source says.
    """

    kind: type[Any]
    workers: int
    keywords: Mapping[str, Any]

    def collector(self) -> CollectorBase:
        """The collector in the actor."""
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

    def runner(self) -> Runner:
        """The same, which is a runner where it has no workers."""
        collector = self.collector()
        assert isinstance(collector, Runner)
        return collector


@dataclass(frozen=True)
class ActorSpec:
    """What every actor is given alike.

    Attributes:
        kind: the class of the collector in each.
        frames: of each one's batch.
        keywords: by name; a list has one for each actor.
        seed: of the run.
        workers: those that the run had when it began, over all actors.
    """

    kind: type[Any]
    frames: int
    keywords: Mapping[str, Any]
    seed: int
    workers: int

    def of_newcomers(self, seed: int) -> Self:
        """The same for actors that come later, of which a list says nothing; `seed` is the run's by then."""
        return replace(self, keywords={name: for_all(value) for name, value in self.keywords.items()}, seed=seed)

    def jobs(
        self, envs: Sequence[Any], env_kwargs: Any, policy: Any, factory: Any, kwargs: Any, count: int, first: int
    ) -> list[RayJob]:
        """A job for each of `envs`, checked.

        Args:
            envs: what each actor's environments are made from.
            env_kwargs: `create_env_kwargs`.
            policy: for all.
            factory: `policy_factory`.
            kwargs: `collector_kwargs`, a dict or one for each.
            count: workers in each actor.
            first: workers that the actors before have.

        Raises:
            TypeError, ValueError: for arguments that no actor would take.
        """
        envs = one_each([env for env in envs for _ in range(count)])[::count]
        given = [dict(one or {}) for one in each("collector_kwargs", kwargs, len(envs))]
        rows: list[dict[str, Any]] = [{} for _ in envs]
        for name, value in self.keywords.items():
            for row, one in zip(rows, each(name, value, len(envs)), strict=True):
                row[name] = one
        jobs = []
        for index, (row, own) in enumerate(zip(rows, given, strict=True)):
            check_not_given("collector_kwargs", own, _NOT_FOR_ACTORS)
            _check_known(self.kind, own)
            own_env_kwargs = own.pop("create_env_kwargs", each("create_env_kwargs", env_kwargs, len(envs))[index])
            (plain,) = make_jobs(
                [envs[index]], own_env_kwargs, policy, each("policy_factory", factory, len(envs))[index],
                [self.frames], row | own, self.seed,
            )  # fmt: skip
            shard = Shard(first + index * count, self.workers)
            jobs.append(
                RayJob(**{**vars(plain), "shard": shard}, kind=self.kind, workers=count, keywords=_taken(row) | own)
            )
        return jobs


def _taken(row: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords but for those that were left as they are."""
    return {name: value for name, value in row.items() if value is not None}


def _check_known(kind: type[Any], own: Mapping[str, Any]) -> None:
    """Raise TypeError for keywords that a class of ours lacks; of a derived one only its constructor can tell."""
    if kind not in CLASSES:
        return
    taken = [name for name, each in signature(kind).parameters.items() if each.kind is not Parameter.VAR_KEYWORD]
    known = {*taken, *(Keywords.__annotations__ if issubclass(kind, WorkerCollector) else ())} - _NOT_FOR_ACTORS.keys()
    if unknown := sorted(own.keys() - known):
        raise TypeError(
            f"collector_kwargs has {unknown}, which {kind.__name__} lacks, expected some of {sorted(known)}: look for "
            "a slip of the pen, or pass another collector_class"
        )


def for_all(given: Any) -> Any:
    """What was given to all collectors alike; a list tells nothing about others."""
    return None if isinstance(given, (list, tuple)) else given


def check_class(kind: Any) -> None:
    """Raise TypeError unless it is a collector that an actor may run."""
    if not isinstance(kind, type) or not issubclass(kind, CLASSES):
        names = ", ".join(each.__name__ for each in CLASSES)
        raise TypeError(f"collector_class is {shown(kind)}, expected {names} or a class derived from one: pass that")


def environments_of(create_env_fn: Any, num_collectors: int | None, **columns: Any) -> list[Any]:
    """What each collector's environments are made from; lists say how many there are.

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
    return each("create_env_fn", create_env_fn, next(iter(counts.values()), 1))


def remote_options(remote_configs: Any, count: int, *, accelerators: bool) -> list[dict[str, Any]]:
    """The resources of each actor: a CPU, a fifth of a GPU where devices name one, and what is given.

    Raises:
        ValueError: for options that are the collector's to set.
    """
    rest = {"num_cpus": 1} | ({"num_gpus": 0.2} if accelerators else {})
    configs = [rest | dict(one or {}) for one in each("remote_configs", remote_configs, count)]
    for config in configs:
        check_not_given("remote_configs", config, _NOT_REMOTE)
    return configs
