"""An index on the CPU from trajectories to the slots of their frames in a ring.

The frames of a trajectory have consecutive positions and leave the ring in that order. So the index stores a range of
positions per trajectory, and the slot of each position. `SlotLists.get` finds the frame at a position in one look-up,
even if the batches of many workers were interleaved. The successor of the frame at ``p`` is at ``p + 1``. Trajectories
without frames in the ring are dropped, and their numbers are used again.
"""

from __future__ import annotations

import numpy as np

from funcollect.buffers import Arrays, Bools, Ints
from funcollect.buffers.segments import Frames, Segments

_MOST_SEGMENTS = 1 << 12  # recorded before the index is updated; three megabytes, if each frame is a segment
_FRAMES_AT_ONCE = 1 << 14  # added to the index together; their arrays fit into a processor's cache
_SMALLEST_BLOCK = 4  # 2**4 entries of a `SlotLists`

_STATE = ("member", "position", "first", "stop", "_free", "_open_key", "_open_trajectory", "_next_step")


class TrajectoryIndex:
    """Finds the slots of each trajectory in a ring; frame ``n`` is in slot ``n % capacity``."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.member = np.zeros(capacity, np.int32)  # by slot: the number of the frame's trajectory
        self.position = np.zeros(capacity, np.int64)  # by slot: the frame's position in its trajectory
        self.slot_lists = SlotLists()
        self.first = np.zeros(0, np.int64)  # by trajectory: the position of its oldest frame
        self.stop = np.zeros(0, np.int64)  # by trajectory: one past the position of its newest frame
        self._next_step = np.zeros(0, np.int64)  # by trajectory: the step of a frame that would continue it
        self._free = np.zeros(0, np.int64)  # numbers that no trajectory has
        self._open_key = np.zeros(0, np.int64)  # the keys of trajectories that may continue, ascending
        self._open_trajectory = np.zeros(0, np.int64)  # the numbers of these trajectories

    def retire(self, numbers: range) -> None:
        """Remove the oldest frames of the ring, which have these numbers."""
        if not numbers:
            return
        slots = slots_of(np.arange(numbers.start, numbers.stop), self.capacity)
        trajectories, after = self.member.take(slots), self.position.take(slots) + 1
        lasts = np.flatnonzero(np.append(trajectories[1:] != trajectories[:-1], True))
        trajectories, after = trajectories[lasts], after[lasts]
        self.first[trajectories] = after  # if a trajectory is repeated, its last assignment counts
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
        # A group consists of successive segments of one trajectory, from a head to a tail.
        heads, group = np.flatnonzero(~linked), np.cumsum(~linked) - 1
        tails = np.append(heads[1:] - 1, len(group) - 1)
        trajectories = found[heads]
        fresh = ~going_on[heads]
        trajectories[fresh] = self._new(int(np.count_nonzero(fresh)))
        before = np.cumsum(segments.length) - segments.length
        start = self.stop[trajectories][group] + before - before[heads][group]  # the position of each segment's start
        self.stop[trajectories] = start[tails] + segments.length[tails]
        self.slot_lists.reserve(trajectories, self.first[trajectories], self.stop[trajectories], start[heads])
        member = trajectories[group]
        slots = slots_of(segments.numbers(), self.capacity)
        position = np.arange(len(slots)) + (start - before).repeat(segments.length)
        self.slot_lists.put(member, segments.length, position, slots)
        self.member[slots], self.position[slots] = member.repeat(segments.length), position
        if segments.step is not None:
            self._next_step[trajectories] = segments.step[tails] + segments.length[tails]
        self._reopen(segments.key[tails], trajectories, segments.ended[tails])

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
        """Replace the open trajectories of the ascending keys by the last one of each key, unless that has ended."""
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

    def places(self, slots: Ints) -> tuple[Ints, Ints]:
        """The numbers of the frames' trajectories, and the positions of the frames in them."""
        return self.member.take(slots).astype(np.int64), self.position.take(slots)

    def following(self, slots: Ints) -> Ints:
        """The slots of the frames' successors; a frame's own slot if it has none."""
        trajectory, position = self.places(slots)
        return self.slot_lists.get(trajectory, np.minimum(position + 1, self.stop.take(trajectory) - 1))

    def preceding(self, slots: Ints) -> Ints:
        """The slots of the frames' predecessors; a frame's own slot if it has none."""
        trajectory, position = self.places(slots)
        return self.slot_lists.get(trajectory, np.maximum(position - 1, self.first.take(trajectory)))

    def state(self) -> Arrays:
        """The state of the index, as arrays by name."""
        return {name: getattr(self, name) for name in _STATE} | self.slot_lists.state()

    def load(self, state: Arrays) -> None:
        """Restore what `state` returned."""
        for name in _STATE:
            setattr(self, name, state[name])
        self.slot_lists.load(state)


