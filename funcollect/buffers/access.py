"""How the frames of a `ReplayBuffer` are read and overwritten by index or by key."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import EllipsisType
from typing import Any, Self

import numpy as np
import optree
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor

from funcollect.buffers import Ints
from funcollect.buffers.ring import RingMemory
from funcollect.buffers.storages.storage import Storage, slots_at
from funcollect.interrupts import Uninterrupted
from funcollect.messages import clipped
from funcollect.tree import time_last


class BufferAccess:
    """The methods of `ReplayBuffer` that read and overwrite stored frames."""

    storage: Storage
    transform: Callable[[Any], Any] | None
    _lock: threading.RLock
    _memory: RingMemory
    _iterator: Iterator[Any] | None = None  # of `next`

    def __getitem__(self, index: Any) -> Any:
        """The frames at an index, copied.

        An array, tensor or list of ints or bools selects among the filled slots, as `extend` returned them; so do an
        int and a slice with ``ndim=1``. With ``ndim > 1``, an int, a slice, ``...`` or a tuple of them is an index of
        the view ``[*lanes, time]`` of the steps that are held for every lane, oldest first. A lane is a row of the
        batches, so those of asynchronous workers share lanes. A key is one of the batch of all frames. TypeError or
        IndexError for other indices; ValueError for such a view, if batches had different dimensions before time.
        """
        if _is_key(index):
            return self[:][index]
        with self._lock:
            held = self._held(index)
            batch = self.storage.at(slots_at(held, index))
        if held.ndim > 1 and isinstance(batch, TensorDictBase):
            batch.names = TensorDict({}, held.shape, names=time_last(held.ndim))[index].names
        return batch

    def _held(self, index: Any) -> Ints:
        """The slots that hold frames, ``[*lanes, time]`` if `index` is one of that view."""
        whole = self.storage.ndim > 1 and isinstance(index, (int, np.integer, slice, EllipsisType, tuple))
        return self._memory.grid() if whole else np.arange(len(self._memory))

    def __setitem__(self, index: Any, data: Any) -> None:
        """Overwrite the frames at an index, or the values of a key in all frames; see `storages.Storage.set`."""
        if _is_key(index):
            self.set_(index, data)
            return
        data = self.transformed(data)
        with self._lock, Uninterrupted():
            self.storage.put(slots_at(self._held(index), index), data)

    def transformed(self, data: Any) -> Any:
        """The data as they are stored: `transform` of a copy of them."""
        return data if self.transform is None else self.transform(optree.tree_map(_copied, data))

    def set_at_(self, key: Any, value: Any, index: Any) -> Self:
        """Overwrite the values of a key in the frames at an index; KeyError if frames have no such key."""
        return self._change(index, lambda frames: frames.set_(key, value))

    def set_(self, key: Any, value: Any) -> Self:
        """Overwrite the values of a key in all frames, in the order of ``buffer[:]``; see `set_at_`."""
        return self.set_at_(key, value, slice(None))

    def update_(self, data: Any) -> Self:
        """Overwrite the values of all keys of `data` in all frames, in the order of ``buffer[:]``."""
        return self._change(slice(None), lambda frames: frames.update_(data))

    def _change(self, index: Any, change: Callable[[Any], Any]) -> Self:
        with self._lock, Uninterrupted():
            slots = slots_at(self._held(index), index)
            frames = self.storage.at(slots)
            if not isinstance(frames, TensorDictBase):
                what = f"the frames are of type {type(frames).__name__}, expected TensorDicts, which have keys"
                raise TypeError(f"{what}: assign to buffer[index]")
            try:
                change(frames)
            except RuntimeError as error:
                what = f"the values do not match the {list(slots.shape)} frames ({clipped(str(error))})"
                raise ValueError(f"{what}: give one for each, of the shape that frames have") from error
            self.storage.put(slots, frames)
        return self

    def next(self) -> Any:
        """The next sample of an iteration; None at its end, after which another begins."""
        if self._iterator is None:
            self._iterator = iter(self)
        if (sample := next(self._iterator, None)) is None:
            self._iterator = None
        return sample


def _copied(leaf: Any) -> Any:
    """A copy of an array, a tensor or a TensorDict; other leaves as they are."""
    if isinstance(leaf, Tensor) or is_tensor_collection(leaf):
        return leaf.clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _is_key(index: Any) -> bool:
    path = index if isinstance(index, tuple) and index else (index,)
    return all(isinstance(part, str) for part in path)
