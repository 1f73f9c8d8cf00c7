"""The interface of storages, and a storage of any objects."""

from __future__ import annotations

import copy
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import EllipsisType, NoneType
from typing import Any, NamedTuple, Protocol

import numpy as np
import optree
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.utils.data import default_collate
from typing_extensions import override

from funcollect.arguments import check_positive
from funcollect.buffers import Bools, Ints
from funcollect.buffers.keywords import takes_foreign
from funcollect.messages import clipped, shown
from funcollect.tree import Path as KeyPath
from funcollect.tree import flatten, to_tensordict

_ITEMS = "items.pt"
_TENSORDICT = "TensorDict of a dump"
_PLAIN = {Tensor, nn.Parameter, torch.Size, torch.dtype, torch.device}
_PLAIN |= {NoneType, bool, int, float, complex, str, bytes, bytearray}


class Incoming(NamedTuple):
    """A batch that matches the storage."""

    lead: tuple[int, ...]  # the batch dimensions, time last
    leaves: Mapping[KeyPath, Tensor]  # of a TensorDict or a tree
    content: Any  # further data for `write`


class Dumped(NamedTuple):
    """The frames of a dump in files."""

    directory: Path
    frames: Any  # the description that `Storage.dump` returned


def slots_at(held: Ints, index: Any) -> Ints:
    """The slots of `held` at an index; TypeError or IndexError for an index that does not fit."""
    parts = index if isinstance(index, tuple) else (index,)
    try:  # NumPy would take a tensor of one element for a number
        return np.asarray(held[tuple(part.numpy(force=True) if isinstance(part, Tensor) else part for part in parts)])
    except IndexError as error:
        what = f"index is {shown(index)}"
        for part in parts:
            if not isinstance(part, (slice, EllipsisType, NoneType)) and np.asarray(part).dtype.kind not in "iub":
                raise TypeError(f"{what}, expected ints, slices or a mask: give slots that extend returned") from error
        if not held.size:
            raise IndexError(f"{what}, the buffer is empty: extend it first") from error
        mend = "give ints below these sizes, slices, or a mask of this shape"
        raise IndexError(f"{what}, expected one into {list(held.shape)} frames: {mend}") from error


