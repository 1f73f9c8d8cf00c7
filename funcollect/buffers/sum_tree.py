"""A tree of sums, which draws slots in proportion to their weights."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch

from funcollect.buffers import Floats, Ints

WIDTH = 16  # of the blocks in a `SumTree`; 32 and 64 are slower
_MOST_AT_TOP = 1 << 14  # numbers whose running sums are made again after each change


def sizes_of(capacity: int) -> list[int]:
    """The number of weights, padded to blocks, and of the sums on each level above them."""
    sizes = [capacity]
    while sizes[-1] > _MOST_AT_TOP:
        sizes[-1] += -sizes[-1] % WIDTH
        sizes.append(sizes[-1] // WIDTH)
    return sizes


class SumTree:
    """A weight of at least 0 for each of `capacity` slots. Weights are 0 at first, and a slot of weight 0 is not drawn.

    Blocks of weights have sums, blocks of these sums again, until few enough numbers are left that all their running
    sums are made again after a change. A buffer of a million frames needs two levels above the weights.
    """

    def __init__(self, capacity: int) -> None:
        sizes = sizes_of(capacity)
        # Each list has one array per level, the weights of the slots first.
        self._sums: list[Floats] = [np.zeros(size) for size in sizes]
        self._least: list[Floats] = [np.full(size, np.inf) for size in sizes]  # positive weight below each, if any
        self._top: Floats | None = None  # 0 and the running sums of the last level, until a weight changes

    def put(self, slots: Ints, weights: Floats) -> None:
        """Set the weights of slots; if a slot is repeated, its last weight counts."""
        self._top = None
        self._sums[0][slots] = weights
        self._least[0][slots] = np.where(weights > 0, weights, np.inf)
        block = slots
        for (sums, least), (above, least_above) in pairwise(zip(self._sums, self._least, strict=True)):
            block = block // WIDTH  # the same one may come several times
            # `reduce` is what `sum` and `min` call, but sooner.
            above[block] = np.add.reduce(sums.reshape(-1, WIDTH).take(block, axis=0), axis=1)
            least_above[block] = np.minimum.reduce(least.reshape(-1, WIDTH).take(block, axis=0), axis=1)

    def get(self, slots: Ints) -> Floats:
        """The weights of slots."""
        return self._sums[0].take(slots)

    @property
    def _running(self) -> Floats:
        if self._top is None:
            self._top = np.empty(len(self._sums[-1]) + 1)
            self._top[0] = 0.0
            torch.cumsum(torch.from_numpy(self._sums[-1]), -1, out=torch.from_numpy(self._top[1:]))
        return self._top

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self._running[-1])

    @property
    def least(self) -> float:
        """The least positive weight; infinite if there is none."""
        return float(np.minimum.reduce(self._least[-1]))

    def find(self, places: Floats) -> Ints:
        """The slots at the given places in ``[0, 1)``, if all weights are laid end to end on that interval."""
        upto = self._running
        rest = np.minimum(places * upto[-1], math.nextafter(upto[-1], 0.0))
        order = rest.argsort()  # sorted places are found sooner, by more than it takes to sort them
        found = np.empty(len(rest), np.int64)
        found[order] = upto.searchsorted(rest[order], side="right") - 1
        rest -= upto.take(found)
        rows, each = np.zeros((len(places), WIDTH + 1)), np.arange(len(places))
        ends = torch.from_numpy(rows[:, 1:])
        for sums in self._sums[-2::-1]:
            some = torch.from_numpy(sums.reshape(-1, WIDTH).take(found, axis=0))
            torch.cumsum(some, -1, out=ends)  # which takes a third of NumPy's time
            # Rounding must not move a place past the end of its block, where the next slot may have the weight 0.
            rest = np.minimum(rest, np.nextafter(rows[:, -1], 0.0))
            child = (rows[:, 1:] > rest[:, None]).argmax(axis=1)
            rest -= rows[each, child]
            found = found * WIDTH + child
        return found

    def find_among(self, slots: Ints, places: Floats) -> Ints:
        """The same over the weights of `slots` [M] alone; ValueError if all of them are 0."""
        upto = self.get(slots).cumsum()
        if not upto[-1] > 0:
            raise ValueError("every frame at which a slice can begin has priority 0: give some frame a positive one")
        places = np.minimum(places * upto[-1], math.nextafter(upto[-1], 0.0))
        return slots[np.searchsorted(upto, places, side="right")]
