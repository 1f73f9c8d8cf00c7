"""Lists of slots, one per trajectory, that grow at one end and shrink at the other, all stored in one array.

Each list has a block of 2**k successive entries of the array, which it uses as a ring. A list that outgrows its block
moves to a larger one. Free blocks are used again for lists of the same size.
"""

from __future__ import annotations

import numpy as np

from funcollect.buffers.arrays import Arrays, Ints

_SMALLEST = 4  # 2**4 entries


class SlotLists:
    """The slots of all trajectories, by position."""

    def __init__(self) -> None:
        self._entries = np.zeros(0, np.int32)
        self._used = 0
        self._begin = np.zeros(0, np.int64)  # by trajectory
        self._bits = np.zeros(0, np.int64)  # by trajectory: its block has 2**bits entries; 0 if it has none
        self._idle: dict[int, Ints] = {}  # the begins of free blocks of 2**bits entries, by bits

    def state(self) -> Arrays:
        """The state of the lists, as arrays by name."""
        return {
            "entries": self._entries[: self._used],
            "begin": self._begin,
            "bits": self._bits,
            **{f"idle{bits}": begin for bits, begin in self._idle.items()},
        }

    def load(self, state: Arrays) -> None:
        """Restore what `state` returned."""
        self._entries, self._begin, self._bits = state["entries"], state["begin"], state["bits"]
        self._used = len(self._entries)
        self._idle = {int(name[4:]): begin for name, begin in state.items() if name.startswith("idle")}

    def grow(self, trajectories: int) -> None:
        """Make room for this number of trajectories."""
        more = np.zeros(trajectories - len(self._bits), np.int64)
        self._begin, self._bits = np.concatenate([self._begin, more]), np.concatenate([self._bits, more])

    def get(self, trajectory: Ints, position: Ints) -> Ints:
        """The slots of the frames at `position` of `trajectory`; the arguments broadcast."""
        mask = (1 << self._bits.take(trajectory)) - 1
        return self._entries.take(self._begin.take(trajectory) + (position & mask)).astype(np.int64)

    def put(self, trajectory: Ints, length: Ints, position: Ints, slot: Ints) -> None:
        """Store the slots of ``length[i]`` frames of each ``trajectory[i]``; `position` and `slot` are per frame."""
        position = position & ((1 << self._bits[trajectory]) - 1).repeat(length)
        position += self._begin[trajectory].repeat(length)
        self._entries[position] = slot

    def reserve(self, trajectory: Ints, first: Ints, stop: Ints, held: Ints) -> None:
        """Give each trajectory a block for its positions ``first … stop - 1``; entries below `held` are kept."""
        bits = np.frexp(np.maximum(stop - first, 2) - 1)[1].astype(np.int64).clip(min=_SMALLEST)
        moving = np.flatnonzero(bits > self._bits[trajectory])
        for size in sorted(set(bits[moving].tolist())):
            some = moving[bits[moving] == size]
            self._move(trajectory[some], size, first[some], held[some])

    def _move(self, trajectory: Ints, bits: int, first: Ints, held: Ints) -> None:
        begin = self._take(bits, len(trajectory))
        length = held - first
        if total := int(length.sum()):
            position = np.arange(total) - (np.cumsum(length) - length - first).repeat(length)
            slots = self.get(trajectory.repeat(length), position)
            self._entries[begin.repeat(length) + (position & ((1 << bits) - 1))] = slots
        self.give_back(trajectory)
        self._begin[trajectory], self._bits[trajectory] = begin, bits

    def give_back(self, trajectory: Ints) -> None:
        """Free the blocks of trajectories that are empty or were moved."""
        bits = self._bits[trajectory]
        for size in sorted({*bits.tolist()} - {0}):
            left = self._begin[trajectory[bits == size]]
            self._idle[size] = np.concatenate([self._idle.get(size, left[:0]), left])
        self._bits[trajectory] = 0

    def _take(self, bits: int, count: int) -> Ints:
        """The begins of `count` blocks of 2**bits entries."""
        idle = self._idle.get(bits, np.zeros(0, np.int64))
        reused, self._idle[bits] = idle[:count], idle[count:]
        missing = count - len(reused)
        begin = self._used + (np.arange(missing) << bits)
        self._used += missing << bits
        if self._used > len(self._entries):
            more = np.zeros(max(self._used, 2 * len(self._entries)) - len(self._entries), np.int32)
            self._entries = np.concatenate([self._entries, more])
        return np.concatenate([reused, begin])
