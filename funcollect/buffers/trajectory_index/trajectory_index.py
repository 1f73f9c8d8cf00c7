"""An index on the CPU from trajectories to the slots of their frames in a ring.

The frames of a trajectory have consecutive positions and leave the ring in that order. So the index stores a range of
positions per trajectory, and the slot of each position. `TrajectoryIndex.slots` finds the frame at a position in one
look-up, even if the batches of many workers were interleaved. The successor of the frame at ``p`` is at ``p + 1``.
Trajectories without frames in the ring are dropped, and their numbers are used again.
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
    "member", "position", "first", "stop", "_free", "_open_key", "_open_trajectory", "_next_step",
)  # fmt: skip


class TrajectoryIndex:
    """Finds the slots of each trajectory in a ring.

    Args:
        capacity: the number of slots of the ring; frame ``n`` is in slot ``n % capacity``.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.member = np.zeros(capacity, np.int32)  # the number of the trajectory of the frame in each slot
        self.position = np.zeros(capacity, np.int64)
        self.slot_lists = SlotLists()
        self.first = np.zeros(0, np.int64)  # the position of the oldest frame of each trajectory
        self.stop = np.zeros(0, np.int64)  # one past the position of the newest
        self._free = np.zeros(0, np.int64)  # numbers that no trajectory has
        # Trajectories that may continue, sorted by key, and the step of the frame that would continue each.
        self._open_key = np.zeros(0, np.int64)
        self._open_trajectory = np.zeros(0, np.int64)
        self._next_step = np.zeros(0, np.int64)  # by trajectory

    def retire(self, numbers: range) -> None:
        """Remove the oldest frames of the ring, which have these numbers."""
        if not numbers:
            return
        slots = slots_of(np.arange(numbers.start, numbers.stop), self.capacity)
        trajectories, after = self.member.take(slots), self.position.take(slots) + 1
        lasts = np.flatnonzero(np.append(trajectories[1:] != trajectories[:-1], True))
        trajectories, after = trajectories[lasts], after[lasts]
        self.first[trajectories] = after  # of several assignments to a trajectory, the last counts
        emptied = trajectories[after == self.stop.take(trajectories)].astype(np.int64)
        if len(emptied):
            self.slot_lists.give_back(emptied)
            self.first[emptied] = self.stop[emptied] = 0
            self._free = np.concatenate([self._free, emptied])
            alive = self.stop.take(self._open_trajectory) > 0
            self._open_key, self._open_trajectory = self._open_key[alive], self._open_trajectory[alive]

    def extend(self, segments: Segments) -> None:
        """Add the newest frames of the ring; the frames that they overwrite must have been retired."""
        segments = segments.in_order()
        linked = segments.linked()
        found, going_on = self._find_open(segments)
        heads = np.flatnonzero(~linked)  # the first of successive segments of one trajectory
        group = np.cumsum(~linked) - 1
        trajectories = found[heads]
        fresh = ~going_on[heads]
        trajectories[fresh] = self._new(int(np.count_nonzero(fresh)))
        before = np.cumsum(segments.length) - segments.length
        start = self.stop[trajectories][group] + before - before[heads][group]  # the position of each first frame
        tails = np.append(heads[1:] - 1, len(group) - 1)
        self.stop[trajectories] = start[tails] + segments.length[tails]
        self.slot_lists.reserve(trajectories, self.first[trajectories], self.stop[trajectories], start[heads])
        self._place(segments, trajectories[group], start, before)
        if segments.step is not None:
            self._next_step[trajectories] = segments.step[tails] + segments.length[tails]
        self._reopen(segments.key[tails], trajectories, segments.ended[tails])

    def _place(self, segments: Segments, trajectory: Ints, start: Ints, before: Ints) -> None:
        """Store slots, trajectories and positions of all frames; each segment begins at position `start`."""
        slots = slots_of(segments.numbers(), self.capacity)
        position = np.arange(len(slots)) + (start - before).repeat(segments.length)
        self.slot_lists.put(trajectory, segments.length, position, slots)
        self.member[slots] = trajectory.repeat(segments.length)
        self.position[slots] = position

    def _find_open(self, segments: Segments) -> tuple[Ints, Bools]:
        """The open trajectory with each segment's key [S], and whether the segment continues it [S]."""
        if not len(self._open_key):
            return np.zeros(len(segments.key), np.int64), np.zeros(len(segments.key), np.bool_)
        place = np.searchsorted(self._open_key, segments.key).clip(max=len(self._open_key) - 1)
        trajectory = self._open_trajectory[place]
        going_on = self._open_key[place] == segments.key
        going_on[1:] &= segments.key[1:] != segments.key[:-1]
        if segments.step is not None:
            going_on &= segments.step == self._next_step[trajectory]
        return trajectory, going_on

    def _reopen(self, key: Ints, trajectory: Ints, ended: Bools) -> None:
        """For each of the ascending keys, replace the open trajectory by the last of these, unless that has ended."""
        stays = ~ended
        stays[:-1] &= key[1:] != key[:-1]
        others = key[np.searchsorted(key, self._open_key).clip(max=len(key) - 1)] != self._open_key
        keys = np.concatenate([self._open_key[others], key[stays]])
        order = keys.argsort(kind="stable")
        self._open_key = keys[order]
        self._open_trajectory = np.concatenate([self._open_trajectory[others], trajectory[stays]])[order]

    def _new(self, count: int) -> Ints:
        """The numbers of `count` new trajectories."""
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
        """The slots of the frames' successors; a frame's own slot if it has none."""
        trajectory, position = self.member.take(slots).astype(np.int64), self.position.take(slots)
        return self.slots(trajectory, np.minimum(position + 1, self.stop.take(trajectory) - 1))

    def preceding(self, slots: Ints) -> Ints:
        """The slots of the frames' predecessors; a frame's own slot if it has none."""
        trajectory, position = self.member.take(slots).astype(np.int64), self.position.take(slots)
        return self.slots(trajectory, np.maximum(position - 1, self.first.take(trajectory)))

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """All arrays by name."""
        return {name: getattr(self, name) for name in _STATE} | self.slot_lists.state()

    def load(self, state: dict[str, npt.NDArray[Any]]) -> None:
        """Restore what `state` returned."""
        for name in _STATE:
            setattr(self, name, state[name])
        self.slot_lists.load(state)

    def slots(self, trajectory: Ints, position: Ints) -> Ints:
        """The slots of the frames at `position` of `trajectory`; the arguments broadcast."""
        return self.slot_lists.get(trajectory, position)


def slots_of(numbers: Ints, capacity: int) -> Ints:
    """``numbers % capacity`` of numbers less than `capacity` apart; several times faster than a division of each."""
    if not len(numbers):
        return numbers
    slots: Ints = numbers - numbers.min() // capacity * capacity
    np.subtract(slots, capacity, out=slots, where=slots >= capacity)
    return slots


def draw(choose: Callable[[int, int], Ints], count: int, size: int, valid: Callable[[Ints], Bools]) -> Ints:
    """`count` independent uniform draws from the valid candidates among ``0 … size - 1``; none if none is valid.

    Random tries come first. Only if too few of them are valid, all candidates are examined.

    Args:
        choose: ``choose(n, k)`` returns k uniform integers below n.
        count: the number of draws.
        size: the number of candidates.
        valid: returns for an array of candidates which of them may be drawn.
    """
    tried = choose(size, 4 * count)
    drawn = tried[valid(tried)][:count]
    if len(drawn) == count:
        return drawn
    everything = np.flatnonzero(valid(np.arange(size)))
    if not len(everything):
        return everything
    return np.concatenate([drawn, everything[choose(len(everything), count - len(drawn))]])
