"""`ReplayBuffer`: stores batches and returns random samples of them, with the interface of TorchRL's class."""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import optree
import torch
from torch import Tensor

from funcollect.arguments import check_count, check_flags, check_function, check_kind, check_optional_positive
from funcollect.buffers import Ints, dumping, ring
from funcollect.buffers.editing import FramesByIndex, note_written
from funcollect.buffers.indices import BufferView, RandomSource, SampleIndices, from_generator, wanted_size
from funcollect.buffers.keywords import OWNERS, part_of, takes_foreign
from funcollect.buffers.reader import ReplayReader, check_readable
from funcollect.buffers.samplers import PrioritizedSampler, RandomSampler, Sampler, SamplerWithoutReplacement
from funcollect.buffers.storages import LazyTensorStorage, ListStorage, Storage
from funcollect.buffers.trajectory_index import Trajectories
from funcollect.files import Uninterrupted
from funcollect.messages import shown

__all__ = ["ReplayBuffer"]

_Sample = tuple[Any, dict[str, Any]]  # the batch, and its info
_Drawn = tuple[Any, dict[str, Tensor], SampleIndices]  # also what was drawn
Relabel = Callable[[BufferView, SampleIndices, RandomSource], SampleIndices]
_FIXED = ("storage", "sampler", "generator")  # cannot be replaced, since they depend on each other


def _in_turn(functions: Iterable[Callable[[Any], Any]], batch: Any) -> Any:
    for function in functions:
        batch = function(batch)
    return batch


