"""`MultiSyncDataCollector` and `MultiaSyncDataCollector`: collection by several worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, get_args

from tensordict import TensorDictBase
from typing_extensions import override

from funcollect.arguments import check_flags, check_kind
from funcollect.collectors.collector import collector
from funcollect.collectors.options import Device, Options, options_of
from funcollect.collectors.runner import ALONE, Shard
from funcollect.collectors.worker_collector import WorkerCollector
from funcollect.collectors.workers.batch_layout import Join
from funcollect.collectors.workers.gathering import AsyncGathering, SyncGathering
from funcollect.collectors.workers.jobs import columns_of, environments, job_of, rows, shares, want_accelerators
from funcollect.collectors.workers.run import OpenGathering
from funcollect.collectors.workers.serial import SerialTransport
from funcollect.collectors.workers.transport import Transport
from funcollect.collectors.workers.worker import Job
from funcollect.keys import key_from_seed, seed_of
from funcollect.messages import shown


@collector
class ProcessCollector(WorkerCollector):
    """The base class of collectors whose workers are processes on this machine.

    The processes begin with the collector's construction. They run one thread each and JAX on the CPU, unless the
    keywords say otherwise. Batches lie in shared memory, which is written again once no view of a batch lives; a reader
    that keeps every batch gets copies after the first few.

    Args:
        num_workers: W, if `create_env_fn` is one for all.
        storing_device: where batches are delivered.
        update_at_each_batch: send the policy's weights to the workers before each batch.
        shard: which lanes are its own, if it is a part of a larger run.
        in_process: run the workers in this process, one after another, for a debugger.

    Attributes:
        num_workers: W.

    Raises:
        TypeError, ValueError: for a bad argument, before any worker starts.
        WorkerError: if a worker cannot be built.
    """

    num_workers: int | None = None
    storing_device: Device = None
    update_at_each_batch: bool = False
    shard: Shard = ALONE
    in_process: bool = False

    _eager = False  # whether workers take new weights before the rollouts that they were sent earlier

    def _start(
        self,
        made: Sequence[Any],
        frames_per_batch: int,
        shares: Sequence[int],
        open_gathering: OpenGathering,
    ) -> None:
        """Check the keywords, and start a worker for each entry of `made`, whose rollouts have the frames `shares`."""
        check_flags(in_process=self.in_process)
        check_kind("shard", self.shard, Shard, "pass for example Shard(index=0, count=2)")
        self._check(self._options(frames_per_batch))
        self.storing_device, self.num_workers = self.options.storing_device, len(made)
        self.seed = seed_of(key_from_seed(self.seed))
        columns = columns_of(self) | {"create_env_fn": made, "frames_per_batch": shares}
        jobs = [
            job_of(row, policy=self.policy, seed=self.seed, shard=self.shard.within(worker, len(made)))
            for worker, row in enumerate(rows(len(made), columns))
        ]
        self._launch(jobs, self._open_transport(jobs), open_gathering)

    def _options(self, frames_per_batch: int) -> Options:
        """The checked options, without lists of devices: each worker checks its own device."""
        if isinstance(self.storing_device, (list, tuple)):
            raise TypeError(
                f"storing_device is {self.storing_device!r}, expected one device, on which a batch of several workers "
                "lies: pass one; RayCollector takes a list"
            )
        devices = {name: getattr(self, name) for name in ("device", "env_device", "policy_device")}
        shared = {name: None if isinstance(given, (list, tuple)) else given for name, given in devices.items()}
        if isinstance(given := self.device, (list, tuple)) and given and all(each == given[0] for each in given):
            shared["device"] = given[0]  # the default of storing_device
        return options_of(self, frames_per_batch=frames_per_batch, **shared)

    def _open_transport(self, jobs: Sequence[Job]) -> Transport:
        if self.in_process:
            return SerialTransport()
        from funcollect.collectors.processes.transport import ProcessTransport  # which needs Linux

        return ProcessTransport(num_threads=self.num_threads, accelerators=want_accelerators(jobs), eager=self._eager)

    @override
    def _gather(self) -> TensorDictBase:
        self._check_at_rest()
        if self.update_at_each_batch and self._batches:
            self.update_policy_weights_()
        return self.rollout()


@collector
class MultiSyncDataCollector(ProcessCollector):
    """Batches of one rollout of every worker, which are begun together.

    Batches are ``[W, P, T]``, ``T = ceil(ceil(frames_per_batch / W) / P)``, and ``[W, T]`` for single environments.
    Rows follow the lanes: worker ``w`` of ``W`` with ``P`` environments owns the lanes ``w * P`` to ``w * P + P - 1``.

    Workers are processes that begin with the construction. A worker that dies, raises, or does not answer within
    `timeout` ends the run with `WorkerError`, or is replaced with ``on_failure="restart"``. Batches lie in shared
    memory, which is written again once no view of a batch lives; a reader that keeps every batch gets copies after the
    first few.

    Args:
        frames_per_batch: of all workers together, in equal shares; or a list with the frames of each.
        cat_results: ``"stack"``; or ``0`` for ``[W * P, T]``, ``-1`` for ``[P, W * T]``, and for single environments
            ``[W * T]`` either way. Workers with different frames need ``-1``, or ``0`` and single environments.
        prefetch: collect the next batch while the reader works on one. New weights act one batch later. Without it a
            batch is begun when it is asked for, with the weights of that moment.

    >>> import funcollect as fc
    >>> collector = MultiSyncDataCollector(
    ...     ["CartPole-v1"] * 2, None, frames_per_batch=100, total_frames=200, seed=0, in_process=True
    ... )
    >>> [batch.batch_size for batch in collector]
    [torch.Size([2, 50]), torch.Size([2, 50])]
    >>> collector.shutdown()
    """

    frames_per_batch: int | Sequence[int]
    cat_results: Join = "stack"
    prefetch: bool = False

    def __post_init__(self) -> None:
        """Check the keywords and start the workers."""
        if self.cat_results not in get_args(Join) or isinstance(self.cat_results, bool):
            raise ValueError(f"cat_results is {self.cat_results!r}, expected 'stack', 0 or -1: pass one of them")
        check_flags(prefetch=self.prefetch)
        made = environments(self.create_env_fn, self.num_workers)
        frames = shares(self.frames_per_batch, len(made))
        whole = sum(frames) if isinstance(self.frames_per_batch, Sequence) else self.frames_per_batch
        self.frames_per_batch = whole
        self._start(made, whole, frames, partial(SyncGathering, join=self.cat_results, prefetch=self.prefetch))

    @property
    @override
    def frames_of_batch(self) -> int:
        return sum(self.run.frames)


@collector
class MultiaSyncDataCollector(ProcessCollector):
    """Batches of one rollout of one worker, in the order of their arrival.

    Batches are ``[P, T]``, ``T = ceil(frames_per_batch / P)``, and ``[T]`` for single environments; their lanes show
    which worker collected them: worker ``w`` of ``W`` owns the lanes ``w * P`` to ``w * P + P - 1``. The batches of one
    worker come in order. A worker continues while the reader is busy, with up to two batches ready; new weights act
    from its next rollout on. Processes, failures and shared memory are as in `MultiSyncDataCollector`.

    Args:
        frames_per_batch: of each worker's rollout.

    >>> import funcollect as fc
    >>> collector = MultiaSyncDataCollector(
    ...     ["CartPole-v1"] * 2, None, frames_per_batch=50, total_frames=100, seed=0, in_process=True
    ... )
    >>> [batch.batch_size for batch in collector]
    [torch.Size([50]), torch.Size([50])]
    >>> collector.shutdown()
    """

    frames_per_batch: int

    _eager = True

    def __post_init__(self) -> None:
        """Check the keywords and start the workers."""
        if isinstance(frames := self.frames_per_batch, Sequence):
            raise TypeError(f"frames_per_batch is {shown(frames)}, expected an int: that of each rollout")
        made = environments(self.create_env_fn, self.num_workers)
        self._start(made, frames, [frames] * len(made), AsyncGathering)

    @property
    @override
    def frames_of_batch(self) -> int:
        return self.run.frames[0]


# Their names in TorchRL since 0.14.
MultiSyncCollector = MultiSyncDataCollector
MultiAsyncCollector = MultiaSyncDataCollector
