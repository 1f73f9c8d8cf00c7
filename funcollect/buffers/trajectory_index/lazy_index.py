"""The trails of a ring, brought up to date when they are asked for."""

from __future__ import annotations

from funcollect.buffers.trajectory_index.segments import Frames, Segments
from funcollect.buffers.trajectory_index.trajectory_index import TrajectoryIndex

_MOST_RUNS = 1 << 12  # that wait: three megabytes, where each frame comes by itself
_FRAMES_AT_ONCE = 1 << 14  # few enough to lie in a processor's cache


class LazyIndex:
    """`TrajectoryIndex` that are told of many extends at once, when somebody looks at them.

    An extend notes its `Segments`, which is a tenth of the work, and all of it while nobody asks for slices.

    Args:
        capacity: the ring's slots.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._trails = TrajectoryIndex(capacity)
        self._waiting: list[Segments] = []  # of which the trails have not been told, an extend each, oldest first
        self._runs = 0  # how many these are
        self._numbers = range(0)  # of their frames

    @property
    def trails(self) -> TrajectoryIndex:
        """The trails, with all frames."""
        if self._waiting:
            self._tell()
        return self._trails

    def extend(self, frames: Frames, numbers: range) -> None:
        """Add the ring's newest frames, which have these numbers; those that it does not hold are left out."""
        runs = Segments.of(frames)
        if self._waiting and (self._waiting[0].step is None) != (runs.step is None):
            self._tell()
        start = self._numbers.start if self._waiting else numbers.start
        self._waiting.append(runs)
        self._numbers = range(start, numbers.stop)
        self._runs += len(runs.key)
        if self._runs > _MOST_RUNS:
            self._tell()

    def _tell(self) -> None:
        start, oldest = self._numbers.start, self._numbers.stop - self.capacity
        self._trails.retire(range(max(start - self.capacity, 0), min(oldest, start)))
        some: list[Segments] = []
        frames = 0
        for runs in self._waiting:
            some.append(runs.since(oldest))
            frames += int(some[-1].length.sum())
            if frames > _FRAMES_AT_ONCE:
                self._trails.extend(Segments.joined(some))
                some, frames = [], 0
        if frames:
            self._trails.extend(Segments.joined(some))
        self._waiting, self._runs = [], 0
