"""`RayCollector`: collection by the actors of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

from tensordict import TensorDictBase

from funcollect.arguments import check_flags, check_kind, check_not_given, check_positive
from funcollect.collectors.cluster.jobs import (
    NOT_HERE,
    ActorSpec,
    RayKeywords,
    check_class,
    environments_of,
    for_all,
    remote_options,
)  # fmt: skip
from funcollect.collectors.sync import SyncDataCollector
from funcollect.collectors.worker_collector import WorkerCollector
from funcollect.collectors.workers.batch_layout import Join
from funcollect.collectors.workers.gathering import AsyncGathering, Gathering, SyncGathering
from funcollect.collectors.workers.jobs import check_alike, each, shares, want_accelerators, worker_options
from funcollect.collectors.workers.pool import FailurePolicy
from funcollect.collectors.workers.transport import BatchAssembler, WorkerGroup
from funcollect.collectors.workers.worker import Job, WorkerInfo
from funcollect.devices import checked_device
from funcollect.keys import key_from_seed, seed_of
from funcollect.messages import shown

_DEVICES = ("device", "env_device", "policy_device")  # each may be a list
_OF_ACTORS = (
    *_DEVICES, "max_frames_per_traj", "init_random_frames", "reset_at_each_iter",
    "exploration_type", "reset_when_done",
)  # fmt: skip
_KNOWN = {*RayKeywords.__annotations__, "storing_device", "reset_at_each_iter"}
_OF_NESTED_WORKERS = ("num_threads", "timeout", "start_timeout", "on_failure")
_TO_TELL = 10.0  # seconds that a collector in an actor has to tell of its own workers' failure


class RayCollector(WorkerCollector):
    """Batches collected by collectors in actors of a Ray cluster (see `WorkerCollector` for what is not said here).

    With ``sync=True`` a batch is one of every collector, stacked: ``[N, P, T]`` for N of them, ``[N, T]`` for single
    environments, each with ``ceil(frames_per_batch / N)`` frames. With ``sync=False`` it is one of one collector, with
    `frames_per_batch` frames, first come first served; each has up to two rollouts under way. Where `collector_class`
    has workers itself, its batches ([K, P, T], as `cat_results` says) take the place of [P, T].

    Collector ``i`` with K workers of P environments owns the lanes ``i * K * P`` to ``(i + 1) * K * P - 1``. The same
    lanes collect the same data, bit for bit, as in the workers of `MultiSyncDataCollector`.

    Batches come out of Ray's object store by one copy, into memory that is used again once no view of it lives. Weights
    are put there once per update.

    Args:
        create_env_fn: what `SyncDataCollector` takes, in a list with an entry for each collector, or one for all.
        policy: what `SyncDataCollector` takes.
        frames_per_batch: with `sync` of all collectors together, else of each.
        policy_factory: makes the policy in each actor, in place of `policy`; or a list with one for each.
        create_env_kwargs: keyword arguments for `make_env` or the callables; or a list with a dict for each.
        storing_device: where batches are delivered; without `sync` also a list with one for each collector.
        reset_at_each_iter: begin every batch with new episodes.
        collector_class: what runs in each actor: `SyncDataCollector`, `MultiSyncDataCollector`,
            `MultiaSyncDataCollector`, or a class derived from one, which has to hand its keywords on.
        collector_kwargs: further keywords for it; or a list with a dict for each.
        num_workers_per_collector: K, where that class has workers.
        sync: whether a batch is one of all collectors.
        ray_init_config: for `ray.init`; None finds a cluster that is there, else starts one on this machine.
        remote_configs: what Ray takes as an actor's options (``{"num_cpus": 1}`` unless given, and a fifth of a GPU
            where a device names one); or a list with a dict for each.
        num_collectors: N, where no argument is a list.
        update_after_each_batch: send the policy's weights to the collectors of each batch before the next one is asked
            for: to all with `sync`, else to the one just gathered from.
        max_weight_update_interval: batches gathered from a collector after which it is sent the weights at the latest;
            negative for no limit.
        prefetch: with `sync`, collect the next batch while the reader works on one.
        seed: an int, or None to draw one.
        **keywords: the others of `MultiSyncDataCollector`. `device`, `env_device` and `policy_device` may be lists with
            one for each collector.

    Raises:
        ImportError: without Ray.
        TypeError, ValueError: for a bad argument, before any actor starts.
        WorkerError: where the cluster lacks the resources, or a collector cannot be built.

    >>> import funcollect as fc
    >>> with fc.RayCollector(["CartPole-v1"] * 2, frames_per_batch=50, total_frames=100) as collector:
    ...     [batch.batch_size for batch in collector]
    [torch.Size([50]), torch.Size([50])]
    """

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        frames_per_batch: int,
        policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        storing_device: Any = None,
        reset_at_each_iter: bool = False,
        collector_class: type[Any] = SyncDataCollector,
        collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        num_workers_per_collector: int = 1,
        sync: bool = False,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        num_collectors: int | None = None,
        update_after_each_batch: bool = False,
        max_weight_update_interval: int = -1,
        prefetch: bool = False,
        seed: int | None = None,
        **keywords: Unpack[RayKeywords],
    ) -> None:
        check_not_given("RayCollector", keywords, NOT_HERE)
        check_class(collector_class)
        self.collector_class, self.collector_kwargs = collector_class, collector_kwargs
        self.num_workers_per_collector = num_workers_per_collector
        self.sync, self.prefetch, self._eager = sync, prefetch, not sync
        self.ray_init_config, self.remote_configs = ray_init_config, remote_configs
        self.update_after_each_batch = update_after_each_batch
        self.max_weight_update_interval = max_weight_update_interval
        self._check()
        self.create_env_fn, self.create_env_kwargs = create_env_fn, create_env_kwargs
        self.policy, self.policy_factory = policy, policy_factory
        self._seed = seed_of(key_from_seed(seed))
        made = environments_of(
            create_env_fn,
            num_collectors,
            policy_factory=policy_factory,
            create_env_kwargs=create_env_kwargs,
            storing_device=storing_device,
            collector_kwargs=collector_kwargs,
            remote_configs=remote_configs,
            **{name: keywords.get(name) for name in _DEVICES},
        )
        given: dict[str, Any] = {**keywords, "storing_device": self._stored(storing_device, len(made))}
        zero = type(reset_at_each_iter) is int and reset_at_each_iter == 0  # TorchRL's documentation passes -False
        given["reset_at_each_iter"] = False if zero else reset_at_each_iter
        self.options = worker_options(frames_per_batch, given, _KNOWN)
        _, frames = self._shared(frames_per_batch, len(made))
        workers = len(made) * num_workers_per_collector
        self._actor_spec = ActorSpec(collector_class, frames[0], self._for_actors(given), self._seed, workers)
        jobs = self._actor_spec.jobs(
            made, create_env_kwargs, policy, policy_factory, collector_kwargs, num_workers_per_collector, 0
        )
        self._owned = workers  # places of workers that have been given away
        self._since = dict.fromkeys(range(len(jobs)), 0)  # batches of each collector since it was sent weights
        self._infos: dict[int, WorkerInfo] = {}
        self._launch(jobs)

    def _check(self) -> None:
        check_flags(sync=self.sync, update_after_each_batch=self.update_after_each_batch, prefetch=self.prefetch)
        check_kind("ray_init_config", self.ray_init_config, (Mapping, type(None)), "pass a dict for ray.init")
        if self.prefetch and not self.sync:
            raise ValueError("prefetch is for sync=True, expected it left out: without sync all run ahead anyway")
        if type(interval := self.max_weight_update_interval) is not int:
            raise TypeError(f"max_weight_update_interval is {shown(interval)}, expected an int: pass -1 for no limit")
        check_positive("num_workers_per_collector", self.num_workers_per_collector)
        if self.num_workers_per_collector > 1 and not self._has_nested_workers:
            raise ValueError(
                f"num_workers_per_collector is {self.num_workers_per_collector}, but {self.collector_class.__name__} "
                "has no workers: pass collector_class=MultiSyncDataCollector, or more collectors"
            )

    @property
    def _has_nested_workers(self) -> bool:
        """Whether the collectors in the actors have workers themselves."""
        return issubclass(self.collector_class, WorkerCollector)

    def _stored(self, storing_device: Any, count: int) -> Any:
        """The device of all batches; None where each collector has its own."""
        self._storing: dict[int, Any] = {}
        if not isinstance(storing_device, (list, tuple)):
            return storing_device
        devices = [checked_device(device, "storing_device") for device in each("storing_device", storing_device, count)]
        if len({*devices}) == 1:
            return devices[0]
        if self.sync:
            raise ValueError(f"storing_device is {storing_device}, expected one for sync=True: a batch is in one place")
        self._storing = dict(enumerate(devices))
        return None

    def _for_actors(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        names = (*_OF_ACTORS, *(_OF_NESTED_WORKERS if self._has_nested_workers else ()))
        return {name: keywords[name] for name in names if name in keywords}

    def _shared(self, frames_per_batch: int | Sequence[int], count: int) -> tuple[int, list[int]]:
        assert isinstance(frames_per_batch, int)
        return frames_per_batch, shares(frames_per_batch, count) if self.sync else [frames_per_batch] * count

    def _failure_policy(self) -> FailurePolicy:
        given = super()._failure_policy()
        grace = _TO_TELL if self._has_nested_workers else 0.0
        return FailurePolicy(given.timeout + grace, given.start_timeout + grace, given.on_failure)

    def _open_transport(self, jobs: Sequence[Job]) -> Any:
        from funcollect.collectors.cluster.transport import RayTransport  # imports Ray

        accelerators = want_accelerators(jobs)
        return RayTransport(
            remote_options(self.remote_configs, len(jobs), accelerators=accelerators),
            self.ray_init_config,
            num_threads=self.options.num_threads,
            accelerators=accelerators,
            eager=self._eager,
        )

    def _describe_workers(self) -> WorkerInfo:
        first = super()._describe_workers()
        self._infos = dict.fromkeys(self._pool.workers, first)
        return first

    def _open_gathering(self) -> Gathering:
        parts = (self._pool, self._pool.workers, self._open_assembler, self._weights)
        return SyncGathering(*parts, prefetch=self.prefetch) if self.sync else AsyncGathering(*parts)

    @property
    def _open_assembler(self) -> Callable[[Sequence[int]], BatchAssembler]:
        return partial(self._make_assembler, join="stack" if self.sync else None)

    def _make_assembler(self, workers: Sequence[int], join: Join | None) -> BatchAssembler:
        return self._transport.assembler(self._pool.submit, WorkerGroup(workers, (), join, self.num_envs is None))

    def _lanes_of(self, worker: int) -> int:
        return self._infos[worker].lanes

    @property
    def num_collectors(self) -> int:
        """N: those at work."""
        return self.num_workers

    @property
    def frames_of_batch(self) -> int:
        """The frames that every batch has: `frames_per_batch`, rounded up to whole steps of all lanes."""
        if not self.sync:
            return self._info.frames
        return sum(self._infos[worker].frames for worker in self._pool.workers)

    def _gather(self) -> TensorDictBase:
        limit = 1 if self.update_after_each_batch else max(self.max_weight_update_interval, 1)
        enforced = self.update_after_each_batch or self.max_weight_update_interval >= 0
        present = {*self._pool.workers}
        late = [worker for worker in self._gathering.workers if worker in present and self._since[worker] >= limit]
        if enforced and late:
            self.update_policy_weights_(worker_ids=late)
        batch = self.rollout()
        for worker in self._gathering.workers:
            self._since[worker] += 1
        device = self._storing.get(self._gathering.workers[0])
        return batch if device is None else batch.to(device)

    def update_policy_weights_(
        self, params: Any = None, worker_ids: int | Sequence[int] | None = None, *, policy_or_weights: Any = None
    ) -> None:
        """Have the collectors act with `params` as they are now, or for None with the policy's own.

        A rollout is collected with one version throughout: with `sync` from the next batch on (with `prefetch` the one
        after it), else from each collector's next rollout on.

        Args:
            params: what the policy takes as parameters, or a module like its own; copied before this returns.
            policy_or_weights: `params`, by TorchRL's name for it.
            worker_ids: the collectors that get them; all unless given.
        """
        super().update_policy_weights_(params, worker_ids, policy_or_weights=policy_or_weights)
        workers = [worker_ids] if isinstance(worker_ids, int) else worker_ids
        self._since.update(dict.fromkeys(self._pool.workers if workers is None else workers, 0))

    def add_collectors(
        self,
        create_env_fn: Any,
        num_envs: int | None = None,
        policy: Any = None,
        collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Let more collectors take part, on lanes that follow the others', with the latest weights that were sent.

        Each collects as many frames as the others, so batches of ``sync=True`` become larger. Where one cannot be
        built, the run goes on without all of them.

        Args:
            create_env_fn: what each one's environments are made from, in a list; or one for one collector.
            num_envs: workers of each, for a class that has them; as many as the others unless given.
            policy: in place of the collector's own; it has to take the same weights. Needed where `policy_factory` was
                a list: like lists of devices and of `create_env_kwargs`, it tells nothing of those that come later.
            collector_kwargs: as the constructor takes them; the constructor's where it was given one dict.
            remote_configs: as the constructor takes them; likewise.

        Returns:
            Their indices, for `worker_ids` and `remove_collectors`.

        Raises:
            TypeError, ValueError: for a bad argument.
            WorkerError: where the cluster lacks the resources, or one cannot be built.
        """
        from funcollect.collectors.cluster.transport import RayTransport

        self._check_open()
        made = environments_of(create_env_fn, None, collector_kwargs=collector_kwargs, remote_configs=remote_configs)
        count = self.num_workers_per_collector if num_envs is None else num_envs
        check_positive("num_envs", count)
        kwargs = for_all(self.collector_kwargs) if collector_kwargs is None else collector_kwargs
        configs = for_all(self.remote_configs) if remote_configs is None else remote_configs
        env_kwargs, factory = for_all(self.create_env_kwargs), for_all(self.policy_factory)
        own = (self.policy, factory) if policy is None else (policy, None)
        if own == (None, None) and self.policy_factory is not None:
            raise ValueError("policy is None, and policy_factory lists those of the first collectors: pass a policy")
        actor_spec = self._actor_spec.of_newcomers(self._seed)
        jobs = actor_spec.jobs(made, env_kwargs, own[0], own[1], kwargs, count, self._owned)
        assert isinstance(self._transport, RayTransport)
        configs = remote_options(configs, len(made), accelerators=want_accelerators(jobs))
        self._transport.expect(configs, len(self._pool.records), self._pool.workers)
        self._owned += count * len(made)
        return self._welcome(jobs)

    def _welcome(self, jobs: Sequence[Job]) -> list[int]:
        """Start workers beside those that are there; nothing has changed where one of them fails."""
        workers = [self._pool.add(job) for job in jobs]
        try:
            calls = [self._pool.call(worker, "describe") for worker in workers]
            infos = dict(zip(workers, self._pool.finish(calls), strict=True))
            check_alike({0: self._info, **infos})
            if self.sync and any(info.frames != self._info.frames for info in infos.values()):
                raise ValueError(
                    "the new collectors have other frames than the others: with sync=True pass as many workers"
                )
        except BaseException:
            for worker in {*workers} & {*self._pool.workers}:
                self._pool.retire(worker)
            raise
        self._pool.admit(workers)
        for worker in workers:
            self._infos[worker], self._since[worker] = infos[worker], 0
            self._weights.join(worker)
        self._gathering.set_workers(self._pool.workers, self._open_assembler)
        return workers

    def remove_collectors(self, worker_ids: int | Sequence[int]) -> None:
        """Let collectors go. What they have begun is delivered; their lanes and ids are not used again.

        Args:
            worker_ids: their indices; those of the others stay.

        Raises:
            ValueError: for one that is not there, or for all.
        """
        self._check_open()
        leaving = {worker_ids} if isinstance(worker_ids, int) else {*worker_ids}
        self._check_workers([*leaving])
        rest = [worker for worker in self._pool.workers if worker not in leaving]
        if not rest:
            raise ValueError("worker_ids holds all collectors, expected one to stay: call shutdown() to end the run")
        self._gathering.set_workers(rest, self._open_assembler)
        for worker in leaving:
            self._pool.retire(worker)
            self._weights.leave(worker)

    def state_dict(self) -> list[dict[str, Any]]:
        """What `load_state_dict` needs: a dict for each collector. Episodes in flight begin anew."""
        whole = super().state_dict()
        workers = whole.pop("workers")
        states = [workers[name] for name in sorted(workers, key=int)]
        return [{**state, "place": place, "run": whole} for state, place in zip(states, self._places, strict=True)]

    @property
    def _places(self) -> list[list[int]]:
        """Of each collector its first worker's index, and how many workers the run began with: ids follow from them."""
        shards = [self._pool.records[worker].job.shard for worker in self._pool.workers]
        return [[shard.index, shard.count] for shard in shards]

    def load_state_dict(self, state_dict: Any) -> None:
        """Go on from a `state_dict`: the same weights, keys and counts; new episodes under ids not used before.

        What the collectors have ready is not delivered: it belongs to the run before. One dict is for all collectors.

        Raises:
            TypeError, ValueError: for what is no `state_dict` of collectors that came and went as these did.
        """
        if isinstance(state_dict, Mapping):  # one for all
            state_dict = [{**state_dict, "place": place} for place in self._places]
        if not isinstance(state_dict, (list, tuple)) or not all(
            isinstance(each, Mapping) and {"place", "run"} <= each.keys() for each in state_dict
        ):
            raise TypeError(
                f"state_dict is {type(state_dict).__name__}, expected a list with a dict for each collector, or one "
                "for all: pass what state_dict of a RayCollector gave"
            )
        if not state_dict:
            raise ValueError("state_dict is empty, expected a dict for each collector: pass what state_dict gave")
        if (places := [each["place"] for each in state_dict]) != self._places:
            raise ValueError(
                f"the state_dict's collectors have the places {places} (first worker, workers at the beginning), these "
                f"have {self._places}, so ids would be used twice: begin with as many, add and remove as was done then"
            )
        workers = {str(index): each for index, each in enumerate(state_dict)}
        super().load_state_dict({"workers": workers, **state_dict[0]["run"]})
