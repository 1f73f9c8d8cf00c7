"""The base class of every collector: an iterator over batches, whose fields are its keywords."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import field, fields
from functools import partial
from typing import Any, ClassVar, NoReturn, Self

import numpy as np
from tensordict import TensorDictBase

from funcollect.collectors.in_use import InUse, exclusive
from funcollect.collectors.keywords import check_same_run, collector, plain_keywords, read_back
from funcollect.collectors.options import Options, RunOptions
from funcollect.core.request import head_of
from funcollect.core.saving import Episodes, checked_path
from funcollect.errors import ReplayError
from funcollect.files import Uninterrupted, read_data, write_data
from funcollect.policies.jax_functions.jax_policy import as_given
from funcollect.policies.normalized import Normalized
from funcollect.protocols import is_policy
from funcollect.running_statistics import RunningStatistics, merge, moments_of
from funcollect.trajectories.final_observations import is_compact
from funcollect.trajectories.next_observations import next_observations
from funcollect.trajectories.whole_trajectories import PendingTrajectories

_KIND = "the run of a collector"
_LARGEST_SEED = 2**32 - 1


class _RunEndedError(Exception):
    """All frames of the run have been delivered."""


@collector
class CollectorBase(RunOptions, InUse, ABC):
    """The base class of all collectors. A subclass gathers the batches.

    Attributes:
        options: the keywords, checked.
        frames: frames delivered so far.
        params: the latest parameters given; None for the policy's own.
    """

    create_env_fn: Any = field(kw_only=False)
    """an `Env`, whatever `make_env` takes, or a callable that returns one of these; with workers also a list with an
    entry for each."""
    policy: Any = field(kw_only=False, default=None)
    """a `Policy`; a `TensorDictModule`, or a callable whose argument is named ``tensordict`` or annotated as one; a
    module or function from observation to action; or None for random actions. Workers have copies, which follow
    `update_policy_weights_`; otherwise it is not copied if it is on its device already."""
    seed: int | None = None
    """an int, or None to draw one. Afterwards the one in use."""
    options: Options = field(init=False)
    frames: int = field(init=False, default=0)
    params: Any = field(init=False, default=None)
    _updating: Any = field(init=False, default_factory=threading.RLock)  # held while weights that are read are replaced
    _moments: RunningStatistics | None = field(init=False, default=None)  # of batches not in the statistics yet
    _pending: dict[int, PendingTrajectories] = field(init=False, default_factory=dict)  # by first lane, or 0
    _unwritten: list[TensorDictBase] = field(init=False, default_factory=list)  # that the buffer lacks

    _batches, _seconds = 0, 0.0  # batches delivered, and the time spent on them
    _lends = False  # whether the memory of a batch is reused once no view of it is alive
    _in_one_order = True  # whether trajectories have one order over all lanes; else one for each worker
    _as_passed: ClassVar[Mapping[str, Any]] = {}  # keywords as the user passed them, if other values are in use

    def _set(self, **values: Any) -> None:
        """Set fields. For a plain assignment, editors would show that line instead of the keyword's description."""
        vars(self).update(values)

    @property
    @abstractmethod
    def frames_of_batch(self) -> int:
        """The frames in every batch: `frames_per_batch`, rounded up to whole steps of all lanes in a batch."""

    @abstractmethod
    def _gather(self) -> TensorDictBase:
        """The next batch, not yet split or post-processed; its frames are counted."""

    def _split_by_order(self, batch: TensorDictBase) -> Sequence[TensorDictBase]:
        """The parts of a batch, each with trajectories in one order; see `_in_one_order`."""
        return [batch]

    def _take_over(self, saved: Mapping[str, Any], seed: int, weights: Mapping[str, Any] | None) -> None:
        """Take over a saved run's counts, seed and weights, and drop moments and trajectories of earlier batches."""
        self._set(seed=seed, frames=saved["frames"], _batches=saved["iter"], _moments=None, _pending={}, _unwritten=[])
        self.params = None if saved["own_weights"] else as_given(self.policy, weights)

    @abstractmethod
    def update_policy_weights_(self, params: Any = None) -> None:
        """Act with `params` from the next version on; None for the policy's own."""

    @exclusive
    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Begin new episodes, seeded by `seed`: before the first batch, as if the collector had been built with it.

        Returns the seed for the next collector, by TorchRL's rule; `seed` itself for `static_seed`.
        """
        lanes = self._reseed(seed)
        for _ in range(0 if static_seed else lanes):
            seed = int.from_bytes(np.random.default_rng(seed).bytes(8), "big") % _LARGEST_SEED
        return seed

    @abstractmethod
    def _reseed(self, seed: int) -> int:
        """Begin new episodes, and return the number of lanes."""

    def state_dict(self) -> Any:
        """The state that `load_state_dict` takes: weights, keys and counts. Saving does not disturb the run."""
        return self.saved_run(None)

    def load_state_dict(self, state_dict: Any) -> None:
        """Continue from a `state_dict`: the same weights, keys and counts; new episodes under ids not used before.

        Weights that were the policy's own are written into the policy; others become `params`. Batches that workers
        have ready belong to the run before, and are not delivered. ValueError for a state of other numbers of lanes or
        workers, or weights that do not fit.
        """
        self.continue_run(state_dict, None)

    @abstractmethod
    def saved_run(self, episodes: Episodes | None) -> Any:
        """The run as plain data, for `continue_run`: with its episodes, or for None a `state_dict`."""

    @abstractmethod
    def continue_run(self, saved: Any, episodes: Episodes | None) -> None:
        """Continue a saved run; raises as `restore` of a collector does."""

    @abstractmethod
    def get_policy_version(self) -> int:
        """The number of the latest weights: 0 at first, one more with each update."""

    @property
    def policy_version(self) -> int:
        """`get_policy_version`, by another of TorchRL's names."""
        return self.get_policy_version()

    def stats(self) -> dict[str, float]:
        """Counts of the run, by name.

        They are the ``frames`` and ``batches`` delivered, the ``requested_frames_per_batch``, the ``seconds`` spent in
        this collector, the ``frames_per_second`` of that time alone, and the ``policy_version`` of the latest weights;
        for a run with an end also ``total_frames``, and whether it is ``completed``.
        """
        total = self.total_frames
        return {
            "frames": self.frames,
            "batches": self._batches,
            "requested_frames_per_batch": self.options.frames_per_batch,
            "seconds": self._seconds,
            "frames_per_second": self.frames / self._seconds if self._seconds else 0.0,
            "policy_version": self.get_policy_version(),
            **({} if total < 0 else {"total_frames": total, "completed": self.frames >= total}),
        }

    def shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """End the run and free its resources. Delivered batches stay valid. Does nothing the second time.

        Both arguments are TorchRL's and have no effect: workers that do not end within seconds are killed, and
        environments that the collector has not built stay open.
        """
        self._end()
        self._check_filler()

    def _end(self) -> None:
        self._closed = True
        if self._filler is not None:
            self._filler.stop()
        self._close()
        if (filler := self._other_filler) is not None:
            filler.join()

    @abstractmethod
    def _close(self) -> None:
        """Free the resources of the run."""

    def save(self, path: str | os.PathLike[str], *, episodes: Episodes = "continue") -> None:
        """Write the run to a file: weights, counts, episodes in flight, and batches that are ready.

        `load`, or `restore` of a collector with the same arguments, continues it in any process. Synchronous collectors
        then deliver the batches that this one would have, bit for bit. Asynchronous ones lose and repeat no frame, and
        each lane continues bit for bit as long as the weights do not change. Saving does not disturb the run.

        An earlier file is replaced once this one is complete. ``episodes="restart"`` saves no episodes in flight:
        others begin after loading, under new trajectory ids. ReplayError and OSError as `funcollect.save` has them.
        """
        file = checked_path(path, episodes)
        self._check_open()
        if self._unwritten:
            raise ReplayError(f"{len(self._unwritten)} batches are not in the buffer yet: call next() before saving")
        run = {"class": type(self).__name__, "keywords": self._plain_keywords(), "run": self.saved_run(episodes)}
        pending = {source: trajectories.plain for source, trajectories in self._pending.items()}
        write_data(file, _KIND, {**run, **self._policy_settings(), "moments": self._moments, "pending": pending})

    def restore(self, path: str | os.PathLike[str], *, episodes: Episodes = "continue") -> None:
        """Continue the run in a file that `save` of such a collector has written.

        Weights that were the policy's own are written into the policy, and the seed becomes that of the saved run.
        ``episodes="restart"`` begins new episodes in all lanes, under new trajectory ids. Raises as `funcollect.load`
        does, ValueError also for a run with other keywords. Then call `restore` again, or build another collector.
        """
        self._check_open()
        saved = read_data(checked_path(path, episodes), _KIND)
        keywords = {name: value for name, value in self._plain_keywords().items() if name != "seed"}
        check_same_run(saved, type(self), keywords)
        self._restore(saved, episodes)

    def _restore(self, saved: Mapping[str, Any], episodes: Episodes) -> None:
        for name, value in self._policy_settings().items():
            if value and (was := saved.get(name)) and value != was:
                mend = "build the policy as it was, or begin another run"
                raise ValueError(f"the policy's {name} is {value}, but {was} in the saved run: {mend}")
        self.continue_run(saved["run"], episodes)
        self._moments = None if (moments := saved.get("moments")) is None else RunningStatistics(*moments)
        if isinstance(self.policy, Normalized) and self.params is not None:
            self.policy.statistics = self.policy.as_pair(self.params)[1]
        pending = saved.get("pending", {}).items()
        self._pending = {source: PendingTrajectories.from_plain(data) for source, data in pending}

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        create_env_fn: Any,
        policy: Any = None,
        *,
        episodes: Episodes = "continue",
        **keywords: Any,
    ) -> Self:
        """Build a collector that continues the run in a file that `save` has written; raises as `restore` does.

        The arguments are those of the constructor, with environments and a policy like those of the saved run. Numbers
        and flags have the saved values unless given; those that define the run have to equal the saved ones. Functions,
        devices, arguments for environments and Ray, `num_threads` and `in_process` are not saved.
        """
        saved = read_data(checked_path(path, episodes, "pass the name of a file, before create_env_fn"), _KIND)
        cls, keywords = cls._of_saved(saved["class"], (create_env_fn, policy), keywords)
        check_same_run(saved, cls, plain_keywords(keywords))
        loaded = cls(create_env_fn, policy, **{**read_back(saved["keywords"], keywords), **keywords})
        try:
            loaded._restore(saved, episodes)
        except BaseException:
            loaded.shutdown()
            raise
        return loaded

    @classmethod
    def _of_saved(cls, name: str, arguments: Any, keywords: dict[str, Any]) -> tuple[type[Self], dict[str, Any]]:
        """The class of a saved run and its keywords; overridden by classes whose call builds another (`front_door`)."""
        return cls, keywords

    def _plain_keywords(self) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        return plain_keywords(values | {**self._as_passed})

    def _policy_settings(self) -> dict[str, str]:
        """The policy's head with its numbers, and its `clip`, as text; empty for a policy built in the workers."""
        head, clip = "", "none" if is_policy(self.policy) else ""
        if (found := head_of(self.policy)) is not None:
            numbers = [f"{name}={value}" for name, value in found.values.items() if isinstance(value, float)]
            head = f"{found.name}({', '.join(numbers)})"
        if isinstance(self.policy, Normalized):
            clip = str(self.policy.clip)
        return {"head": head, "clip": clip}

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """`shutdown`, by TorchRL's name for the end of a run that `start` began."""
        self.shutdown(timeout, close_env)

    def is_running(self) -> bool:
        """Whether frames or trajectories are left to deliver; not after `shutdown`, or once a thread has failed."""
        self._check_filler()  # or a loop while this is True would never end
        waiting = any(each.begins_with_whole(self.trajs_per_batch or 1) for each in [*self._pending.values()])
        over = self._closed or (self._filler is not None and self._filler.failure is not None)
        return not over and (waiting or bool(self._unwritten) or not 0 <= self.total_frames <= self.frames)

    def next(self) -> TensorDictBase | None:
        """The next batch; None at the end of the run."""
        return next(self, None)

    def iterator(self) -> Iterator[TensorDictBase]:
        """The batches, as ``iter(collector)``."""
        return iter(self)

    def __len__(self) -> int:
        """Batches in the whole run; TypeError for an endless one, and with `trajs_per_batch`."""
        if self.trajs_per_batch is not None:
            raise TypeError("a collector of whole trajectories has no length: their lengths decide it")
        if self.total_frames < 0:
            raise TypeError("an endless collector (total_frames=-1) has no length: give total_frames")
        return -(-self.total_frames // self.frames_of_batch)

    def __next__(self) -> TensorDictBase:
        try:
            if self._moments is not None and not self._closed:
                if self._in_use:
                    self._refuse()
                self._check_ready()
                self._add_to_statistics(self._moments)
            if self.replay_buffer is not None:
                return self._fill_buffer()
            if self._unwritten:  # the buffer of `start` has refused it
                self._check_ready()
                return self._unwritten.pop()
            count = self.trajs_per_batch
            return self._delivered(self._next_frames() if count is None else self._next_trajectories(count))
        except _RunEndedError:
            raise StopIteration from None
        except StopIteration as error:  # which would end the loop over the batches
            what = "a function that the collector calls raised StopIteration, expected a result or another exception"
            raise RuntimeError(f"{what}: give its next(…) a default") from error

    @partial(exclusive, closed_too=True)  # the collector may have been shut down while the batch was collected
    def _delivered(self, batch: TensorDictBase) -> TensorDictBase:
        if self.update_statistics:
            moments = moments_of(batch, self.policy.statistics)
            self._moments = moments if self._moments is None else merge(self._moments, moments)
        return self.show(self.options.finish(batch))

    def show(self, batch: TensorDictBase) -> TensorDictBase:
        """Call `post_collect_hook`, where this process runs it, and return the batch, which it may have changed."""
        return batch

    def _next_frames(self) -> TensorDictBase:
        if 0 <= self.total_frames <= self.frames:
            raise _RunEndedError
        self._check_ready()
        return self._gather()

    def _next_trajectories(self, count: int) -> TensorDictBase:
        while True:
            for source, pending in self._pending.items():
                if (taken := pending.take(count)) is not None:
                    batch, self._pending[source] = taken
                    return batch
            self._add_pending(self._next_frames())

    def _add_pending(self, batch: TensorDictBase) -> None:
        for part in self._split_by_order(batch.clone() if self._lends else batch):
            source = 0 if self._in_one_order else int(part["collector", "lane"].flatten()[0])
            self._pending[source] = self._pending.get(source, PendingTrajectories()).add(part)

    def _fill_buffer(self) -> Any:
        """Extend `replay_buffer` with the frames of the next batch, or with the trajectories that it completes."""
        if not self._unwritten:  # otherwise `extend` raised, and gets them again
            batches = [self._next_frames()] if self.trajs_per_batch is None else self._next_whole()
            self._unwritten = [self._delivered(batch) for batch in batches]
        while self._unwritten:
            with Uninterrupted() if self._fills_ours else nullcontext():  # or Ctrl-C would have it written twice
                self._write(self._unwritten[0])
                del self._unwritten[0]

    def _next_whole(self) -> list[TensorDictBase]:
        """The whole trajectories in groups of `trajs_per_write`; collects a batch if none is whole."""
        if not any(pending.has_whole for pending in self._pending.values()):
            self._add_pending(self._next_frames())
        batches = []
        for source, pending in self._pending.items():
            groups, self._pending[source] = pending.take_whole(self.trajs_per_write)
            batches += groups
        return batches

    @property
    def _fills_ours(self) -> bool:
        """Whether `replay_buffer` is a `ReplayBuffer`, which restores next observations itself."""
        return hasattr(getattr(self.replay_buffer, "storage", None), "admit")

    def _write(self, batch: TensorDictBase) -> None:
        flat = getattr(getattr(self.replay_buffer, "storage", None), "ndim", None) == 1 and batch.ndim > 1
        if is_compact(batch) and (flat or not self._fills_ours):
            batch = next_observations(batch)
        self.replay_buffer.extend(batch.reshape(-1) if flat else batch)

    def _add_to_statistics(self, moments: RunningStatistics) -> None:
        policy, self._moments = self.policy, None
        with self._updating:
            trainable, before = policy.params if self.params is None else policy.as_pair(self.params)
            policy.statistics = after = merge(before, moments)
            self.update_policy_weights_(None if self.params is None else (trainable, after))

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be copied or pickled: save(path) writes its run, and load continues it")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None or self._filler is None:
            self.shutdown()
        else:  # the thread's exception must not replace that of the block
            self._end()