class Storage(Protocol):
    """The interface of storages for a `ReplayBuffer`, whose frame ``n`` is in slot ``n % max_size``."""

    max_size: int  # the capacity in frames
    ndim: int  # the number of batch dimensions, time last: 1 for [T], 2 for [P, T], 3 for [W, P, T]
    device: torch.device  # of samples
    compact_obs: bool  # whether equal observations and next observations are stored once
    frame_stack: int | None = None  # frames per stack, if each frame is stored once
    scratch_dir: Path | None = None  # of the file that other processes may read
    end: int = 0  # the number of the frame after the newest
    edits: int = 0  # grows whenever stored frames are overwritten
    linked: bool = False  # whether an index of trajectories depends on the frames
    lock: AbstractContextManager[Any] = nullcontext()  # the buffer's

    def recognized(self, data: Any) -> Incoming | None:
        """The result of `admit` without checks, if the batch has the form of the previous one; else None."""
        return None

    def admit(self, data: Any) -> Incoming:
        """Check a batch and prepare it for `write`; TypeError or ValueError if it does not match the storage."""

    def write(self, batch: Incoming, start: int) -> None:
        """Store the frames of a batch, or the last `max_size`, numbered from `start` on by time, then by lane.

        MemoryError or OSError if there is no room; the stored frames are unchanged then.
        """

    def read(self, slots: Ints, mask: Bools | None = None) -> Any:
        """A copy of the frames in `slots` [N] as a batch; zeros where `mask` [N] is False."""

    def copy(self) -> Storage:
        """A storage in memory with the same frames."""

    def dump(self, directory: Path, frames: range, earlier: Dumped | None = None) -> Any:
        """Write all frames to files, or link files of an `earlier` dump; return a description for JSON."""

    def load(self, frames: range, dumped: Dumped, allow_pickle: bool) -> None:
        """Read the frames with these numbers; ValueError for damaged files, or without a needed `allow_pickle`."""

    def empty(self) -> None:
        """Remove all frames; keys, shapes and dtypes are kept."""
        self.end = 0

    def at(self, slots: Ints) -> Any:
        """A copy of the frames in `slots` ``[*S]``, as a batch ``[*S]``."""
        batch = self.read(slots.reshape(-1))
        if slots.ndim == 1:
            return batch
        shaped = optree.tree_map(lambda x: x.reshape((*slots.shape, *x.shape[1:])), batch)
        if isinstance(shaped, TensorDictBase) and any(batch.names):
            shaped.names = [*[None] * slots.ndim, *batch.names[1:]]
        return shaped

    def put(self, slots: Ints, data: Any) -> None:
        """Overwrite the frames in `slots` ``[*S]`` by the batch `data` ``[*S]``; see `set`."""
        if self.linked:
            raise ValueError("the sampler follows the trajectories, so no frame can be overwritten: extend instead")
        if len(np.unique(slots)) < slots.size:
            raise ValueError(f"index is {shown(slots.reshape(-1).tolist())}, expected each slot once: leave others out")
        self.overwrite(slots, data)
        self.edits += 1

    def overwrite(self, slots: Ints, data: Any) -> None:
        """Overwrite frames for `put`, which has checked the slots."""

    def amend(self, slots: Ints, leaves: Mapping[KeyPath, Tensor]) -> None:
        """Overwrite leaves [N, ...] of the frames in `slots` [N], each once; see `ReplayBuffer.update`."""
        raise TypeError(f"{self} keeps objects, whose parts cannot be overwritten: assign whole ones to buffer[index]")

    def numbers(self, slots: Ints) -> Mapping[KeyPath, Tensor]:
        """The leaves with one number per frame in `slots` [N], on the host."""
        raise TypeError(f"{self} keeps objects, which have no columns: store TensorDicts in a LazyTensorStorage")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}  # the buffer's

    def __len__(self) -> int:
        return min(self.end, self.max_size)

    def __getitem__(self, index: Any) -> Any:
        """A copy of the frames in slots: an int, a slice, or an array, tensor or list of ints or bools."""
        with self.lock:
            return self.at(slots_at(np.arange(len(self)), index))

    get: Callable[..., Any] = __getitem__

    def __iter__(self) -> Iterator[Any]:
        return (self[slot] for slot in range(len(self)))

    def __setitem__(self, index: Any, data: Any) -> None:
        """Overwrite stored frames, whose slots are given as to ``storage[index]``; frames are added by a buffer.

        ValueError if trajectories are sampled, which the frames' places follow; if frames share memory (`compact_obs`,
        `frame_stack`) or other processes may read them (`scratch_dir`), and if the data do not match. IndexError for
        slots without a frame.
        """
        with self.lock:
            self.put(slots_at(np.arange(len(self)), index), data)

    set: Callable[..., None] = __setitem__


def check_size(max_size: Any) -> None:
    """Raise TypeError or ValueError unless `max_size` is a number of frames that a storage can hold."""
    check_positive("max_size", max_size, example=100_000)
    if max_size >= 2**31:
        raise ValueError(f"max_size is {max_size}, expected less than 2**31 frames: pass for example max_size=100000")


