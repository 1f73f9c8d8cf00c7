"""A ring of frames: functions that store the newest frames of any lanes and workers, and sample them.

`extend` writes the memory in place, so using an earlier state raises `StaleStateError`; `snapshot` makes a copy. The
oldest frames are overwritten first, step by step of all lanes. Frames of one trajectory are linked across batches
(`Trajectories`), so slices are contiguous even if the batches of asynchronous workers are interleaved.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from types import EllipsisType, NoneType
from typing import Any, cast

import numpy as np
import optree
import torch
from tensordict import TensorDictBase, is_tensor_collection, is_tensorclass
from torch import Tensor

from funcollect.arguments import check_kind, check_positive
from funcollect.buffers import Ints
from funcollect.buffers.indices import Flat, RandomSource, SampleSpec, Slices
from funcollect.buffers.storages.row_storages import LazyTensorStorage
from funcollect.buffers.storages.storage import ListStorage, Storage
from funcollect.buffers.trajectory_index import Segments, Trajectories, TrajectoryIndex
from funcollect.errors import StaleStateError
from funcollect.files import Uninterrupted
from funcollect.keys import Key, Purpose, seed_of
from funcollect.messages import clipped, shown
from funcollect.trajectories.final_observations import is_compact
from funcollect.trajectories.next_observations import next_observations

__all__ = ["Flat", "RingState", "Slices", "Trajectories", "extend", "init", "sample", "snapshot"]


class RingMemory:
    """The frames and the trajectory index of a ring, shared by all of its states."""

    def __init__(self, storage: Storage, trajectories: Trajectories | None) -> None:
        self.storage, self.trajectories = storage, trajectories
        self.capacity, storage.linked = storage.max_size, trajectories is not None
        self._index = None if trajectories is None else TrajectoryIndex(self.capacity)
        self.written = 0  # frames written since `init`; frame n is in slot n % capacity
        self.before = 0  # more than the frames written to the buffer's earlier rings
        self.counted = 0  # frames of these that its `write_count` includes
        self.lanes: tuple[int, ...] | None = None  # the batch dimensions before time of the newest batch
        self.since = 0  # the number of the first frame from which on all batches have had these dimensions
        self.by_lane = False  # whether lanes of one batch have had equal trajectory ids, like the runs of a vmap
        self.version = 0
        # The name of the last dump, written or loaded, which has the ring's first frames; and the storage's edits then.
        self.dumped: tuple[str | None, int] = None, 0

    def __len__(self) -> int:
        return min(self.written, self.capacity)

    @property
    def numbers(self) -> range:
        """The numbers of the frames that the ring has."""
        return range(self.written - len(self), self.written)

    @property
    def index(self) -> TrajectoryIndex | None:
        """The trajectory index, up to date; None if the ring has none."""
        if self._index is not None:
            self._index.update()
        return self._index

    def link(self, trajectories: Trajectories) -> None:
        """Follow trajectories from now on, also in the frames that the ring has; ValueError if these have no ids."""
        index, count, numbers = TrajectoryIndex(self.capacity), len(self), self.numbers
        if count:
            columns = self.storage.numbers(np.arange(numbers.start, numbers.stop) % self.capacity)
            segments = trajectories.segments(columns, (count,), numbers.start, by_lane=False)
            if (width := math.prod(self.lanes or ())) > 1 and numbers.start >= self.since:
                segments = self._apart(segments, self.since, width)
            index.extend(segments)
        self.trajectories, self._index, self.storage.linked = trajectories, index, True

    def _apart(self, segments: Segments, start: int, width: int) -> Segments:
        """The segments of frames from number `start` on, of so many lanes, which may have equal ids."""
        self.by_lane = self.by_lane or segments.share_ids(start, width)
        return segments.by_lane(start, width) if self.by_lane else segments

    def extend(self, data: Any) -> Ints:
        """Write a batch ``[*B, T]``, see `extend`; returns the slots. The caller must prevent interruptions."""
        batch, start = self.storage.recognized(data), self.written
        if batch is None:
            if isinstance(data, list) and not isinstance(self.storage, ListStorage):
                data = stacked([next_observations(item) if is_compact(item) else item for item in data])
            data = next_observations(data) if is_compact(data) else data
            batch = self.storage.admit(data)
        lanes, steps, count = batch.lead[:-1], batch.lead[-1], math.prod(batch.lead)
        segments = None
        if self.trajectories is not None and count:
            if not isinstance(data, TensorDictBase):
                what = f"the data is {type(data).__name__}, expected a TensorDict with keys that identify trajectories"
                raise TypeError(f"{what}: extend with one, or sample with a RandomSampler")
            segments = self.trajectories.segments(batch.leaves, batch.lead, start)
            if (width := count // steps) > 1:
                segments = self._apart(segments, start, width)
        self.storage.write(batch, start)
        self.written += count
        if self.lanes != lanes and count:
            self.lanes, self.since = lanes, start
        if self._index is not None and segments is not None:
            self._index.note(segments, range(start, self.written))
            if self.storage.compact_obs:
                self._index.update()  # the order in which slices are drawn depends on it
        begin = start % self.capacity
        slots = np.arange(begin, begin + count)
        if begin + count > self.capacity:
            slots[self.capacity - begin :] %= self.capacity
            slots[: max(count - self.capacity, 0)] = -1  # later frames of the same batch are there
        self.version += 1
        return np.ascontiguousarray(slots.reshape(steps, math.prod(lanes)).T).reshape(batch.lead)  # `flatten` is a view

    def held(self, index: Any) -> Ints:
        """The slots that hold frames; for an index of lanes and time, the steps ``[*lanes, T]`` that all lanes have.

        The oldest steps are first. ValueError if batches had different lanes.
        """
        if self.storage.ndim == 1 or not isinstance(index, (int, np.integer, slice, EllipsisType, NoneType, tuple)):
            return np.arange(len(self))
        if not len(self):
            return np.zeros((0,) * self.storage.ndim, np.int64)
        oldest = self.numbers.start
        if self.lanes is None or oldest < self.since:
            what = "the frames are from batches with different dimensions before time, so they have no common lanes"
            raise ValueError(f"{what}: index them by a tensor of slots, as extend returns")
        missing = (self.since - oldest) % math.prod(self.lanes)  # frames of a step that is not complete any more
        slots = np.arange(oldest + missing, self.written) % self.capacity
        return np.moveaxis(slots.reshape(-1, *self.lanes), 0, -1)


@dataclass(frozen=True)
class RingState:
    """A ring at one version; its length is the number of its frames.

    >>> import torch, funcollect as fc
    >>> state, indices = fc.ring.extend(fc.ring.init(100), {"x": torch.zeros(8)})
    >>> len(state), state.capacity, state.version
    (8, 100, 1)
    """

    memory: RingMemory  # the frames and the index, shared by all states of the ring
    version: int = 0  # the number of `extend` calls that led to this state

    def __len__(self) -> int:
        return len(check_current(self))

    @property
    def capacity(self) -> int:
        """The largest number of frames."""
        return self.memory.capacity


def check_current(state: RingState) -> RingMemory:
    """The memory of a state, which must not be stale."""
    check_kind("state", state, RingState, "pass the result of ring.init or ring.extend")
    if state.version != state.memory.version:
        what = f"this state is version {state.version} of its ring, which is now at {state.memory.version}"
        raise StaleStateError(f"{what}. Use the state that extend returned, or a ring.snapshot taken before")
    return state.memory


def init(storage: int | Storage, *, trajectories: Trajectories | None = None) -> RingState:
    """An empty ring with this storage, or room for so many frames.

    `trajectories` are the keys that identify trajectories, ``Trajectories()`` for batches of collectors; None if no
    slices will be sampled. Raises TypeError or ValueError for other arguments.

    >>> import funcollect as fc
    >>> len(fc.ring.init(100))
    0
    """
    if not hasattr(storage, "admit"):
        check_positive("storage", storage)
        storage = LazyTensorStorage(storage)
    check_kind("trajectories", trajectories, (Trajectories, type(None)), "pass Trajectories(), or leave it out")
    return RingState(RingMemory(cast(Storage, storage), trajectories))


def extend(state: RingState, batch: Any) -> tuple[RingState, Tensor]:
    """Add the frames of a batch, which replace the oldest; returns the next state and their slots, ``[*B, T]`` int64.

    The batch is a TensorDict or a tree of tensors ``[*B, T, ...]``, with as many batch dimensions as the storage's
    `ndim`. Lists, and batches longer than the ring, are treated as by `ReplayBuffer.extend`. Raises StaleStateError if
    the ring has been extended since this state; ValueError if the batch does not match the storage or lacks trajectory
    ids, and the ring is unchanged then.

    >>> import funcollect as fc, torch
    >>> state, indices = fc.ring.extend(fc.ring.init(4), {"x": torch.arange(3)})
    >>> fc.ring.extend(state, {"x": torch.arange(3, 6)})[1]
    tensor([3, 0, 1])
    """
    memory = check_current(state)
    with Uninterrupted():  # an interrupted write would leave frames that are half old, half new
        slots = memory.extend(batch)
    return RingState(memory, memory.version), torch.from_numpy(slots)


def stacked(items: list[Any]) -> Any:
    """Items as a batch, along a new first dimension; TypeError or ValueError for those that cannot be stacked."""
    if not items:
        raise ValueError("the list has no items, expected at least one: skip the call if there are none")
    if is_tensorclass(items[0]):
        what = f"the list has items of {type(items[0]).__name__}, expected TensorDicts, tensors, or trees of tensors"
        raise TypeError(f"{what}: give [item.to_tensordict() for item in items]")
    try:
        return optree.tree_map(lambda *leaves: torch.stack([as_leaf(leaf) for leaf in leaves]), *items)
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
        what = f"the list has items that cannot be stacked ({clipped(str(error))}), expected the same keys and shapes"
        raise ValueError(f"{what}: store others in a ListStorage, in a buffer with collate_fn=") from error


def as_leaf(leaf: Any) -> Any:
    """A number or an array as a tensor; a TensorDict or a tensorclass, which `as_tensor` would empty, as it is."""
    return leaf if is_tensor_collection(leaf) else torch.as_tensor(leaf)


def copied(leaf: Any) -> Any:
    """A copy of an array, a tensor or a TensorDict; another leaf as it is."""
    if isinstance(leaf, Tensor) or is_tensor_collection(leaf):
        return leaf.clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def sample(state: RingState, key: Key, spec: SampleSpec) -> Any:
    """A random batch of frames ``[N, ...]``, copied, on the storage's device; the same key gives the same batch.

    The key is ``uint32[2]``, see `funcollect.keys.key_from_seed`. Raises StaleStateError if the ring has been extended
    since this state; ValueError if it is empty, or no trajectory is as long as a slice.

    >>> import funcollect as fc, torch
    >>> state, _ = fc.ring.extend(fc.ring.init(4), {"x": torch.arange(6)})
    >>> fc.ring.sample(state, np.array([0, 7], np.uint32), fc.ring.Flat(3))["x"].shape
    torch.Size([3])
    """
    memory = check_current(state)
    check_kind("spec", spec, (Flat, Slices), "pass for example Flat(256)")
    if getattr(key, "shape", None) != (2,) or key.dtype != np.uint32:
        raise TypeError(f"key is {shown(key)}, expected uint32 [2]: pass funcollect.keys.key_from_seed(0), say")
    words = np.array([seed_of(key), int(Purpose.SAMPLE) << 48], np.uint64)
    source = np.random.Generator(np.random.Philox(key=words))
    numbers = RandomSource(lambda limit, count: source.integers(limit, size=count), source.random, source.permutation)
    drawn = spec.draw(memory, numbers)
    return drawn.finish(memory.storage.read(drawn.slots, drawn.mask))


def snapshot(state: RingState) -> RingState:
    """An independent copy of a ring, with its frames in memory.

    >>> import funcollect as fc, torch
    >>> state, _ = fc.ring.extend(fc.ring.init(4), {"x": torch.arange(3)})
    >>> copy = fc.ring.snapshot(state)
    >>> state, _ = fc.ring.extend(state, {"x": torch.arange(3)})
    >>> len(copy), len(state)
    (3, 4)
    """
    memory = check_current(state)
    twin = copy.copy(memory)
    twin.storage, twin._index = memory.storage.copy(), copy.deepcopy(memory._index)
    return RingState(twin, twin.version)
