"""A sampler that draws frames by age: those that recent versions of the policy have made, each once if wanted."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from typing_extensions import override

from funcollect.arguments import check_count, check_flags
from funcollect.buffers import Arrays, Bools, Ints, indices
from funcollect.buffers.indices import BufferView, RandomSource, SampleIndices
from funcollect.buffers.uniform_samplers import RandomSampler, takes_replacement
from funcollect.trajectories.split import VERSION, readable

_NO_VERSION = np.iinfo(np.int64).min


class RecentSampler(RandomSampler):
    """Single frames, drawn uniformly from those whose ``collector.policy_version`` is at most so many versions old.

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
        self.policy_version: int | None = None  # the version of age 0; None for the newest in the buffer
        self._versions: Ints  # by slot
        self._used: Bools  # by slot
        self._newest: int  # the highest version so far
        self._read, self._edits = 0, 0  # the number of frames whose versions were read, and the storage's edits then
        self._left: Ints | None  # with `once`: the slots left in the round; None if a new round has to begin
        self._memory: BufferView | None  # which was extended last
        self.load({})

    @override
    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        size, below = indices.check_filled(memory), random_source.below
        self._follow(memory)
        if self.once:
            if self._left is None:
                left = self._unused(size)
                self._left = left[random_source.permutation(len(left))]
            left = self._left[self._recent(self._left)]
            slots, self._left = left[:batch_size], left[batch_size:]
            self._used[slots] = True
        else:
            tried, redraw = below(size, 2 * batch_size), lambda some, count: some[below(len(some), count)]
            slots = indices.completed(tried, batch_size, size, self._recent, redraw)
        if not len(slots):
            what = f"{self} has no frame left" if self.once else f"no frame is at most {self.max_age} versions old"
            raise ValueError(f"{what}, expected at least one: extend the buffer first")
        return SampleIndices(slots=slots, written=memory.written)

    def _unused(self, size: int) -> Ints:
        return np.flatnonzero(~self._used[:size])

    def _follow(self, memory: BufferView) -> None:
        """Read the versions of the frames that were written since the last call."""
        if len(self._versions) != memory.capacity:
            self._versions, self._used = np.zeros(memory.capacity, np.int64), np.zeros(memory.capacity, np.bool_)
        fresh = np.arange(max(self._read, memory.written - len(memory)), memory.written) % memory.capacity
        edits = -1 if self.max_age is None else cast(Any, memory).storage.edits  # a reader takes other samplers
        slots = fresh if edits == self._edits else np.arange(len(memory))  # `update` may change versions
        if self.max_age is not None and len(slots):
            columns = cast(Any, memory).storage.numbers(slots)
            if (column := columns.get(VERSION)) is None:
                what = f"frames have the numbers {sorted(map(readable, columns))}, expected {readable(VERSION)}"
                raise ValueError(f"{what}: store batches of collectors whole, or pass max_age=None")
            self._versions[slots], self._newest = column.numpy(), max(self._newest, int(column.max()))
        self._used[fresh], self._read, self._edits = False, memory.written, edits

    def _recent(self, slots: Ints) -> Bools:
        newest = self._newest if self.policy_version is None else self.policy_version
        least = _NO_VERSION if self.max_age is None else newest - self.max_age
        return np.asarray(self._versions.take(slots) >= least)

    @override
    def ran_out(self, batch_size: int) -> bool:
        memory: Any = self._memory
        if not self.once or (self._left is None and memory is None):
            return False  # a buffer without frames is an error of `draw`
        if memory is None:
            return not self._recent(cast(Any, self._left)).any()
        with memory.storage.lock:  # the buffer's, since another thread may extend it
            self._follow(memory)
            return not self._recent(self._unused(len(memory)) if self._left is None else self._left).any()

    @override
    def extended(self, memory: BufferView, slots: Ints) -> None:
        self._left, self._memory = None, memory

    @override
    def give_back(self, drawn: SampleIndices) -> None:
        if not self.once:
            return
        slots = drawn.slots if drawn.taken is None else drawn.taken
        if drawn.written is not None:  # other frames may have come since, and may have been drawn
            slots = slots[(slots - drawn.written) % len(self._used) >= self._read - drawn.written]
        self._used[slots] = False
        self._left = None if self._left is None else np.concatenate([slots, self._left])

    @property
    @override
    def settings(self) -> tuple[Any, ...]:
        return self.max_age, self.policy_version

    @override
    def state(self) -> Arrays:
        left = {} if self._left is None else {"left": self._left}
        return {"versions": self._versions, "used": self._used, "counts": np.array([self._newest, self._read]), **left}

    @override
    def load(self, state: Arrays) -> None:
        self._versions, self._used = state.get("versions", np.zeros(0, np.int64)), state.get("used", np.zeros(0, bool))
        self._newest, self._read = state.get("counts", np.array([_NO_VERSION, 0])).tolist()
        self._left, self._memory = state.get("left"), None

    @override
    def load_moved(self, memory: BufferView, state: Arrays, source: Ints, slots: Ints) -> None:
        self._follow(memory)
        if len(state["used"]):  # otherwise nothing has been drawn
            self._used[slots] = state["used"][source]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_age={self.max_age}, once={self.once})"
