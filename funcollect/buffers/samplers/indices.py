"""Specifications of samples: single frames, or slices of trajectories."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from funcollect.arguments import check_choice, check_flags, check_positive
from funcollect.buffers.arrays import Bools, Ints
from funcollect.buffers.samplers.randomness import RandomSource
from funcollect.buffers.trajectory_index.trajectory_index import TrajectoryIndex
from funcollect.trajectories.split import MASK

__all__ = ["Flat", "SampleIndices", "SampleSpec", "Slices"]

_CUT = (("next", "truncated"), ("next", "done"))


class BufferView(Protocol):
    """The part of a ring's memory that samplers read."""

    @property
    def index(self) -> TrajectoryIndex | None: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class SampleIndices:
    """The frames of a sample of N rows."""

    slots: Ints  # [N]
    mask: Bools | None = None  # [N]: False for padding; None if there is none
    last: Ints | slice | None = None  # the rows that end a slice
    info: Mapping[str, Tensor] = field(default_factory=dict)  # [N] by name, such as importance weights

    @property
    def index(self) -> Ints:
        """The slots [N] by which the caller knows the rows of the finished sample."""
        return self.slots

    def finish(self, batch: Any) -> Any:
        """Mark the ends of slices and the padding in a batch that was read."""
        if self.last is not None:
            rows = self.last if isinstance(self.last, slice) else torch.from_numpy(self.last)
            for key in _CUT:
                flags = batch.get(key, None)
                if flags is None:
                    flags = torch.zeros(*batch.batch_size, 1, dtype=torch.bool, device=batch.device)
                    batch.set(key, flags)
                flags[rows] = True
        if self.mask is not None:
            batch.set(MASK, torch.from_numpy(self.mask).to(batch.device))
        return batch


def check_filled(memory: BufferView) -> None:
    """Raise ValueError if the ring is empty."""
    if not len(memory):
        raise ValueError("the buffer is empty: extend it before sampling")


@dataclass(frozen=True)
class Flat:
    """`batch_size` single frames, drawn uniformly with replacement.

    >>> import funcollect as fc, numpy as np, torch
    >>> state, _ = fc.ring.extend(fc.ring.init(4), {"x": torch.arange(3)})
    >>> fc.ring.sample(state, np.array([0, 7], np.uint32), fc.ring.Flat(5))["x"].shape
    torch.Size([5])
    """

    batch_size: int

    def __post_init__(self) -> None:
        check_positive("batch_size", self.batch_size)

    def draw(self, memory: BufferView, random_source: RandomSource) -> SampleIndices:
        """Draw the frames of one sample; ValueError if the ring is empty."""
        check_filled(memory)
        return SampleIndices(slots=random_source.below(len(memory), self.batch_size))


