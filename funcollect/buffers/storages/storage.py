"""The interface of storages, and a storage of any objects."""

from __future__ import annotations

import copy
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.utils.data import default_collate
from typing_extensions import override

from funcollect.arguments import check_positive
from funcollect.buffers import Bools, Ints
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
    content: Any  # what else `write` needs


class Dumped(NamedTuple):
    """The frames of a dump in files."""

    directory: Path
    frames: Any  # the description that `Storage.dump` returned


class Storage(Protocol):
    """The interface of storages for a `ReplayBuffer`, whose frame ``n`` is in slot ``n % max_size``."""

    max_size: int  # the capacity in frames
    ndim: int  # the number of batch dimensions, time last: 1 for [T], 2 for [P, T], 3 for [W, P, T]
    device: torch.device  # of samples
    compact_obs: bool  # whether equal observations and next observations are stored once
    frame_stack: int | None = None  # frames per stack, where each frame is stored once

    def recognized(self, data: Any) -> Incoming | None:
        """What `admit` would return, if the batch has the form of the one before, which is admitted already."""
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
        return


def check_size(max_size: Any) -> None:
    """Raise unless `max_size` is a number of frames that a storage can hold."""
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

    def __init__(self, max_size: int) -> None:
        check_size(max_size)
        self.max_size, self.ndim = int(max_size), 1
        self.device = torch.device("cpu")
        self._items: list[Any] = [None] * self.max_size
        self.collate: Callable[[list[Any]], Any] = _collate

    @override
    def admit(self, data: Any) -> Incoming:
        if not hasattr(data, "__len__"):
            raise TypeError(f"the data is {type(data).__name__}, expected a sequence of items: give a list of them")
        tensors, leaves = isinstance(data, (TensorDictBase, Tensor)), dict[KeyPath, Tensor]()
        if isinstance(data, TensorDictBase):
            leaves = {key if isinstance(key, tuple) else (key,): leaf for key, leaf in data.items(True, True)}
        return Incoming((len(data),), leaves, data.clone().unbind(0) if tensors else list(data))

    @override
    def write(self, batch: Incoming, start: int) -> None:
        for number, item in enumerate(batch.content, start):
            self._items[number % self.max_size] = item

    @override
    def read(self, slots: Ints, mask: Bools | None = None) -> Any:
        if mask is not None and not mask.all():
            what = "a ListStorage cannot pad slices, as pad_output=True and a MultiStepSampler do"
            raise ValueError(f"{what}: leave pad_output out, or use a LazyTensorStorage")
        if not len(slots):
            raise ValueError("no items are selected, expected at least one to collate: extend the buffer first")
        return self.collate([self._items[slot] for slot in slots])

    def item(self, slot: int) -> Any:
        """One item, unchanged."""
        return self._items[slot]

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
                raise TypeError(
                    f"item {slot} of the ListStorage holds {shown(wrong)} ({type(wrong).__name__}), expected tensors, "
                    "numbers, strings, lists, tuples and dicts of these, or a TensorDict of tensors, which are read "
                    "without running code: store such items, or write the buffer with its dumps instead"
                )

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
        self._items = items + [None] * (self.max_size - count)

    @override
    def empty(self) -> None:
        self._items = [None] * self.max_size

    def __repr__(self) -> str:
        return f"ListStorage(max_size={self.max_size})"


def _as_dict(item: Any) -> Any:
    """An item as it is saved: a TensorDict of tensors as a dict, which is read without running code."""
    if not isinstance(item, TensorDictBase) or not all(isinstance(leaf, Tensor) for leaf in item.values(True, True)):
        return item
    return {_TENSORDICT: flatten(item), "shape": tuple(item.batch_size)}


def _not_plain(item: Any) -> Iterator[Any]:
    """The parts of an item that `torch.load` does not read with ``weights_only=True``."""
    if type(item) in (list, tuple, set, dict, OrderedDict, Counter):
        for part in (*item, *item.values()) if isinstance(item, dict) else item:
            yield from _not_plain(part)
    elif type(item) not in _PLAIN:
        yield item


def _collate(items: list[Any]) -> Any:
    """Stack tensors, numbers and trees of them into a batch; items of other types stay a list."""
    try:
        return torch.stack(items) if isinstance(items[0], TensorDictBase) else default_collate(items)
    except (RuntimeError, KeyError) as error:
        what = f"the items cannot be stacked ({clipped(str(error))}), expected ones with the same keys and shapes"
        raise ValueError(f"{what}: build the buffer with a collate_fn=, such as list") from error
    except TypeError:
        return items
