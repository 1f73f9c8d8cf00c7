"""Frames as packed rows in memory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import override

from funcollect.arguments import check_flags, check_positive, checked_device
from funcollect.buffers.arrays import Bools, Ints
from funcollect.buffers.storages.next_observations import NextObservations, next_paths
from funcollect.buffers.storages.packed_rows import RowLayout, leaves_of
from funcollect.buffers.storages.segment_files import link_segments, read_segments, write_segments
from funcollect.buffers.storages.storage import Dumped, Incoming, Storage, check_size
from funcollect.files import read_arrays
from funcollect.tree import Path as KeyPath

_ASIDE = "aside.npz"


class LazyTensorStorage(Storage):
    """Frames as packed rows in memory. The first batch fixes keys, shapes and dtypes, and memory is allocated then.

    Args:
        max_size: the capacity in frames.
        ndim: the number of batch dimensions, time last.
        device: the device of rows and samples; by default the CPU.
        compact_obs: store each observation once. The next observation of a frame is then read from its successor. It is
            stored only if the successor is missing or differs, in memory that has room for those of the largest batch.
            Samples have both observations in any case. Only on the CPU.

    Raises:
        TypeError, ValueError: if `max_size` or `ndim` is below 1, or for `compact_obs` on another device.

    >>> import torch
    >>> from funcollect import LazyTensorStorage, ReplayBuffer
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    >>> indices = buffer.extend({"reward": torch.arange(3.0)})
    >>> buffer[1:]["reward"]
    tensor([1., 2.])
    """

    def __init__(
        self, max_size: int, *, ndim: int = 1, device: torch.device | str | None = None, compact_obs: bool = False
    ) -> None:
        check_size(max_size)
        check_flags(compact_obs=compact_obs)
        if compact_obs and torch.device(device or "cpu").type != "cpu":
            raise ValueError(f"compact_obs is for storages on the host, device is {device}: leave one of them out")
        check_positive("ndim", ndim)
        self.max_size, self.ndim = int(max_size), int(ndim)
        self.device = checked_device(device) or torch.device("cpu")
        self.compact_obs = compact_obs
        self.layout: RowLayout | None = None
        self._rows: Tensor | None = None
        self._next: NextObservations | None = None

    @override
    def admit(self, data: Any) -> Incoming:
        leaves = leaves_of(data)
        lead = _lead(data, leaves, self.ndim)
        content, beside = leaves, dict[KeyPath, Tensor]()
        if self.compact_obs:
            aside = next_paths(leaves) if self._next is None else [column.path for column in self._next.aside.columns]
            beside = {path: leaves[path] for path in aside if path in leaves}
            content = {path: leaf for path, leaf in leaves.items() if path not in beside}
            if self._next is not None:
                self._next.aside.check(beside, self.ndim)
        layout = RowLayout.of(data, self.ndim, content) if self.layout is None else self.layout
        layout.check(content, self.ndim)
        return Incoming(lead, leaves, content, layout, beside)

    @override
    def allocate(self, batch: Incoming) -> None:
        if self.layout is None and batch.layout is not None:
            self._rows = self._allocate(batch.layout)
            self.layout = batch.layout
            if self.compact_obs:
                aside = RowLayout.of(TensorDict({}), self.ndim, batch.beside)
                self._next = NextObservations(self.layout, aside, self._rows)

    def _allocate(self, layout: RowLayout, existsok: bool = False) -> Tensor:
        """Memory for the rows [max_size, words] int64; `existsok` allows a subclass to replace an existing file."""
        return torch.empty(self.max_size, layout.words, dtype=torch.int64, device=self.device)

    def _open(self) -> tuple[RowLayout, Tensor]:
        """The layout, and the rows [max_size, words] int64; ValueError before the first batch."""
        if self.layout is None or self._rows is None:
            raise ValueError("the storage has no frames yet: extend it first")
        return self.layout, self._rows

    @override
    def write(self, start: int, batch: Incoming, first: int, count: int) -> None:
        layout, rows = self._open()
        if self._next is not None:
            self._next.write(np.arange(start, start + count), batch.beside, self.ndim, first)
        target = rows[start : start + count]
        source = next(iter(batch.content.values())).device
        if source == rows.device or rows.is_cpu:
            layout.pack(target, batch.content, self.ndim, first)
            return
        staged = torch.empty_like(target, device=source, pin_memory=source.type == "cpu")
        layout.pack(staged, batch.content, self.ndim, first)
        target.copy_(staged, non_blocking=True)

    @override
    def settle(self, slots: Ints, following: Ints) -> None:
        if self._next is not None:
            self._next.settle(slots, following)

    @override
    def read(self, slots: Ints, mask: Bools | None = None, following: Ints | None = None) -> Any:
        layout, rows = self._open()
        if rows.is_cpu:
            gathered = layout.gather(rows.numpy(), slots)
        else:
            gathered = rows.index_select(0, torch.from_numpy(slots).to(self.device))
        if mask is not None:
            gathered[torch.from_numpy(~mask).to(gathered.device)] = 0
        if gathered.device != self.device:
            gathered = gathered.pin_memory().to(self.device, non_blocking=True)
        batch = layout.unpack(gathered)
        if self._next is not None and following is not None:
            for path, leaf in self._next.read(slots, following, mask).items():
                batch.set(path, leaf)
        return batch

    @override
    def copy(self) -> LazyTensorStorage:
        twin = LazyTensorStorage(self.max_size, ndim=self.ndim, device=self.device, compact_obs=self.compact_obs)
        twin.layout = self.layout
        twin._rows, twin._next = copy.deepcopy((self._rows, self._next))  # together, since `_next` refers to the rows
        return twin

    @override
    def dump(self, directory: Path, frames: range, earlier: Dumped | None = None) -> Any:
        if self.layout is None or self._rows is None:
            return None
        header: dict[str, Any] = {"rows": self.layout.to_json()}
        if self._next is not None:
            header["aside"] = self._next.aside.to_json()
            np.savez(directory / _ASIDE, allow_pickle=False, **self._next.state())
        linked = link_segments(directory, frames, earlier) if earlier is not None and earlier.frames else []
        start = linked[-1].stop if linked else frames.start
        written = write_segments(directory, self._rows, range(start, frames.stop))
        return {**header, "segments": [*linked, *written]}

    @override
    def load(self, frames: range, dumped: Dumped, allow_pickle: bool) -> None:
        directory, header = dumped
        if header is None:
            return
        layout = RowLayout.from_json(header["rows"])
        rows = self._allocate(layout, existsok=True)
        read_segments(directory, rows, frames, header["segments"])
        self._rows, self.layout = rows, layout
        if "aside" in header:
            self._next = NextObservations(layout, RowLayout.from_json(header["aside"]), rows)
            self._next.load(read_arrays(directory / _ASIDE))

    @property
    def nbytes(self) -> int:
        """The number of bytes allocated for frames."""
        aside = 0 if self._next is None else self._next.nbytes
        return aside + (0 if self._rows is None else self._rows.nbytes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_size={self.max_size}, ndim={self.ndim}, device={self.device})"


def _lead(data: Any, leaves: Any, ndim: int) -> tuple[int, ...]:
    """The sizes of the first `ndim` dimensions; ValueError unless all leaves share as many."""
    if not leaves:
        raise ValueError("the batch has no leaves, expected at least one tensor: nothing would be stored")
    if isinstance(data, TensorDictBase):
        shape = tuple(data.batch_size)
    else:
        shapes = {tuple(leaf.shape[:ndim]) for leaf in leaves.values()}
        shape = shapes.pop() if len(shapes) == 1 else ()
    if len(shape) < ndim:
        mend = "stack single frames, or give them to add"
        if shape:
            mend = f"build it with ndim={len(shape)}, or reshape the batch"
        raise ValueError(
            f"the batch has batch dimensions {list(shape)}, the storage takes {ndim} (ndim={ndim}), time last: {mend}"
        )
    return shape[:ndim]