@dataclass(frozen=True, kw_only=True)
class Slices:
    """Slices of trajectories, concatenated to ``num_slices * slice_len`` frames.

    A slice consists of successive frames of one trajectory. ``next.truncated`` and ``next.done`` are True in its last
    row, in the sample only.

    Attributes:
        num_slices: the number of slices.
        slice_len: the number of frames in a slice.
        strict_length: whether to draw only from trajectories that are long enough. If False, shorter ones are returned
            whole and padded with zeros; ``("collector", "mask")`` ``[N]`` bool is False for padding.
        over: ``"trajectories"`` draws the trajectory uniformly, then the slice's first frame in it; ``"windows"`` draws
            uniformly from all possible slices.

    >>> import funcollect as fc, numpy as np
    >>> env = fc.make_env("CartPole-v1")
    >>> policy = fc.random_policy(env)
    >>> _, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 50)
    >>> state, _ = fc.ring.extend(fc.ring.init(100, trajectories=fc.ring.Trajectories()), batch)
    >>> slices = fc.ring.sample(state, np.array([0, 7], np.uint32), fc.ring.Slices(num_slices=2, slice_len=4))
    >>> slices["collector", "step"].view(2, 4).diff()
    tensor([[1, 1, 1],
            [1, 1, 1]])
    """

    num_slices: int
    slice_len: int
    strict_length: bool = True
    over: Literal["trajectories", "windows"] = "trajectories"

    def __post_init__(self) -> None:
        check_positive("num_slices", self.num_slices)
        check_positive("slice_len", self.slice_len)
        check_flags(strict_length=self.strict_length)
        check_choice("over", self.over, ("trajectories", "windows"))

    def draw(self, memory: BufferView, random_source: RandomSource) -> SampleIndices:
        """Draw the frames of one sample; ValueError if the ring is empty, or no trajectory is long enough."""
        check_filled(memory)
        index = trajectory_index_of(memory)
        if self.over == "trajectories":
            trajectory, begin = self._by_trajectory(index, random_source)
        else:
            slots = _draw(random_source, self.num_slices, len(memory), lambda some: self.begins(index, some))
            trajectory, begin = index.member.take(slots).astype(np.int64), index.position.take(slots)
        if not len(trajectory):
            raise ValueError(too_long(self, index))
        return self.along(index, trajectory, begin)

    def _by_trajectory(self, index: TrajectoryIndex, random_source: RandomSource) -> tuple[Ints, Ints]:
        """The trajectories of random slices, and the positions at which the slices begin: [num_slices] both, or [0]."""
        first, stop, least = index.first, index.stop, self.slice_len if self.strict_length else 1

        def long_enough(trajectory: Ints) -> Bools:
            return stop.take(trajectory) - first.take(trajectory) >= least

        trajectory = _draw(random_source, self.num_slices, len(stop), long_enough)
        places = np.maximum(stop.take(trajectory) - first.take(trajectory) - self.slice_len, 0) + 1
        return trajectory, first.take(trajectory) + (random_source.uniform(len(trajectory)) * places).astype(np.int64)

    def begins(self, index: TrajectoryIndex, slots: Ints) -> Bools:
        """Whether a slice can begin at the frames in `slots`."""
        trajectory, begin = index.member.take(slots), index.position.take(slots)
        fits: Bools = begin + self.slice_len <= index.stop.take(trajectory)
        return fits if self.strict_length else fits | (begin == index.first.take(trajectory))

    def along(self, index: TrajectoryIndex, trajectory: Ints, begin: Ints) -> SampleIndices:
        """The slices that begin at position `begin` of `trajectory`, [num_slices] both."""
        steps = np.arange(self.slice_len)
        position = begin[:, None] + steps
        if self.strict_length:
            slots = index.slot_lists.get(trajectory[:, None], position).reshape(-1)
            return SampleIndices(slots=slots, last=slice(self.slice_len - 1, None, self.slice_len))
        stop = index.stop.take(trajectory)[:, None]
        mask = (position < stop).reshape(-1)
        slots = index.slot_lists.get(trajectory[:, None], np.minimum(position, stop - 1)).reshape(-1)
        lengths = np.minimum(stop[:, 0] - begin, self.slice_len)
        return SampleIndices(slots=slots, mask=mask, last=np.arange(len(trajectory)) * self.slice_len + lengths - 1)


SampleSpec = Flat | Slices  # a description of a sample


def _draw(random_source: RandomSource, count: int, size: int, valid: Callable[[Ints], Bools]) -> Ints:
    """Draw `count` of the numbers below `size` for which `valid` is True, uniformly; none if there are no such numbers.

    Random tries come first. Only if too few of them are valid, all numbers are examined.
    """
    tried = random_source.below(size, 4 * count)
    drawn = tried[valid(tried)][:count]
    if len(drawn) == count:
        return drawn
    everything = np.flatnonzero(valid(np.arange(size)))
    if not len(everything):
        return everything
    return np.concatenate([drawn, everything[random_source.below(len(everything), count - len(drawn))]])


def trajectory_index_of(memory: BufferView) -> TrajectoryIndex:
    """The trajectory index of a ring; ValueError if it has none."""
    if memory.index is None:
        raise ValueError(
            "this ring does not know which frames follow each other: make it with trajectories=ring.Trajectories()"
        )
    return memory.index


def too_long(slices: Slices, index: TrajectoryIndex) -> str:
    """The message of the ValueError that is raised if no trajectory is as long as a slice."""
    longest = int((index.stop - index.first).max(initial=0))
    return (
        f"slices are {slices.slice_len} frames long, the longest trajectory held has {longest}: ask for shorter ones, "
        "collect more, or pass strict_length=False for padded ones"
    )
