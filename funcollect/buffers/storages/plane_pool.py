"""Stores planes, the frames of a stack, so that planes with the same bytes are stored once.

A plane is found by a hash of its bytes, and then compared. Whether two stacks share a plane therefore depends on their
bytes alone, not on the order of frames or on who wrote them. A plane is freed when no stored frame uses it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from funcollect.buffers.arrays import Bools, Ints
from funcollect.buffers.storages.packed_rows import RowLayout

_Words = npt.NDArray[np.uint64]
_Numbers = npt.NDArray[np.int32] | Ints  # of planes


class PlaneMemory:
    """Memory for planes."""

    def __init__(self, words: int) -> None:
        self._rows: Ints = np.empty((0, words), np.int64)

    @property
    def rows(self) -> Ints:
        """The planes [count, words] int64; a view is valid until `grow`."""
        return self._rows

    def grow(self, count: int) -> None:
        """Make room for `count` planes; OSError or MemoryError if there is none."""
        if len(self._rows):
            self._rows.resize((count, self._rows.shape[1]), refcheck=False)  # Linux moves large arrays without a copy
        else:
            self._rows = np.empty((count, self._rows.shape[1]), np.int64)


class PlanePool:
    """Planes by number. Plane 0 consists of zeros, and is always there.

    Args:
        layout: the layout of one plane, a row with one leaf.
        memory: where the planes are.
        count: the number of planes for which memory is allocated at first.
    """

    def __init__(self, layout: RowLayout, memory: PlaneMemory, count: int) -> None:
        self.layout, self.memory = layout, memory
        self._factors: _Words = np.random.default_rng(0).integers(2**63, size=layout.words, dtype=np.uint64) * 2 + 1
        self._hashes: _Words = np.zeros(0, np.uint64)  # by plane
        self._uses = np.zeros(0, np.int64)  # by plane: how often stored frames contain it
        self._recent = np.zeros(0, np.int64)  # by the first bits of a hash: the newest plane with them
        self._free = np.zeros(0, np.int64)  # numbers of freed planes, the first `_idle` entries
        self._idle = 0
        self._end = 0  # numbers from here on were never used
        self._grow(count)
        memory.rows[self._take(1)] = 0
        self._uses[0] = 1

    @property
    def nbytes(self) -> int:
        """The number of bytes allocated, those of the look-up tables included."""
        tables = (self._hashes, self._uses, self._recent, self._free)
        return self.memory.rows.nbytes + sum(table.nbytes for table in tables)

    def add(self, planes: Ints) -> Ints:
        """The numbers [N] of `planes` [N, words], which are stored if they are new; each counts as one use."""
        hashes = self._hash(planes)
        distinct, first, group = np.unique(hashes, return_index=True, return_inverse=True)
        found, known = self._find(distinct, planes, first)
        alike = (planes == planes.take(first[group], axis=0)).all(axis=1)
        alone = np.flatnonzero(~alike)  # the hash is that of another plane
        fresh = np.concatenate([first[~known], alone])
        taken = self._take(len(fresh))
        self.memory.rows[taken] = planes[fresh]
        self._hashes[taken] = hashes[fresh]
        self._recent[self._place(hashes[fresh])] = taken
        count = len(fresh) - len(alone)
        found[~known] = taken[:count]
        numbers = found[group]
        numbers[alone] = taken[count:]
        np.add.at(self._uses, numbers, 1)
        return numbers

    def use(self, numbers: _Numbers) -> None:
        """Count further uses of planes."""
        np.add.at(self._uses, numbers[numbers > 0], 1)

    def release(self, numbers: _Numbers) -> None:
        """Count uses of planes that have ended, and free planes without any."""
        numbers = numbers[numbers > 0]
        np.subtract.at(self._uses, numbers, 1)
        unused = np.unique(numbers[self._uses[numbers] == 0])
        end = self._idle + len(unused)
        self._free[self._idle : end] = unused
        self._idle = end

    def _hash(self, planes: Ints) -> _Words:
        """A hash of each of the `planes` [N, words]: [N]. Its first bits depend on all bits of a plane."""
        sums: _Words = np.einsum("ij,j->i", planes.view(np.uint64), self._factors)
        mixed: _Words = (sums ^ (sums >> np.uint64(32))) * self._factors[0]
        return mixed

    def _place(self, hashes: _Words) -> Ints:
        """The places of hashes in `_recent`, whose length is a power of two."""
        return (hashes >> np.uint64(65 - len(self._recent).bit_length())).astype(np.int64)

    def _find(self, hashes: _Words, planes: Ints, index: Ints) -> tuple[Ints, Bools]:
        """The number of each stored plane that has the hash and the bytes of ``planes[index]``; whether there is one.

        A plane is no longer found if a later one has taken its place in `_recent`. It is then stored twice.
        """
        numbers = self._recent.take(self._place(hashes))
        known = (self._hashes.take(numbers) == hashes) & (self._uses.take(numbers) > 0)
        stored = self.memory.rows.take(numbers[known], axis=0)
        known[known] = (stored == planes.take(index[known], axis=0)).all(axis=1)
        return numbers, known

    def _take(self, count: int) -> Ints:
        """The numbers of `count` free planes."""
        reused = min(count, self._idle)
        end = self._end + count - reused
        if end > len(self._uses):
            self._grow(max(end, len(self._uses) * 17 // 16))
        cut = self._idle - reused
        taken = np.concatenate([self._free[cut : self._idle], np.arange(self._end, end)])
        self._idle, self._end = cut, end
        return taken

    def _grow(self, count: int) -> None:
        """Make room for `count` planes."""
        self.memory.grow(count)
        more = count - len(self._uses)
        self._hashes = np.concatenate([self._hashes, np.zeros(more, np.uint64)])
        self._uses = np.concatenate([self._uses, np.zeros(more, np.int64)])
        self._free = np.concatenate([self._free, np.zeros(more, np.int64)])
        size = 1 << (2 * count - 1).bit_length()
        if size > len(self._recent):
            self._recent = np.zeros(size, np.int64)
            used = np.flatnonzero(self._uses)
            self._recent[self._place(self._hashes[used])] = used
