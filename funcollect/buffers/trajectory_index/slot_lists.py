"""Lists of slots, one per trail, that grow at one end and are forgotten at the other, all in one array.

Each list has a block: a stretch of the array, 2**k entries long, used as a ring. One that grows out of its block moves
to the next size; blocks given back are used again for lists of the same size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_SMALLEST = 4  # 2**4 entries


class SlotLists:
    """The slots of every trail, by position."""

    def __init__(self) -> None:
        self._entries = np.zeros(0, np.int32)
        self._used = 0
        self._begin = np.zeros(0, np.int64)  # by trail
        self._bits = np.zeros(0, np.int64)  # by trail: its block has 2**bits entries; 0 where it has none
        self._idle: dict[int, Ints] = {}  # where blocks of 2**bits entries begin that nobody uses

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Everything, as arrays by name."""
        return {
            "entries": self._entries[: self._used],
            "begin": self._begin,
            "bits": self._bits,
            **{f"idle{bits}": begin for bits, begin in self._idle.items()},
        }

    def load(self, state: dict[str, npt.NDArray[Any]]) -> None:
        """Restore what `state` returned."""
        self._entries, self._begin, self._bits = state["entries"], state["begin"], state["bits"]
        self._used = len(self._entries)
        self._idle = {int(name[4:]): begin for name, begin in state.items() if name.startswith("idle")}

    def grow(self, trails: int) -> None:
        """Make room for so many trails."""
        more = np.zeros(trails - len(self._bits), np.int64)
        self._begin, self._bits = np.concatenate([self._begin, more]), np.concatenate([self._bits, more])

    def get(self, trail: Ints, position: Ints) -> Ints:
        """The slot of the frame at `position` of `trail`; the two broadcast."""
        mask = (1 << self._bits.take(trail)) - 1
        return self._entries.take(self._begin.take(trail) + (position & mask)).astype(np.int64)

    def put(self, trail: Ints, length: Ints, position: Ints, slot: Ints) -> None:
        """Note the slots of ``length[i]`` frames of each ``trail[i]``; `position` and `slot` are of all of these."""
        position = position & ((1 << self._bits[trail]) - 1).repeat(length)
        position += self._begin[trail].repeat(length)
        self._entries[position] = slot

    def reserve(self, trail: Ints, first: Ints, stop: Ints, held: Ints) -> None:
        """Give each of `trail` a block for its positions ``first … stop - 1``; keep what it has below `held`."""
        bits = np.frexp(np.maximum(stop - first, 2) - 1)[1].astype(np.int64).clip(min=_SMALLEST)
        moving = np.flatnonzero(bits > self._bits[trail])
        for size in sorted(set(bits[moving].tolist())):
            some = moving[bits[moving] == size]
            self._move(trail[some], size, first[some], held[some])

    def _move(self, trail: Ints, bits: int, first: Ints, held: Ints) -> None:
        begin = self._take(bits, len(trail))
        length = held - first
        if total := int(length.sum()):
            position = np.arange(total) - (np.cumsum(length) - length - first).repeat(length)
            slots = self.get(trail.repeat(length), position)
            self._entries[begin.repeat(length) + (position & ((1 << bits) - 1))] = slots
        self.give_back(trail)
        self._begin[trail], self._bits[trail] = begin, bits

    def give_back(self, trail: Ints) -> None:
        """Leave the blocks of trails that hold nothing any more, or have moved."""
        bits = self._bits[trail]
        for size in sorted({*bits.tolist()} - {0}):
            left = self._begin[trail[bits == size]]
            self._idle[size] = np.concatenate([self._idle.get(size, left[:0]), left])
        self._bits[trail] = 0

    def _take(self, bits: int, count: int) -> Ints:
        """Where `count` blocks of 2**bits entries begin."""
        idle = self._idle.get(bits, np.zeros(0, np.int64))
        reused, self._idle[bits] = idle[:count], idle[count:]
        missing = count - len(reused)
        begin = self._used + (np.arange(missing) << bits)
        self._used += missing << bits
        if self._used > len(self._entries):
            more = np.zeros(max(self._used, 2 * len(self._entries)) - len(self._entries), np.int32)
            self._entries = np.concatenate([self._entries, more])
        return np.concatenate([reused, begin])
