"""Stores equal parts of observations once: a row has the numbers of a leaf's planes instead of the leaf.

A plane is a whole observation, which is also the next observation of the frame before it, or one of the k frames of a
stack, which is in k stacks. No order of frames is assumed, since planes are compared.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

from funcollect.buffers import Ints
from funcollect.buffers.storages.packed_rows import FrameLayout, RowLayout, time_major
from funcollect.files import allocate
from funcollect.tree import Path as KeyPath

PLANES = "planes-{}.bin"  # the names of the files
_WORD = 8  # bytes
_AT_ONCE, _BYTES_AT_ONCE = 64, 1 << 17  # frames, or bytes of a leaf if these are more frames, that are added together
_SPARE = 64  # room for one plane more per this number of frames: each episode has one more plane than frames
_PLANE = ("plane",)

_Hashes = npt.NDArray[np.uint64]
_Numbers = npt.NDArray[np.int32] | Ints  # of planes, as rows have them, or as arrays have indices


@contextmanager
def room_for(message: str) -> Iterator[None]:
    """Raise an OSError that begins with this message if the disk has no room for what is written in the block."""
    try:
        yield
    except OSError as error:
        reason = f"({os.strerror(error.errno or 0)}): give a smaller max_size, or another scratch_dir"
        raise OSError(error.errno, f"{message} {reason}") from error


class GrowingRows:
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


class RowsInFile(GrowingRows):
    """Rows in a new file, or for reading in one that another process fills. A copy is in memory."""

    def __init__(self, path: Path, words: int, *, reading: bool = False) -> None:
        super().__init__(words)
        self.path, self._access = path, mmap.ACCESS_READ if reading else mmap.ACCESS_WRITE
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
        with room_for(f"{self.path} has no room for {count} distinct frames of {size} bytes"):
            allocate(self._file, count * size)

    def __deepcopy__(self, memo: dict[int, object]) -> GrowingRows:
        twin = GrowingRows(self._rows.shape[1])
        twin._rows = self.rows.copy()
        return twin


class PlanePool:
    """Planes by number. Equal ones are stored once, for as long as rows refer to them; plane 0 has zeros, and stays.

    A plane is found by a hash of its bytes, and then compared. `count` planes have room at first.
    """

    def __init__(self, layout: RowLayout, memory: GrowingRows, count: int) -> None:
        self.layout, self.memory = layout, memory
        self._factors: _Hashes = np.random.default_rng(0).integers(2**63, size=layout.words, dtype=np.uint64) * 2 + 1
        self._hashes: _Hashes = np.zeros(0, np.uint64)  # by number
        self._uses = np.zeros(0, np.int64)  # by number: how often stored frames contain it
        self._recent = np.zeros(0, np.int64)  # by the first bits of a hash: the newest plane with them
        self._free = np.zeros(0, np.int64)  # the numbers of planes that are not in use any more
        self._end = 1  # numbers from here on were never used
        self._grow(count)
        self.rows[0] = 0
        self._uses[0] = 1

    @property
    def rows(self) -> Ints:
        """All planes; a view is valid until `add`."""
        return self.memory.rows

    def add(self, planes: Ints) -> Ints:
        """The numbers [N] of `planes` [N, words], which are stored if they are new; each counts as one use."""
        hashes = self._hash(planes)
        distinct, first, group = np.unique(hashes, return_index=True, return_inverse=True)
        if not (planes == planes.take(first[group], axis=0)).all():  # some have the same hash: one after the other
            return np.concatenate([self.add(plane[None]) for plane in planes])
        found = self._recent.take(self._place(distinct))
        known = (self._hashes.take(found) == distinct) & (self._uses.take(found) > 0)
        # A plane is no longer found if a later one has taken its place in `_recent`. It is then stored twice.
        known[known] = (self.rows.take(found[known], axis=0) == planes.take(first[known], axis=0)).all(axis=1)
        fresh = first[~known]
        taken = self._take(len(fresh))
        self.rows[taken], self._hashes[taken] = planes[fresh], hashes[fresh]
        self._recent[self._place(hashes[fresh])] = found[~known] = taken
        numbers = found[group]
        self.use(numbers)
        return numbers

    def use(self, numbers: _Numbers) -> None:
        """Count further uses."""
        np.add.at(self._uses, numbers, 1)

    def release(self, numbers: _Numbers) -> None:
        """Count uses that have ended, and free planes without any."""
        numbers = numbers[numbers > 0]
        np.subtract.at(self._uses, numbers, 1)
        self._free = np.concatenate([self._free, np.unique(numbers[self._uses[numbers] == 0])])

    def _take(self, count: int) -> Ints:
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

    def _grow(self, count: int) -> None:
        self.memory.grow(count)
        for name in ("_hashes", "_uses"):  # `_uses`, whose length counts, comes last: there may be no memory
            table = getattr(self, name)
            setattr(self, name, np.concatenate([table, np.zeros(count - len(table), table.dtype)]))
        size = 1 << (2 * count - 1).bit_length()
        if size > len(self._recent):
            self._recent = np.zeros(size, np.int64)
            used = np.flatnonzero(self._uses)
            self._recent[self._place(self._hashes[used])] = used


class SharedLeaves:
    """The planes of shared leaves, if there are any, for reading, or to store those of up to `max_size` frames.

    The methods take `rows` [N, words] of this layout of frames. For each kind of shared leaf, there is a function that
    returns the rows for planes of so many words. `max_size` is 0 for reading.
    """

    def __init__(self, layout: FrameLayout, rows: Iterable[Callable[[int], GrowingRows]], max_size: int = 0) -> None:
        self.pools: list[PlanePool] = []
        self._layout = layout.rows
        self._planes: list[tuple[RowLayout, GrowingRows]] = []
        kinds: dict[KeyPath, tuple[int, tuple[int, ...]]] = {}
        for ((_, size, dtype), leaves), rows_of in zip(layout.kinds().items(), rows, strict=False):
            plane = RowLayout({_PLANE: ((size,), dtype)})
            kinds |= {leaf.path: (len(self._planes), leaf.shape) for leaf in leaves}
            self._planes.append((plane, rows_of(plane.words)))
            if max_size:
                following = sum(leaf.path[0] == "next" for leaf in leaves)
                count = max(following, len(leaves) - following) * max_size
                self.pools.append(PlanePool(*self._planes[-1], count + count // _SPARE + _SPARE // 4))
        # The index of a shared leaf's column, the index of its planes and of their pool, and the leaf's own shape.
        columns = enumerate(column.path for column in layout.rows.columns)
        self._shared = [(index, path, *kinds[path]) for index, path in columns if path in kinds]

    @property
    def nbytes(self) -> int:
        """The number of bytes allocated for planes, and for the tables by which they are found."""
        tables = ((pool.rows, pool._hashes, pool._uses, pool._recent, pool._free) for pool in self.pools)
        return sum(table.nbytes for some in tables for table in some)

    def unpack(self, rows: Tensor) -> Any:
        """The batch in the rows, with copies of the shared leaves; the other leaves are views."""
        leaves = self._layout.leaves(rows)
        for index, _, kind, shape in self._shared:
            plane, memory = self._planes[kind]
            (planes,) = plane.leaves(plane.gather(memory.rows, leaves[index].numpy().reshape(-1).astype(np.int64)))
            leaves[index] = planes.view(len(rows), *shape)
        return self._layout.unpack(rows, leaves)

    def add(self, leaves: Mapping[KeyPath, Tensor], ndim: int, first: int) -> Mapping[KeyPath, Tensor]:
        """Store the planes of shared leaves ``[*B, T, ...]``; return all leaves with the numbers of planes instead.

        Frames before `first`, by time, then by lane, are not stored, and have the numbers 0. OSError or MemoryError if
        there is no room; nothing has changed then.
        """
        if not self._shared:
            return leaves
        found: dict[KeyPath, _Numbers] = {}
        for index, path, *_ in self._shared:
            lead = time_major(leaves[path], ndim).shape[:ndim]
            found[path] = np.zeros((*lead, self._layout.columns[index].count), np.int32)
        try:
            for number, pool in enumerate(self.pools):
                paths = [path for _, path, kind, _ in self._shared if kind == number]
                flat = [found[path].reshape(-1, found[path].shape[-1]) for path in paths]
                some = [time_major(leaves[path], ndim) for path in paths]
                for frames, planes in _parts(some, ndim, first, pool.layout):
                    numbers = pool.add(planes).reshape(len(paths), *flat[0][frames].shape)
                    for numbered, each in zip(flat, numbers, strict=True):
                        numbered[frames] = each
        except BaseException:
            for _, path, kind, _ in self._shared:
                self.pools[kind].release(found[path].reshape(-1))
            raise
        return {**leaves, **{p: torch.from_numpy(each).movedim(0, ndim - 1) for p, each in found.items()}}

    def numbers(self, rows: Tensor) -> Iterator[tuple[PlanePool, _Numbers]]:
        """Each shared leaf's pool, and a view [N, k] of the numbers of its planes."""
        leaves = self._layout.leaves(rows) if self._shared else []
        for index, _, kind, _ in self._shared:
            yield self.pools[kind], leaves[index].numpy()

    def release(self, rows: Tensor, index: Ints | slice = slice(None)) -> None:
        """Free the planes whose last uses were in the rows at `index`."""
        for pool, numbers in self.numbers(rows):
            pool.release(numbers[index].reshape(-1))

    # Numbers of planes are valid in one storage only. So a file has the planes that its rows refer to, each with its
    # number as one more word, and rows get other numbers when they are loaded.

    def used(self, rows: Tensor, index: Ints) -> list[Ints]:
        """The planes to which the rows at `index` refer, each with its number [N, words + 1], ascending; by pool."""
        found = {pool: [np.zeros(1, np.int64)] for pool in self.pools}  # plane 0 is always there
        for pool, numbers in self.numbers(rows):
            found[pool].append(numbers[index].reshape(-1).astype(np.int64))
        distinct = {pool: np.unique(np.concatenate(each))[1:] for pool, each in found.items()}
        return [np.c_[pool.rows.take(each, axis=0), each] for pool, each in distinct.items()]

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
            pool.use(numbers[index].reshape(-1))
        for pool, (_, new) in tables.items():
            pool.release(new)


def _parts(leaves: Sequence[Tensor], ndim: int, first: int, plane: RowLayout) -> Iterator[tuple[slice, Ints]]:
    """Parts of leaves ``[T, *B, ...]`` from frame `first` on: the frames, and rows of their planes, leaf after leaf."""
    steps, lanes = len(leaves[0]), leaves[0].shape[1:ndim].numel()
    size = max(max(_AT_ONCE, _BYTES_AT_ONCE // plane.nbytes) // lanes, 1) if lanes else 1
    for start in range(first // lanes if lanes else steps, steps, size):
        skipped = max(first - start * lanes, 0)
        some = [leaf[start : start + size].flatten(0, ndim - 1)[skipped:] for leaf in leaves]
        planes = [leaf.reshape(-1, plane.columns[0].count) for leaf in some]
        rows = np.zeros((len(planes), len(planes[0]), plane.words), np.int64)
        for part, each in zip(rows, planes, strict=True):
            plane.pack(torch.from_numpy(part), {_PLANE: each}, 1)
        begin = start * lanes + skipped
        yield slice(begin, begin + len(some[0])), rows.reshape(-1, plane.words)
