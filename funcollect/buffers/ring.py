"""A ring of frames: the newest `capacity` of them, whatever lane or worker they come from.

Three functions over an explicit state: ``state = init(capacity)``, ``state, indices = extend(state, batch)``,
``batch = sample(state, key, spec)``. The memory is written in place, so a state is good until the next `extend`; an
older one raises `StaleStateError`. `snapshot` makes a copy that goes its own way.

Frames leave in the order in which they came: a batch ``[P, T]`` counts as T steps of P frames each, so that all lanes
lose their oldest steps first. Frames of one trajectory are linked across batches (`Trajectories`), so that slices are
contiguous however the batches of asynchronous workers are interleaved.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from funcollect.arguments import check_kind, check_positive
from funcollect.buffers.samplers.indices import Flat, SampleIndices, SampleSpec, Slices
from funcollect.buffers.samplers.randomness import KeySource
from funcollect.buffers.storages.storage import Incoming, Storage
from funcollect.buffers.storages.tensor_storage import LazyTensorStorage
from funcollect.buffers.trajectory_index.lazy_index import LazyIndex
from funcollect.buffers.trajectory_index.trajectory_index import TrajectoryIndex
from funcollect.buffers.trajectory_index.trajectory_keys import Trajectories, check_linked
from funcollect.errors import StaleStateError
from funcollect.interrupts import Uninterrupted
from funcollect.keys import Key
from funcollect.messages import shown

__all__ = ["Flat", "RingState", "Slices", "Trajectories", "extend", "init", "sample", "snapshot"]


class RingMemory:
    """What the states of one ring share: the frames and the trajectory index at the current version."""

    def __init__(self, storage: Storage, trajectories: Trajectories | None) -> None:
        self.storage = storage
        if storage.compact_obs and trajectories is None:
            trajectories = Trajectories()  # the next observation of a frame is that of its successor
        self.trajectories = trajectories
        self.capacity = storage.max_size
        self._lazy_index = None if trajectories is None else LazyIndex(self.capacity)
        self.written = 0  # frames given in all; frame n lies in slot n % capacity
        self.version = 0

    def __len__(self) -> int:
        return min(self.written, self.capacity)

    @property
    def index(self) -> TrajectoryIndex | None:
        """Which frames follow each other; None where that was not asked for."""
        return None if self._lazy_index is None else self._lazy_index.current

    def extend(self, data: Any) -> npt.NDArray[np.int64]:
        """Write a batch; the slots of its frames in the order of time, then of lanes, -1 for those that did not stay.

        The slots are as `lead` of the batch has it, with time first.
        """
        batch = self.storage.admit(data)
        *lanes, steps = batch.lead
        count = math.prod(batch.lead)
        numbers, skipped = range(self.written, self.written + count), max(count - self.capacity, 0)
        frames = None
        if self.trajectories is not None and count:
            check_linked(data)
            frames = self.trajectories.frames(batch.leaves, batch.lead, self.written)
        self.storage.allocate(batch)
        whole = max(numbers.stop - self.capacity, 0)
        self.storage.announce(whole, self.written)
        self._write(batch, skipped, count - skipped)
        self.written = numbers.stop
        self.storage.announce(whole, self.written)
        if self._lazy_index is not None and frames is not None:
            self._lazy_index.extend(frames, numbers)
        begin = numbers.start % self.capacity
        slots = np.arange(begin, begin + count)
        slots[self.capacity - begin :] %= self.capacity
        if self.storage.compact_obs:
            self._settle(slots[skipped:])
        slots[:skipped] = -1
        return slots.reshape(steps, *lanes)

    def _settle(self, slots: npt.NDArray[np.int64]) -> None:
        """Tell a storage with `compact_obs` which frames the new ones, in `slots`, follow."""
        assert self.index is not None
        before = self.index.preceding(slots)
        linked = before != slots
        self.storage.settle(before[linked], slots[linked])

    def read(self, slots: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_] | None = None) -> Any:
        """A batch of the frames in `slots`, [N]; zeros where `mask` is False."""
        if self.index is None or not self.storage.compact_obs:
            return self.storage.read(slots, mask)
        return self.storage.read(slots, mask, self.index.following(slots))

    def _write(self, batch: Incoming, first: int, count: int) -> None:
        start = (self.written + first) % self.capacity
        fitting = min(count, self.capacity - start)
        if fitting:
            self.storage.write(start, batch, first, fitting)
        if count > fitting:
            self.storage.write(0, batch, first + fitting, count - fitting)


@dataclass(frozen=True)
class RingState:
    """A ring at one version. `len` is the number of frames that it holds.

    Attributes:
        memory: what all states of the ring share.
        version: which extend made this state.
    """

    memory: RingMemory
    version: int = 0

    def __len__(self) -> int:
        return len(check_current(self))

    @property
    def capacity(self) -> int:
        """The most frames that it holds."""
        return self.memory.capacity


def check_current(state: RingState) -> RingMemory:
    """The memory of a state.

    Raises:
        StaleStateError: for a state after which the ring was extended.
    """
    check_kind("state", state, RingState, "pass what ring.init or ring.extend returned")
    if state.version != state.memory.version:
        raise StaleStateError(
            f"this state is version {state.version} of its ring, which is now at {state.memory.version}: the rows were "
            "written in place. Use the state that extend returned, as in `state, indices = ring.extend(state, batch)`, "
            "or take ring.snapshot(state) before extending"
        )
    return state.memory


def init(storage: int | Storage, *, trajectories: Trajectories | None = None) -> RingState:
    """An empty ring.

    Args:
        storage: the frames to hold, or a storage of that size.
        trajectories: which keys tell trajectories apart, ``Trajectories()`` for those of collectors; None where slices
            will not be asked for.

    Raises:
        TypeError, ValueError: for a capacity that is not a positive int.

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
    """Add the frames of a batch; the oldest ones make room.

    Args:
        state: the ring's current state.
        batch: a TensorDict, or a tree of tensors, ``[*B, T, ...]`` with as many dimensions before a frame's own as the
            storage's `ndim` says.

    Returns:
        The next state, and the slot of each frame, ``[*B, T]`` int64; -1 for frames that did not fit, of a batch longer
        than the ring.

    Raises:
        StaleStateError: for a state after which the ring was extended.
        ValueError: for a batch that does not fit the storage or lacks its trajectories' key; the ring is as it was.

    >>> import funcollect as fc
    >>> import torch
    >>> state = fc.ring.init(4)
    >>> state, indices = fc.ring.extend(state, {"x": torch.arange(3)})
    >>> state, indices = fc.ring.extend(state, {"x": torch.arange(3, 6)})
    >>> indices
    tensor([3, 0, 1])
    """
    memory = check_current(state)
    with Uninterrupted():  # half an extend would leave frames that are neither the old ones nor the new
        slots = torch.from_numpy(memory.extend(batch))
        memory.version += 1
    return RingState(memory, memory.version), slots.movedim(0, -1)


