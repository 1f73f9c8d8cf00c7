"""The base class of collectors with workers. Subclasses decide where workers live, and which of them share a batch."""

from __future__ import annotations

import itertools
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal, get_args

import torch
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from funcollect import arguments
from funcollect.collectors.collector import CollectorBase
from funcollect.collectors.in_use import exclusive
from funcollect.collectors.keywords import collector
from funcollect.collectors.options import HOOKS, Device, Options, check_hook, check_updated
from funcollect.collectors.sync import given_weights
from funcollect.collectors.workers.gathering import Join, Means
from funcollect.collectors.workers.run import WorkerRun
from funcollect.collectors.workers.worker import Job, Progress, WorkerInfo, runners_of
from funcollect.core.api import checked_mask
from funcollect.core.env_params import part_of_lanes
from funcollect.core.evaluate_actions import remember_spaces
from funcollect.core.request import check_given
from funcollect.core.saving import Episodes
from funcollect.core.whole_episodes import check_limited
from funcollect.errors import WorkerError
from funcollect.keys import key_from_seed
from funcollect.policies.base import policies_of
from funcollect.policies.torch_modules.settings import dumps
from funcollect.policies.torch_modules.torch_backed import has_lazy_layers
from funcollect.processes.failures import sending
from funcollect.processes.pool import FailurePolicy, OnFailure
from funcollect.protocols import is_policy

_View = Literal["aggregate", "per_worker", "both"]
_COPIES_WARNING = (
    "the reader keeps every batch, so from now on it gets copies of those in shared memory: if you keep only some of "
    "them, copy those, batch.clone(), and release the others"
)