class ListStorage(Storage):
    """A list of objects of any kind. TensorDicts and sequences are split into items along their first dimension.

    Raises TypeError or ValueError unless `max_size`, the capacity in items, is a positive int.

    >>> from funcollect import ReplayBuffer
    >>> buffer = ReplayBuffer(storage=ListStorage(10))
    >>> buffer.extend(["a", "b"]), buffer[1]
    (tensor([0, 1]), 'b')
    """

    compact_obs = False

    @takes_foreign("storage")
    def __init__(self, max_size: int) -> None:
        check_size(max_size)
        self.max_size, self.ndim = int(max_size), 1
        self.device = torch.device("cpu")
        self._items: list[Any] = [None] * self.max_size
        self.collate: Callable[[list[Any]], Any] = _collate

    @override
    def admit(self, data: Any) -> Incoming:
        if not hasattr(data, "__len__") or isinstance(data, (str, bytes, dict)):
            raise TypeError(f"the data is {type(data).__name__}, expected a sequence of items: give a list of them")
        leaves = flatten(data) if self.linked and isinstance(data, TensorDictBase) else {}
        unbound = isinstance(data, (TensorDictBase, Tensor))
        return Incoming((len(data),), leaves, data.clone().unbind(0) if unbound else list(data))

    @override
    def write(self, batch: Incoming, start: int) -> None:
        for number, item in enumerate(batch.content, start):
            self._items[number % self.max_size] = item
        self.end = start + len(batch.content)

    @override
    def read(self, slots: Ints, mask: Bools | None = None) -> Any:
        if mask is not None and not mask.all():
            raise ValueError("a ListStorage cannot pad slices (pad_output, MultiStepSampler): use a LazyTensorStorage")
        if not len(slots):
            raise ValueError("no items are selected, expected at least one to collate: extend the buffer first")
        return self.collate([self._items[slot] for slot in slots])

    @override
    def at(self, slots: Ints) -> Any:
        return super().at(slots) if slots.ndim else self._items[int(slots)]  # an item as it is

    @override
    def overwrite(self, slots: Ints, data: Any) -> None:
        items = self.admit(data).content if slots.ndim else [data]
        if len(items) != slots.size:
            raise ValueError(f"{len(items)} items are given for {slots.size} slots: give one for each")
        for slot, item in zip(slots.reshape(-1).tolist(), items, strict=True):
            self._items[slot] = item

    @override
    def copy(self) -> ListStorage:
        twin = copy.copy(self)
        twin._items = list(self._items)
        return twin

    @override
    def dump(self, directory: Path, frames: range, earlier: Dumped | None = None) -> Any:
        torch.save([_as_dict(item) for item in self._items[: len(frames)]], directory / _ITEMS)
        return None

    def check_plain(self) -> None:
        """Raise TypeError for an item that `load` reads only with `allow_pickle`."""
        for slot, item in enumerate(self._items):
            for wrong in _not_plain(_as_dict(item)):
                what = f"item {slot} of the ListStorage holds {shown(wrong)} ({type(wrong).__name__})"
                wanted = "expected plain data and tensors, which are read without running code"
                raise TypeError(f"{what}, {wanted}: store such items, or write the buffer with its dumps instead")

    @override
    def load(self, frames: range, dumped: Dumped, allow_pickle: bool) -> None:
        path, count = dumped.directory / _ITEMS, len(frames)
        try:
            items = torch.load(path, weights_only=not allow_pickle)
        except pickle.UnpicklingError as error:
            what = f"{path} holds objects that are read by running code from the file"
            raise ValueError(f"{what}: if you trust it, load it with buffer.loads(…, allow_pickle=True)") from error
        if not isinstance(items, list) or len(items) != count:
            raise ValueError(f"{path} does not hold a list of {count} items: it was changed")
        for slot, item in enumerate(items):
            if isinstance(item, dict) and _TENSORDICT in item:
                items[slot] = to_tensordict(item[_TENSORDICT], item["shape"])
        self._items, self.end = items + [None] * (self.max_size - count), count

    @override
    def empty(self) -> None:
        super().empty()
        self._items = [None] * self.max_size

    def __repr__(self) -> str:
        return f"ListStorage(max_size={self.max_size})"


def _as_dict(item: Any) -> Any:
    """An item as it is saved: a TensorDict of tensors as a dict, which can be read without running code."""
    return {_TENSORDICT: flatten(item), "shape": tuple(item.batch_size)} if _of_tensors(item) else item


def _of_tensors(item: Any) -> bool:
    """Whether this is a TensorDict of tensors and single objects, also in nested ones; not a lazy stack."""
    leaves = (Tensor, NonTensorData)
    return type(item) is TensorDict and all(isinstance(leaf, leaves) or _of_tensors(leaf) for leaf in item.values())


def _not_plain(item: Any) -> Iterator[Any]:
    """Yield the parts of an item that `torch.load` refuses with ``weights_only=True``."""
    if type(item) in (list, tuple, set, dict, OrderedDict, Counter):
        for part in (*item, *item.values()) if isinstance(item, dict) else item:
            yield from _not_plain(part)
    elif type(item) not in _PLAIN:
        yield item


def _collate(items: list[Any]) -> Any:
    """Stack tensors, numbers and trees of them into a batch; items of other types stay a list."""
    try:
        if not isinstance(items[0], TensorDictBase):
            return default_collate(items)
        keys, size = {*items[0].keys(True, True)}, items[0].batch_size
        if all({*item.keys(True, True)} == keys and item.batch_size == size for item in items):
            stacked = LazyStackedTensorDict.maybe_dense_stack(items)  # lazily if leaves have different shapes
            return stacked if _of_tensors(stacked) else stacked.clone()  # a lazy stack has the items themselves
        return torch.stack(items)
    except (RuntimeError, KeyError) as error:
        what = f"the items cannot be stacked ({clipped(str(error))}), expected ones with the same keys and shapes"
        raise ValueError(f"{what}: build the buffer with a collate_fn=, such as list") from error
    except TypeError:
        return items
