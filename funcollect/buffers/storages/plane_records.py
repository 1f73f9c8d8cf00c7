"""The planes of some rows as records for files: the words of a plane, then its number.

Numbers of planes are valid in one storage only. A file therefore has the planes that its rows refer to, and rows get
other numbers when they are loaded.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from torch import Tensor

from funcollect.buffers.arrays import Ints
from funcollect.buffers.storages.frame_stacks import FrameStacks
from funcollect.buffers.storages.packed_rows import RowLayout


class PlaneRecords:
    """Reads and adds the planes to which `rows` [N, words] of a storage refer."""

    def __init__(self, stacks: FrameStacks, layout: RowLayout, rows: Tensor) -> None:
        self._stacks, self._layout, self._rows = stacks, layout, rows
        self.words = [pool.layout.words + 1 for pool in stacks.pools]  # of a record, by pool

    def used(self, index: Ints) -> list[Ints]:
        """The numbers of the planes to which the rows at `index` refer, ascending, by pool."""
        found: list[list[Ints]] = [[] for _ in self._stacks.pools]
        for pool, numbers in self._stacks.numbers(self._layout, self._rows):
            found[self._stacks.pools.index(pool)].append(numbers[index].reshape(-1).astype(np.int64))
        distinct = [np.unique(np.concatenate(each)) if each else np.zeros(0, np.int64) for each in found]
        return [each[each > 0] for each in distinct]

    def read(self, pool: int, numbers: Ints) -> Ints:
        """The records [N, words] of the planes of one pool with these numbers [N]."""
        planes = self._stacks.pools[pool].memory.rows.take(numbers, axis=0)
        return np.concatenate([planes, numbers[:, None]], axis=1)

    def load(self, index: Ints, records: Iterable[tuple[int, Ints]]) -> None:
        """Add the planes to which the rows at `index` refer, and write their new numbers to the rows.

        `records` yields all that `used` and `read` returned for these rows, or for more rows: indices of pools, and
        records.
        """
        pools = self._stacks.pools
        old, new = [[np.zeros(1, np.int64)] for _ in pools], [[np.zeros(1, np.int64)] for _ in pools]
        for index_of_pool, some in records:
            old[index_of_pool].append(some[:, -1])
            new[index_of_pool].append(pools[index_of_pool].add(some[:, :-1].copy()))
        known = [(np.concatenate(one), np.concatenate(two)) for one, two in zip(old, new, strict=True)]
        for pool, numbers in self._stacks.numbers(self._layout, self._rows):
            before, after = known[pools.index(pool)]
            numbers[index] = after.take(np.searchsorted(before, numbers[index]), mode="clip")
            pool.use(numbers[index].reshape(-1))
        for pool, (_, after) in zip(pools, known, strict=True):
            pool.release(after)


def records_of(stacks: FrameStacks | None, layout: RowLayout, rows: Tensor) -> PlaneRecords | None:
    """The records of the planes to which `rows` [N, words] refer; None without stacks."""
    return None if stacks is None else PlaneRecords(stacks, layout, rows)
