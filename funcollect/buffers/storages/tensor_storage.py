"""Frames as packed rows in memory, and in the files of dumps."""

from __future__ import annotations

import copy
import math
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from funcollect.arguments import check_flags, check_positive, checked_device
from funcollect.buffers import Bools, Ints
from funcollect.buffers.storages.next_observations import NextObservations
from funcollect.buffers.storages.packed_rows import FrameLayout, RowLayout, leaves_of
from funcollect.buffers.storages.planes import FrameStacks, GrowingRows
from funcollect.buffers.storages.storage import Dumped, Incoming, Storage, check_size
from funcollect.files import read_arrays
from funcollect.interop.memory import memory_for
from funcollect.tree import Path as KeyPath

_ASIDE = "aside.npz"
_PARTS = 16  # a file of rows has at most this part of the capacity: it can be deleted only once all its frames are gone
_BYTES = 1 << 26  # and at most so many bytes of rows: a file is read and written as a whole


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
        self.layout: FrameLayout | None = None
        self._rows: Tensor | None = None
        self._next: NextObservations | None = None
        self._stacks: FrameStacks | None = None

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
            self._use(batch.content, *self._allocate(batch.content))
        leaves, count = batch.leaves, math.prod(batch.lead)
        first = max(count - self.max_size, 0)  # earlier frames would be overwritten by later ones of the same batch
        if self._stacks is not None:
            leaves = {**leaves, **self._stacks.add(leaves, self.ndim, first)}
        oldest = max(start + count - self.max_size, 0)
        self._announce(oldest, start)
        while first < count:
            slot = (start + first) % self.max_size
            fitting = min(count - first, self.max_size - slot)
            self._write(slot, leaves, first, fitting)
            first += fitting
        self._announce(oldest, start + count)

    def _announce(self, oldest: int, written: int) -> None:
        """Publish that exactly the frames ``oldest … written - 1`` are complete; before and after they are written."""

    def _write(self, start: int, leaves: Mapping[KeyPath, Tensor], first: int, count: int) -> None:
        """Write `count` frames, beginning with the frame `first` of a batch, to the slots from `start` on."""
        layout, rows = self._open()
        if self._next is not None:
            self._next.write(np.arange(start, start + count), leaves, self.ndim, first)
        target = rows[start : start + count]
        if self._stacks is not None:
            self._stacks.release(layout.rows, target)
        source = next(iter(leaves.values())).device
        if source == rows.device or rows.is_cpu:
            layout.rows.pack(target, leaves, self.ndim, first)
            return
        staged = torch.empty_like(target, device=source, pin_memory=source.type == "cpu")
        layout.rows.pack(staged, leaves, self.ndim, first)
        target.copy_(staged, non_blocking=True)

    def _allocate(self, layout: FrameLayout, existsok: bool = False) -> tuple[Tensor, FrameStacks | None]:
        """Memory for the rows [max_size, words] int64, and for planes; `existsok` allows to replace existing files."""
        if layout.stacks is None:
            with memory_for(lambda: f"a storage of {self.max_size:,} frames of {layout.rows.nbytes:,} bytes"):
                return torch.empty(self.max_size, layout.rows.words, dtype=torch.int64, device=self.device), None
        # No numbers of planes yet. NumPy's zeros take memory as they are written, unlike Torch's.
        rows = torch.from_numpy(np.zeros((self.max_size, layout.rows.words), np.int64))
        return rows, FrameStacks(layout.stacks, GrowingRows, self.max_size)

    def _use(self, layout: FrameLayout, rows: Tensor, stacks: FrameStacks | None) -> None:
        """Store frames in these rows from now on."""
        self.layout, self._rows, self._stacks = layout, rows, stacks
        self._next = None if layout.aside is None else NextObservations(layout.rows, layout.aside, rows, stacks)

    def _open(self) -> tuple[FrameLayout, Tensor]:
        if self.layout is None or self._rows is None:
            raise ValueError("the storage has no frames yet: extend it first")
        return self.layout, self._rows

    @override
    def settle(self, slots: Ints, following: Ints) -> None:
        if self._next is not None:
            self._next.settle(slots, following)

    @override
    def read(self, slots: Ints, mask: Bools | None = None, following: Ints | None = None) -> Any:
        layout, rows = self._open()
        if rows.is_cpu:
            gathered = layout.rows.gather(rows.numpy(), slots)
        else:
            gathered = rows.index_select(0, torch.from_numpy(slots).to(self.device))
        if mask is not None:
            gathered[torch.from_numpy(~mask).to(gathered.device)] = 0
        if gathered.device != self.device:
            gathered = gathered.pin_memory().to(self.device, non_blocking=True)
        batch = layout.rows.unpack(gathered) if self._stacks is None else self._stacks.unpack(layout.rows, gathered)
        if self._next is not None and following is not None:
            for path, leaf in self._next.read(slots, following, mask).items():
                batch.set(path, leaf)
        return batch

    @override
    def copy(self) -> LazyTensorStorage:
        options: dict[str, Any] = {"compact_obs": self.compact_obs, "frame_stack": self.frame_stack}
        twin = LazyTensorStorage(self.max_size, ndim=self.ndim, device=self.device, **options)
        twin.layout = self.layout
        # Together, since `_next` refers to the others.
        twin._rows, twin._stacks, twin._next = copy.deepcopy((self._rows, self._stacks, self._next))
        return twin

    @override
    def dump(self, directory: Path, frames: range, earlier: Dumped | None = None) -> Any:
        if self.layout is None or self._rows is None:
            return None
        header = self.layout.to_json()
        if self._next is not None:
            np.savez(directory / _ASIDE, allow_pickle=False, **self._next.state())
        files = SegmentFiles(directory, self.layout.rows, self._rows, self._stacks)
        return {**header, "segments": files.dump(frames, earlier)}

    @override
    def load(self, frames: range, dumped: Dumped, allow_pickle: bool) -> None:
        directory, header = dumped
        if header is not None:
            layout = FrameLayout.from_json(header)
            rows, stacks = self._allocate(layout, existsok=True)
            SegmentFiles(directory, layout.rows, rows, stacks).load(header["segments"])
            self._use(layout, rows, stacks)
            if self._next is not None:
                self._next.load(read_arrays(directory / _ASIDE))
        self._announce(frames.start, frames.stop)

    @property
    def nbytes(self) -> int:
        """The number of bytes allocated for frames."""
        return sum(part.nbytes for part in (self._rows, self._next, self._stacks) if part is not None)

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
    """A file with the frames ``start … stop - 1``, and the planes of their stacks; as a list in JSON."""

    start: int
    stop: int
    crc: int  # zlib's CRC-32 of its bytes
    planes: Sequence[int] = ()  # the number of planes after the rows, by pool

    @property
    def name(self) -> str:
        """The name of the file."""
        return f"rows-{self.start}.bin"


