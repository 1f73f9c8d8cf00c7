"""Which frames of a ring make up which trajectory: an index on the host, kept up to date at each extend.

A **trail** is what the ring holds of one trajectory. Its frames have consecutive positions, and leave the ring in that
order, so a trail is a range of positions and the slots at which they lie. Frame ``p`` of a trail is found in one
look-up by `TrajectoryIndex.slots`, however the batches of many workers were interleaved. Its successor is frame
``p + 1``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from funcollect.buffers.trajectory_index.segments import Segments
from funcollect.buffers.trajectory_index.slot_lists import SlotLists

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


_STATE = (
    "member", "position", "first", "stop", "_free", "_open_key", "_open_trail", "_next_step",
)  # fmt: skip


class TrajectoryIndex:
    """Finds the slots of each trajectory in a ring.

    Args:
        capacity: the ring's slots; frame ``n`` lies in slot ``n % capacity``.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.member = np.zeros(capacity, np.int32)  # the trail of the frame in each slot
        self.position = np.zeros(capacity, np.int64)
        self.slot_lists = SlotLists()
        self.first = np.zeros(0, np.int64)  # position of the oldest frame of each trail
        self.stop = np.zeros(0, np.int64)  # one after that of the newest
        self._free = np.zeros(0, np.int64)  # trails that hold nothing
        # Trails that may go on: by ascending key, and the step with which each would.
        self._open_key = np.zeros(0, np.int64)
        self._open_trail = np.zeros(0, np.int64)
        self._next_step = np.zeros(0, np.int64)  # by trail

    def retire(self, numbers: range) -> None:
        """Drop the ring's oldest frames, which have these numbers."""
        if not numbers:
            return
        slots = slots_of(np.arange(numbers.start, numbers.stop), self.capacity)
        trails, after = self.member.take(slots), self.position.take(slots) + 1
        lasts = np.flatnonzero(np.append(trails[1:] != trails[:-1], True))
        trails, after = trails[lasts], after[lasts]
        self.first[trails] = after  # the last assignment to a trail stays
        emptied = trails[after == self.stop.take(trails)].astype(np.int64)
        if len(emptied):
            self.slot_lists.give_back(emptied)
            self.first[emptied] = self.stop[emptied] = 0
            self._free = np.concatenate([self._free, emptied])
            alive = self.stop.take(self._open_trail) > 0
            self._open_key, self._open_trail = self._open_key[alive], self._open_trail[alive]

    def extend(self, segments: Segments) -> None:
        """Add the ring's newest frames; the slots that they take have been retired."""
        segments = segments.in_order()
        linked = segments.linked()
        found, going_on = self._find_open(segments)
        heads = np.flatnonzero(~linked)  # the first of the segments that make up one trail
        group = np.cumsum(~linked) - 1
        trails = found[heads]
        fresh = ~going_on[heads]
        trails[fresh] = self._new(int(np.count_nonzero(fresh)))
        before = np.cumsum(segments.length) - segments.length
        start = self.stop[trails][group] + before - before[heads][group]  # position of each first frame
        tails = np.append(heads[1:] - 1, len(group) - 1)
        self.stop[trails] = start[tails] + segments.length[tails]
        self.slot_lists.reserve(trails, self.first[trails], self.stop[trails], start[heads])
        self._place(segments, trails[group], start, before)
        if segments.step is not None:
            self._next_step[trails] = segments.step[tails] + segments.length[tails]
        self._reopen(segments.key[tails], trails, segments.ended[tails])

    def _place(self, segments: Segments, trail: Ints, start: Ints, before: Ints) -> None:
        """Note slots, trails and positions of all frames; a segment begins at `start` in its trail."""
        slots = slots_of(segments.numbers(), self.capacity)
        position = np.arange(len(slots)) + (start - before).repeat(segments.length)
        self.slot_lists.put(trail, segments.length, position, slots)
        self.member[slots] = trail.repeat(segments.length)
        self.position[slots] = position

    def _find_open(self, segments: Segments) -> tuple[Ints, Bools]:
        """The open trail with each segment's key, and whether the segment continues it: [S] both."""
        if not len(self._open_key):
            return np.zeros(len(segments.key), np.int64), np.zeros(len(segments.key), np.bool_)
        place = np.searchsorted(self._open_key, segments.key).clip(max=len(self._open_key) - 1)
        trail = self._open_trail[place]
        going_on = self._open_key[place] == segments.key
        going_on[1:] &= segments.key[1:] != segments.key[:-1]
        if segments.step is not None:
            going_on &= segments.step == self._next_step[trail]
        return trail, going_on

    def _reopen(self, key: Ints, trail: Ints, ended: Bools) -> None:
        """Replace the open trails of these keys (ascending) by the last of these trails that has each, if not ended."""
        stays = ~ended
        stays[:-1] &= key[1:] != key[:-1]
        others = key[np.searchsorted(key, self._open_key).clip(max=len(key) - 1)] != self._open_key
        keys = np.concatenate([self._open_key[others], key[stays]])
        order = keys.argsort(kind="stable")
        self._open_key = keys[order]
        self._open_trail = np.concatenate([self._open_trail[others], trail[stays]])[order]

    def _new(self, count: int) -> Ints:
        """Trails that hold nothing yet."""
        if count > len(self._free):
            size = len(self.stop)
            grown = max(2 * size, size + count, 64)
            for name in ("first", "stop", "_next_step"):
                setattr(self, name, np.concatenate([getattr(self, name), np.zeros(grown - size, np.int64)]))
            self.slot_lists.grow(grown)
            self._free = np.concatenate([self._free, np.arange(grown - 1, size - 1, -1)])
        cut = len(self._free) - count
        taken, self._free = self._free[cut:][::-1], self._free[:cut]
        return taken

    def following(self, slots: Ints) -> Ints:
        """Where the successor of each frame in `slots` lies; its own slot where it has none."""
        trail, position = self.member.take(slots).astype(np.int64), self.position.take(slots)
        return self.slots(trail, np.minimum(position + 1, self.stop.take(trail) - 1))

    def preceding(self, slots: Ints) -> Ints:
        """Where the predecessor of each frame in `slots` lies; its own slot where it has none."""
        trail, position = self.member.take(slots).astype(np.int64), self.position.take(slots)
        return self.slots(trail, np.maximum(position - 1, self.first.take(trail)))

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Everything, as arrays by name."""
        return {name: getattr(self, name) for name in _STATE} | self.slot_lists.state()

    def load(self, state: dict[str, npt.NDArray[Any]]) -> None:
        """Restore what `state` returned."""
        for name in _STATE:
            setattr(self, name, state[name])
        self.slot_lists.load(state)

    def slots(self, trail: Ints, position: Ints) -> Ints:
        """Where the frames at `position` of `trail` lie; the two broadcast."""
        return self.slot_lists.get(trail, position)


def slots_of(numbers: Ints, capacity: int) -> Ints:
    """``numbers % capacity``, of numbers less than `capacity` apart; a division of each takes several times longer."""
    if not len(numbers):
        return numbers
    slots: Ints = numbers - numbers.min() // capacity * capacity
    np.subtract(slots, capacity, out=slots, where=slots >= capacity)
    return slots


def draw(choose: Callable[[int, int], Ints], count: int, size: int, valid: Callable[[Ints], Bools]) -> Ints:
    """`count` independent uniform draws from the valid ones of ``0 … size - 1``; fewer than `count` if none is.

    Tries a few at random first, and looks through all only where too few of these were valid.

    Args:
        choose: ``choose(n, k)`` gives k uniform integers below n.
        count: draws.
        size: candidates.
        valid: whether each candidate may be drawn.
    """
    tried = choose(size, 4 * count)
    drawn = tried[valid(tried)][:count]
    if len(drawn) == count:
        return drawn
    everything = np.flatnonzero(valid(np.arange(size)))
    if not len(everything):
        return everything
    return np.concatenate([drawn, everything[choose(len(everything), count - len(drawn))]])
