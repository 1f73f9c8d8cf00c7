"""Segments: a compact record of an extend, with a few numbers per sequence of successive frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from funcollect.buffers.arrays import Bools, Ints


class Frames(NamedTuple):
    """The frames of one extend, ordered by lane, then by time; all arrays are [N]."""

    number: Ints  # the number of frames written before; increases evenly within a lane
    key: Ints  # equal for frames of one trajectory
    begins: Bools  # whether the frame is the first of its lane in this extend
    ends: Bools | None  # whether the trajectory ends with the frame
    step: Ints | None  # increases by one within a trajectory


class Segments(NamedTuple):
    """Successive frames of one trajectory in one extend; all arrays are [S]."""

    number: Ints  # of the first frame
    stride: Ints  # the increase of numbers from frame to frame
    length: Ints
    key: Ints
    step: Ints | None  # of the first frame
    ended: Bools  # whether the trajectory ends with the segment's last frame

    @classmethod
    def of(cls, frames: Frames) -> Segments:
        """The segments of one extend, which must not be empty."""
        begins = frames.begins.copy()
        begins[1:] |= frames.key[1:] != frames.key[:-1]
        if frames.ends is not None:
            begins[1:] |= frames.ends[:-1]
        if frames.step is not None:
            begins[1:] |= frames.step[1:] != frames.step[:-1] + 1
        start = np.flatnonzero(begins)
        stop = np.empty_like(start)
        stop[:-1], stop[-1] = start[1:], len(begins)
        number = frames.number.take(start)
        second = np.minimum(start + 1, stop - 1)
        return cls(
            number=number,
            stride=frames.number.take(second) - number,
            length=stop - start,
            key=frames.key[start],
            step=None if frames.step is None else frames.step[start],
            ended=np.zeros(len(start), np.bool_) if frames.ends is None else frames.ends[stop - 1],
        )

    @staticmethod
    def joined(parts: Sequence[Segments]) -> Segments:
        """The segments of several extends, oldest first. Either all of them have steps, or none."""
        if len(parts) == 1:
            return parts[0]
        columns = zip(*parts, strict=True)
        return Segments._make(None if some[0] is None else np.concatenate(some) for some in columns)

    def take(self, index: Ints | Bools) -> Segments:
        """The segments at `index`."""
        return Segments._make(None if column is None else column[index] for column in self)

    def since(self, number: int) -> Segments:
        """The segments without the frames before `number`."""
        gone: Ints = (-((self.number - number) // np.maximum(self.stride, 1))).clip(0, self.length)
        if not gone.any():
            return self
        left = self._replace(
            number=self.number + gone * self.stride,
            length=self.length - gone,
            step=None if self.step is None else self.step + gone,
        )
        return left.take(left.length > 0)

    def in_order(self) -> Segments:
        """The segments sorted by key, then by time."""
        if (self.key[1:] > self.key[:-1]).all():
            return self
        return self.take(np.lexsort((self.number, self.key)))

    def linked(self) -> Bools:
        """Whether each segment continues the one before it: [S]. The segments must be sorted."""
        linked = np.zeros(len(self.key), np.bool_)
        last = self.number + (self.length - 1) * self.stride
        linked[1:] = (self.key[1:] == self.key[:-1]) & ~self.ended[:-1] & (self.number[1:] > last[:-1])
        if self.step is not None:
            linked[1:] &= self.step[1:] == self.step[:-1] + self.length[:-1]
        return linked

    def numbers(self) -> Ints:
        """The numbers of all frames, segment after segment."""
        before = self.length.cumsum() - self.length
        index = np.arange(self.length.sum())
        if (self.stride > 1).any():
            index = (index - before.repeat(self.length)) * self.stride.repeat(self.length)
            before = np.zeros_like(before)
        index += (self.number - before).repeat(self.length)
        return index
