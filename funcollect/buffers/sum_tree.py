"""Draws slots by weight, on the host and on a device; and finds the frames of an index that are still there."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import is_tensor_collection
from torch import Tensor

from funcollect.arguments import check_number
from funcollect.buffers import Bools, Floats, Ints
from funcollect.messages import shown

_WIDTH = 16  # of the blocks in a `SumTree`; 32 and 64 are slower
_MOST_AT_TOP = 1 << 14  # numbers whose running sums are recomputed after each change


class SumTree:
    """A weight of at least 0 for each of `capacity` slots. Weights are 0 at first, and a slot of weight 0 is not drawn.

    Blocks of weights have sums, and so have blocks of these sums, until few enough are left to recompute all their
    running sums after a change. A buffer of a million frames needs two levels above the weights.
    """

    xp = np

    def __init__(self, capacity: int) -> None:
        self.capacity, sizes = capacity, [capacity]
        while sizes[-1] > _MOST_AT_TOP:
            sizes[-1] += -sizes[-1] % _WIDTH
            sizes.append(sizes[-1] // _WIDTH)
        # Each list has one array per level, the weights of the slots first.
        self._sums: list[Floats] = [np.zeros(size) for size in sizes]
        self._least: list[Floats] = [np.full(size, np.inf) for size in sizes]  # the least positive weight below each
        self._top: Floats | None = None  # 0 and the running sums of the last level, until a weight changes

    def moved(self, array: Any) -> Any:
        """The array itself, which is on the host."""
        return array

    def put(self, slots: Ints, weights: Floats) -> None:
        """Set the weights of slots, one each or one for all; if a slot is repeated, its last weight counts."""
        self._top = None
        self._sums[0][slots] = weights
        self._least[0][slots] = np.where(weights > 0, weights, np.inf)
        block = slots
        for (sums, least), (above, least_above) in pairwise(zip(self._sums, self._least, strict=True)):
            block = block // _WIDTH  # may have repetitions
            # `sum` and `min` call `reduce`; to call it directly is faster.
            above[block] = np.add.reduce(sums.reshape(-1, _WIDTH).take(block, axis=0), axis=1)
            least_above[block] = np.minimum.reduce(least.reshape(-1, _WIDTH).take(block, axis=0), axis=1)

    def get(self, slots: Ints) -> Floats:
        """The weights of slots."""
        return self._sums[0].take(slots)

    @property
    def weights(self) -> Floats:
        """All weights [capacity], a view."""
        return self._sums[0][: self.capacity]

    @property
    def _running(self) -> Floats:  # see `_top`
        if self._top is None:
            self._top = np.empty(len(self._sums[-1]) + 1)
            self._top[0] = 0.0
            torch.cumsum(torch.from_numpy(self._sums[-1]), -1, out=torch.from_numpy(self._top[1:]))
        return self._top

    @property
    def least(self) -> float:
        """The least positive weight; infinite if there is none."""
        return float(np.minimum.reduce(self._least[-1]))

    def find(self, places: Floats) -> Ints:
        """The slots at places in ``[0, 1)``, if all weights are laid end to end there; ValueError if all are 0."""
        upto = self._running
        if not upto[-1] > 0:
            raise ValueError("every priority is 0: give some frame a positive one, or the sampler a positive eps")
        rest = np.minimum(places * upto[-1], math.nextafter(upto[-1], 0.0))
        order = rest.argsort()  # a search for sorted places is faster, by more than the time to sort them
        found = np.empty(len(rest), np.int64)
        found[order] = upto.searchsorted(rest[order], side="right") - 1
        rest -= upto.take(found)
        rows, row = np.zeros((len(places), _WIDTH + 1)), np.arange(len(places))
        ends = torch.from_numpy(rows[:, 1:])
        for sums in self._sums[-2::-1]:
            blocks = torch.from_numpy(sums.reshape(-1, _WIDTH).take(found, axis=0))
            torch.cumsum(blocks, -1, out=ends)  # which takes a third of NumPy's time
            # Rounding must not move a place past the end of its block, where the next slot may have the weight 0.
            rest = np.minimum(rest, np.nextafter(rows[:, -1], 0.0))
            child = (rows[:, 1:] > rest[:, None]).argmax(axis=1)
            rest -= rows[row, child]
            found = found * _WIDTH + child
        return found

    def find_among(self, slots: Ints, places: Floats) -> Ints:
        """`find` among `slots` [M] alone; ValueError if all their weights are 0."""
        upto = self.get(slots).cumsum()
        if not upto[-1] > 0:
            raise ValueError("every frame at which a slice can begin has priority 0: give some frame a positive one")
        places = np.minimum(places * upto[-1], math.nextafter(upto[-1], 0.0))
        return slots[np.searchsorted(upto, places, side="right")]


class DeviceSums:
    """A `SumTree` on a device: nothing is copied to the host, or waits for the device.

    In place of a tree, it has the running sums of all weights, which a GPU recomputes as fast as it searches a tree.
    """

    xp = torch

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._all = torch.zeros(capacity + 1, dtype=torch.float64, device=device)  # the last is of no slot
        self.weights = self._all[:capacity]
        self._upto: Tensor | None = None  # the running sums, until a weight changes

    def moved(self, array: Any) -> Tensor:
        """An array on the device."""
        here = array if isinstance(array, Tensor) else torch.from_numpy(array)
        return here.to(self.weights.device, non_blocking=True)

    def put(self, slots: Any, weights: Any) -> None:
        """Set the weights of slots, one each or one for all. What is given for the slot `capacity` is ignored."""
        self._all[self.moved(slots)], self._upto = self.moved(weights), None

    def put_some(self, kept: Tensor, slots: Tensor, weights: Tensor) -> None:
        """`put` where `kept` [N] is True; if a slot is repeated, its last weight counts."""
        end = len(self.weights)
        slots, order = torch.where(kept, slots, end).sort(stable=True)
        repeated = torch.cat([slots[1:] == slots[:-1], slots.new_zeros(min(len(slots), 1), dtype=torch.bool)])
        self.put(slots.masked_fill(repeated, end), weights.expand(len(slots))[order])

    def get(self, slots: Tensor) -> Tensor:
        """The weights of slots."""
        return self.weights[slots]

    @property
    def least(self) -> Tensor:
        """The least positive weight; infinite if there is none."""
        return torch.where(self.weights > 0, self.weights, torch.inf).amin()

    def find(self, places: Floats) -> Tensor:
        """See `SumTree.find`; slot 0 if all weights are 0, which the host does not know."""
        upto = self._upto = self.weights.cumsum(0) if self._upto is None else self._upto
        below = torch.nextafter(upto[-1], torch.zeros_like(upto[-1]))
        found = torch.searchsorted(upto, torch.minimum(self.moved(places) * upto[-1], below), right=True)
        return torch.where(upto[-1] > 0, found, 0)


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


def later(written: Any, now: int, count: int) -> Any:
    """How many frames were written after the `written` ones, a number or [N]; ValueError for impossible numbers."""
    least = most = written
    if type(written) is not int:
        written = numbers_of("written", written, "iu").astype(np.int64)
        if len(written) not in (1, count):
            raise ValueError(f"written has {len(written)} numbers for {count} frames: give one for each, or for all")
        least, most = written.min(initial=now), written.max(initial=0)
    if not 0 <= least <= most <= now:
        raise ValueError(f"written is {shown(written)}, expected 0 to {now}, the frames so far: pass written_at(index)")
    return now - written


def present_in(memory: Any, slots: Ints, written: Any) -> Bools | None:
    """Whether the frames that were in `slots` [N] are still in a ring; None if all are. Slots of -1 have no frame.

    They were there when the buffer had been given `written` frames, one number or [N]; None means now. ValueError for
    slots without a frame, and for an impossible `written`.
    """
    after = 0 if written is None else later(written, memory.before + memory.written, len(slots))
    late = bool(np.any(after > 0)) if isinstance(after, np.ndarray) else after > 0
    if not len(slots) or (not late and slots.view(np.uint64).max() < len(memory)):  # a negative one is huge there
        return None
    present: Bools = slots != -1
    if late:  # the frame that a slot held then is still there
        present &= ((memory.written - 1 - slots) % memory.capacity >= after) & (after < memory.written)
    rest = slots[present]
    if len(rest) and rest.view(np.uint64).max() >= len(memory):
        what = f"index holds slots from {rest.min()} to {rest.max()}"
        where = f"the buffer has frames in 0 … {len(memory) - 1}"
        raise ValueError(f'{what}, {where}: give slots that extend returned, or those in info["index"]')
    return present


def check_one_each(priorities: Any, count: int) -> None:
    """Raise ValueError unless there are so many priorities, or one."""
    if len(priorities) not in (1, count):
        raise ValueError(f"{len(priorities)} priorities are given for {count} frames: give one each, or for all")


def check_scalar(name: str, value: float | Tensor) -> None:
    """Raise TypeError or ValueError unless this is a number, or a tensor with one, of at least 0."""
    check_number(name, value.item() if isinstance(value, Tensor) and value.ndim == 0 else value)
