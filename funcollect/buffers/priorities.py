"""Weights of the slots of a ring, which are drawn in proportion to them, and the checks of given priorities."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import is_tensor_collection

from funcollect.buffers import Floats, Ints
from funcollect.messages import shown

_WIDTH = 16  # of the blocks in a `SumTree`; 32 and 64 are slower
_MOST_AT_TOP = 1 << 14  # numbers whose running sums are made again after each change


class SumTree:
    """A weight of at least 0 for each of `capacity` slots. Weights are 0 at first, and a slot of weight 0 is not drawn.

    Blocks of weights have sums, blocks of these sums again, until few enough numbers are left that all their running
    sums are made again after a change. A buffer of a million frames needs two levels above the weights.
    """

    def __init__(self, capacity: int) -> None:
        sizes = [capacity]
        while sizes[-1] > _MOST_AT_TOP:
            sizes[-1] += -sizes[-1] % _WIDTH
            sizes.append(sizes[-1] // _WIDTH)
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
            block = block // _WIDTH  # the same one may come several times
            # `reduce` is what `sum` and `min` call, but sooner.
            above[block] = np.add.reduce(sums.reshape(-1, _WIDTH).take(block, axis=0), axis=1)
            least_above[block] = np.minimum.reduce(least.reshape(-1, _WIDTH).take(block, axis=0), axis=1)

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
        rows, each = np.zeros((len(places), _WIDTH + 1)), np.arange(len(places))
        ends = torch.from_numpy(rows[:, 1:])
        for sums in self._sums[-2::-1]:
            some = torch.from_numpy(sums.reshape(-1, _WIDTH).take(found, axis=0))
            torch.cumsum(some, -1, out=ends)  # which takes a third of NumPy's time
            # Rounding must not move a place past the end of its block, where the next slot may have the weight 0.
            rest = np.minimum(rest, np.nextafter(rows[:, -1], 0.0))
            child = (rows[:, 1:] > rest[:, None]).argmax(axis=1)
            rest -= rows[each, child]
            found = found * _WIDTH + child
        return found

    def find_among(self, slots: Ints, places: Floats) -> Ints:
        """The same over the weights of `slots` [M] alone; ValueError if all of them are 0."""
        upto = self.get(slots).cumsum()
        if not upto[-1] > 0:
            raise ValueError("every frame at which a slice can begin has priority 0: give some frame a positive one")
        places = np.minimum(places * upto[-1], math.nextafter(upto[-1], 0.0))
        return slots[np.searchsorted(upto, places, side="right")]


def numbers_of(name: str, values: Any, kinds: str) -> npt.NDArray[Any]:
    """The values as an array ``[N]``; TypeError unless its dtype is of one of these kinds."""
    wanted = "integers: slots" if kinds == "iu" else "numbers: one for each frame, or one for all"
    try:
        array = torch.as_tensor(values).detach().cpu()
        numbers = (array.float() if array.dtype == torch.bfloat16 else array).numpy().reshape(-1)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} is {shown(values)}, expected {wanted}") from error
    if numbers.dtype.kind not in kinds and (numbers.size or is_tensor_collection(values)):
        raise TypeError(f"{name} is {numbers.dtype if numbers.size else type(values).__name__}, expected {wanted}")
    return numbers


def check_priorities(given: Floats) -> float:
    """The highest of these priorities; ValueError for one that is negative or not finite."""
    lowest, highest = (float(given.min()), float(given.max())) if len(given) else (0.0, 0.0)
    if not (lowest >= 0 and highest < np.inf):
        what = f"priorities lie between {lowest} and {highest}, expected finite numbers of at least 0"
        raise ValueError(f"{what}: give for example the absolute TD error")
    return highest


def later(written: Any, now: int, count: int) -> Any:
    """How many frames were written after these numbers of frames, one or [N]; ValueError for impossible ones."""
    least = most = written
    if type(written) is not int:
        written = numbers_of("written", written, "iu").astype(np.int64)
        if len(written) not in (1, count):
            what = f"written has {len(written)} numbers for {count} frames"
            raise ValueError(f"{what}: give one for each, or one for all")
        least, most = written.min(initial=now), written.max(initial=0)
    if not 0 <= least <= most <= now:
        what = f"written is {shown(written)}, expected 0 to {now}, the number of frames so far"
        raise ValueError(f"{what}: pass what written_at of this buffer returned")
    return now - written
