"""Frames as packed rows in memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from typing_extensions import override

from funcollect.arguments import check_flags, check_positive, checked_device
from funcollect.buffers.arrays import Bools, Ints
from funcollect.buffers.storages.frame_stacks import FrameStacks, numbers_leaf, plane_layouts, stack_paths
from funcollect.buffers.storages.next_observations import NextObservations, next_paths
from funcollect.buffers.storages.packed_rows import RowLayout, leaves_of
from funcollect.buffers.storages.plane_pool import PlaneMemory
from funcollect.buffers.storages.plane_records import records_of
from funcollect.buffers.storages.segment_files import link_segments, read_segments, write_segments
from funcollect.buffers.storages.storage import Dumped, Incoming, Storage, check_size, lead_of
from funcollect.files import read_arrays
from funcollect.interop.memory import memory_for
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
        frame_stack: the number of stacked frames in an observation, its first dimension. Each distinct frame is then
            stored once, for observations and next observations, in memory that grows if stacks share few frames.
            Samples have whole stacks. Only on the CPU.

    Raises:
        TypeError, ValueError: if `max_size`, `ndim` or `frame_stack` is below 1, or for `compact_obs` or `frame_stack`
            on another device.
        MemoryError: at the first batch, if there is no memory for `max_size` frames like its own.

    >>> import torch
    >>> from funcollect import LazyTensorStorage, ReplayBuffer
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    >>> indices = buffer.extend({"reward": torch.arange(3.0)})
    >>> buffer[1:]["reward"]
    tensor([1., 2.])
    >>> screens = torch.rand(103, 84, 84)
    >>> stacks = screens.unfold(0, 4, 1).movedim(-1, 1)  # [100, 4, 84, 84]
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(100, frame_stack=4))
    >>> indices = buffer.extend({"pixels": stacks})
    >>> torch.equal(buffer[:]["pixels"], stacks), f"{buffer.storage.nbytes / screens.nbytes:.1f}"
    (True, '1.1')
    """

    def __init__(
        self,
        max_size: int,
        *,
        ndim: int = 1,
        device: torch.device | str | None = None,
        compact_obs: bool = False,
        frame_stack: int | None = None,
    ) -> None:
        check_size(max_size)
        check_flags(compact_obs=compact_obs)
        if frame_stack is not None:
            check_positive("frame_stack", frame_stack, example=4)
        for name, given in {"compact_obs": compact_obs, "frame_stack": frame_stack}.items():
            if given and torch.device(device or "cpu").type != "cpu":
                raise ValueError(f"{name} is for storages on the host, device is {device}: leave one of them out")
        check_positive("ndim", ndim)
        self.max_size, self.ndim = int(max_size), int(ndim)
        self.device = checked_device(device) or torch.device("cpu")
        self.compact_obs, self.frame_stack = compact_obs, frame_stack
        self.layout: RowLayout | None = None
        self._rows: Tensor | None = None
        self._next: NextObservations | None = None
        self._stacks: FrameStacks | None = None

    @override
    def admit(self, data: Any) -> Incoming:
        leaves = leaves_of(data)
        lead = lead_of(data, leaves, self.ndim)
        stacks = self._stacks_of(leaves)
        content = leaves | {path: numbers_leaf(leaf, self.ndim) for path, leaf in stacks.items()}
        beside = dict[KeyPath, Tensor]()
        if self.compact_obs:
            aside = next_paths(leaves) if self._next is None else [column.path for column in self._next.aside.columns]
            beside = {path: content.pop(path) for path in aside if path in leaves}
            if self._next is not None:
                self._next.aside.check(beside, self.ndim)
        layout = RowLayout.of(data, self.ndim, content) if self.layout is None else self.layout
        layout.check(content, self.ndim)
        return Incoming(lead, leaves, content, layout, beside, stacks)

    def _stacks_of(self, leaves: Mapping[KeyPath, Tensor]) -> dict[KeyPath, Tensor]:
        """The leaves that are stacks; ValueError if they differ from those that are stored, or if there are none."""
        if self.frame_stack is None:
            return {}
        if self._stacks is None:
            return {path: leaves[path] for path in stack_paths(leaves, self.ndim, self.frame_stack)}
        layout = self._stacks.layout
        stacks = {column.path: leaves[column.path] for column in layout.columns if column.path in leaves}
        layout.check(stacks, self.ndim)
        return stacks

    @override
    def allocate(self, batch: Incoming) -> Incoming:
        if self.layout is None and batch.layout is not None:
            stacks, aside = (
                RowLayout.of(TensorDict({}), self.ndim, leaves) if leaves else None
                for leaves in (batch.stacks, batch.beside)
            )
            self._use(batch.layout, aside, *self._allocate(batch.layout, stacks))
        if self._stacks is None:
            return batch
        skipped = max(math.prod(batch.lead) - self.max_size, 0)
        numbers = self._stacks.add(batch.stacks, self.ndim, skipped)
        content, beside = (
            {path: numbers.get(path, leaf) for path, leaf in leaves.items()} for leaves in (batch.content, batch.beside)
        )
        return batch._replace(content=content, beside=beside)

    def _allocate(
        self, layout: RowLayout, stacks: RowLayout | None, existsok: bool = False
    ) -> tuple[Tensor, FrameStacks | None]:
        """Memory for the rows [max_size, words] int64, and for the planes of `stacks`.

        `existsok` allows a subclass to replace an existing file.
        """
        if stacks is None:
            with memory_for(lambda: f"a storage of {self.max_size:,} frames of {layout.nbytes:,} bytes"):
                return torch.empty(self.max_size, layout.words, dtype=torch.int64, device=self.device), None
        memories = [PlaneMemory(plane.words) for plane, _ in plane_layouts(stacks)]
        # No numbers of planes yet. NumPy's zeros take memory as they are written, unlike Torch's.
        rows = torch.from_numpy(np.zeros((self.max_size, layout.words), np.int64))
        return rows, FrameStacks(stacks, memories, self.max_size)

    def _use(self, layout: RowLayout, aside: RowLayout | None, rows: Tensor, stacks: FrameStacks | None) -> None:
        """Store frames in these rows from now on."""
        self.layout, self._rows, self._stacks = layout, rows, stacks
        self._next = None if aside is None else NextObservations(layout, aside, rows, stacks)

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
        if self._stacks is not None:
            self._stacks.release(layout, target)
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
        batch = layout.unpack(gathered) if self._stacks is None else self._stacks.unpack(layout, gathered)
        if self._next is not None and following is not None:
            for path, leaf in self._next.read(slots, following, mask).items():
                batch.set(path, leaf)
        return batch

    @override
    def copy(self) -> LazyTensorStorage:
        twin = LazyTensorStorage(
            self.max_size,
            ndim=self.ndim,
            device=self.device,
            compact_obs=self.compact_obs,
            frame_stack=self.frame_stack,
        )
        twin.layout = self.layout
        # Together, since `_next` refers to the others.
        twin._rows, twin._stacks, twin._next = copy.deepcopy((self._rows, self._stacks, self._next))
        return twin

    @override
    def dump(self, directory: Path, frames: range, earlier: Dumped | None = None) -> Any:
        if self.layout is None or self._rows is None:
            return None
        header: dict[str, Any] = {"rows": self.layout.to_json()}
        if self._next is not None:
            header["aside"] = self._next.aside.to_json()
            np.savez(directory / _ASIDE, allow_pickle=False, **self._next.state())
        if self._stacks is not None:
            header["stacks"] = self._stacks.layout.to_json()
        linked = link_segments(directory, frames, earlier) if earlier is not None and earlier.frames else []
        start = linked[-1].stop if linked else frames.start
        written = write_segments(
            directory, self._rows, range(start, frames.stop), records_of(self._stacks, self.layout, self._rows)
        )
        return {**header, "segments": [*linked, *written]}

    @override
    def load(self, frames: range, dumped: Dumped, allow_pickle: bool) -> None:
        directory, header = dumped
        if header is None:
            return
        layout, stacks, aside = (
            RowLayout.from_json(header[name]) if name in header else None for name in ("rows", "stacks", "aside")
        )
        assert layout is not None
        rows, shared = self._allocate(layout, stacks, existsok=True)
        read_segments(directory, rows, frames, header["segments"], records_of(shared, layout, rows))
        self._use(layout, aside, rows, shared)
        if self._next is not None:
            self._next.load(read_arrays(directory / _ASIDE))

    @property
    def nbytes(self) -> int:
        """The number of bytes allocated for frames."""
        return sum(part.nbytes for part in (self._rows, self._next, self._stacks) if part is not None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_size={self.max_size}, ndim={self.ndim}, device={self.device})"
