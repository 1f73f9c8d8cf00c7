"""`MultiSyncDataCollector` and `MultiaSyncDataCollector`: collection by several workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Unpack, get_args

from funcollect.collectors.options import Keywords
from funcollect.collectors.runner import Shard
from funcollect.collectors.worker_collector import WorkerCollector
from funcollect.collectors.workers.batch_layout import Join
from funcollect.collectors.workers.gathering import AsyncGathering, Gathering, SyncGathering
from funcollect.collectors.workers.jobs import shares
from funcollect.messages import shown


class SyncKeywords(Keywords, total=False):
    """What `MultiSyncDataCollector` hands on."""

    num_workers: int | None
    policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None
    create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
    seed: int | None
    shard: Shard


class MultiSyncDataCollector(WorkerCollector):
    """Batches of one rollout of every worker, which are begun together (see `WorkerCollector`).

    Batches are ``[W, P, T]``, ``T = ceil(ceil(frames_per_batch / W) / P)``, and ``[W, T]`` for single environments.
    Rows follow the lanes.

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

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        frames_per_batch: int | Sequence[int],
        cat_results: Join = "stack",
        prefetch: bool = False,
        **keywords: Unpack[SyncKeywords],
    ) -> None:
        if cat_results not in get_args(Join) or isinstance(cat_results, bool):
            raise ValueError(f"cat_results is {cat_results!r}, expected 'stack', 0 or -1: pass one of them")
        if not isinstance(prefetch, bool):
            raise TypeError(f"prefetch is {shown(prefetch)}, expected a bool: pass True or False")
        self.cat_results, self.prefetch = cat_results, prefetch
        super().__init__(create_env_fn, policy, frames_per_batch=frames_per_batch, **keywords)

    def _shared(self, frames_per_batch: int | Sequence[int], count: int) -> tuple[int, list[int]]:
        frames = shares(frames_per_batch, count)
        return sum(frames) if isinstance(frames_per_batch, Sequence) else frames_per_batch, frames

    def _open_gathering(self) -> Gathering:
        if len({*self._lengths}) > 1 and (self.cat_results == "stack" or (self.cat_results == 0 and self.num_envs)):
            raise ValueError(
                f"the workers' rollouts have {self._lengths} steps, which cat_results={self.cat_results!r} cannot put "
                "together: pass cat_results=-1, or equal frames"
            )
        open_assembler = partial(self._make_assembler, join=self.cat_results)
        return SyncGathering(self._pool, self._pool.workers, open_assembler, self._weights, prefetch=self.prefetch)

    @property
    def frames_of_batch(self) -> int:
        """The frames that every batch has: `frames_per_batch`, rounded up to whole steps of all lanes."""
        return sum(self._lengths) * (self.num_envs or 1)


class MultiaSyncDataCollector(WorkerCollector):
    """Batches of one rollout of one worker, first come first served (see `WorkerCollector`).

    Batches are ``[P, T]``, ``T = ceil(frames_per_batch / P)``, and ``[T]`` for single environments; the lanes tell
    whose they are. One worker's batches come in order. A worker goes on while the reader is busy, with up to two
    batches ready; new weights act from its next rollout on.

    >>> import funcollect as fc
    >>> collector = MultiaSyncDataCollector(
    ...     ["CartPole-v1"] * 2, None, frames_per_batch=50, total_frames=100, seed=0, in_process=True
    ... )
    >>> [batch.batch_size for batch in collector]
    [torch.Size([50]), torch.Size([50])]
    >>> collector.shutdown()
    """

    _eager = True

    def _shared(self, frames_per_batch: int | Sequence[int], count: int) -> tuple[int, list[int]]:
        if isinstance(frames_per_batch, Sequence):
            raise TypeError(f"frames_per_batch is {shown(frames_per_batch)}, expected an int: that of each rollout")
        return frames_per_batch, [frames_per_batch] * count

    def _open_gathering(self) -> Gathering:
        return AsyncGathering(self._pool, self._pool.workers, partial(self._make_assembler, join=None), self._weights)

    @property
    def frames_of_batch(self) -> int:
        """The frames that every batch has: `frames_per_batch`, rounded up to whole steps of a worker's lanes."""
        return self._lengths[0] * (self.num_envs or 1)


# Their names in TorchRL since 0.14.
MultiSyncCollector = MultiSyncDataCollector
MultiAsyncCollector = MultiaSyncDataCollector
