"""Stores equal parts of observations once: instead of a leaf, a row has the numbers of the leaf's planes.

A plane is an observation, which is also the next one of the frame before it, or one of the k frames of a stack, which
is in k stacks. No order of frames is assumed, since planes are compared.
"""

from __future__ import annotations

import mmap
import os
import shutil
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

from funcollect.buffers import Ints
from funcollect.buffers.storages.packed_rows import PackedLeaf, Records, RowLayout, ViewedRows, gather, time_major
from funcollect.buffers.storages.storage import Dumped
from funcollect.files import allocate
from funcollect.tree import Path as KeyPath

PLANES = "planes-{}.bin"  # the names of the files of a storage
_ROWS = "rows-{}.bin"  # the names of those of a dump, by the numbers of their first frames
_PARTS = 16  # a file has at most this part of the capacity: it can be deleted only once all its frames are gone
_BYTES = 1 << 26  # and at most so many bytes of rows: it is read and written as a whole
_WORD = 8  # bytes
_AT_ONCE, _BYTES_AT_ONCE = 64, 1 << 17  # frames, or bytes of a leaf if those are more, that are added together
_SPARE = 64  # room for one plane more per this number of frames: each episode has one more plane than frames
_PLANE = ("plane",)

_Hashes = npt.NDArray[np.uint64]
_Numbers = npt.NDArray[np.int32] | Ints  # of planes, as stored in rows, or as indices


@contextmanager
def room_for(message: str) -> Iterator[None]:
    """Raise an OSError that begins with this message if the disk has no room for the data written in the block."""
    try:
        yield
    except OSError as error:
        reason = f"({os.strerror(error.errno or 0)}): give a smaller max_size, or another scratch_dir"
        raise OSError(error.errno, f"{message} {reason}") from error


class HeldRows:
    """Rows in memory."""

    def __init__(self, words: int) -> None:
        self._rows: Ints = np.empty((0, words), np.int64)

    @property
    def rows(self) -> Ints:
        """All rows [count, words] int64; a view is valid until `grow`."""
        return self._rows

    def grow(self, count: int) -> None:
        """Make room for `count` rows; OSError or MemoryError if there is none."""
        if len(self._rows):
            self._rows.resize((count, self._rows.shape[1]), refcheck=False)  # Linux moves large arrays without a copy
        else:
            self._rows = np.empty((count, self._rows.shape[1]), np.int64)  # memory is taken as it is written


class RowsInFile(HeldRows):
    """Rows in a new file, or for reading in one that another process fills. A copy is in memory."""

    def __init__(self, path: Path, words: int, *, reading: bool = False) -> None:
        super().__init__(words)
        self._access = mmap.ACCESS_READ if reading else mmap.ACCESS_WRITE
        flags = os.O_RDONLY if reading else os.O_RDWR | os.O_CREAT | os.O_EXCL
        self._file = os.open(path, flags | os.O_CLOEXEC, 0o666)  # kept open: it may grow, also after it was replaced
        weakref.finalize(self, os.close, self._file)

    @property
    @override
    def rows(self) -> Ints:
        held, words = self._rows.shape
        count = os.fstat(self._file).st_size // (words * _WORD)
        if count > held:
            mapped = mmap.mmap(self._file, count * words * _WORD, access=self._access)
            self._rows = np.frombuffer(mapped, np.int64).reshape(count, words)
        return self._rows

    @override
    def grow(self, count: int) -> None:
        size = self._rows.shape[1] * _WORD
        with room_for(f"there is no room for {count} distinct frames of {size} bytes"):
            allocate(self._file, count * size)

    def __deepcopy__(self, memo: dict[int, object]) -> HeldRows:
        twin = HeldRows(self._rows.shape[1])
        twin._rows = self.rows.copy()
        return twin


