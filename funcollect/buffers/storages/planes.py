"""Stores the frames of stacked observations once: a row holds the numbers of a stack's planes instead of the stack.

Consecutive stacks of k frames share k - 1 of them, and so do an observation and its next observation. Each distinct
frame, called a plane here, is stored in a `PlanePool`. No order of frames is assumed, since planes are compared.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

from funcollect.buffers import Arrays, Bools, Ints
from funcollect.buffers.storages.packed_rows import PackedLeaf, RowLayout, time_major
from funcollect.files import allocate
from funcollect.tree import Path as KeyPath

PLANES = "planes-{}.bin"  # the names of the files
_WORD = 8  # bytes
_AT_ONCE = 64  # frames whose planes are compared at once
_SPARE = 64  # room for one plane more per this number of frames: each episode has one more plane than frames
_PLANE = ("plane",)

_Hashes = npt.NDArray[np.uint64]
_Numbers = npt.NDArray[np.int32] | Ints  # of rows


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


class RowPool:
    """Rows by number. The numbers of rows that are not needed any more are used again."""

    _tables: ClassVar[tuple[str, ...]] = ("_free",)  # arrays by number; `_free`, whose length counts, comes last

    def __init__(self, memory: GrowingRows) -> None:
        self.memory = memory
        self._free = np.zeros(0, np.int64)  # numbers of freed rows, the first `_idle` entries
        self._idle = 0
        self._end = 0  # numbers from here on were never used

    @property
    def rows(self) -> Ints:
        """All rows; a view is valid until `take`."""
        return self.memory.rows

    def take(self, count: int) -> Ints:
        """The numbers of `count` free rows."""
        reused = min(count, self._idle)
        end = self._end + count - reused
        if end > len(self._free):
            self._grow(max(end, len(self._free) * 17 // 16))
        cut = self._idle - reused
        taken = np.concatenate([self._free[cut : self._idle], np.arange(self._end, end)])
        self._idle, self._end = cut, end
        return taken

    def give_back(self, numbers: _Numbers) -> None:
        """Free rows, each of them once."""
        end = self._idle + len(numbers)
        self._free[self._idle : end] = numbers
        self._idle = end

    def _grow(self, count: int) -> None:
        self.memory.grow(count)
        for name in self._tables:
            table = getattr(self, name)
            setattr(self, name, np.concatenate([table, np.zeros(count - len(table), table.dtype)]))

    def state(self) -> Arrays:
        """The rows that were used, and the numbers of those that are free."""
        return {"aside": self.rows[: self._end], "free": self._free[: self._idle]}

    def load(self, state: Arrays) -> None:
        """Restore what `state` returned."""
        self._end, self._idle = len(state["aside"]), len(state["free"])
        self._grow(self._end)
        self.rows[:] = state["aside"]
        self._free[: self._idle] = state["free"]


class PlanePool(RowPool):
    """Planes of this layout. Equal ones are stored once, for as long as frames use them; plane 0 has zeros, and stays.

    A plane is found by a hash of its bytes, and then compared. Whether two stacks share one therefore depends on their
    bytes alone, not on the order of frames or on who wrote them. `count` planes have room at first.
    """

    _tables = ("_hashes", "_uses", "_free")

    def __init__(self, layout: RowLayout, memory: GrowingRows, count: int) -> None:
        super().__init__(memory)
        self.layout = layout
        self._factors: _Hashes = np.random.default_rng(0).integers(2**63, size=layout.words, dtype=np.uint64) * 2 + 1
        self._hashes: _Hashes = np.zeros(0, np.uint64)  # by number
        self._uses = np.zeros(0, np.int64)  # by number: how often stored frames contain it
        self._recent = np.zeros(0, np.int64)  # by the first bits of a hash: the newest plane with them
        self._grow(count)
        self.rows[self.take(1)] = 0
        self._uses[0] = 1

    @property
    def nbytes(self) -> int:
        """The number of bytes allocated, those of the look-up tables included."""
        return sum(each.nbytes for each in (self.rows, self._hashes, self._uses, self._recent, self._free))

    def add(self, planes: Ints) -> Ints:
        """The numbers [N] of `planes` [N, words], which are stored if they are new; each counts as one use."""
        hashes = self._hash(planes)
        distinct, first, group = np.unique(hashes, return_index=True, return_inverse=True)
        found, known = self._find(distinct, planes, first)
        alike = (planes == planes.take(first[group], axis=0)).all(axis=1)
        alone = np.flatnonzero(~alike)  # the hash is that of another plane
        fresh = np.concatenate([first[~known], alone])
        taken = self.take(len(fresh))
        self.rows[taken] = planes[fresh]
        self._hashes[taken] = hashes[fresh]
        self._recent[self._place(hashes[fresh])] = taken
        count = len(fresh) - len(alone)
        found[~known] = taken[:count]
        numbers = found[group]
        numbers[alone] = taken[count:]
        np.add.at(self._uses, numbers, 1)
        return numbers

    def use(self, numbers: _Numbers) -> None:
        """Count further uses."""
        np.add.at(self._uses, numbers, 1)

    def release(self, numbers: _Numbers) -> None:
        """Count uses that have ended, and free planes without any."""
        numbers = numbers[numbers > 0]
        np.subtract.at(self._uses, numbers, 1)
        self.give_back(np.unique(numbers[self._uses[numbers] == 0]))

    def _hash(self, planes: Ints) -> _Hashes:
        """A hash of each of the `planes` [N, words]: [N]. Its first bits depend on all bits of a plane."""
        sums: _Hashes = np.einsum("ij,j->i", planes.view(np.uint64), self._factors)
        mixed: _Hashes = (sums ^ (sums >> np.uint64(32))) * self._factors[0]
        return mixed

    def _place(self, hashes: _Hashes) -> Ints:
        """The places of hashes in `_recent`, whose length is a power of two."""
        return (hashes >> np.uint64(65 - len(self._recent).bit_length())).astype(np.int64)

    def _find(self, hashes: _Hashes, planes: Ints, index: Ints) -> tuple[Ints, Bools]:
        """The number of each stored plane that has the hash and the bytes of ``planes[index]``; whether there is one.

        A plane is no longer found if a later one has taken its place in `_recent`. It is then stored twice.
        """
        numbers = self._recent.take(self._place(hashes))
        known = (self._hashes.take(numbers) == hashes) & (self._uses.take(numbers) > 0)
        stored = self.rows.take(numbers[known], axis=0)
        known[known] = (stored == planes.take(index[known], axis=0)).all(axis=1)
        return numbers, known

    @override
    def _grow(self, count: int) -> None:
        super()._grow(count)
        size = 1 << (2 * count - 1).bit_length()
        if size > len(self._recent):
            self._recent = np.zeros(size, np.int64)
            used = np.flatnonzero(self._uses)
            self._recent[self._place(self._hashes[used])] = used


class FrameStacks:
    """The planes of stacks, for reading, or to store those of up to `max_size` frames.

    Args:
        layout: the layout of the stacks, as batches have them.
        rows_of: returns the rows for planes of so many words; called once for each shape and dtype of planes.
        max_size: the capacity in frames; 0 for reading.

    Arguments of its methods that are named `layout` and `rows` [N, words] describe rows with numbers of planes.
    """

    def __init__(self, layout: RowLayout, rows_of: Callable[[int], GrowingRows], max_size: int = 0) -> None:
        self.layout = layout
        self.pools: list[PlanePool] = []
        self._planes: list[tuple[RowLayout, GrowingRows]] = []
        self._kind: dict[KeyPath, int] = {}  # by path: the index of the planes, and of their pool
        paths_of: dict[tuple[tuple[int, ...], torch.dtype], list[KeyPath]] = {}
        for column in layout.columns:
            paths_of.setdefault((column.shape[1:], column.dtype), []).append(column.path)
        for shape_and_dtype, paths in paths_of.items():
            plane = RowLayout([PackedLeaf(_PLANE, *shape_and_dtype, offset=0)])
            self._kind |= dict.fromkeys(paths, len(self._planes))
            self._planes.append((plane, rows_of(plane.words)))
            if max_size:
                following = sum(path[0] == "next" for path in paths)
                count = max(following, len(paths) - following) * max_size
                self.pools.append(PlanePool(*self._planes[-1], count + count // _SPARE + _SPARE // 4))

    @property
    def nbytes(self) -> int:
        """The number of bytes allocated for planes."""
        return sum(pool.nbytes for pool in self.pools)

    def restore(self, path: KeyPath, leaf: Tensor) -> Tensor:
        """The stacks [N, k, ...] at a path, copied, from the numbers of their planes [N, k]; other leaves unchanged."""
        if path not in self._kind:
            return leaf
        plane, memory = self._planes[self._kind[path]]
        (planes,) = plane.leaves(plane.gather(memory.rows, leaf.numpy().reshape(-1).astype(np.int64)))
        return planes.view(*leaf.shape, *planes.shape[1:])

    def unpack(self, layout: RowLayout, rows: Tensor) -> Any:
        """The batch in the rows, with its stacks; the other leaves are views."""
        pairs = zip(layout.columns, layout.leaves(rows), strict=True)
        return layout.build([self.restore(column.path, leaf) for column, leaf in pairs], len(rows))

    def add(self, leaves: Mapping[KeyPath, Tensor], ndim: int, first: int) -> dict[KeyPath, Tensor]:
        """Store the planes of stacks ``[*B, T, k, ...]``; return their numbers, ``[*B, T, k]`` int32.

        Frames before `first`, by time, then by lane, are not stored, and have the numbers 0. OSError or MemoryError if
        there is no room; nothing has changed then.
        """
        stacks = {path: time_major(leaves[path], ndim) for path in self._kind}
        found: dict[KeyPath, npt.NDArray[np.int32]] = {
            p: np.zeros(leaf.shape[: ndim + 1], np.int32) for p, leaf in stacks.items()
        }
        try:
            for index, pool in enumerate(self.pools):
                paths = [path for path, kind in self._kind.items() if kind == index]
                flat = [found[path].reshape(-1, found[path].shape[-1]) for path in paths]
                for frames, some in _parts([stacks[path] for path in paths], ndim, first):
                    numbers = pool.add(_packed(pool.layout, some)).reshape(len(paths), *flat[0][frames].shape)
                    for numbered, each in zip(flat, numbers, strict=True):
                        numbered[frames] = each
        except BaseException:
            for path, numbered in found.items():
                self.pools[self._kind[path]].release(numbered.reshape(-1))
            raise
        return {path: torch.from_numpy(numbered).movedim(0, ndim - 1) for path, numbered in found.items()}

    def numbers(self, layout: RowLayout, rows: Tensor) -> Iterator[tuple[int, npt.NDArray[np.int32]]]:
        """The index of its pool, and a view [N, k] of the numbers of its planes, of each stack in the rows."""
        for column, leaf in zip(layout.columns, layout.leaves(rows), strict=True):
            if column.path in self._kind:
                yield self._kind[column.path], leaf.numpy()

    def release(self, layout: RowLayout, rows: Tensor) -> None:
        """Free the planes whose last uses were in the rows."""
        for pool, numbers in self.numbers(layout, rows):
            self.pools[pool].release(numbers.reshape(-1))

    # Numbers of planes are valid in one storage only. So a file has the planes that its rows refer to, each with its
    # number as one more word, and rows get other numbers when they are loaded.

    def used(self, layout: RowLayout, rows: Tensor, index: Ints) -> list[Ints]:
        """The planes to which the rows at `index` refer, each with its number [N, words + 1], ascending; by pool."""
        found = [[np.zeros(1, np.int64)] for _ in self.pools]  # plane 0 is always there
        for pool, numbers in self.numbers(layout, rows):
            found[pool].append(numbers[index].reshape(-1).astype(np.int64))
        distinct = [np.unique(np.concatenate(each))[1:] for each in found]
        return [np.c_[pool.rows.take(each, axis=0), each] for pool, each in zip(self.pools, distinct, strict=True)]

    def renumber(self, layout: RowLayout, rows: Tensor, index: Ints, planes: Sequence[Ints]) -> None:
        """Add the `planes` that were `used` in the rows at `index`, and write their new numbers to these rows."""
        tables = []
        for pool, each in zip(self.pools, planes, strict=True):
            parts = np.array_split(each, len(each) // _AT_ONCE + 1)
            added = np.concatenate([pool.add(part[:, :-1].copy()) for part in parts])
            tables.append((np.append(0, each[:, -1]), np.append(0, added)))
        for which, numbers in self.numbers(layout, rows):
            old, new = tables[which]
            numbers[index] = new.take(np.searchsorted(old, numbers[index]), mode="clip")
            self.pools[which].use(numbers[index].reshape(-1))
        for pool, (_, new) in zip(self.pools, tables, strict=True):
            pool.release(new)


def _parts(leaves: Sequence[Tensor], ndim: int, first: int) -> Iterator[tuple[slice, list[Tensor]]]:
    """Parts of leaves ``[T, *B, k, ...]`` from frame `first` on: the frames, and their stacks [N, k, ...], by leaf."""
    steps, lanes = len(leaves[0]), leaves[0].shape[1:ndim].numel()
    size = max(_AT_ONCE // lanes, 1) if lanes else 1
    for start in range(first // lanes if lanes else steps, steps, size):
        skipped = max(first - start * lanes, 0)
        some = [leaf[start : start + size].flatten(0, ndim - 1)[skipped:] for leaf in leaves]
        begin = start * lanes + skipped
        yield slice(begin, begin + len(some[0])), some


def _packed(plane: RowLayout, stacks: Sequence[Tensor]) -> Ints:
    """The planes of several leaves [N, k, ...] as rows [planes, words], leaf after leaf."""
    rows = np.zeros((len(stacks), stacks[0].shape[:2].numel(), plane.words), np.int64)
    for part, stack in zip(rows, stacks, strict=True):
        plane.pack(torch.from_numpy(part), {_PLANE: stack.flatten(0, 1)}, 1)
    return rows.reshape(-1, plane.words)