@collector
class WorkerCollector(CollectorBase):
    """The base class of collectors with workers. No batch is ever dropped: workers wait for a slow reader.

    Attributes:
        run: the workers; read by a larger run that this collector is a part of.
    """

    policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None
    """makes the policy in each worker, in place of a copy of `policy`; or a list with one for each. If both are given,
    policies in the workers get the weights of `policy`, from the beginning and by `update_policy_weights_`."""
    create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    """keyword arguments for `make_env` or the callables; or a list with a dict for each worker."""
    device: Device | Sequence[Device] = None
    """for `storing_device`, `env_device` and `policy_device` if they are not given; or a list with one for each
    worker."""
    env_device: Device | Sequence[Device] = None
    """where the environments run; or a list with one for each worker."""
    policy_device: Device | Sequence[Device] = None
    """where the policies run; or a list with one for each worker."""
    num_threads: int = 1
    """threads of each worker, for Torch and XLA."""
    timeout: float = 60.0
    """seconds of waiting for a worker without a sign of life after which it counts as hung. An answer is a sign, and so
    is every step of an environment, but a compiled loop makes all steps of a rollout in one call."""
    start_timeout: float = 300.0
    """the same for its start and its first rollout, which may compile."""
    on_failure: OnFailure = "raise"
    """``"raise"`` ends the run when a worker fails. ``"restart"`` replaces the worker, with the latest weights, on new
    episodes under ids not used before; the rollout that it was collecting is lost."""
    run: WorkerRun = field(init=False)

    _lends = True
    _warned = False  # whether the user was warned that batches are copies

    def _check(self, options: Options) -> None:
        """Store the checked options, and check the keywords that are not among them."""
        arguments.check_positive("num_threads", self.num_threads)
        arguments.check_number("timeout", self.timeout, positive=True, example=60)
        arguments.check_number("start_timeout", self.start_timeout, positive=True, example=300)
        arguments.check_choice("on_failure", self.on_failure, get_args(OnFailure))
        self.options = options
        if any(map(has_lazy_layers, policies_of(self.policy))):
            what = "policy has lazy layers, whose parameters each worker would draw, expected layers with parameters"
            raise ValueError(f"{what}: call the module once with an observation before")
        if is_policy(self.policy):
            check_given(self.policy, options.exploration)
        check_updated(self.update_statistics, self.policy)

    def _launch(
        self, jobs: Sequence[Job], means: Means, join: Join | None, *, ahead: int, level: int, grace: float = 0.0
    ) -> None:
        """Start the workers; `WorkerRun` describes `join`.

        `grace` is added to the timeouts, in seconds. The user's call of the constructor is `level` frames above.
        """
        failures = FailurePolicy(self.timeout + grace, self.start_timeout + grace, self.on_failure)
        self.run = WorkerRun(jobs, means, failures, self.policy, join, ahead, getattr(self, "max_policy_lag", None))
        self._finalizer = weakref.finalize(self, self.run.end)
        if self.policy is not None and self.policy_factory is not None:
            self.run.weights.publish(None, 0, None, own=False)
        info = self.run.info
        if info.warning:
            warnings.warn(info.warning, stacklevel=level)
        if is_policy(self.policy):
            remember_spaces(self.policy, info.space, info.leaves, info.action)
        try:
            self._check_whole_trajectories([*self.run.infos.values()])
        except ValueError:
            self.shutdown()
            raise

    def _check_whole_trajectories(self, infos: Sequence[WorkerInfo]) -> None:
        """With `trajs_per_batch`, raise ValueError unless all trajectories end, and workers of one order keep pace."""
        if self.trajs_per_batch is None:
            return
        for info in infos:
            check_limited(info.limited, info.label)
        lengths = [info.length for info in infos]
        if self._in_one_order and len({*lengths}) > 1:
            what = f"the workers make {lengths} steps for a batch, which does not go together with trajs_per_batch"
            raise ValueError(f"{what}, as the fastest would wait for others: give all the same frames_per_batch")

    @property
    def num_envs(self) -> int | None:
        """P: the environments of each worker; None for one without a batch dimension."""
        return self.run.info.num_envs

    @property
    @override
    def frames_of_batch(self) -> int:
        return sum(self.run.frames) if self.run.together else max(self.run.frames)

    @override
    def _gather(self) -> TensorDictBase:
        if self.options.update_at_each_batch and self._batches:
            with self._updating:
                self.update_policy_weights_(self.params)
        return self.rollout()

    @exclusive
    def rollout(self) -> TensorDictBase:
        """One batch as it is gathered, even if the run has ended: not split, not post-processed."""
        began = time.monotonic()
        last = 0 <= self.total_frames <= self.frames + self.frames_of_batch
        try:
            batch = self.run.next(more=not last)
        except WorkerError:
            self._closed = True
            self._close()
            raise
        self._seconds += time.monotonic() - began
        self._batches += 1
        self.frames += batch.numel()
        if not self._warned and self.run.copies:
            self._warned = True
            warnings.warn(_COPIES_WARNING, stacklevel=6)  # the line of the user's loop over the batches
        return batch

    @exclusive
    def reset(self, mask: Tensor | None = None) -> None:
        """Begin new episodes in the lanes of `mask` [L], or in all. Batches collected before are delivered first."""
        lanes = self.run.lanes
        masks = [None] * len(lanes) if mask is None else torch.split(checked_mask(mask, sum(lanes)), lanes)
        self.run.call_each("reset", masks)

    @exclusive
    def apply(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function with the environment of every lane, as `funcollect.apply` does, wherever it lives.

        Returns the results in the order of workers, then lanes. Each worker calls it between two of its rollouts;
        batches that were begun before are delivered first. A process that replaces a lost worker calls it again,
        workers that are added later do not. If it raises, the worker's lanes begin new episodes.
        """
        arguments.check_function("function", function, "a function of one lane's environment and args", 1 + len(args))
        with sending("function or its arguments", "the workers", "pass a function of a module, and plain arguments"):
            packed = dumps((function, args))
        return [result for results in self.run.call_all("apply", packed) for result in results]

    @exclusive
    def set_env_params(self, params: Any, *, at_once: bool = False) -> None:
        """Change the parameters of JAX environments, as `funcollect.set_env_params` does, in all workers.

        Leaves with a first dimension L more have a value for each lane, in the order of workers, then lanes. Each
        worker acts with them from the next rollout that it begins; one that replaces it gets them again.
        """
        arguments.check_flags(at_once=at_once)
        shapes, lanes = self.run.info.param_shapes, self.run.lanes
        if shapes is None:
            raise TypeError(f"{self.run.info.label} has no parameters that can be set, expected an environment in JAX")
        parts = [
            part_of_lanes(params, shapes, sum(lanes), slice(end - count, end))
            for count, end in zip(lanes, itertools.accumulate(lanes), strict=True)
        ]
        self.run.call_each("set_env_params", [dumps((part, at_once)) for part in parts])

    @override
    def _reseed(self, seed: int) -> int:
        key_from_seed(seed)
        self.run.set_seed(seed)
        self._set(seed=seed)
        return sum(self.run.lanes)

    def update_policy_weights_(
        self, params: Any = None, worker_ids: int | Sequence[int] | None = None, *, policy_or_weights: Any = None
    ) -> None:
        """Make the workers act with a copy of `params` as they are now, or for None of the policy's own.

        `params`, or `policy_or_weights` as TorchRL calls them, are the policy's parameters, or a module like its own.
        Only the workers in `worker_ids` get them, by default all; a dict ``{worker: params}`` has those of each, and
        counts as one update for each. ValueError for parameters that do not fit the policy, a worker that is not there,
        or single workers if `update_at_each_batch` or `update_statistics` send other weights before each batch.

        A rollout is collected with one version throughout. A batch of all workers has these weights from the next one
        on, with ``prefetch`` from the one after it; workers that collect their own batches take them at their next
        rollout.
        """
        self._check_open()
        given = params if policy_or_weights is None else policy_or_weights
        by_worker = worker_ids is None and _has_int_keys(given) and not _has_int_keys(getattr(self.policy, "params", 0))
        if by_worker or worker_ids is not None:
            for name in ("update_statistics", "update_at_each_batch", "max_policy_lag"):
                if getattr(self, name, None) not in (None, False):
                    what = f"{name} is {getattr(self, name)}, so all workers get the same weights for each batch"
                    raise ValueError(f"{what}: give none by worker")
        if by_worker:
            workers = self.run.chosen([*given])
            for worker in workers:
                self.run.weights.prepare(given_weights(given[worker], None, self.policy))
            for worker in workers:
                self.update_policy_weights_(given[worker], worker)
            return
        workers = self.run.chosen(worker_ids)
        weights = given_weights(params, policy_or_weights, self.policy)
        with self._updating:
            self._send(weights, workers)
            if worker_ids is None:
                self.params = weights

    def _send(self, params: Any, workers: Sequence[int]) -> None:
        """Make these workers act with a copy of `params`, or for None of the policy's own."""
        self.run.weights.update(params, workers)

    @override
    def get_policy_version(self) -> int:
        self._check_filler()
        return self.run.weights.version

    @override
    @exclusive
    def saved_run(self, episodes: Episodes | None) -> dict[str, Any]:
        return {**self.run.save(episodes), "frames": self.frames, "iter": self._batches}

    @override
    @exclusive
    def continue_run(self, saved: Mapping[str, Any], episodes: Episodes | None) -> None:
        seed = self.run.load(saved, episodes)
        runners = [runners_of(each)[0] for each in runners_of(saved)]
        newest = max(runners, key=lambda runner: int(runner["policy_version"]))
        self._take_over(saved, seed, dict(newest["policy_state_dict"]) or None)

    @override
    def stats(self, workers: _View = "aggregate", *, timeout: float | None = None) -> dict[str, float]:
        """Counts of the run, by name: those of `SyncDataCollector.stats`, and others.

        They are the number of ``workers``, those that are ``workers_alive``, the ``worker_frames`` that they have
        collected, the seconds ``reader_waited`` in which your process waited for the workers, ``workers_waited`` in
        which workers waited for it, summed over workers, ``policy_lag``, by how many versions the weights of the last
        batch are older than the latest ones by now, ``restarts`` of workers, ``lost_frames`` with them, and ``copies``,
        the batches delivered as copies.

        With ``workers="both"`` there are also ``worker_0/frames``, ``worker_0/batches`` and so on, which each worker
        has collected, with ``"per_worker"`` these alone. No worker is waited for, so TorchRL's `timeout` has no effect.
        """
        arguments.check_choice("workers", workers, get_args(_View))
        run, per_worker = self.run, dict[str, float]()
        progress = {worker: run.records[worker].progress or Progress() for worker in run.workers}
        for worker, each in progress.items() if workers != "aggregate" else ():
            per_worker |= {f"worker_{worker}/{name}": getattr(each, name) for name in ("frames", "batches")}
        if workers == "per_worker":
            return per_worker
        return {
            **super().stats(),
            **per_worker,
            "workers": len(run.workers),
            "workers_alive": 0 if run.closed else len(run.workers),
            "worker_frames": sum(each.frames for each in progress.values()),
            "reader_waited": run.waited,
            "workers_waited": run.idle,
            "policy_lag": run.weights.version - run.version if self._batches else 0,
            "restarts": run.restarts,
            "lost_frames": run.lost,
            "copies": run.copies,
        }

    @override
    def _close(self) -> None:
        self._finalizer()

    @override
    def _check_open(self) -> None:
        self._closed = self._closed or self.run.closed
        super()._check_open()

    def __repr__(self) -> str:
        workers = f"num_workers={len(self.run.workers)}, frames_per_batch={self.options.frames_per_batch}"
        return f"{type(self).__name__}({self.run.info.label}, {workers}, frames={self.frames})"


def _hook(name: str) -> property:
    """A field that the workers get when it is assigned; `__setattr__` would make each batch's counting slower."""

    def assign(self: WorkerCollector, value: Any) -> None:
        if "run" in vars(self):
            check_hook(name, value)
            self._check_open()
            self.run.set_hook(name, value)
        vars(self)[name] = value

    return property(lambda self: vars(self).get(name), assign)


for _name in HOOKS:
    setattr(WorkerCollector, _name, _hook(_name))


def _has_int_keys(params: Any) -> bool:
    return isinstance(params, dict) and bool(params) and all(map(arguments.is_int, params))