def slots_of(numbers: Ints, capacity: int) -> Ints:
    """``numbers % capacity``, for numbers less than `capacity` apart; several times faster than a division of each."""
    if not len(numbers):
        return numbers
    slots: Ints = numbers - numbers.min() // capacity * capacity
    np.subtract(slots, capacity, out=slots, where=slots >= capacity)
    return slots


class LazyIndex:
    """A `TrajectoryIndex` that is updated on the first lookup, for many extends at once.

    `extend` only records segments. This is a tenth of the work, and the rest is never done if no slices are sampled.
    """

    def __init__(self, capacity: int) -> None:
        self._index = TrajectoryIndex(capacity)
        self._waiting: list[Segments] = []  # not yet in the index, one entry per extend, oldest first
        self._count = 0  # the number of waiting segments
        self._numbers = range(0)  # the numbers of their frames

    @property
    def current(self) -> TrajectoryIndex:
        """The index, up to date."""
        if self._waiting:
            self._update()
        return self._index

    def extend(self, frames: Frames, numbers: range) -> None:
        """Add the newest frames, which have these numbers; frames that the ring does not store are omitted."""
        segments = Segments.of(frames)
        if self._waiting and (self._waiting[0].step is None) != (segments.step is None):
            self._update()
        start = self._numbers.start if self._waiting else numbers.start
        self._waiting.append(segments)
        self._numbers = range(start, numbers.stop)
        self._count += len(segments.key)
        if self._count > _MOST_SEGMENTS:
            self._update()

    def _update(self) -> None:
        """Add the waiting segments to the index, and remove the frames that they overwrote."""
        start, oldest = self._numbers.start, self._numbers.stop - self._index.capacity
        self._index.retire(range(max(start - self._index.capacity, 0), min(oldest, start)))
        some: list[Segments] = []
        frames = 0
        for segments in self._waiting:
            some.append(segments.since(oldest))
            frames += int(some[-1].length.sum())
            if frames > _FRAMES_AT_ONCE:
                self._index.extend(Segments.joined(some))
                some, frames = [], 0
        if frames:
            self._index.extend(Segments.joined(some))
        self._waiting, self._count = [], 0


class SlotLists:
    """Lists of slots, one per trajectory, that grow at one end and shrink at the other, all stored in one array.

    Each list has a block of 2**k successive entries of the array, which it uses as a ring. A list that outgrows its
    block moves to a larger one. Free blocks are used again for lists of the same size.
    """

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
        bits = np.frexp(np.maximum(stop - first, 2) - 1)[1].astype(np.int64).clip(min=_SMALLEST_BLOCK)
        moving = np.flatnonzero(bits > self._bits[trajectory])
        for size in sorted(set(bits[moving].tolist())):
            some = moving[bits[moving] == size]
            self._move(trajectory[some], size, first[some], held[some])

    def _move(self, trajectory: Ints, bits: int, first: Ints, held: Ints) -> None:
        """Move the entries ``first … held - 1`` of trajectories to larger blocks of 2**bits entries."""
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
