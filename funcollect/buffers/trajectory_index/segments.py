"""Segments: what a ring records of an extend, a few numbers for each stretch of consecutive frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Frames:
    """The frames of one extend, lane after lane, each lane in the order of time; all arrays are [N]."""

    number: Ints  # how many frames the ring had been given before; rises evenly within a lane
    key: Ints  # frames that follow each other in one trajectory have equal ones
    begins: Bools  # the first frame of its lane in this extend
    ends: Bools | None  # no frame follows this one
    step: Ints | None  # rises by one within a trajectory


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Frames that follow each other directly in one trajectory and one extend; all arrays are [S]."""

    number: Ints  # of the first frame
    stride: Ints  # by which numbers rise from frame to frame
    length: Ints
    key: Ints
    step: Ints | None  # of the first frame
    ended: Bools  # by its last frame

    @classmethod
    def of(cls, frames: Frames) -> Segments:
        """The segments of one extend that has frames."""
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
        """The segments of several extends, oldest first, which all have steps or all have none."""
        if len(parts) == 1:
            return parts[0]
        columns = {column.name: [getattr(part, column.name) for part in parts] for column in fields(Segments)}
        joined: Any = {name: None if some[0] is None else np.concatenate(some) for name, some in columns.items()}
        return Segments(**joined)

    def take(self, index: Ints | Bools) -> Segments:
        """Some of the segments."""
        columns = {column.name: getattr(self, column.name) for column in fields(Segments)}
        taken: Any = {name: None if some is None else some[index] for name, some in columns.items()}
        return Segments(**taken)

    def since(self, number: int) -> Segments:
        """What is left of them without the frames before `number`."""
        gone: Ints = (-((self.number - number) // np.maximum(self.stride, 1))).clip(0, self.length)
        if not gone.any():
            return self
        left = replace(
            self,
            number=self.number + gone * self.stride,
            length=self.length - gone,
            step=None if self.step is None else self.step + gone,
        )
        return left.take(left.length > 0)

    def in_order(self) -> Segments:
        """By key, those of one key in the order of time."""
        if (self.key[1:] > self.key[:-1]).all():
            return self
        return self.take(np.lexsort((self.number, self.key)))

    def linked(self) -> Bools:
        """Of segments in order: which continue where the one before stopped."""
        linked = np.zeros(len(self.key), np.bool_)
        last = self.number + (self.length - 1) * self.stride
        linked[1:] = (self.key[1:] == self.key[:-1]) & ~self.ended[:-1] & (self.number[1:] > last[:-1])
        if self.step is not None:
            linked[1:] &= self.step[1:] == self.step[:-1] + self.length[:-1]
        return linked

    def numbers(self) -> Ints:
        """Of all their frames, segment after segment."""
        before = self.length.cumsum() - self.length
        index = np.arange(self.length.sum())
        if (self.stride > 1).any():
            index = (index - before.repeat(self.length)) * self.stride.repeat(self.length)
            before = np.zeros_like(before)
        index += (self.number - before).repeat(self.length)
        return index