def sample(state: RingState, key: Key, spec: SampleSpec) -> Any:
    """A batch of frames; equal keys give equal ones.

    Args:
        state: the ring's current state.
        key: ``uint32[2]``, see `funcollect.keys.key_from_seed`.
        spec: `Flat` for single frames, `Slices` for stretches of trajectories.

    Returns:
        ``[N, ...]`` in memory of its own, on the storage's device.

    Raises:
        StaleStateError: for a state after which the ring was extended.
        ValueError: for an empty ring, and for slices longer than any trajectory.

    >>> import funcollect as fc
    >>> import torch
    >>> state, _ = fc.ring.extend(fc.ring.init(4), {"x": torch.arange(6)})
    >>> batch = fc.ring.sample(state, np.array([0, 7], np.uint32), fc.ring.Flat(3))
    >>> batch["x"].shape
    torch.Size([3])
    """
    memory = check_current(state)
    check_kind("spec", spec, (Flat, Slices), "pass for example Flat(256)")
    if getattr(key, "shape", None) != (2,) or key.dtype != np.uint32:
        raise TypeError(f"key is {shown(key)}, expected uint32 [2]: pass funcollect.keys.key_from_seed(0), say")
    return gather(memory, spec.draw(memory, KeySource(key)))


def gather(memory: RingMemory, drawn: SampleIndices) -> Any:
    """The frames that were drawn."""
    return drawn.finish(memory.read(drawn.slots, drawn.mask))


def snapshot(state: RingState) -> RingState:
    """A copy of a ring, which goes its own way; its frames lie in memory also where the ring's lie in a file."""
    memory = check_current(state)
    twin = copy.copy(memory)
    twin.storage, twin._lazy_index = memory.storage.copy(), copy.deepcopy(memory._lazy_index)
    return RingState(twin, twin.version)
