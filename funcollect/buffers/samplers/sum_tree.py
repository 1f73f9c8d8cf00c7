"""Draws slots in proportion to their priorities, by a tree whose nodes have 16 children each.

Wide nodes make few levels, and each level costs a few NumPy calls for all draws together. A node stores the running
sums of its children, so that a draw need not add anything.
"""

from __future__ import annotations

import numpy as np

from funcollect.buffers.arrays import Floats, Ints

_CHILDREN = 16


class SumTree:
    """A weight of at least 0 for each of `capacity` slots. Weights are 0 at first, and a slot of weight 0 is not drawn.

    >>> priorities = SumTree(100)
    >>> priorities.put(np.array([3, 40]), np.array([1.0, 3.0]))
    >>> priorities.total, priorities.least
    (4.0, 1.0)
    >>> priorities.find(np.array([0.0, 0.24, 0.26, 0.99])).tolist()
    [3, 3, 40, 40]
    """

    def __init__(self, capacity: int) -> None:
        # Each list has one array per level. The children of the nodes in the first level are the slots.
        self._weights: list[Floats] = []  # [nodes, 16]: the weights of the children
        self._upto: list[Floats] = []  # [nodes, 17]: 0 and the running sums of these weights
        self._least: list[Floats] = []  # [nodes, 16]: the least positive weight below each child; else infinite
        nodes = capacity
        while not self._weights or nodes > 1:
            nodes = -(-nodes // _CHILDREN)
            self._weights.append(np.zeros((nodes, _CHILDREN)))
            self._upto.append(np.zeros((nodes, _CHILDREN + 1)))
            self._least.append(np.full((nodes, _CHILDREN), np.inf))

    def put(self, slots: Ints, weights: Floats) -> None:
        """Set the weights of slots; if a slot is repeated, its last weight counts."""
        self._weights[0].reshape(-1)[slots] = weights
        self._least[0].reshape(-1)[slots] = np.where(weights > 0, weights, np.inf)
        node = np.unique(slots // _CHILDREN)
        for level, (own, upto, least) in enumerate(zip(self._weights, self._upto, self._least, strict=True)):
            sums = own.take(node, axis=0).cumsum(axis=1)
            upto[node, 1:] = sums
            if level + 1 < len(self._weights):
                self._weights[level + 1].reshape(-1)[node] = sums[:, -1]
                self._least[level + 1].reshape(-1)[node] = least.take(node, axis=0).min(axis=1)
                node = _distinct(node // _CHILDREN)

    def get(self, slots: Ints) -> Floats:
        """The weights of slots."""
        return self._weights[0].reshape(-1).take(slots)

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self._upto[-1][0, -1])

    @property
    def least(self) -> float:
        """The least positive weight; infinite if there is none."""
        return float(self._least[-1].min())

    def find(self, places: Floats) -> Ints:
        """The slots at the given places in ``[0, 1)``, if all weights are laid end to end on that interval."""
        rest = places * self.total
        node = np.zeros(len(places), np.int64)
        for upto in reversed(self._upto):
            rows = upto.take(node, axis=0)
            # Rounding must not move a place past the end of its node, where the next slot may have the weight 0.
            rest = np.minimum(rest, np.nextafter(rows[:, -1], 0.0))
            child = (rows[:, 1:] > rest[:, None]).argmax(axis=1)
            rest = rest - rows.reshape(-1).take(np.arange(len(rows)) * (_CHILDREN + 1) + child)
            node = node * _CHILDREN + child
        return node


def _distinct(ascending: Ints) -> Ints:
    """Ascending numbers without repetitions."""
    first = np.ones(len(ascending), np.bool_)
    first[1:] = ascending[1:] != ascending[:-1]
    return ascending[first]