class SegmentFiles(NamedTuple):
    """The files in a directory for a ring, in which frame n is in row ``n % capacity``."""

    directory: Path
    layout: RowLayout
    rows: Tensor  # [capacity, words] int64
    stacks: FrameStacks | None

    def dump(self, frames: range, earlier: Dumped | None) -> list[Segment]:
        """Write `frames`, but link the files of an earlier dump that hold some of them."""
        linked, first, (capacity, words) = list[Segment](), frames.start, self.rows.shape
        if earlier is not None and earlier.frames:
            found = [Segment(*each) for each in earlier.frames["segments"]]
            linked = [segment for segment in found if segment.stop > first]
            for segment in linked:
                _link(earlier.directory / segment.name, self.directory / segment.name)
                first = segment.stop
        size = max(min(capacity // _PARTS, _BYTES // (words * 8)), 1)
        starts = range(first, frames.stop, size)
        return [*linked, *(self._write(start, min(start + size, frames.stop)) for start in starts)]

    def _write(self, start: int, stop: int) -> Segment:
        slots = np.arange(start, stop) % len(self.rows)
        first, crc = start % len(self.rows), 0
        last = first + stop - start  # beyond the end, rows go on from row 0
        rows = self.rows[first:last], self.rows[: max(last - len(self.rows), 0)]
        planes = [] if self.stacks is None else self.stacks.used(self.layout, self.rows, slots)
        with open(self.directory / f"rows-{start}.bin", "wb") as file:
            for array in (*(each.numpy(force=True) for each in rows), *planes):
                file.write(array.data)  # `tofile` would not report a full disk
                crc = zlib.crc32(array.data, crc)
        return Segment(start, stop, crc, [len(each) for each in planes])

    def load(self, segments: Sequence[Any]) -> None:
        """Read the frames of these files, oldest first; ValueError if the files were damaged.

        A file may begin with frames that the ring did not hold any more. Later ones take their places again.
        """
        for segment in (Segment(*each) for each in segments):
            rows, *planes = self._read(segment)
            slots = np.arange(segment.start, segment.stop) % len(self.rows)
            place = torch.from_numpy(slots)
            if self.stacks is not None:
                self.stacks.release(self.layout, self.rows[place])
            self.rows[place] = torch.from_numpy(rows).to(self.rows.device)
            if self.stacks is not None:
                self.stacks.renumber(self.layout, self.rows, slots, planes)

    def _read(self, segment: Segment) -> list[Ints]:
        """The rows of a segment, then its planes with their numbers, by pool."""
        path, pools = self.directory / segment.name, [] if self.stacks is None else self.stacks.pools
        words = [self.rows.shape[1], *(pool.layout.words + 1 for pool in pools)]
        try:
            data = np.fromfile(path, np.uint8)
            sizes = np.array([segment.stop - segment.start, *segment.planes]) * words
            *parts, rest = np.split(data.view(np.int64), sizes.cumsum())
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read ({error!r}): the dump is damaged") from error
        if zlib.crc32(data.data) != segment.crc or len(rest):
            raise ValueError(f"{path} has other bytes than were written: the dump is damaged")
        return [part.reshape(-1, width) for part, width in zip(parts, words, strict=True)]


def _link(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)  # left behind by an interrupted dump
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
