"""A trajectory index that is updated on the first lookup after an extend."""

from __future__ import annotations

from funcollect.buffers.trajectory_index.segments import Frames, Segments
from funcollect.buffers.trajectory_index.trajectory_index import TrajectoryIndex

_MOST_SEGMENTS = 1 << 12  # that are kept: three megabytes, if each frame is a segment
_FRAMES_AT_ONCE = 1 << 14  # few enough for a processor's cache


class LazyIndex:
    """A `TrajectoryIndex` that is updated on the first lookup, for many extends at once.

    `extend` only records segments. This is a tenth of the work, and the rest is never done if no slices are sampled.

    Args:
        capacity: the number of slots of the ring.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._index = TrajectoryIndex(capacity)
        self._waiting: list[Segments] = []  # not yet in the index, one entry per extend, oldest first
        self._count = 0  # the number of these segments
        self._numbers = range(0)  # the numbers of their frames

    @property
    def current(self) -> TrajectoryIndex:
        """The index, up to date."""
        if self._waiting:
            self._update()
        return self._index

    def extend(self, frames: Frames, numbers: range) -> None:
        """Add the newest frames, which have these numbers; frames that the ring does not store are left out."""
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
        start, oldest = self._numbers.start, self._numbers.stop - self.capacity
        self._index.retire(range(max(start - self.capacity, 0), min(oldest, start)))
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