class ReplayBuffer(FramesByIndex):
    """Stores the newest frames, up to the capacity of its storage, and returns random batches of them.

    Raises TypeError or ValueError for a bad argument.

    Args:
        storage: by default a `ListStorage` of 1,000 items. It and the next may be functions that return one.
        sampler: chooses the frames of a sample; by default a `RandomSampler`.
        writer: only ``"round robin"`` or None, which mean the same: new frames replace the oldest.
        transform: applied to a copy of the data of `add` and `extend`, which it may change, before that is stored.
        batch_size: the number of frames in a sample.
        prefetch: the number of samples that threads prepare ahead. They are discarded if the buffer changes.
        generator: the source of randomness; by default Torch's global generator.
        shared: see `share`.
        collate_fn: turns the list of items of a `ListStorage` into a batch; for other storages, applied to samples.
        sample_transform: applied to samples, after `collate_fn`; in the threads of `prefetch`, if there are any, of
            which several may call it at once. Transforms of TorchRL's are such functions.

    >>> import funcollect as fc
    >>> buffer = ReplayBuffer(storage=fc.LazyTensorStorage(1_000), batch_size=32)
    >>> with fc.SyncDataCollector("CartPole-v1", frames_per_batch=100, total_frames=300, seed=0) as collector:
    ...     for batch in collector:
    ...         indices = buffer.extend(batch)
    >>> len(buffer), buffer.sample()["observation"].shape
    (300, torch.Size([32, 4]))
    """

    _labels: ClassVar[bool] = False  # whether samples get their info as keys

    @takes_foreign("buffer")
    def __init__(
        self,
        *,
        storage: Storage | Callable[[], Storage] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: str | None = None,
        transform: Callable[[Any], Any] | None = None,
        batch_size: int | None = None,
        prefetch: int | None = None,
        generator: torch.Generator | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        shared: bool = False,
        sample_transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self.storage: Storage = part_of("storage", ListStorage(1_000) if storage is None else storage)
        self.sampler: Sampler = part_of("sampler", RandomSampler() if sampler is None else sampler)
        if writer not in (None, "round robin"):
            raise ValueError(f'writer is {writer!r}, expected "round robin", the only one there is: leave it out')
        check_optional_positive("batch_size", batch_size)
        functions = {"transform": transform, "collate_fn": collate_fn, "sample_transform": sample_transform}
        for name, function in functions.items():
            if function is not None:
                check_function(name, function, "a function of a batch", 1)
        self.sampler.fit(self.storage.max_size)
        on_device = type(self.storage) is LazyTensorStorage and self.storage.device.type != "cpu"
        if on_device and isinstance(self.sampler, PrioritizedSampler):
            self.sampler.move_to(self.storage.device)
        self.transform, self.collate_fn, self.sample_transform = transform, collate_fn, sample_transform
        self.relabel: Relabel | None = None  # of `hindsight`
        self.batch_size, self.generator = batch_size, generator
        if collate_fn is not None and isinstance(self.storage, ListStorage):
            self.storage.collate, self.collate_fn = collate_fn, None
        self._memory = ring.RingMemory(self.storage, self.sampler.trajectories)
        self._random_source = from_generator(generator)
        check_count("prefetch", prefetch := 0 if prefetch is None else prefetch)
        self._lock = threading.RLock()
        self._ahead: deque[tuple[SampleIndices, Future[_Sample | None]]] = deque()  # drawn, and read ahead
        self._kind_ahead: Any = None  # their batch size, the storage's edits and the sampler's settings then
        self._prefetch, self._pool = prefetch, ThreadPoolExecutor(prefetch, "funcollect-replay") if prefetch else None
        self.storage.lock, self.storage.end = self._lock, 0
        self._iterator: Iterator[Any] | None = None  # of `next`
        self.share(shared)
        OWNERS[self.storage] = OWNERS[self.sampler] = weakref.ref(self)

    @property
    def state(self) -> ring.RingState:
        """The current state of the buffer's ring, for the functions of `funcollect.ring`."""
        return ring.RingState(self._memory, self._memory.version)

    def add(self, data: Any) -> Tensor:
        """Add one frame, or with ``ndim > 1`` one step of all lanes, ``[*B]``; returns the slots."""
        data = self.transformed(data)
        if isinstance(self.storage, ListStorage):
            return self._extend([data])[0]
        axis = self.storage.ndim - 1
        return self._extend(optree.tree_map(lambda leaf: ring.as_leaf(leaf).unsqueeze(axis), data))[..., 0]

    def extend(self, data: Any) -> Tensor:
        """Add the frames of a batch ``[*B, T]``, which replace the oldest; returns their slots, ``[*B, T]`` int64.

        If the batch is longer than the buffer, the slots of frames that were not stored are -1. A list of items is
        stacked along a new first dimension; a `ListStorage` stores the items themselves. TypeError or ValueError if the
        batch does not match the stored frames; the buffer is unchanged then.
        """
        return self._extend(data if self.transform is None else self.transformed(data))  # saves a call

    def _extend(self, data: Any) -> Tensor:
        with self._lock, Uninterrupted():
            slots = self._memory.extend(data)
            if self._ahead:
                self._discard_prefetched()
            self.sampler.extended(self._memory, slots)
            return self._index(slots)

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """A random batch of `batch_size` frames, copied; by default as many as the buffer's own `batch_size`.

        With `return_info`, a dict comes with it: ``"index"``, the slots [N], where padding has -1, and the entries of
        the sampler. ValueError if there is no batch size, the buffer is empty, or no trajectory is as long as a slice.
        """
        batch, info, _ = self.sampled(wanted_size(batch_size, self.batch_size), return_info)
        return (batch, info) if return_info else batch

    def sampled(self, batch_size: int, with_info: bool = True) -> _Drawn:
        """A sample, what `return_info` adds, and what was drawn; if this raises, `give_back` gets what was drawn."""
        if self._pool is not None:
            return self._take_prefetched(batch_size, self._pool)
        drawn: SampleIndices | None = None
        try:
            with self._lock:
                drawn = self._draw(batch_size)
                batch, info = self._gathered(drawn, with_info)
            if self._labels or self.collate_fn is not None or self.sample_transform is not None:
                batch = self._finished(batch, info)
        except BaseException:
            self.give_back(drawn)
            raise
        return batch, info, drawn

    def _draw(self, batch_size: int) -> SampleIndices:
        drawn = self.sampler.draw(self._memory, batch_size, self._random_source)
        return drawn if self.relabel is None else self.relabel(self._memory, drawn, self._random_source)

    def give_back(self, drawn: SampleIndices | None) -> None:
        """Let the sampler draw the frames of a sample again that nobody got."""
        with self._lock:
            if drawn is not None:
                self.sampler.give_back(drawn)

    def _finished(self, batch: Any, info: Mapping[str, Tensor]) -> Any:
        batch = batch if self.collate_fn is None else self.collate_fn(batch)
        return batch if self.sample_transform is None else self.sample_transform(batch)

    def update_priority(self, index: Any, priority: Any, written: Any = None) -> None:
        """Set the priorities of the frames in these slots, for a `PrioritizedSampler`.

        Rows of -1 are ignored, and so are frames that have been overwritten since `index` was returned. The tensor that
        `extend`, `add` or `sample` returned records when that was, and so do its views. A copy, such as
        ``index[mask]``, ``index.int()``, ``index.cuda()``, ``index.numpy()`` or an unpickled index, needs `written`, or
        the frames that are in the slots now get the priorities; so does an index that was changed in place.

        Args:
            index: ``[N]`` slots, as `extend` returned them or ``info["index"]`` has them.
            priority: ``[N]`` numbers, or one for all; finite, not negative.
            written: what `written_at` of the original returned, or ``[N]`` such numbers; by default that of `index`.

        TypeError for another sampler; ValueError for empty slots, a bad priority and an impossible `written`.
        """
        if not isinstance(self.sampler, PrioritizedSampler):
            raise TypeError(f"{self.sampler} has no priorities: build the buffer with sampler=PrioritizedSampler(…)")
        if written is None:
            written = self.written_at(index)
        with self._lock, Uninterrupted():
            self.sampler.update_priority(self._memory, index, priority, written)
            self._ahead.clear()

    def _index(self, slots: Ints | Tensor) -> Tensor:  # that records how many frames had been written
        index = slots if isinstance(slots, Tensor) else torch.from_numpy(slots)
        note_written(index, self._memory.before + self._memory.written)
        return index

    def _gathered(self, drawn: SampleIndices, with_info: bool = True) -> _Sample:
        batch = drawn.finish(self.storage.read(drawn.slots, drawn.mask))
        return batch, {"index": self._index(drawn.index), **drawn.info} if with_info else {}

    def _take_prefetched(self, batch_size: int, pool: ThreadPoolExecutor) -> _Drawn:
        """Wait for the oldest prepared sample that is still up to date; threads prepare others meanwhile."""
        while True:
            with self._lock:
                if (kind := (batch_size, self.storage.edits, self.sampler.settings)) != self._kind_ahead:
                    self._discard_prefetched()
                    self._kind_ahead = kind
                while len(self._ahead) <= self._prefetch and not (self._ahead and self.sampler.ran_out(batch_size)):
                    # The sample is drawn here, so that the generator is used in the order of the calls.
                    drawn = self._draw(batch_size)
                    self._ahead.append((drawn, pool.submit(self._gather_if_current, drawn, self.state)))
                drawn, first = self._ahead.popleft()
            try:
                sample = first.result()
            except BaseException:
                self.give_back(drawn)
                raise
            if sample is not None:
                return *sample, drawn

    def _gather_if_current(self, drawn: SampleIndices, state: ring.RingState) -> _Sample | None:
        with self._lock:  # None if the buffer has changed since the sample was drawn
            if state != self.state:
                return None
            batch, info = self._gathered(drawn)
        return self._finished(batch, info), info

    def _discard_prefetched(self) -> None:
        """Discard the prepared samples, newest first, so that the sampler draws their frames again."""
        while self._ahead:
            self.sampler.give_back(self._ahead.pop()[0])

    def __iter__(self) -> Iterator[Any]:
        """Endless samples; with a `SamplerWithoutReplacement`, until every frame was returned once."""
        size = wanted_size(None, self.batch_size)
        if isinstance(self.sampler, SamplerWithoutReplacement):
            with self._lock:
                self._ahead.clear()
                self.sampler.empty()
        while self._ahead or not self.sampler.ran_out(size):
            yield self.sample()

    def relabel_by(self, relabel: Relabel) -> None:
        """Apply a function to each sample that is drawn, and follow trajectories for it; see `hindsight`."""
        with self._lock:
            if self._shared:
                raise ValueError("buffer is shared, and its readers draw no goals in hindsight: build another")
            self._discard_prefetched()
            if self._memory.trajectories is None:
                self._memory.link(trajectories := Trajectories())
                self.sampler.trajectories = trajectories
            self.relabel = relabel

    def next(self) -> Any:
        """The next sample of an iteration; None at its end, after which another begins."""
        self._iterator = self._iterator or iter(self)
        if (sample := next(self._iterator, None)) is None:
            self._iterator = None
        return sample

    def __len__(self) -> int:
        return len(self._memory)

    @property
    def write_count(self) -> int:
        """How many frames the buffer has been given since it was made, or emptied."""
        return self._memory.counted + self._memory.written

    def stats(self) -> dict[str, int | float | bool]:
        """Numbers by TorchRL's names: size, write_count, prefetch_queue_size, initialized, capacity, utilization."""
        size, capacity = len(self), self.storage.max_size
        counts = {"size": size, "write_count": self.write_count, "prefetch_queue_size": len(self._ahead)}
        return counts | {"initialized": True, "capacity": capacity, "utilization": size / capacity}

    def empty(self, empty_write_count: bool = True) -> None:
        """Remove all frames; keys, shapes and dtypes are kept, and `write_count` unless it is to begin at 0 again."""
        check_flags(empty_write_count=empty_write_count)
        with self._lock:
            self.storage.empty()
            self.sampler.empty()
            fresh = ring.RingMemory(self.storage, self.sampler.trajectories)
            fresh.counted = 0 if empty_write_count else self.write_count
            self._replace(fresh)

    def _replace(self, memory: ring.RingMemory) -> None:  # by a ring with other frames: indices of earlier ones expire
        self._ahead.clear()
        memory.before = self._memory.before + self._memory.written + 1
        self._memory = memory

    def dumps(self, path: str | os.PathLike[str], *, base: str | os.PathLike[str] | None = None) -> None:
        """Write the frames and the states of the sampler and the generator to a directory.

        An earlier dump in the directory is replaced only once this one is complete. If it is this buffer's last dump,
        or the one that it was loaded from, only the frames that are new are written; files of the others are linked.
        `base` may name another directory with that dump, on the same file system. A `ListStorage` is written whole, and
        Torch's global generator is not saved. TypeError if the frames are trees of other nodes than dicts, lists and
        tuples; OSError if the files cannot be written.
        """
        check_kind("path", path, (str, os.PathLike), "pass a directory")
        check_kind("base", base, (str, os.PathLike, type(None)), "pass a directory, or leave it out")
        with self._lock:
            self._discard_prefetched()
            dumping.dump(Path(path), self._memory, self.sampler, self.generator, None if base is None else Path(base))

    def loads(self, path: str | os.PathLike[str], *, allow_pickle: bool = False) -> None:
        """Restore a dump: the next samples are the ones that the dumped buffer would have returned.

        A buffer of another capacity gets the newest frames that fit, with their priorities; its samples are others, and
        a sampler without replacement begins a new round.

        `allow_pickle` also reads items of a `ListStorage` that are restored by code from the file. FileNotFoundError if
        there is no complete dump; ValueError if the buffer was built with other arguments but the capacity, or files
        are damaged; also for another capacity with ``ndim > 1``, if batches had different lanes.
        """
        check_kind("path", path, (str, os.PathLike), "pass a directory")
        with self._lock:
            fresh = ring.RingMemory(self.storage, self.sampler.trajectories)
            other = dumping.load(Path(path), fresh, self.sampler, self.generator, allow_pickle)
            if other is None:
                self._replace(fresh)
                return
            self.empty()
            dumping.move(other, self._memory, self.sampler)

    save = dump = dumps
    load = loads

    def state_dict(self) -> dict[str, Tensor]:
        """The files that `dumps` writes, as plain data: their bytes [N] uint8 by name. Raises the errors of `dumps`."""
        with self._lock, tempfile.TemporaryDirectory() as directory:
            dumped = self._memory.dumped
            self.dumps(directory)
            self._memory.dumped = dumped
            files = sorted(Path(directory).glob("v*/*"))
            return {path.name: torch.from_numpy(np.fromfile(path, np.uint8)) for path in files}

    def load_state_dict(self, state_dict: Mapping[str, Tensor], *, allow_pickle: bool = False) -> None:
        """Restore the result of `state_dict`, as `loads` does; TypeError for anything else."""
        with tempfile.TemporaryDirectory() as directory:
            dumping.write_files(Path(directory), state_dict)
            self.loads(directory, allow_pickle=allow_pickle)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and name in self.__dict__:
            raise AttributeError(f"{name} is {shown(value)}, expected what the buffer was built with: make another")
        super().__setattr__(name, value)

    def share(self, shared: bool = True) -> Self:
        """Let other processes read: pickled, the buffer becomes a `ReplayReader` with its sampler and batch size.

        This process stays the only writer. ValueError unless the storage is a `LazyMemmapStorage` with a `scratch_dir`;
        TypeError for a sampler that a reader cannot have.
        """
        check_flags(shared=shared)
        if shared and self.storage.scratch_dir is None:
            raise ValueError(f"{self.storage} cannot be shared: pass storage=LazyMemmapStorage(…, scratch_dir=…)")
        if shared and self.relabel is not None:
            raise ValueError("readers draw no goals in hindsight, so this buffer cannot be shared: sample here")
        if shared:
            check_readable(self.sampler)
        self._shared = shared
        return self

    def __reduce__(self) -> Any:
        if self._shared:
            if self._memory.by_lane:
                what = "lanes of the buffer have equal trajectory ids, by which readers would mix them"
                raise ValueError(f"{what}: give each lane ids of its own, as collectors do")
            options: dict[str, Any] = {"sampler": self.sampler, "batch_size": self.batch_size}
            if functions := [each for each in (self.collate_fn, self.sample_transform) if each is not None]:
                options["sample_transform"] = partial(_in_turn, functions)
            return partial(ReplayReader, **options), (self.storage.scratch_dir,)
        raise TypeError(f"{self!r} cannot be copied or pickled: dumps(path) writes it, loads(path) of another reads it")

    def __repr__(self) -> str:
        parts = f"{self.storage}, {self.sampler}, {len(self)} frames, batch_size={self.batch_size}"
        return f"{type(self).__name__}({parts})"
