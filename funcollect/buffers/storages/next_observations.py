"""Stores next observations only if the following frame does not contain the same bytes as its observation.

The last observation of an episode, and that after the newest frame of each lane, are in no other frame. These are
stored **aside**, in rows that grow as needed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from funcollect.buffers import Arrays, Bools, Ints
from funcollect.buffers.storages.packed_rows import RowLayout
from funcollect.buffers.storages.planes import FrameStacks, GrowingRows, RowPool
from funcollect.tree import Path

_AT_ONCE = 256  # frames compared at once


class NextObservations:
    """The next observations of the frames in a storage.

    `layout` is the layout of the `rows` [capacity, words], which contain the observations at the root. `aside` is the
    layout of the next observations that are stored aside. With `stacks`, both have the numbers of planes for stacks.
    """

    def __init__(self, layout: RowLayout, aside: RowLayout, rows: Tensor, stacks: FrameStacks | None) -> None:
        self.layout, self.aside = layout, aside
        self.place = np.full(len(rows), -1)  # by slot: the number of its next observation aside; -1 if it is not there
        self.pool = RowPool(GrowingRows(aside.words))
        self._rows, self._stacks = rows, stacks
        # The fields of a next observation in `aside`, and of the observation at the root in `rows`.
        self._pairs = [(str(column.path), str(column.path[1:])) for column in aside.columns if column.nbytes]

    @property
    def nbytes(self) -> int:
        """The number of bytes allocated aside."""
        return self.pool.rows.nbytes

    def write(self, slots: Ints, leaves: Mapping[Path, Tensor], ndim: int, first: int) -> None:
        """Store the next observations of new frames aside; `settle` removes those that are not needed."""
        self._release(slots)
        place = self.pool.take(len(slots))
        packed = torch.empty(len(slots), self.aside.words, dtype=torch.int64)
        self.aside.pack(packed, leaves, ndim, first)
        self.pool.rows[place] = packed.numpy()
        self.place[slots] = place

    def settle(self, slots: Ints, following: Ints) -> None:
        """Remove the next observations of frames in `slots` that equal the observations of their successors."""
        laid = self.place.take(slots) >= 0
        slots, following = slots[laid], following[laid]
        rows, aside = self.layout.records(self._rows), self.aside.records(torch.from_numpy(self.pool.rows))
        for start in range(0, len(slots), _AT_ONCE):
            some, after = slots[start : start + _AT_ONCE], following[start : start + _AT_ONCE]
            same = np.ones(len(some), np.bool_)
            for name, field in self._pairs:
                one, two = aside[name][self.place.take(some)], rows[field][after]
                same &= (_bytes(one) == _bytes(two)).all(axis=1)
            self._release(some[same])

    def _release(self, slots: Ints) -> None:
        """Free the places aside of the frames in `slots`."""
        place = self.place.take(slots)
        place = place[place >= 0]
        if self._stacks is not None:
            self._stacks.release(self.aside, torch.from_numpy(self.pool.rows[place]))
        self.pool.give_back(place)
        self.place[slots] = -1

    def read(self, slots: Ints, following: Ints, mask: Bools | None) -> dict[Path, Tensor]:
        """Copies of the next observations of the frames in `slots`; zeros where `mask` is False."""
        place = self.place.take(slots)
        laid = place >= 0
        packed = np.zeros((len(slots), self.aside.words), np.int64)
        records, rows = self.aside.records(torch.from_numpy(packed)), self.layout.records(self._rows)
        for name, field in self._pairs:
            records[name] = rows[field][np.where(laid, 0, following)]  # `take` would copy all rows
        packed[laid] = self.pool.rows[place[laid]]
        if mask is not None:
            packed[~mask] = 0
        leaves = zip(self.aside.columns, self.aside.leaves(torch.from_numpy(packed)), strict=True)
        restore = (lambda _, leaf: leaf) if self._stacks is None else self._stacks.restore
        return {column.path: restore(column.path, leaf) for column, leaf in leaves}

    def state(self) -> Arrays:
        """The stored next observations, as arrays by name."""
        arrays = {"place": self.place, **self.pool.state()}
        if self._stacks is not None:
            used = self._stacks.used(self.aside, torch.from_numpy(self.pool.rows), self.place[self.place >= 0])
            arrays |= {f"planes{pool}": planes for pool, planes in enumerate(used)}
        return arrays

    def load(self, state: Arrays) -> None:
        """Restore what `state` returned."""
        self.place = state["place"]
        self.pool.load(state)
        if self._stacks is not None:
            planes = [state[f"planes{pool}"] for pool in range(len(self._stacks.pools))]
            rows = torch.from_numpy(self.pool.rows)
            self._stacks.renumber(self.aside, rows, self.place[self.place >= 0], planes)


def _bytes(elements: npt.NDArray[np.void]) -> npt.NDArray[np.uint8]:
    """The bytes of each element: [N, nbytes]."""
    return elements.view(np.uint8).reshape(len(elements), -1)
