"""Draws in proportion to priorities, and the least of them, from a tree whose nodes have 16 children each.

Wide nodes make few levels, and every level is a handful of NumPy calls for all draws together.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_CHILDREN = 16


class _Tree:
    """Numbers, and over each 16 of them one that sums them up, up to a single one.

    Args:
        size: how many numbers.
        fill: what they are at first, and what rows are filled up with.
        combine: the one number of each row of 16, ``[N, 16] -> [N]``.
    """

    def __init__(self, size: int, fill: float, combine: Callable[[Floats], Floats]) -> None:
        self.combine = combine
        self.levels: list[Floats] = []  # [rows, 16] each; the numbers themselves first
        while not self.levels or len(self.levels[-1]) > 1:
            size = -(-size // _CHILDREN)
            self.levels.append(np.full((size, _CHILDREN), fill))

    def put(self, index: Ints, value: Floats) -> None:
        """Set numbers; of an index given twice, the last."""
        for level, above in zip(self.levels, [*self.levels[1:], None], strict=True):
            level.reshape(-1)[index] = value
            if above is None:
                return
            index = index // _CHILDREN
            if len(index) > _CHILDREN:
                index = np.unique(index)
            value = self.combine(level[index])

    def get(self, index: Ints) -> Floats:
        """The numbers at `index`."""
        return self.levels[0].reshape(-1).take(index)

    @property
    def top(self) -> float:
        """What sums up all."""
        return float(self.combine(self.levels[-1])[0])


def _sum(rows: Floats) -> Floats:
    """The sums as `find` adds them up: in order, so that both round alike."""
    total: Floats = rows.cumsum(axis=1)[:, -1]
    return total


def _least(rows: Floats) -> Floats:
    least: Floats = rows.min(axis=1)
    return least


class Priorities:
    """A weight for each slot, not negative; a slot without one has 0, and is never drawn.

    >>> priorities = Priorities(100)
    >>> priorities.put(np.array([3, 40]), np.array([1.0, 3.0]))
    >>> priorities.total, priorities.least
    (4.0, 1.0)
    >>> priorities.find(np.array([0.0, 0.24, 0.26, 0.99])).tolist()
    [3, 3, 40, 40]
    """

    def __init__(self, capacity: int) -> None:
        self._sums = _Tree(capacity, 0.0, _sum)
        self._least = _Tree(capacity, np.inf, _least)

    def put(self, slots: Ints, weights: Floats) -> None:
        """Set the weights of slots; of a slot given twice, the last."""
        self._sums.put(slots, weights)
        self._least.put(slots, np.where(weights > 0, weights, np.inf))

    def get(self, slots: Ints) -> Floats:
        """The weights of slots."""
        return self._sums.get(slots)

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return self._sums.top

    @property
    def least(self) -> float:
        """The least weight that is not 0; infinite where all are."""
        return self._least.top

    def find(self, places: Floats) -> Ints:
        """The slots at these places, in ``[0, 1)``, of all weights laid end to end."""
        rest = places * self.total
        node = np.zeros(len(places), np.int64)
        for level in reversed(self._sums.levels):
            rows = level[node]
            upto = rows.cumsum(axis=1)
            child = (upto <= rest[:, None]).sum(axis=1)
            # Rounding may carry a place past the end of its row, or to the end of its child: it stays inside.
            child = np.minimum(child, _last_positive(rows, child))
            picked = np.arange(len(node))
            weight = rows[picked, child]
            rest = np.clip(rest - (upto[picked, child] - weight), 0.0, np.nextafter(weight, 0.0))
            node = node * _CHILDREN + child
        return node


def _last_positive(rows: Floats, child: Ints) -> Ints:
    """The last child with a weight, of rows for which `child` lies past the end; else `child` itself."""
    past = child >= rows.shape[1]
    if not past.any():
        return child
    last = rows.shape[1] - 1 - (rows[:, ::-1] > 0).argmax(axis=1)
    return np.where(past, last, child)
