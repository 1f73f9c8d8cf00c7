"""Reads and overwrites frames of a buffer by index, and writes values back to frames that are still there."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import optree
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from funcollect.buffers import ring
from funcollect.buffers.storages import ListStorage, Storage
from funcollect.buffers.storages.storage import slots_at
from funcollect.buffers.sum_tree import numbers_of, present_in
from funcollect.files import Uninterrupted
from funcollect.messages import clipped, kind_of, shown
from funcollect.trajectories.split import readable
from funcollect.tree import Path, as_path, flatten, time_last

# The attribute of the memory of slots: the frames written when they were returned, and the tensor's version then.
_WRITTEN = "_funcollect_written"


class FramesByIndex:
    """The methods of a `ReplayBuffer` for frames at an index."""

    storage: Storage
    transform: Callable[[Any], Any] | None
    _lock: threading.RLock
    _memory: ring.RingMemory

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
            held = self._memory.held(index)
            batch = self.storage.at(slots_at(held, index))
        if held.ndim > 1 and isinstance(batch, TensorDictBase):
            names = TensorDict({}, held.shape, names=time_last(held.ndim))[index].names
            batch.names = [*names, *batch.names[len(names) :]]
        return batch

    def __setitem__(self, index: Any, data: Any) -> None:
        """Overwrite the frames at an index, or the values of a key in all frames; see `storages.Storage.set`."""
        if _is_key(index):
            self.set_(index, data)
            return
        data = self.transformed(data)
        if isinstance(data, list) and not isinstance(self.storage, ListStorage):
            data = ring.stacked(data)
        with self._lock, Uninterrupted():
            self.storage.put(slots_at(self._memory.held(index), index), data)

    def transformed(self, data: Any) -> Any:
        """The data as they are stored: a copy, changed by `transform`; without one, the data themselves."""
        return data if self.transform is None else self.transform(optree.tree_map(ring.copied, data))

    def set_at_(self, key: Any, value: Any, index: Any) -> Self:
        """Overwrite the values of a key in the frames at an index; KeyError if frames have no such key."""
        return self._change(index, lambda frames: frames.set_(key, value))

    def set_(self, key: Any, value: Any) -> Self:
        """Overwrite the values of a key in all frames, in the order of ``buffer[:]``; see `set_at_`."""
        return self.set_at_(key, value, slice(None))

    def update_(self, data: Any) -> Self:
        """Overwrite the values of all keys of `data` in all frames, in the order of ``buffer[:]``."""
        return self._change(slice(None), lambda frames: frames.update_(data))

    def _change(self, index: Any, change: Callable[[Any], Any]) -> Self:  # applies `change` to the frames
        with self._lock, Uninterrupted():
            slots = slots_at(self._memory.held(index), index)
            frames = self.storage.at(slots)
            if not isinstance(frames, TensorDictBase):
                raise TypeError(f"the frames are {kind_of(frames)}, expected TensorDicts: assign to buffer[index]")
            try:
                change(frames)
            except RuntimeError as error:
                what = f"the values do not match the {list(slots.shape)} frames ({clipped(str(error))})"
                raise ValueError(f"{what}: give one for each, of the shape that frames have") from error
            self.storage.put(slots, frames)
        return self

    def update(self, index: Any, values: Mapping[Any, Any] | TensorDictBase, written: Any = None) -> int:
        """Write values back to the frames in these slots, such as recurrent states; returns how many had gone.

        Frames that have been overwritten since `index` was returned are left out and counted; rows of -1 are padding,
        and are not. If `index` has a frame several times, the last values count.

        Args:
            index: ``[N]`` slots, as `extend` returned them or ``info["index"]`` has them.
            values: tensors ``[N, ...]`` by key, with the shapes and dtypes of the frames' own.
            written: for copies of an index, see `update_priority`.

        TypeError for a `ListStorage`; ValueError for values that do not match, for keys by which trajectories are
        followed, and for those whose memory frames share (`compact_obs`, `frame_stack`) or other processes may read.
        """
        slots = numbers_of("index", index, "iu").astype(np.int64)
        leaves = rows_of(values, np.shape(index))
        written = self.written_at(index) if written is None else written
        with self._lock, Uninterrupted():
            trajectories = self._memory.trajectories
            if linked := [] if trajectories is None else sorted(leaves.keys() & trajectories.read):
                what = f"values has {[*map(readable, linked)]}, by which the sampler follows trajectories"
                raise ValueError(f"{what}: leave them out, or sample with a RandomSampler")
            held = present_in(self._memory, slots, written)
            rows = np.arange(len(slots)) if held is None else held.nonzero()[0]
            rows = rows[::-1][np.unique(slots[rows[::-1]], return_index=True)[1]]  # the last of each slot
            self.storage.amend(slots[rows], {path: leaf[torch.from_numpy(rows)] for path, leaf in leaves.items()})
            self.storage.edits += len(rows)
        return 0 if held is None else int(np.count_nonzero(~held & (slots != -1)))

    def check_index(self, slots: Any, written: Any) -> None:
        """Raise ValueError for slots without a frame, and for an impossible `written`."""
        with self._lock:
            present_in(self._memory, slots, written)

    def check_update(self, slots: Any, leaves: Mapping[Path, Tensor], written: Any) -> None:
        """Raise what `update` of these slots would raise, for leaves ``[N, ...]`` by path."""
        self.check_index(slots, written)
        FramesByIndex.update(self, slots[:0], {path: leaf[:0] for path, leaf in leaves.items()}, 0)

    def written_at(self, index: Any) -> int | None:
        """How many frames a buffer had been given when it returned these slots; None if they do not record it."""
        written: Any = written_of(index)
        if isinstance(written, tuple):
            what = f"index is one of mix, which numbers the slots of {len(written)} buffers"
            raise ValueError(f"{what}, expected one of this buffer: call the method of the mixture")
        return written  # type: ignore[no-any-return]


def written_of(index: Any) -> Any:
    """What `note_written` recorded for these slots; None if there is nothing, or the index was changed since."""
    if not isinstance(index, Tensor):
        return None
    written, version = getattr(index.untyped_storage(), _WRITTEN, (None, None))
    return written if version is None or _version(index) in (None, version) else None


def note_written(index: Tensor, written: Any) -> None:
    """Record in the memory of slots what `written_at` returns for them and their views."""
    setattr(index.untyped_storage(), _WRITTEN, (written, _version(index)))


def _version(index: Tensor) -> int | None:
    """How often a tensor was changed in place; None for one of inference mode, which does not count this."""
    return None if index.is_inference() else index._version


def rows_of(values: Any, shape: tuple[int, ...]) -> dict[Path, Tensor]:
    """The leaves ``[N, ...]`` by path, from values ``[*shape, ...]`` by key, nested or not."""
    if not isinstance(values, (Mapping, TensorDictBase)):
        raise TypeError(f"values is {shown(values)}, expected tensors by key: pass for example {{'recurrent': state}}")
    leaves = dict[Path, Tensor]()
    for name, value in values.items():
        parts = flatten(value) if isinstance(value, (Mapping, TensorDictBase)) else {(): value}
        leaves |= {(*as_path(name), *path): torch.as_tensor(leaf).detach() for path, leaf in parts.items()}
    for path, leaf in leaves.items():
        if leaf.shape[: len(shape)] != shape:
            what = f"values has {readable(path)} of shape {list(leaf.shape)}, expected {list(shape)} first"
            raise ValueError(f"{what}: give one value for each row of index")
    return {path: leaf.reshape(math.prod(shape), *leaf.shape[len(shape) :]) for path, leaf in leaves.items()}


def _is_key(index: Any) -> bool:
    path = index if isinstance(index, tuple) and index else (index,)
    return all(isinstance(part, str) for part in path)
