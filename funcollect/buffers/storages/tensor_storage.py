"""Frames as packed rows in memory, and in the files of dumps."""

from __future__ import annotations

import copy
import math
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from funcollect.arguments import check_flags, check_positive, checked_device
from funcollect.buffers import Bools, Ints
from funcollect.buffers.storages.packed_rows import FrameLayout, leaves_of
from funcollect.buffers.storages.shared_leaves import GrowingRows, SharedLeaves
from funcollect.buffers.storages.storage import Dumped, Incoming, Storage, check_size
from funcollect.interop.memory import memory_for
from funcollect.tree import Path as KeyPath

_ROWS = "rows-{}.bin"  # the names of files, by the numbers of their first frames
_PARTS = 16  # a file of rows has at most this part of the capacity: it can be deleted only once all its frames are gone
_BYTES = 1 << 26  # and at most so many bytes of rows: a file is read and written as a whole


class LazyTensorStorage(Storage):
    """Frames as packed rows in memory. The first batch fixes keys, shapes and dtypes, and memory is allocated then.

    Samples are the same with and without `compact_obs` and `frame_stack`, which only work on the CPU. What they store
    once is in memory that has room for one such part per frame at first, and grows if frames share less.

    Args:
        max_size: the capacity in frames.
        ndim: the number of batch dimensions, time last.
        device: the device of rows and samples; by default the CPU.
        compact_obs: store equal observations and next observations of at least 64 bytes once.
        frame_stack: the number of stacked frames in an observation, its first dimension. Each distinct frame is then
            stored once, for observations and next observations.

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
        self.layout: FrameLayout | None = None
        self._rows: Tensor | None = None
        self._shared: SharedLeaves | None = None

    @override
    def admit(self, data: Any) -> Incoming:
        leaves = leaves_of(data)
        lead = _lead_of(data, leaves, self.ndim)
        layout = self.layout or FrameLayout.of(data, leaves, self.ndim, self.compact_obs, self.frame_stack)
        layout.batch.check(leaves, self.ndim)
        return Incoming(lead, leaves, layout)

    @override
    def write(self, batch: Incoming, start: int) -> None:
        if self.layout is None:
            self.layout, (self._rows, self._shared) = batch.content, self._allocate(batch.content)
        layout, rows, shared = self._open()
        count = math.prod(batch.lead)
        first = max(count - self.max_size, 0)  # earlier frames would be overwritten by later ones of the same batch
        leaves = shared.add(batch.leaves, self.ndim, first)
        oldest = max(start + count - self.max_size, 0)
        self._announce(oldest, start)
        while first < count:
            slot = (start + first) % self.max_size
            fitting = min(count - first, self.max_size - slot)
            target = rows[slot : slot + fitting]
            shared.release(target)
            layout.rows.pack(target, leaves, self.ndim, first)
            first += fitting
        self._announce(oldest, start + count)

    def _announce(self, oldest: int, written: int) -> None:
        """Publish that exactly the frames ``oldest … written - 1`` are complete; before and after they are written."""

    def _allocate(self, layout: FrameLayout, existsok: bool = False) -> tuple[Tensor, SharedLeaves]:
        """Memory for the rows [max_size, words] int64, and for planes; `existsok` allows to replace existing files."""
        with memory_for(lambda: f"a storage of {self.max_size:,} frames of {layout.rows.nbytes:,} bytes"):
            if layout.planes:  # no numbers of planes yet; NumPy's zeros take memory as they are written, unlike Torch's
                rows = torch.from_numpy(np.zeros((self.max_size, layout.rows.words), np.int64))
            else:
                rows = torch.empty(self.max_size, layout.rows.words, dtype=torch.int64, device=self.device)
        return rows, SharedLeaves(layout, repeat(GrowingRows), self.max_size)

    def _open(self) -> tuple[FrameLayout, Tensor, SharedLeaves]:
        if self.layout is None or self._rows is None or self._shared is None:
            raise ValueError("the storage has no frames yet: extend it first")
        return self.layout, self._rows, self._shared

    @override
    def read(self, slots: Ints, mask: Bools | None = None) -> Any:
        layout, rows, shared = self._open()
        if rows.is_cpu:
            gathered = layout.rows.gather(rows.numpy(), slots)
        else:
            gathered = rows.index_select(0, torch.from_numpy(slots).to(self.device))
        if mask is not None:
            gathered[torch.from_numpy(~mask).to(gathered.device)] = 0
        if gathered.device != self.device:
            gathered = gathered.pin_memory().to(self.device, non_blocking=True)
        return shared.unpack(gathered)

    @override
    def copy(self) -> LazyTensorStorage:
        options: dict[str, Any] = {"compact_obs": self.compact_obs, "frame_stack": self.frame_stack}
        twin = LazyTensorStorage(self.max_size, ndim=self.ndim, device=self.device, **options)
        twin.layout, twin._rows, twin._shared = self.layout, copy.deepcopy(self._rows), copy.deepcopy(self._shared)
        return twin

    @override
    def dump(self, directory: Path, frames: range, earlier: Dumped | None = None) -> Any:
        if self.layout is None:
            return None
        layout, rows, shared = self._open()
        return {**layout.to_json(), "segments": SegmentFiles(directory, rows, shared).dump(frames, earlier)}

    @override
    def load(self, frames: range, dumped: Dumped, allow_pickle: bool) -> None:
        directory, header = dumped
        if header is not None:
            layout = FrameLayout.from_json(header)
            rows, shared = self._allocate(layout, existsok=True)
            SegmentFiles(directory, rows, shared).load(header["segments"])
            self.layout, self._rows, self._shared = layout, rows, shared
        self._announce(frames.start, frames.stop)

    @property
    def nbytes(self) -> int:
        """The number of bytes allocated for frames."""
        return sum(part.nbytes for part in (self._rows, self._shared) if part is not None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_size={self.max_size}, ndim={self.ndim}, device={self.device})"


def _lead_of(data: Any, leaves: Mapping[KeyPath, Tensor], ndim: int) -> tuple[int, ...]:
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
            mend = f"build it with ndim={len(shape)}, make the environments with num_envs, or reshape the batch"
        raise ValueError(
            f"the batch has batch dimensions {list(shape)}, the storage takes {ndim} (ndim={ndim}), time last: {mend}"
        )
    ids = leaves.get(("collector", "traj_ids"))
    if ndim > 1 and ids is not None and ids.ndim > ndim:
        raise ValueError(
            f"the batch has a frame for each of {list(ids.shape)}, the storage takes {ndim} dimensions (ndim={ndim}): "
            f"build it with ndim={ids.ndim}, or flatten the first ones, as cat_results=0 of a collector does"
        )
    return shape[:ndim]


class Segment(NamedTuple):
    """A file with the frames ``start … stop - 1``, and the planes of their shared leaves; as a list in JSON."""

    start: int
    stop: int
    crc: int  # zlib's CRC-32 of its bytes
    planes: Sequence[int] = ()  # the number of planes after the rows, by pool


class SegmentFiles(NamedTuple):
    """The files in a directory for a ring, in which frame n is in row ``n % capacity``."""

    directory: Path
    rows: Tensor  # [capacity, words] int64
    shared: SharedLeaves

    def dump(self, frames: range, earlier: Dumped | None) -> list[Segment]:
        """Write `frames`, but link the files of an earlier dump that hold some of them."""
        linked, first, (capacity, words) = list[Segment](), frames.start, self.rows.shape
        if earlier is not None and earlier.frames:
            found = [Segment(*each) for each in earlier.frames["segments"]]
            linked = [segment for segment in found if segment.stop > first]
            for segment in linked:
                source, target = (each / _ROWS.format(segment.start) for each in (earlier.directory, self.directory))
                target.unlink(missing_ok=True)  # left behind by an interrupted dump
                try:
                    os.link(source, target)
                except OSError:  # another file system, or one without links
                    shutil.copyfile(source, target)
                first = segment.stop
        size = max(min(capacity // _PARTS, _BYTES // (words * 8)), 1)
        starts = range(first, frames.stop, size)
        return [*linked, *(self._write(start, min(start + size, frames.stop)) for start in starts)]

    def _write(self, start: int, stop: int) -> Segment:
        slots = np.arange(start, stop) % len(self.rows)
        first, crc = start % len(self.rows), 0
        last = first + stop - start  # beyond the end, rows go on from row 0
        rows = self.rows[first:last], self.rows[: max(last - len(self.rows), 0)]
        planes = self.shared.used(self.rows, slots)
        with open(self.directory / _ROWS.format(start), "wb") as file:
            for array in (*(each.numpy(force=True) for each in rows), *planes):
                file.write(array.data)  # `tofile` would not report a full disk
                crc = zlib.crc32(array.data, crc)
        return Segment(start, stop, crc, [len(each) for each in planes])

    def load(self, segments: Sequence[Any]) -> None:
        """Read the frames of these files, oldest first: later ones overwrite those that the ring had lost already."""
        for segment in (Segment(*each) for each in segments):
            rows, *planes = self._read(segment)
            slots = np.arange(segment.start, segment.stop) % len(self.rows)
            self.shared.release(self.rows, slots)
            self.rows[torch.from_numpy(slots)] = torch.from_numpy(rows).to(self.rows.device)
            self.shared.renumber(self.rows, slots, planes)

    def _read(self, segment: Segment) -> list[Ints]:
        """The rows of a segment, then its planes with their numbers, by pool."""
        path = self.directory / _ROWS.format(segment.start)
        words = [self.rows.shape[1], *(pool.layout.words + 1 for pool in self.shared.pools)]
        try:
            data = np.fromfile(path, np.uint8)
            sizes = np.array([segment.stop - segment.start, *segment.planes]) * words
            *parts, rest = np.split(data.view(np.int64), sizes.cumsum())
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read ({error!r}): the dump is damaged") from error
        if zlib.crc32(data.data) != segment.crc or len(rest):
            raise ValueError(f"{path} has other bytes than were written: the dump is damaged")
        return [part.reshape(-1, width) for part, width in zip(parts, words, strict=True)]
