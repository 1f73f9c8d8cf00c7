"""Draws in proportion to priorities, and the least of them, from a tree whose nodes have 16 children each.

Wide nodes make few levels, and every level is a handful of NumPy calls for all draws together. A node holds the running
sums of its children, so that a draw adds nothing up.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_CHILDREN = 16


class SumTree:
    """A weight for each slot, not negative; a slot without one has 0, and is never drawn.

    Args:
        capacity: slots.

    >>> priorities = SumTree(100)
    >>> priorities.put(np.array([3, 40]), np.array([1.0, 3.0]))
    >>> priorities.total, priorities.least
    (4.0, 1.0)
    >>> priorities.find(np.array([0.0, 0.24, 0.26, 0.99])).tolist()
    [3, 3, 40, 40]
    """

    def __init__(self, capacity: int) -> None:
        # By level, the slots' own first, for each node: its children's weights, the running sums of these with a 0 in
        # front, and the least weights above 0 among them.
        self._weights: list[Floats] = []  # [nodes, 16]
        self._upto: list[Floats] = []  # [nodes, 17]
        self._least: list[Floats] = []  # [nodes, 16]
        nodes = capacity
        while not self._weights or nodes > 1:
            nodes = -(-nodes // _CHILDREN)
            self._weights.append(np.zeros((nodes, _CHILDREN)))
            self._upto.append(np.zeros((nodes, _CHILDREN + 1)))
            self._least.append(np.full((nodes, _CHILDREN), np.inf))

    def put(self, slots: Ints, weights: Floats) -> None:
        """Set the weights of slots; of a slot given twice, the last."""
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
        """The least weight that is not 0; infinite where all are."""
        return float(self._least[-1].min())

    def find(self, places: Floats) -> Ints:
        """The slots at these places, in ``[0, 1)``, of all weights laid end to end."""
        rest = places * self.total
        node = np.zeros(len(places), np.int64)
        for upto in reversed(self._upto):
            rows = upto.take(node, axis=0)
            # Rounding must not carry a place past the end of its node: there lies a slot of another weight, or of none.
            rest = np.minimum(rest, np.nextafter(rows[:, -1], 0.0))
            child = (rows[:, 1:] > rest[:, None]).argmax(axis=1)
            rest = rest - rows.reshape(-1).take(np.arange(len(rows)) * (_CHILDREN + 1) + child)
            node = node * _CHILDREN + child
        return node


def _distinct(ascending: Ints) -> Ints:
    """Each of some numbers in ascending order once."""
    first = np.ones(len(ascending), np.bool_)
    first[1:] = ascending[1:] != ascending[:-1]
    return ascending[first]
