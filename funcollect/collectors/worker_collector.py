"""What collectors with workers share: everything but how batches are gathered."""

from __future__ import annotations

import time
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from tensordict import TensorDictBase
from torch import Tensor

from funcollect.collectors.buffer_filler import BufferFiller
from funcollect.collectors.collector import CollectorBase
from funcollect.collectors.options import Keywords, WorkerOptions
from funcollect.collectors.runner import ALONE, Shard, given_weights
from funcollect.collectors.workers.batch_layout import Join
from funcollect.collectors.workers.gathering import Gathering
from funcollect.collectors.workers.jobs import (
    check_alike,
    environments,
    make_jobs,
    masks_of,
    want_accelerators,
    worker_options,
)
from funcollect.collectors.workers.pool import FailurePolicy, WorkerPool
from funcollect.collectors.workers.serial import SerialTransport
from funcollect.collectors.workers.transport import BatchAssembler, Transport, WeightStore, WorkerGroup
from funcollect.collectors.workers.weights import Weights
from funcollect.collectors.workers.worker import Job, WorkerInfo, progress_of, runners_of, saved_workers
from funcollect.core.restore import next_seed
from funcollect.errors import WorkerError
from funcollect.keys import key_from_seed, seed_of


class WorkerCollector(CollectorBase):
    """What both collectors with workers are.

    Worker ``w`` of ``W`` with ``P`` environments owns the lanes ``w * P`` to ``w * P + P - 1``. Workers are processes
    that begin with the collector's construction; they run one thread each and JAX on the CPU, unless told otherwise.

    A worker that dies, raises, or does not answer within `timeout` ends the run: `WorkerError` says which, with its
    traceback, and all processes are gone. With ``on_failure="restart"`` another takes its place, with the latest
    weights, on new episodes under ids not used before; the rollout that it was at is lost.

    Nothing is ever dropped: workers wait for a slow reader. Batches lie in shared memory, which is written again once
    no view of a batch lives; a reader that keeps every batch gets copies after the first few.

    Args:
        create_env_fn: what `SyncDataCollector` takes, in a list with an entry for each worker, or one for all.
        policy: what `SyncDataCollector` takes. Each worker has its own copy, which follows `update_policy_weights_`.
        num_workers: W, where `create_env_fn` is one for all.
        policy_factory: makes the policy in each worker, in place of `policy`; or a list with one for each.
        create_env_kwargs: keyword arguments for `make_env` or the callables; or a list with a dict for each worker.
        seed: an int, or None to draw one.
        device, env_device, policy_device: as `SyncDataCollector` takes them; or a list with one for each worker.
        num_threads: threads of each worker, for Torch and XLA.
        timeout: seconds of waiting for a worker after which it hangs.
        start_timeout: the same for its start and its first rollout, which may compile.
        on_failure: ``"raise"`` ends the run with a worker's failure, ``"restart"`` replaces the worker.
        shard: which lanes are its own, where it is a part of a larger run.
        in_process: run the workers in this process, one after another, as a debugger wants it.
        **keywords: the others of `SyncDataCollector`. Frames of `total_frames` and `init_random_frames` are those of
            all workers; `update_at_each_batch` sends the weights before each batch.

    Attributes:
        num_workers: W.
        num_envs: P, or None for environments without a batch dimension.

    Raises:
        TypeError, ValueError: for a bad argument, before any worker starts.
        WorkerError: where a worker cannot be built.
    """

    options: WorkerOptions
    _eager = False  # whether workers take new weights before the rollouts that they were sent earlier

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        frames_per_batch: int | Sequence[int],
        num_workers: int | None = None,
        policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        seed: int | None = None,
        shard: Shard = ALONE,
        **keywords: Unpack[Keywords],
    ) -> None:
        made = environments(create_env_fn, num_workers)
        frames, self._shares = self._shared(frames_per_batch, len(made))
        self.options = worker_options(frames, keywords)
        self._seed = seed_of(key_from_seed(seed))
        self.create_env_fn, self.create_env_kwargs = create_env_fn, create_env_kwargs
        self.policy, self.policy_factory = policy, policy_factory
        run = (self._shares, keywords, self._seed, shard)
        self._launch(make_jobs(made, create_env_kwargs, policy, policy_factory, *run))

    def _launch(self, jobs: Sequence[Job]) -> None:
        """Start the workers."""
        self.frames, self._batches, self._seconds, self._warned = 0, 0, 0.0, False
        self._filler: BufferFiller | None = None
        self._transport = self._open_transport(jobs)
        self._pool = WorkerPool(self._transport, jobs, self._failure_policy())
        weight_store = self._transport.weight_store(len(jobs))
        self._held: list[WeightStore | Gathering] = [weight_store]
        self._finalizer = weakref.finalize(self, _end, self._pool, self._held)
        try:
            self._info = self._describe_workers()
            self._weights = Weights(self._pool, weight_store, self.policy)
            self._gathering = self._open_gathering()
        except BaseException:
            self._finalizer()
            raise
        self._held.append(self._gathering)
        self._pool.prepare = self._gathering.restarted

    @abstractmethod
    def _shared(self, frames_per_batch: int | Sequence[int], count: int) -> tuple[int, list[int]]:
        """The frames of a batch, and those of each worker's rollout."""

    def _failure_policy(self) -> FailurePolicy:
        return FailurePolicy(self.options.timeout, self.options.start_timeout, self.options.on_failure)

    def _open_transport(self, jobs: Sequence[Job]) -> Transport:
        if self.options.in_process:
            return SerialTransport()
        from funcollect.collectors.processes.transport import ProcessTransport  # which needs Linux

        return ProcessTransport(
            num_threads=self.options.num_threads, accelerators=want_accelerators(jobs), eager=self._eager
        )

    def _describe_workers(self) -> WorkerInfo:
        infos: list[WorkerInfo] = self._pool.call_all("describe")
        check_alike(dict(enumerate(infos)))
        self._pool.begin()
        return infos[0]

    @abstractmethod
    def _open_gathering(self) -> Gathering:
        """What gathers the batches."""

    def _make_assembler(self, workers: Sequence[int], join: Join | None) -> BatchAssembler:
        lengths = tuple(self._lengths[worker] for worker in workers)
        return self._transport.assembler(self._pool.submit, WorkerGroup(workers, lengths, join, self.num_envs is None))

    @property
    def _lengths(self) -> list[int]:
        """T of each worker."""
        return [-(-frames // (self.num_envs or 1)) for frames in self._shares]

    def inside(self) -> tuple[WorkerPool, Weights, Gathering, WorkerInfo]:
        """What a larger run, which this collector is a part of, works with."""
        return self._pool, self._weights, self._gathering, self._info

    @property
    def num_workers(self) -> int:
        """W: those at work."""
        return len(self._pool.workers)

    @property
    def num_envs(self) -> int | None:
        """P: the environments of each worker; None for one without a batch dimension."""
        return self._info.num_envs

    @property
    def seed(self) -> int:
        """The seed of the run; what was drawn where None was given."""
        return self._seed

    def _gather(self) -> TensorDictBase:
        self._check_at_rest()
        if self.options.update_at_each_batch and self._batches:
            self.update_policy_weights_()
        return self.rollout()

    def rollout(self) -> TensorDictBase:
        """One batch as it is gathered, whether or not the run has ended: not split, not post-processed."""
        self._check_at_rest()
        began = time.monotonic()
        last = 0 <= self.options.total_frames <= self.frames + self.frames_of_batch
        try:
            batch = self._gathering.next(more=not last)
        except WorkerError:
            self.shutdown()
            raise
        self._seconds += time.monotonic() - began
        self._batches += 1
        self.frames += batch.numel()
        if not self._warned and self._gathering.copies:
            self._warned = True
            warnings.warn(_KEPT, stacklevel=4)  # where the loop over the batches stands
        return batch

    def start(self, buffer: Any) -> None:
        """Fill a buffer from a thread, ``buffer.extend(batch)``, until the run ends or the collector is shut down.

        Weights may be updated and `stats` read meanwhile; all else needs `pause`. An exception in the thread is raised
        by the next call of the collector.

        Args:
            buffer: a replay buffer, or whatever has `extend`.

        Raises:
            TypeError: for a buffer without it.
            RuntimeError: where a buffer is being filled.

        >>> import funcollect as fc
        >>> batches = []
        >>> collector = fc.MultiaSyncDataCollector(
        ...     ["CartPole-v1"] * 2, None, frames_per_batch=50, total_frames=100, in_process=True
        ... )
        >>> collector.start(batches)
        >>> collector.join()
        >>> sum(rows.numel() for rows in batches)
        100
        """
        self._check_open()
        if self._filler is not None and self._filler.at_work:
            raise RuntimeError("the collector fills a buffer already, expected it to rest: shut it down before")
        self._filler = BufferFiller(self, buffer)

    def pause(self) -> None:
        """Return once the batch under way is in the buffer, and fill it no further until `resume`.

        Meanwhile batches can be taken, and whatever else changes or saves the run.

        Raises:
            RuntimeError: where no buffer was given to `start`.
        """
        self._filling().pause()
        self._check_open()

    def resume(self) -> None:
        """Go on filling the buffer after `pause`."""
        self._check_open()
        self._filling().resume()

    def join(self) -> None:
        """Wait until the run that `start` began has ended; an exception in its thread is raised."""
        self._filling().join()
        self._filling().tell()

    def _filling(self) -> BufferFiller:
        if self._filler is None:
            raise RuntimeError("no buffer is being filled: call start(buffer) before")
        return self._filler

    def reset(self, mask: Tensor | None = None) -> None:
        """Begin new episodes in the lanes of `mask` [L], or in all. What has been collected before is delivered first.

        Raises:
            ValueError: for a mask of another shape or dtype.
        """
        self._check_at_rest()
        workers = self._pool.workers
        resets = zip(workers, masks_of(mask, [self._lanes_of(worker) for worker in workers]), strict=True)
        self._pool.finish([self._pool.call(worker, "reset", each) for worker, each in resets])

    def _lanes_of(self, worker: int) -> int:
        return self._info.lanes

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Begin new episodes, seeded by `seed`: before the first batch, as if the collector had been built with it.

        Returns:
            The seed for the next collector, as TorchRL works it out; `seed` itself for `static_seed`.
        """
        self._check_at_rest()
        key_from_seed(seed)
        self._pool.call_all("set_seed", seed)
        self._pool.go_on_from(seed)
        self._seed = seed
        return seed if static_seed else next_seed(seed, sum(map(self._lanes_of, self._pool.workers)))

    def update_policy_weights_(
        self, params: Any = None, worker_ids: int | Sequence[int] | None = None, *, policy_or_weights: Any = None
    ) -> None:
        """Have the workers act with `params` as they are now, or for None with the policy's own.

        A rollout is collected with one version throughout. The next batch of `MultiSyncDataCollector` has these, with
        ``prefetch`` the one after it; the workers of `MultiaSyncDataCollector` take them at their next rollout.

        Args:
            params: what `SyncDataCollector` takes; copied before this returns.
            policy_or_weights: `params`, by TorchRL's name for it.
            worker_ids: the workers that get them; all unless given.

        Raises:
            ValueError: for parameters that do not fit the policy, or a worker that is not there.
        """
        self._check_open()
        chosen = [worker_ids] if isinstance(worker_ids, int) else worker_ids
        workers = self._pool.workers if chosen is None else chosen
        self._check_workers(workers)
        self._weights.update(given_weights(params, policy_or_weights, self.policy), workers)

    def _check_workers(self, workers: Sequence[int]) -> None:
        if wrong := [worker for worker in workers if worker not in self._pool.workers]:
            raise ValueError(f"worker_ids holds {wrong}, expected numbers of {self._pool.workers}: pass those")

    def state_dict(self) -> Any:
        """What `load_state_dict` needs: one of `SyncDataCollector`'s per worker. Episodes in flight begin anew.

        Saving does not disturb the run.
        """
        self._check_at_rest()
        self._weights.flush()
        saved = self._pool.call_all("state_dict")
        return {
            "workers": {str(worker): each for worker, each in enumerate(saved)},
            "frames": self.frames,
            "iter": self._batches,
            "policy_version": self._weights.version,
            "own_weights": self._weights.own,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`: the same weights, keys and counts; new episodes under ids not used before.

        What the workers have ready is not delivered: it belongs to the run before.

        Raises:
            TypeError, ValueError: for what is no `state_dict` of as many workers.
        """
        self._check_at_rest()
        saved = saved_workers(state_dict, self.num_workers)
        self._gathering.discard()
        loads = zip(self._pool.workers, saved, strict=True)
        self._pool.finish([self._pool.call(worker, "load_state_dict", each) for worker, each in loads])
        runners = {worker: runners_of(each)[0] for worker, each in zip(self._pool.workers, saved, strict=True)}
        self._seed = seed_of(runners_of(saved[0])[0]["key"].numpy())
        self._pool.go_on_from(self._seed, [progress_of(each) for each in saved])
        self._weights.go_on_from(state_dict["policy_version"], runners, own=state_dict["own_weights"])
        self.frames, self._batches = state_dict["frames"], state_dict["iter"]

    def stats(self) -> dict[str, float]:
        """Counts of the run.

        Returns:
            ``frames``, ``batches``; ``seconds`` spent in this collector and ``frames_per_second`` of them;
            ``policy_version`` of the latest weights and ``policy_lag``, how many versions the last batch was behind;
            ``reader_waited`` and ``workers_waited`` (the sum over workers), seconds; ``restarts`` of workers,
            ``lost_frames`` with them; ``copies``: batches handed over as copies.
        """
        return {
            "frames": self.frames,
            "batches": self._batches,
            "seconds": self._seconds,
            "frames_per_second": self.frames / self._seconds if self._seconds else 0.0,
            "policy_version": self._weights.version,
            "policy_lag": self._weights.version - self._gathering.version if self._batches else 0,
            "reader_waited": self._pool.waited,
            "workers_waited": sum(record.idle for record in self._pool.records),
            "restarts": self._pool.restarts,
            "lost_frames": self._pool.lost,
            "copies": self._gathering.copies,
        }

    def shutdown(self, timeout: float | None = None) -> None:
        """End the workers; nothing can be collected afterwards, but batches stay. Does nothing the second time."""
        self._closed = True
        filler = self._filler if self._filler is not None and not self._filler.own else None
        if filler is not None:
            filler.stop()
        self._finalizer()
        if filler is not None:
            filler.join()

    def _check_at_rest(self) -> None:
        self._check_open()
        if self._filler is not None and self._filler.at_work and not self._filler.own:
            raise RuntimeError("the collector fills a buffer, expected it to rest: call pause() before")

    def _check_open(self) -> None:
        if self._filler is not None and not self._filler.own:
            self._filler.tell()
        self._closed = self._closed or self._pool.closed
        super()._check_open()

    def __repr__(self) -> str:
        workers = f"num_workers={self.num_workers}, frames_per_batch={self.options.frames_per_batch}"
        return f"{type(self).__name__}({self._info.label}, {workers}, frames={self.frames})"


_KEPT = (
    "the reader keeps every batch, so from now on it gets copies of those in shared memory: where it only keeps some, "
    "copy those, batch.clone(), and let go of the others"
)


def _end(pool: WorkerPool, held: Sequence[WeightStore | Gathering]) -> None:
    pool.close()
    for each in held:
        each.close()
