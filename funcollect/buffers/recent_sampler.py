"""Samples frames by the age of the weights that collected them, and on request each frame only once."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from typing_extensions import override

from funcollect.arguments import check_count, check_flags
from funcollect.buffers import Arrays, Bools, Ints, indices
from funcollect.buffers.indices import BufferView, RandomSource, SampleIndices
from funcollect.buffers.uniform_samplers import RandomSampler, takes_replacement
from funcollect.trajectories.split import VERSION, readable

__all__ = ["RecentSampler"]

_NO_VERSION = np.iinfo(np.int64).min


class RecentSampler(RandomSampler):
    """Single frames whose weights are at most so many versions old, drawn uniformly, by ``collector.policy_version``.

    Ages count from the newest version that the buffer has had, or from `policy_version`, if that is set: a learner that
    is ahead of its workers sets ``sampler.policy_version = collector.policy_version``. Raises TypeError or ValueError
    for bad arguments; a sample raises ValueError if there is no such frame.

    Args:
        max_age: the largest difference of versions; None for any.
        once: whether a frame is drawn only once, for data that should be on policy. The last sample may have fewer
            frames, and iteration ends there; ``sampler.ran_out(1)`` is True until the buffer is extended.

    >>> import funcollect as fc, torch
    >>> from tensordict import TensorDict
    >>> buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(100), sampler=RecentSampler(max_age=1), batch_size=50)
    >>> indices = buffer.extend(TensorDict({"collector": {"policy_version": torch.arange(9) // 3}}, [9]))
    >>> buffer.sample()["collector", "policy_version"].unique()
    tensor([1, 2])
    """

    @takes_replacement
    def __init__(self, *, max_age: int | None = None, once: bool = False) -> None:
        if max_age is not None:
            check_count("max_age", max_age)
        check_flags(once=once)
        self.max_age, self.once = max_age, once
        self.policy_version: int | None = None  # from which ages count
        self._versions: Ints  # by slot
        self._used: Bools  # by slot
        self._newest: int  # version so far
        self._read: int  # the number of frames whose versions were read
        self._left: Ints | None  # with `once`: the slots of a round, which begins as frames come in
        self.load({})

    @override
    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        size, below = indices.check_filled(memory), random_source.below
        self._follow(memory)
        if self.once:
            if self._left is None:
                left = np.flatnonzero(~self._used[:size])
                self._left = left[random_source.permutation(len(left))]
            left = self._left[self._young(self._left)]
            slots, self._left = left[:batch_size], left[batch_size:]
            self._used[slots] = True
        else:
            tried, again = below(size, 2 * batch_size), lambda some, count: some[below(len(some), count)]
            slots = indices.completed(tried, batch_size, size, self._young, again)
        if not len(slots):
            what = f"{self} has no frame left" if self.once else f"no frame is at most {self.max_age} versions old"
            raise ValueError(f"{what}, expected at least one: extend the buffer first")
        return SampleIndices(slots=slots)

    def _follow(self, memory: BufferView) -> None:
        """Read the versions of the frames that were written since the last time."""
        if len(self._versions) != memory.capacity:
            self._versions, self._used = np.zeros(memory.capacity, np.int64), np.zeros(memory.capacity, np.bool_)
        slots = np.arange(max(self._read, memory.written - len(memory)), memory.written) % memory.capacity
        if self.max_age is not None and len(slots):
            columns = cast(Any, memory).storage.numbers(slots)  # a reader, whose view has none, takes other samplers
            if (column := columns.get(VERSION)) is None:
                what = f"frames have the numbers {sorted(map(readable, columns))}, expected {readable(VERSION)}"
                raise ValueError(f"{what}: store batches of collectors whole, or pass max_age=None")
            self._versions[slots], self._newest = column.numpy(), max(self._newest, int(column.max()))
        self._used[slots], self._read = False, memory.written

    def _young(self, slots: Ints) -> Bools:
        newest = self._newest if self.policy_version is None else self.policy_version
        least = _NO_VERSION if self.max_age is None else newest - self.max_age
        return np.asarray(self._versions.take(slots) >= least)

    @override
    def ran_out(self, batch_size: int) -> bool:
        return self.once and self._left is not None and not self._young(self._left).any()

    @override
    def extended(self, memory: BufferView, slots: Ints) -> None:
        self._left = None

    @override
    def give_back(self, drawn: SampleIndices) -> None:
        slots = drawn.slots if drawn.taken is None else drawn.taken
        if self.once:
            self._used[slots] = False
            self._left = None if self._left is None else np.concatenate([slots, self._left])

    @override
    def state(self) -> Arrays:
        left = {} if self._left is None else {"left": self._left}
        return {"versions": self._versions, "used": self._used, "counts": np.array([self._newest, self._read]), **left}

    @override
    def load(self, state: Arrays) -> None:
        self._versions, self._used = state.get("versions", np.zeros(0, np.int64)), state.get("used", np.zeros(0, bool))
        self._newest, self._read = state.get("counts", np.array([_NO_VERSION, 0])).tolist()
        self._left = state.get("left")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_age={self.max_age}, once={self.once})"
