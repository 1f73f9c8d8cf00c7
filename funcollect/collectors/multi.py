"""`MultiSyncDataCollector` and `MultiaSyncDataCollector`: collection by several worker processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

from typing_extensions import override

from funcollect.arguments import check_count, check_flags, check_positive
from funcollect.collectors.keywords import collector
from funcollect.collectors.options import FRAMES, LocalOptions, options_of
from funcollect.collectors.worker_collector import WorkerCollector
from funcollect.collectors.workers import jobs
from funcollect.collectors.workers.gathering import Join, in_this_process
from funcollect.keys import key_from_seed, seed_of


@collector
class ProcessCollector(WorkerCollector, LocalOptions):
    """The base class of collectors whose workers are processes on this machine."""

    num_workers: int | None = None
    """W, if `create_env_fn` is one for all. Afterwards W in any case."""
    in_process: bool = False
    """run the workers in this process, one after another, for a debugger."""

    def _start(self, frames: Sequence[int], whole: Callable[..., int], join: Join | None = None, *, ahead: int) -> None:
        """Start a worker for each entry of `frames`, its frames per rollout; `whole(frames)` are those of a batch."""
        if jobs.listed(given := self.frames_per_batch) is not None:
            self._set(_as_passed={"frames_per_batch": given}, frames_per_batch=whole(frames))
        check_flags(in_process=self.in_process)
        if jobs.listed(self.storing_device) is not None:
            rule = "expected one device, on which a batch of several workers lies"
            raise TypeError(f"storing_device is {self.storing_device!r}, {rule}: pass one; RayCollector takes a list")
        self._check(options_of(self, **{name: jobs.common(getattr(self, name)) for name in jobs.DEVICES}))
        self.num_workers, seed = len(frames), seed_of(key_from_seed(self.seed))
        self._set(storing_device=self.options.storing_device, seed=seed)
        table = jobs.rows(len(frames), jobs.columns_of(self) | {"frames_per_batch": frames})
        shards = [self.shard.within(worker, len(frames)) for worker in range(len(frames))]
        started = [jobs.job_of(*each, policy=self.policy, seed=seed) for each in zip(table, shards, strict=True)]
        if self.in_process:
            means = in_this_process()
        else:
            from funcollect.collectors.workers.slots import over_processes  # which needs Linux or macOS

            wanted, eager = jobs.want_accelerators(started), join is None
            means = over_processes(len(started), num_threads=self.num_threads, accelerators=wanted, eager=eager)
        self._launch(started, means, join, ahead=ahead, level=6)


@collector
class MultiSyncDataCollector(ProcessCollector):
    """Batches of one rollout of every worker; the workers begin them together.

    Batches are ``[W, P, T]``, ``T = ceil(ceil(frames_per_batch / W) / P)``, and ``[W, T]`` for single environments.
    Rows follow the lanes: worker ``w`` of ``W`` with ``P`` environments owns the lanes ``w * P`` to ``w * P + P - 1``.

    Workers are processes. They run one thread each and JAX on the CPU, unless the keywords say otherwise. A worker that
    dies, raises, or is silent for `timeout` seconds ends the run with `WorkerError`, or is replaced with
    ``on_failure="restart"``. Batches lie in shared memory, which is reused once no view of a batch is alive; a reader
    that keeps every batch gets copies after the first few.

    >>> import funcollect as fc
    >>> with MultiSyncDataCollector(["CartPole-v1"] * 2, frames_per_batch=90, total_frames=180, in_process=True) as run:
    ...     [batch.batch_size for batch in run]
    [torch.Size([2, 45]), torch.Size([2, 45])]
    """

    frames_per_batch: int | Sequence[int] = FRAMES
    """frames in a batch of all workers, in equal shares, each rounded up to a whole step of the worker's lanes; or a
    list with the frames of each."""
    cat_results: Join = "stack"
    """``"stack"``; or ``0`` for ``[W * P, T]``, ``-1`` for ``[P, W * T]``, and for single environments ``[W * T]``
    either way. Workers with different numbers of frames need ``-1``, or single environments with ``0``. If rows of
    workers follow each other in time, only trajectory ids separate them: no flag does."""
    prefetch: bool = False
    """collect the next batch while the reader works on one. New weights act one batch later. Without it a batch
    begins when it is requested, with the weights of that moment."""

    def __post_init__(self) -> None:
        check_join(self.cat_results)
        check_flags(prefetch=self.prefetch)
        count = jobs.number_of_workers(self.create_env_fn, self.num_workers)
        frames = jobs.shares(self.frames_per_batch, count)
        self._start(frames, sum, self.cat_results, ahead=int(self.prefetch))


@collector
class MultiaSyncDataCollector(ProcessCollector):
    """Batches of one rollout of one worker, in the order of their arrival.

    Batches are ``[P, T]``, ``T = ceil(frames_per_batch / P)``, and ``[T]`` for single environments; their lanes show
    which worker collected them. The batches of one worker come in order. A worker continues while the reader is busy,
    with up to `max_unread` batches ready; new weights act from its next rollout on. Lanes, processes, failures and
    shared memory are as in `MultiSyncDataCollector`.

    >>> import funcollect as fc
    >>> with MultiaSyncDataCollector(["CartPole-v1"] * 2, frames_per_batch=50, total_frames=90, in_process=True) as run:
    ...     [batch.batch_size for batch in run]
    [torch.Size([50]), torch.Size([50])]
    """

    frames_per_batch: int | Sequence[int] = FRAMES
    """frames in a batch, which is one worker's rollout, rounded up to a whole step of its lanes; or a list with the
    frames of each worker."""
    cat_results: Join | None = None
    """has no effect, since a batch is one worker's."""
    max_policy_lag: int | None = None
    """the most versions by which the weights that acted in a batch may be older than the latest ones when it is
    delivered; None for no bound. A worker then waits before a rollout that might be delivered too late, and no batch is
    dropped. This assumes as many updates between two batches as there have been at most, so the first batch is
    collected alone; batches that were begun before updates became more frequent may exceed the bound."""
    max_unread: int = 2
    """batches of each worker that may be ready, or under way, beyond the one that is delivered; then it waits."""

    _in_one_order = False

    def __post_init__(self) -> None:
        check_join(self.cat_results, None)
        check_positive("max_unread", self.max_unread, example=2)
        if self.max_policy_lag is not None:
            check_count("max_policy_lag", self.max_policy_lag)
        count = jobs.number_of_workers(self.create_env_fn, self.num_workers)
        frames = jobs.each_of("frames_per_batch", self.frames_per_batch, count)
        self._start(frames, max, ahead=self.max_unread)

    @override
    def __len__(self) -> int:
        if len({*self.run.frames}) > 1:
            raise TypeError("workers with frames of their own have no length: their speeds decide it")
        return super().__len__()


def check_join(cat_results: Any, *others: Any) -> None:
    """Raise ValueError unless this is a `Join`, or one of the `others`."""
    if cat_results not in (*get_args(Join), *others) or isinstance(cat_results, bool):
        raise ValueError(f"cat_results is {cat_results!r}, expected 'stack', 0 or -1: pass one of them")


# Their names in TorchRL since 0.14.
MultiSyncCollector = MultiSyncDataCollector
MultiAsyncCollector = MultiaSyncDataCollector