class PlanePool:
    """Planes by number. Equal ones are stored once, for as long as rows refer to them. Plane 0 is all zeros, and stays.

    A plane is found by a hash of its bytes, and then compared. `count` planes have room at first; 0 is for reading.
    """

    def __init__(self, layout: RowLayout, memory: HeldRows, count: int) -> None:
        self.layout, self.memory = layout, memory
        self._factors: _Hashes = np.random.default_rng(0).integers(2**63, size=layout.words, dtype=np.uint64) * 2 + 1
        self._hashes: _Hashes = np.zeros(0, np.uint64)  # by number
        self._uses = np.zeros(0, np.int64)  # by number: how often stored frames contain it
        self._recent = np.zeros(0, np.int64)  # by the first bits of a hash: the newest plane with them
        self._free = np.zeros(0, np.int64)  # the numbers of planes that are no longer used
        self._end = 1  # numbers from here on have never been used
        if count:
            self._grow(count)
            self.memory.rows[0] = 0
            self._uses[0] = 1

    def add(self, planes: Ints) -> Ints:
        """The numbers [N] of `planes` [N, words], which are stored if they are new; each counts as one use."""
        hashes = self._hash(planes)
        distinct, first, group = np.unique(hashes, return_index=True, return_inverse=True)
        if not (planes == planes.take(first[group], axis=0)).all():  # hashes collide: add one by one
            return np.concatenate([self.add(plane[None]) for plane in planes])
        found = self._recent.take(self._place(distinct))
        known = (self._hashes.take(found) == distinct) & (self._uses.take(found) > 0)
        # A plane is not found if a later one has its place in `_recent`, and is then stored twice.
        known[known] = (self.memory.rows.take(found[known], axis=0) == planes.take(first[known], axis=0)).all(axis=1)
        fresh = first[~known]
        taken = self._take(len(fresh))
        self.memory.rows[taken], self._hashes[taken] = planes[fresh], hashes[fresh]
        self._recent[self._place(hashes[fresh])] = found[~known] = taken
        numbers = found[group]
        np.add.at(self._uses, numbers, 1)
        return numbers

    def release(self, numbers: _Numbers) -> None:
        """Count uses that have ended, and free planes without any."""
        numbers = numbers[numbers > 0]
        np.subtract.at(self._uses, numbers, 1)
        self._free = np.concatenate([self._free, np.unique(numbers[self._uses[numbers] == 0])])

    def _take(self, count: int) -> Ints:  # numbers for so many new planes
        cut = max(len(self._free) - count, 0)
        end = self._end + count - (len(self._free) - cut)
        if end > len(self._uses):
            self._grow(max(end, len(self._uses) * 17 // 16))
        taken = np.concatenate([self._free[cut:], np.arange(self._end, end)])
        self._free, self._end = self._free[:cut], end
        return taken

    def _hash(self, planes: Ints) -> _Hashes:
        # The first bits of a hash depend on all bits of a plane.
        sums: _Hashes = np.einsum("ij,j->i", planes.view(np.uint64), self._factors)
        mixed: _Hashes = (sums ^ (sums >> np.uint64(32))) * self._factors[0]
        return mixed

    def _place(self, hashes: _Hashes) -> Ints:
        """The places of hashes in `_recent`, whose length is a power of two."""
        return (hashes >> np.uint64(65 - len(self._recent).bit_length())).astype(np.int64)

    def _grow(self, count: int) -> None:  # to room for so many planes
        self.memory.grow(count)
        for name in ("_hashes", "_uses"):  # `_uses` last, since its length is the room: memory may run out
            table = getattr(self, name)
            setattr(self, name, np.concatenate([table, np.zeros(count - len(table), table.dtype)]))
        size = 1 << (2 * count - 1).bit_length()
        if size > len(self._recent):
            self._recent = np.zeros(size, np.int64)
            used = np.flatnonzero(self._uses)
            self._recent[self._place(self._hashes[used])] = used


class SharedLeaves:
    """The planes of shared leaves: methods take `rows` [N, words] of this layout of frames.

    They are in memory, or in a file for each kind of leaf: a new one with room for `max_size` frames at first, or one
    to read, if that is 0.
    """

    def __init__(self, layout: RowLayout, files: Sequence[Path] = (), max_size: int = 0) -> None:
        self._layout = layout
        self._leaves: dict[PlanePool, list[PackedLeaf]] = {}
        for number, ((_, size, dtype), leaves) in enumerate(layout.kinds().items()):
            plane = RowLayout({_PLANE: ((size,), dtype)})
            rows = RowsInFile(files[number], plane.words, reading=not max_size) if files else HeldRows(plane.words)
            following = sum(leaf.path[0] == "next" for leaf in leaves)
            count = max(following, len(leaves) - following) * max_size  # next observations are others' observations
            self._leaves[PlanePool(plane, rows, count and count + count // _SPARE + _SPARE // 4)] = leaves
        self.pools = [*self._leaves]

    @property
    def nbytes(self) -> int:
        """The number of bytes allocated for planes, and for the tables by which they are found."""
        tables = ((each.memory.rows, each._hashes, each._uses, each._recent, each._free) for each in self.pools)
        return sum(table.nbytes for some in tables for table in some)

    def unpack(self, rows: Records) -> Any:
        """The batch in the rows, with copies of the shared leaves; the other leaves are views."""
        leaves = self._layout.leaves(rows)
        for pool, shared in self._leaves.items():
            for leaf in shared:
                numbers = leaves[leaf.index].numpy().reshape(-1).astype(np.int64)
                (planes,) = pool.layout.leaves(gather(pool.layout.records(pool.memory.rows), numbers))
                leaves[leaf.index] = planes.view(len(rows), *leaf.form[0])
        return self._layout.unpack(rows, leaves)

    def add(self, leaves: Mapping[KeyPath, Tensor], ndim: int, first: int) -> Mapping[KeyPath, Tensor]:
        """Store the planes of leaves ``[*B, T, ...]`` from frame `first` on; return the leaves with numbers instead.

        OSError or MemoryError if there is no room; nothing has changed then.
        """
        found: dict[PlanePool, _Numbers] = {}
        try:
            for pool, shared in self._leaves.items():
                some, count = [time_major(leaves[leaf.path], ndim) for leaf in shared], shared[0].count
                found[pool] = np.zeros((len(some), *some[0].shape[:ndim], count), np.int32)
                flat = found[pool].reshape(len(some), -1, count)
                for frames, planes in _parts(some, ndim, first, pool.layout):
                    flat[:, frames] = pool.add(planes).reshape(flat[:, frames].shape)
        except BaseException:
            for pool, numbers in found.items():
                pool.release(numbers.reshape(-1))
            raise
        numbered = {
            leaf.path: torch.from_numpy(numbers).movedim(0, ndim - 1)
            for pool, each in found.items()
            for leaf, numbers in zip(self._leaves[pool], each, strict=True)
        }
        return {**leaves, **numbered}

    def numbers(self, rows: Tensor) -> Iterator[tuple[PlanePool, _Numbers]]:
        """Each shared leaf's pool, and a view [N, k] of the numbers of its planes."""
        records = self._layout.records(rows.numpy())
        for pool, shared in self._leaves.items():
            yield from ((pool, records[self._layout.names[leaf.index]]) for leaf in shared)

    def release(self, rows: Tensor, index: Ints | slice = slice(None)) -> None:
        """Free the planes whose last uses were in the rows at `index`."""
        for pool, numbers in self.numbers(rows):
            pool.release(numbers[index].reshape(-1))

    # Numbers of planes are valid in one storage only. So a file has the planes to which its rows refer, each with its
    # number as one more word, and rows get new numbers when they are loaded.

    def used(self, rows: Tensor, index: Ints) -> list[Ints]:
        """By pool, the planes to which the rows at `index` refer, each with its number: [N, words + 1], ascending."""
        found = {pool: [np.zeros(1, np.int64)] for pool in self.pools}  # plane 0 is always there
        for pool, numbers in self.numbers(rows):
            found[pool].append(numbers[index].reshape(-1).astype(np.int64))
        distinct = {pool: np.unique(np.concatenate(each))[1:] for pool, each in found.items()}
        return [np.c_[pool.memory.rows.take(each, axis=0), each] for pool, each in distinct.items()]

    def renumber(self, rows: Tensor, index: Ints, planes: Sequence[Ints]) -> None:
        """Add the `planes` that were `used` in the rows at `index`, and write their new numbers to these rows."""
        tables: dict[PlanePool, tuple[Ints, Ints]] = {}
        for pool, each in zip(self.pools, planes, strict=True):
            parts = np.array_split(each, len(each) // _AT_ONCE + 1)
            added = np.concatenate([pool.add(part[:, :-1].copy()) for part in parts])
            tables[pool] = np.append(0, each[:, -1]), np.append(0, added)
        for pool, numbers in self.numbers(rows):
            old, new = tables[pool]
            numbers[index] = new.take(np.searchsorted(old, numbers[index]), mode="clip")
            np.add.at(pool._uses, numbers[index].reshape(-1), 1)
        for pool, (_, new) in tables.items():
            pool.release(new)  # the uses that `add` has counted


def _parts(leaves: Sequence[Tensor], ndim: int, first: int, plane: RowLayout) -> Iterator[tuple[slice, Ints]]:
    """Yield parts of leaves ``[T, *B, ...]`` from frame `first` on: their frames, and rows of planes, leaf by leaf."""
    steps, lanes = len(leaves[0]), leaves[0].shape[1:ndim].numel()
    size = max(max(_AT_ONCE, _BYTES_AT_ONCE // plane.nbytes) // lanes, 1) if lanes else 1
    for start in range(first // lanes if lanes else steps, steps, size):
        skipped = max(first - start * lanes, 0)
        some = [leaf[start : start + size].flatten(0, ndim - 1)[skipped:] for leaf in leaves]
        planes = [leaf.reshape(-1, plane.columns[0].count) for leaf in some]
        rows = np.zeros((len(planes), len(planes[0]), plane.words), np.int64)
        for part, each in zip(rows, planes, strict=True):
            ViewedRows(plane, torch.from_numpy(part)).write(0, len(part), {_PLANE: each}, 1)
        begin = start * lanes + skipped
        yield slice(begin, begin + len(some[0])), rows.reshape(-1, plane.words)


class Segment(NamedTuple):
    """A file with the frames ``start … stop - 1``, and the planes of their shared leaves; as a list in JSON."""

    start: int
    stop: int
    crc: int  # zlib's CRC-32 of its bytes
    planes: Sequence[int] = ()  # the number of planes after the rows, by pool


def dump_rows(
    directory: Path, rows: Tensor, shared: SharedLeaves, frames: range, earlier: Dumped | None
) -> list[Segment]:
    """Write `frames` of a ring in rows [capacity, words] to files, but link those of an earlier dump that hold some."""
    segments, first, (capacity, words) = list[Segment](), frames.start, rows.shape
    if earlier is not None and earlier.frames:
        segments = [each for each in starmap(Segment, earlier.frames["segments"]) if each.stop > first]
        for segment in segments:
            source, target = (each / _ROWS.format(segment.start) for each in (earlier.directory, directory))
            target.unlink(missing_ok=True)  # left behind by an interrupted dump
            try:
                os.link(source, target)
            except OSError:  # another file system, or one without links
                shutil.copyfile(source, target)
            first = segment.stop
    size = max(min(capacity // _PARTS, _BYTES // (words * _WORD)), 1)
    for start in range(first, frames.stop, size):
        slots, crc = np.arange(start, min(start + size, frames.stop)) % capacity, 0
        end = start % capacity + len(slots)  # beyond the last row, they go on from row 0
        parts = rows[start % capacity : end], rows[: max(end - capacity, 0)]
        planes = shared.used(rows, slots)
        with open(directory / _ROWS.format(start), "wb") as file:
            for array in (*(each.numpy(force=True) for each in parts), *planes):
                file.write(array.data)  # `tofile` would not report a full disk
                crc = zlib.crc32(array.data, crc)
        segments.append(Segment(start, start + len(slots), crc, [len(each) for each in planes]))
    return segments


def load_rows(dumped: Dumped, rows: Tensor, shared: SharedLeaves) -> None:
    """Read the files of a dump, oldest first: they may begin with frames that later ones overwrite."""
    words = [rows.shape[1], *(pool.layout.words + 1 for pool in shared.pools)]  # of a row, and of planes
    for segment in starmap(Segment, dumped.frames["segments"]):
        path = dumped.directory / _ROWS.format(segment.start)
        try:
            data = np.fromfile(path, np.uint8)
            sizes = np.array([segment.stop - segment.start, *segment.planes]) * words
            *parts, rest = np.split(data.view(np.int64), sizes.cumsum())
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read ({error!r}): the dump is damaged") from error
        if zlib.crc32(data.data) != segment.crc or len(rest):
            raise ValueError(f"{path} has other bytes than were written: the dump is damaged")
        read, *planes = (part.reshape(-1, width) for part, width in zip(parts, words, strict=True))
        slots = np.arange(segment.start, segment.stop) % len(rows)
        shared.release(rows, slots)
        rows[torch.from_numpy(slots)] = torch.from_numpy(read).to(rows.device)
        shared.renumber(rows, slots, planes)
