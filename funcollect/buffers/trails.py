"""Which frames of a ring make up which trajectory: an index on the host, kept up to date at each extend.

A **trail** is what the ring holds of one trajectory. Its frames have consecutive positions, and leave the ring in that
order, so a trail is a range of positions and the slots at which they lie. Frame ``p`` of a trail is found in one
look-up (`Trails.slots`), however the batches of many workers were interleaved; its successor is frame ``p + 1``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from funcollect.buffers.shelves import Shelves

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


_STATE = (
    "member", "position", "first", "stop", "_free", "_open_key", "_open_trail", "_last_number", "_last_step",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Frames:
    """The frames of one extend, lane after lane, each lane in the order of time; all arrays are [N]."""

    number: Ints  # how many frames the ring had been given before; rises within a lane
    key: Ints  # frames that follow each other in one trajectory have equal ones
    begins: Bools  # the first frame of its lane in this extend
    ends: Bools | None  # no frame follows this one
    step: Ints | None  # rises by one within a trajectory


@dataclass(frozen=True)
class _Runs:
    """Frames of one extend that follow each other directly; all arrays are [R], by key, then in the order of time."""

    start: Ints  # index of the first frame
    length: Ints
    key: Ints
    ended: Bools  # by its last frame
    linked: Bools  # goes on where the run before it in this order stopped


class Trails:
    """The trails of a ring.

    Args:
        capacity: the ring's slots; frame ``n`` lies in slot ``n % capacity``.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.member = np.zeros(capacity, np.int32)  # the trail of the frame in each slot
        self.position = np.zeros(capacity, np.int64)
        self.shelves = Shelves()
        self.first = np.zeros(0, np.int64)  # position of the oldest frame of each trail
        self.stop = np.zeros(0, np.int64)  # one after that of the newest
        self._free = np.zeros(0, np.int64)  # trails that hold nothing
        # Trails that may go on: by ascending key, and how the newest frame of each was numbered.
        self._open_key = np.zeros(0, np.int64)
        self._open_trail = np.zeros(0, np.int64)
        self._last_number = np.zeros(0, np.int64)  # by trail
        self._last_step = np.zeros(0, np.int64)  # by trail

    def retire(self, slots: Ints) -> None:
        """Drop the ring's oldest frames, which lie in `slots`, oldest first."""
        trails, positions = self.member.take(slots), self.position.take(slots)
        self.first[trails] = positions + 1  # the last assignment to a trail stays
        emptied = trails[positions + 1 == self.stop.take(trails)].astype(np.int64)
        if len(emptied):
            self.shelves.give_back(emptied)
            self.first[emptied] = self.stop[emptied] = 0
            self._free = np.concatenate([self._free, emptied])
            alive = self.stop.take(self._open_trail) > 0
            self._open_key, self._open_trail = self._open_key[alive], self._open_trail[alive]

    def extend(self, frames: Frames) -> None:
        """Add the ring's newest frames; the slots that they take have been retired."""
        runs = _runs(frames)
        lasts = runs.start + runs.length - 1
        found, going_on = self._find_open(runs, frames)
        begins = ~(runs.linked | going_on)
        group = np.cumsum(~runs.linked) - 1  # of runs that make up one trail
        heads = np.flatnonzero(~runs.linked)
        trails = found[heads]
        fresh = begins[heads]
        trails[fresh] = self._new(int(np.count_nonzero(fresh)))
        before = np.cumsum(runs.length) - runs.length
        start = self.stop[trails][group] + before - before[heads][group]  # position of the first frame of each run
        tails = np.empty_like(heads)
        tails[:-1], tails[-1] = heads[1:] - 1, len(group) - 1
        self.stop[trails] = start[tails] + runs.length[tails]
        self.shelves.reserve(trails, self.first[trails], self.stop[trails], start[heads])
        self._place(frames, runs, trails[group], start)
        self._last_number[trails] = frames.number[lasts[tails]]
        if frames.step is not None:
            self._last_step[trails] = frames.step[lasts[tails]]
        self._reopen(runs.key[tails], trails, runs.ended[tails])

    def _place(self, frames: Frames, runs: _Runs, trail: Ints, start: Ints) -> None:
        """Note slots, trails and positions of all frames; a run begins at `start` in its trail."""
        order = slice(None) if (runs.start[1:] > runs.start[:-1]).all() else runs.start.argsort()
        length, trail = runs.length[order], trail[order]
        slots = frames.number % self.capacity
        position = np.arange(len(slots)) + (start[order] - runs.start[order]).repeat(length)
        self.shelves.put(trail, length, position, slots)
        self.member[slots] = trail.repeat(length)
        self.position[slots] = position

    def _find_open(self, runs: _Runs, frames: Frames) -> tuple[Ints, Bools]:
        """The open trail with each run's key, and whether the run goes on with it: [R] both."""
        if not len(self._open_key):
            return np.zeros(len(runs.key), np.int64), np.zeros(len(runs.key), np.bool_)
        place = np.searchsorted(self._open_key, runs.key).clip(max=len(self._open_key) - 1)
        trail = self._open_trail[place]
        going_on = self._open_key[place] == runs.key
        going_on[1:] &= runs.key[1:] != runs.key[:-1]
        if frames.step is not None:
            going_on &= frames.step[runs.start] == self._last_step[trail] + 1
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
            for name in ("first", "stop", "_last_number", "_last_step"):
                setattr(self, name, np.concatenate([getattr(self, name), np.zeros(grown - size, np.int64)]))
            self.shelves.grow(grown)
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
        return {name: getattr(self, name) for name in _STATE} | self.shelves.state()

    def load(self, state: dict[str, npt.NDArray[Any]]) -> None:
        """Become what `state` told."""
        for name in _STATE:
            setattr(self, name, state[name])
        self.shelves.load(state)

    def slots(self, trail: Ints, position: Ints) -> Ints:
        """Where the frames at `position` of `trail` lie; the two broadcast."""
        return self.shelves.get(trail, position)


def _runs(frames: Frames) -> _Runs:
    """The runs of one extend. A key that comes again later goes on with it only where time has."""
    begins = frames.begins.copy()
    begins[1:] |= frames.key[1:] != frames.key[:-1]
    if frames.ends is not None:
        begins[1:] |= frames.ends[:-1]
    if frames.step is not None:
        begins[1:] |= frames.step[1:] != frames.step[:-1] + 1
    start = np.flatnonzero(begins)
    key = frames.key[start]
    length = np.empty_like(start)
    length[:-1], length[-1] = start[1:] - start[:-1], len(begins) - start[-1]
    if (key[1:] <= key[:-1]).any():  # else they are in order, and no key comes twice
        order = np.lexsort((frames.number[start], key))
        start, key, length = start[order], key[order], length[order]
    lasts = start + length - 1
    ended = np.zeros(len(start), np.bool_) if frames.ends is None else frames.ends[lasts]
    linked = np.zeros(len(start), np.bool_)
    linked[1:] = (key[1:] == key[:-1]) & ~ended[:-1] & (frames.number[start[1:]] > frames.number[lasts[:-1]])
    if frames.step is not None:
        linked[1:] &= frames.step[start[1:]] == frames.step[lasts[:-1]] + 1
    return _Runs(start, length, key, ended, linked)


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
