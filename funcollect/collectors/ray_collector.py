"""`RayCollector`: collection by the actors of a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from inspect import signature
from typing import Any

from tensordict import TensorDictBase
from typing_extensions import override

from funcollect.arguments import (
    check_flags,
    check_kind,
    check_not_given,
    check_positive,
    checked_device,
    without_foreign,
)
from funcollect.collectors.keywords import FOREIGN, collector
from funcollect.collectors.multi import MultiaSyncDataCollector, MultiSyncDataCollector
from funcollect.collectors.options import FRAMES, HOOKS, Device, RunOptions, Shard, WorkerShard, options_of
from funcollect.collectors.sync import SyncDataCollector
from funcollect.collectors.worker_collector import WorkerCollector
from funcollect.collectors.workers.jobs import DEVICES, columns_of, job_of, listed, rows, shares, want_accelerators
from funcollect.collectors.workers.worker import Job, WorkerInfo
from funcollect.core.saving import Episodes
from funcollect.keys import key_from_seed, seed_of
from funcollect.messages import shown
from funcollect.trajectories.final_observations import attach, detach

_OF_ACTORS = ("collector_kwargs", "remote_configs")
# Keywords that may be lists with a value for each collector.
_LISTS = ("create_env_fn", *DEVICES, "create_env_kwargs", "policy_factory", "storing_device", *_OF_ACTORS)
_NESTED = ("num_threads", "timeout", "start_timeout", "on_failure")  # passed on to collectors that have workers
_TO_REPORT = 10.0  # seconds that a collector in an actor has to report the failure of its own workers
_CLASSES = (SyncDataCollector, MultiSyncDataCollector, MultiaSyncDataCollector)
_OF_RUN = {each.name for each in fields(RunOptions)} - {"reset_when_done", "set_truncated"}
_OF_RUN |= {"create_env_fn", "policy", "policy_factory", "seed", "update_at_each_batch"}
_NOT_FOR_ACTORS = dict.fromkeys(_OF_RUN, "it holds for the whole run: give it to RayCollector itself") | {
    "num_workers": "it is num_workers_per_collector of RayCollector",
    "shard": "RayCollector gives it",
    "in_process": "its workers are processes beside the actor",
}
_OF_WHOLE = {"set_truncated": False, "reset_when_done": True}  # what keeps trajectories whole
_NOT_REMOTE = {  # options of Ray that are refused, and why
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


@collector
class RayCollector(WorkerCollector):
    """Batches collected by collectors in actors of a Ray cluster.

    With ``sync=True`` a batch is one of every collector, stacked: ``[N, P, T]`` for N of them, ``[N, T]`` for single
    environments, each with ``ceil(frames_per_batch / N)`` frames. With ``sync=False`` it is one of one collector, with
    `frames_per_batch` frames, in the order of arrival; each collector has up to two rollouts under way. If
    `collector_class` has workers itself, its batches ([K, P, T], depending on `cat_results`) replace [P, T].

    Collector ``i`` with K workers of P environments owns the lanes ``i * K * P`` to ``(i + 1) * K * P - 1``. The same
    lanes collect the same data, bit for bit, as in a `MultiSyncDataCollector`, which also handles failures alike.
    Batches are copied once out of Ray's object store, into memory that is reused once no view of it is alive. Weights
    are put into the object store once per update.

    ImportError without Ray; TypeError or ValueError for a bad argument, before any actor starts; WorkerError if the
    cluster lacks the resources, or a collector cannot be built.

    >>> import funcollect as fc
    >>> with fc.RayCollector(["CartPole-v1"] * 2, frames_per_batch=50, total_frames=100) as collector:
    ...     [batch.batch_size for batch in collector]
    [torch.Size([50]), torch.Size([50])]
    """

    frames_per_batch: int = FRAMES
    """frames in a batch, which with `sync` is one of all collectors together, else of one."""
    storing_device: Device | Sequence[Device] = None
    """where batches are delivered; without `sync` also a list with one for each collector."""
    collector_class: type[Any] = SyncDataCollector
    """the class of the collector in each actor: `SyncDataCollector`, `MultiSyncDataCollector`,
    `MultiaSyncDataCollector`, or a class derived from one that passes its keywords on."""
    collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    """further keywords for that class; or a list with a dict for each collector."""
    num_workers_per_collector: int = 1
    """K, if `collector_class` has workers."""
    sync: bool = False
    """whether a batch consists of one rollout of every collector."""
    ray_init_config: Mapping[str, Any] | None = None
    """for `ray.init`; None uses a running cluster, or else starts one on this machine."""
    remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    """Ray's options for an actor (by default ``{"num_cpus": 1}``, and a fifth of a GPU if a device names one); or
    a list with a dict for each."""
    num_collectors: int | None = None
    """N, if no argument is a list. Afterwards the number of collectors at work."""
    update_after_each_batch: bool = False
    """send the policy's weights before the next batch is requested: with `sync` to all collectors, else to the one that
    collected the last batch."""
    max_weight_update_interval: int = -1
    """batches after which a collector gets the weights at the latest; negative for no limit."""
    prefetch: bool = False
    """with `sync`, collect the next batch while the reader works on one."""

    def __post_init__(self) -> None:
        self._check_ray_keywords()
        if type(self.reset_at_each_iter) is int and self.reset_at_each_iter == 0:
            self._set(reset_at_each_iter=False)  # TorchRL's documentation passes -False
        lists = {name: getattr(self, name) for name in _LISTS}
        count = _number_of_collectors(lists, self.num_collectors)
        devices = {name: lists[name] if listed(lists[name]) is None else None for name in DEVICES}
        self._check(options_of(self, **devices, storing_device=self._delivery_device(count)))
        self._set(seed=seed_of(key_from_seed(self.seed)))
        defaults = {name: each.default for name, each in self.__dataclass_fields__.items()}
        nested, workers = issubclass(self.collector_class, WorkerCollector), self.num_workers_per_collector
        columns = {name: value for name, value in columns_of(self).items() if value is not defaults[name]}
        columns |= {name: getattr(self, name) for name in (*_OF_ACTORS, *(_NESTED if nested else ()))}
        columns["frames_per_batch"] = shares(self.frames_per_batch, count)[0] if self.sync else self.frames_per_batch
        self._columns = columns
        jobs = self._jobs(count, self._columns, Shard(0, count * workers), workers, self.policy)
        self._since_update = dict.fromkeys(range(count), 0)  # batches of each collector since it was sent weights
        from funcollect.collectors.cluster.transport import over_ray  # imports Ray

        wanted = want_accelerators(jobs)
        means = over_ray(self.ray_init_config, num_threads=self.num_threads, accelerators=wanted, eager=not self.sync)
        self._in_one_order = self.sync and not issubclass(self.collector_class, MultiaSyncDataCollector)
        ahead, grace = int(self.prefetch) if self.sync else 2, _TO_REPORT if nested else 0.0
        self._launch(jobs, means, "stack" if self.sync else None, ahead=ahead, level=5, grace=grace)
        self.num_collectors = count

    def _check_ray_keywords(self) -> None:
        if not isinstance(kind := self.collector_class, type) or not issubclass(kind, _CLASSES):
            names = f"{', '.join(each.__name__ for each in _CLASSES)} or a class derived from one"
            raise TypeError(f"collector_class is {shown(kind)}, expected {names}: pass that")
        check_flags(sync=self.sync, update_after_each_batch=self.update_after_each_batch, prefetch=self.prefetch)
        check_kind("ray_init_config", self.ray_init_config, (Mapping, type(None)), "pass a dict for ray.init")
        if self.prefetch and not self.sync:
            raise ValueError("prefetch is for sync=True, expected it left out: without sync all run ahead anyway")
        if type(interval := self.max_weight_update_interval) is not int:
            raise TypeError(f"max_weight_update_interval is {shown(interval)}, expected an int: pass -1 for no limit")
        check_positive("num_workers_per_collector", self.num_workers_per_collector)
        if self.num_workers_per_collector > 1 and not issubclass(kind, WorkerCollector):
            what = f"num_workers_per_collector is {self.num_workers_per_collector}, but {kind.__name__} has no workers"
            raise ValueError(f"{what}: pass collector_class=MultiSyncDataCollector, or more collectors")

    def _delivery_device(self, count: int) -> Device:
        """The device of all batches; None if each collector has its own, which `_storing` holds then."""
        given = (row["storing_device"] for row in rows(count, {"storing_device": self.storing_device}))
        devices = [checked_device(device, "storing_device") for device in given]
        alike = len({*devices}) == 1
        if self.sync and not alike:
            raise ValueError(f"storing_device is {self.storing_device}, expected one for sync=True: pass one device")
        self._storing: dict[int, Device] = {} if alike else dict(enumerate(devices))
        return devices[0] if alike else None

    def _jobs(self, count: int, columns: Mapping[str, Any], shard: Shard, workers: int, policy: Any) -> list[Job]:
        """The checked jobs of `count` actors, each with a collector of `workers` workers.

        `columns` are keywords: one value for all actors, or a list with one for each. `shard` is that of the first
        worker of the first actor. An actor has one CPU unless its `remote_configs` says otherwise, and a fifth of a GPU
        if a device of any of them is one. TypeError or ValueError for arguments that no actor would take.
        """
        assert self.seed is not None
        kind, jobs, nested = self.collector_class, [], issubclass(self.collector_class, WorkerCollector)
        accepted = signature(kind).parameters.keys()
        known, foreign = accepted - _NOT_FOR_ACTORS.keys(), {name: FOREIGN[name] for name in FOREIGN.keys() - accepted}
        for index, row in enumerate(rows(count, columns, copies=workers)):
            config = dict(row.pop("remote_configs", None) or {})
            check_not_given("remote_configs", config, _NOT_REMOTE)
            further = without_foreign("collector_kwargs", foreign, dict(row.pop("collector_kwargs", None) or {}))
            check_not_given("collector_kwargs", further, _NOT_FOR_ACTORS)
            for name, whole in _OF_WHOLE.items() if self.trajs_per_batch is not None else ():
                if further.get(name, whole) is not whole:
                    what = f"collector_kwargs has {name}={further[name]!r}, which does not go together with "
                    raise ValueError(f"{what}trajs_per_batch: leave one of them out")
            if kind in _CLASSES and (unknown := sorted(further.keys() - known)):  # a derived class checks its own
                what = f"collector_kwargs has {unknown}, which {kind.__name__} lacks, expected some of {sorted(known)}"
                raise TypeError(f"{what}: check the spelling, or pass another collector_class")
            (row,) = rows(1, row | further)
            place = (WorkerShard if nested else Shard)(shard.index + index * workers, shard.count)
            job = job_of(row, place, policy=policy, seed=self.seed)
            del row["create_env_fn"]
            keywords = row | ({"num_workers": workers} if nested else {})
            jobs.append(replace(job, kind=kind, keywords=keywords, config=config))
        default = {"num_cpus": 1} | ({"num_gpus": 0.2} if want_accelerators(jobs) else {})
        return [replace(job, config={**default, **job.config}) for job in jobs]

    @property
    def num_workers(self) -> int:
        """N: the collectors at work."""
        return len(self.run.workers)

    @override
    def _split_by_order(self, batch: TensorDictBase) -> Sequence[TensorDictBase]:
        if self._in_one_order or not self.sync:
            return [batch]
        final = detach(batch.unlock_())
        parts = [part.clone(recurse=False) for part in batch.unbind(0)]  # each is of one worker of a collector
        for part in parts:
            attach(part, final)  # those of all parts; `next_observations` finds the part's own
        return parts

    @override
    def _gather(self) -> TensorDictBase:
        if self.update_after_each_batch or self.max_weight_update_interval >= 0:
            limit = 1 if self.update_after_each_batch else max(self.max_weight_update_interval, 1)
            gathered = {*self.run.gathered} & {*self.run.workers}
            if late := [worker for worker in sorted(gathered) if self._since_update[worker] >= limit]:
                with self._updating:
                    self._send(self.params, late)
        batch = self.rollout()
        for worker in self.run.gathered:
            self._since_update[worker] += 1
        device = self._storing.get(self.run.gathered[0])
        return batch if device is None else batch.to(device)

    @override
    def _send(self, params: Any, workers: Sequence[int]) -> None:
        super()._send(params, workers)
        self._since_update |= dict.fromkeys(workers, 0)

    def add_collectors(
        self,
        create_env_fn: Any,
        num_envs: int | None = None,
        policy: Any = None,
        collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Add collectors, on lanes that follow the others', with the latest weights that were sent.

        Each collects as many frames as the others, so batches of ``sync=True`` become larger. Returns their indices,
        for `worker_ids` and `remove_collectors`. If one cannot be built, or the cluster lacks the resources,
        WorkerError is raised, and the run continues without any of them.

        `create_env_fn` is a list with an entry for each, or one for one collector. `num_envs` are the workers of each,
        for a class that has them; as many as the others by default. `collector_kwargs` and `remote_configs` are by
        default the constructor's, if that was one dict. A `policy` in place of the collector's own has to take the same
        weights. It is needed if `policy_factory` was a list: like lists of devices and of `create_env_kwargs`, it has
        no value for later collectors.
        """
        self._check_open()
        new = {"create_env_fn": create_env_fn, "collector_kwargs": collector_kwargs, "remote_configs": remote_configs}
        count = _number_of_collectors(new)
        workers = self.num_workers_per_collector if num_envs is None else num_envs
        check_positive("num_envs", workers)
        columns = {name: given for name, given in self._columns.items() if listed(given) is None}
        columns |= {name: given for name, given in new.items() if given is not None or name == "create_env_fn"}
        hooks = {name: getattr(self, name) for name in HOOKS}  # which may have been set since
        columns |= {name: hook for name, hook in hooks.items() if hook is not None or name in columns}
        if policy is not None:
            columns.pop("policy_factory", None)
        elif self.policy is None and self.policy_factory is not None and "policy_factory" not in columns:
            raise ValueError("policy is None, and policy_factory lists those of the first collectors: pass a policy")
        last = self.run.records[-1].job
        place = Shard(last.options.shard.index + last.keywords.get("num_workers", 1), last.options.shard.count)
        jobs = self._jobs(count, columns, place, workers, self.policy if policy is None else policy)
        added = self.run.add(jobs, self._check_newcomer)
        self._since_update |= dict.fromkeys(added, 0)
        self.num_collectors = self.num_workers
        return added

    def _check_newcomer(self, info: WorkerInfo) -> None:
        if self.sync and info.frames != self.run.info.frames:
            raise ValueError("new collectors have other frames than the others: with sync=True pass as many workers")
        self._check_whole_trajectories([info])

    def remove_collectors(self, worker_ids: int | Sequence[int]) -> None:
        """Remove collectors by their indices; those of the others stay. ValueError for all, or one that is not there.

        The batches that they have begun are delivered; their lanes and ids are not used again.
        """
        self._check_open()
        leaving = self.run.chosen(worker_ids)
        if {*leaving} == {*self.run.workers}:
            raise ValueError("worker_ids holds all collectors, expected one to stay: call shutdown() to end the run")
        self.run.remove(leaving)
        self.num_collectors = self.num_workers

    @override
    def state_dict(self) -> list[dict[str, Any]]:
        """The state that `load_state_dict` takes: a dict for each collector. Episodes in flight start again."""
        whole = self.saved_run(None)
        workers, places = whole.pop("workers"), whole.pop("places")
        states = [workers[name] for name in sorted(workers, key=int)]
        return [{**state, "place": place, "run": whole} for state, place in zip(states, places, strict=True)]

    @override
    def load_state_dict(self, state_dict: Any) -> None:
        """See `SyncDataCollector.load_state_dict`; one dict in place of a list is for all collectors.

        TypeError or ValueError if it is no `state_dict` of collectors that were added and removed as these were.
        """
        for_all = isinstance(state_dict, Mapping)
        saved = [{**state_dict, "place": place} for place in self._places] if for_all else listed(state_dict)
        if not saved or not all(isinstance(each, Mapping) and {"place", "run"} <= each.keys() for each in saved):
            what = f"state_dict is {shown(state_dict, 60)}, expected a list with a dict for each collector, or one"
            raise TypeError(f"{what} for all: pass the result of state_dict of a RayCollector")
        run, workers = saved[0]["run"], {str(index): each for index, each in enumerate(saved)}
        if for_all:  # the saved run may have had another number of collectors
            run = {**run, "own_workers": [run["own_weights"]] * len(saved)}
        self.continue_run({**run, "workers": workers, "places": [each["place"] for each in saved]}, None)

    @property
    def _places(self) -> list[list[int]]:
        """Each collector's first worker, and the number of workers when the run began. Ids follow from both."""
        shards = [self.run.records[worker].job.options.shard for worker in self.run.workers]
        return [[shard.index, shard.count] for shard in shards]

    @override
    def saved_run(self, episodes: Episodes | None) -> dict[str, Any]:
        since = [self._since_update[worker] for worker in self.run.workers]
        ours = {"since": since, "collectors": self._collector_settings} if episodes else {}
        return {**super().saved_run(episodes), **ours, "places": self._places}

    @property
    def _collector_settings(self) -> list[Any]:
        """The class of the collectors, and the numbers and flags among their further keywords."""
        plain = (bool, int, float, str, type(None))
        table = listed(self.collector_kwargs) or [self.collector_kwargs or {}]
        kept = [[[name, row[name]] for name in sorted(row) if isinstance(row[name], plain)] for row in table]
        return [self.collector_class.__name__, kept]

    @override
    def continue_run(self, saved: Mapping[str, Any], episodes: Episodes | None) -> None:
        if episodes and (was := saved["collectors"]) != (now := self._collector_settings):
            what = f"collector_class and collector_kwargs are {now}, but {was} in the saved run"
            raise ValueError(f"{what}: build the collector with those, or begin another run")
        if saved["places"] != self._places:
            what = f"the saved collectors have the places {saved['places']} (first worker, workers at the beginning)"
            mend = "begin with as many, and add and remove collectors as the saved run did"
            raise ValueError(f"{what}, these have {self._places}, so ids would be used twice: {mend}")
        super().continue_run(saved, episodes)
        if episodes:
            self._since_update |= dict(zip(self.run.workers, saved["since"], strict=True))


def _number_of_collectors(columns: Mapping[str, Any], num_collectors: int | None = None) -> int:
    """The number of collectors, from the lists among these keywords, which are of one length; 1 without any."""
    counts = {name: len(values) for name, given in columns.items() if (values := listed(given)) is not None}
    if num_collectors is not None:
        check_positive("num_collectors", num_collectors)
        counts["num_collectors"] = num_collectors
    if len({*counts.values()}) > 1 or 0 in counts.values():
        raise ValueError(f"the numbers of collectors differ, or are 0: {counts}: pass lists with an entry for each")
    return next(iter(counts.values()), 1)
