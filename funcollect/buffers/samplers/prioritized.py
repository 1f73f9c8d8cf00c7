"""Samplers of frames and of slices by priority (Schaul et al., 2016)."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import is_tensor_collection
from torch import Tensor
from typing_extensions import override

from funcollect.arguments import check_number, check_positive
from funcollect.buffers import Arrays, Floats, Ints
from funcollect.buffers.samplers.indices import (
    BufferView,
    RandomSource,
    SampleIndices,
    check_filled,
    completed,
    trajectory_index_of,
)
from funcollect.buffers.samplers.uniform import RandomSampler, SliceSampler
from funcollect.messages import shown
from funcollect.tree import Path

__all__ = ["PrioritizedSampler", "PrioritizedSliceSampler"]

_WIDTH = 16  # of the blocks in a `SumTree`; 32 and 64 are slower
_MOST_AT_TOP = 1 << 14  # numbers whose running sums are made again after each change


class PrioritizedSampler(RandomSampler):
    """Single frames, with probabilities in proportion to ``(priority + eps) ** alpha``.

    A new frame gets the highest priority given so far, but at least 1. ``info["priority_weight"]`` ``[N]``
    float32 is the importance weight ``(probability / lowest probability in the buffer) ** -beta``, at most 1.
    Raises TypeError or ValueError for a capacity below 1, and for negative numbers.

    Args:
        max_capacity: the capacity of the storage.
        alpha: the exponent of priorities; 0 makes all frames equally likely.
        beta: the exponent of the importance weights; 1 corrects the sampling bias fully. It may be changed at any time.
        eps: a small number added to every priority. With ``eps=0``, frames of priority 0 are never drawn.

    >>> import funcollect as fc, torch
    >>> sampler = PrioritizedSampler(max_capacity=10, alpha=0.6, beta=0.4, eps=0)
    >>> buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(10), sampler=sampler, batch_size=4)
    >>> indices = buffer.extend(torch.arange(3))
    >>> buffer.update_priority(indices, torch.tensor([0.0, 2.0, 0.0]))
    >>> batch, info = buffer.sample(return_info=True)
    >>> batch, info["priority_weight"]
    (tensor([1, 1, 1, 1]), tensor([1., 1., 1., 1.]))
    """

    def __init__(self, max_capacity: int, alpha: float, beta: float, eps: float = 1e-8) -> None:
        check_positive("max_capacity", max_capacity)
        for name, value in (("alpha", alpha), ("beta", beta), ("eps", eps)):
            check_number(name, value)
        self.max_capacity, self.alpha, self.beta, self.eps = max_capacity, alpha, beta, eps
        self.load({})

    @override
    def fit(self, capacity: int) -> None:
        if capacity > self.max_capacity:
            raise ValueError(
                f"max_capacity is {self.max_capacity}, the storage holds {capacity} frames: give the sampler "
                f"max_capacity={capacity}"
            )

    @override
    def extended(self, memory: BufferView, slots: Ints) -> None:
        held = slots[slots >= 0]
        self._priorities.put(held, self._weights(np.full(len(held), self._highest)))

    @override
    def state(self) -> Arrays:
        return {"weights": self._priorities.get(np.arange(self.max_capacity)), "highest": np.array(self._highest)}

    @override
    def load(self, state: Arrays) -> None:
        self._priorities, self._highest = SumTree(self.max_capacity), float(state.get("highest", 1.0))
        # The dump may come from a sampler with a larger max_capacity, whose further slots hold no frames.
        weights = state.get("weights", np.zeros(0))[: self.max_capacity]
        self._priorities.put(np.arange(len(weights)), weights)

    def update_priority(
        self, memory: BufferView, index: Any, priority: Any, written: Any = None, before: int = 0
    ) -> None:
        """See `ReplayBuffer.update_priority`; `memory` is the buffer's ring, which began after `before` frames."""
        slots = _numbers("index", index, "iu").astype(np.int64)
        given = _numbers("priority", priority, "fiub").astype(np.float64)
        if len(given) not in (1, len(slots)):
            raise ValueError(
                f"{len(given)} priorities are given for {len(slots)} frames: give one for each, or one for all"
            )
        after = 0 if written is None else _later(written, before + memory.written, len(slots))
        late = bool(np.any(after > 0)) if isinstance(after, np.ndarray) else after > 0
        if len(slots) and (late or slots.view(np.uint64).max() >= len(memory)):  # a negative one is huge there
            present = slots != -1
            if late:  # the frame that a slot held then is still there
                present &= ((memory.written - 1 - slots) % memory.capacity >= after) & (after < memory.written)
            slots, given = slots[present], given if len(given) == 1 else given[present]
            if len(slots) and slots.view(np.uint64).max() >= len(memory):
                raise ValueError(
                    f"index holds slots from {slots.min()} to {slots.max()}, the buffer has frames in 0 … "
                    f'{len(memory) - 1}: give slots that extend returned, or those in info["index"]'
                )
        lowest, highest = (float(given.min()), float(given.max())) if len(given) else (0.0, 0.0)
        if not (lowest >= 0 and highest < np.inf):
            raise ValueError(
                f"priorities lie between {lowest} and {highest}, expected finite numbers of at least 0: give for "
                "example the absolute TD error"
            )
        if len(slots):
            self._priorities.put(slots, self._weights(given))
            self._highest = max(self._highest, highest)

    def _weights(self, priority: Floats) -> Floats:
        return np.asarray((priority + self.eps) ** self.alpha)

    def _check(self, memory: BufferView) -> None:
        check_filled(memory)
        if self._priorities.total <= 0:
            raise ValueError(
                "every priority is 0, so nothing can be drawn: give some frame a positive one, or the sampler a "
                "positive eps"
            )

    @override
    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        self._check(memory)
        slots = self._priorities.find(random_source.uniform(batch_size))
        return SampleIndices(slots=slots, info=self._corrections(slots))

    def _corrections(self, slots: Ints) -> dict[str, Tensor]:
        """The importance weights [N] float32 of the frames in `slots` [N]."""
        ratio = self._priorities.get(slots) / self._priorities.least
        return {"priority_weight": torch.from_numpy((ratio**-self.beta).astype(np.float32))}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_capacity={self.max_capacity}, alpha={self.alpha}, beta={self.beta})"


def _later(written: Any, now: int, count: int) -> Any:
    """How many frames were written after these numbers of frames, one or [N]; ValueError for impossible ones."""
    least = most = written
    if type(written) is not int:
        written = _numbers("written", written, "iu").astype(np.int64)
        if len(written) not in (1, count):
            raise ValueError(
                f"written has {len(written)} numbers for {count} frames: give one for each, or one for all"
            )
        least, most = written.min(initial=now), written.max(initial=0)
    if not 0 <= least <= most <= now:
        raise ValueError(
            f"written is {shown(written)}, expected 0 to {now}, the number of frames so far: pass what written_at of "
            "this buffer returned"
        )
    return now - written


def _numbers(name: str, values: Any, kinds: str) -> npt.NDArray[Any]:
    """The values as an array ``[N]``; TypeError unless its dtype is of one of these kinds."""
    wanted = "integers: slots" if kinds == "iu" else "numbers: one for each frame, or one for all"
    try:
        array = torch.as_tensor(values).detach().cpu()
        numbers = (array.float() if array.dtype == torch.bfloat16 else array).numpy().reshape(-1)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} is {shown(values)}, expected {wanted}") from error
    if numbers.dtype.kind not in kinds and (numbers.size or is_tensor_collection(values)):
        raise TypeError(f"{name} is {numbers.dtype if numbers.size else type(values).__name__}, expected {wanted}")
    return numbers


class PrioritizedSliceSampler(PrioritizedSampler):
    """Slices of trajectories. Their first frames are drawn by priority from those at which a slice can begin.

    `PrioritizedSampler` and `SliceSampler` describe the arguments and errors. In ``info["priority_weight"]``, all
    frames of a slice have the weight of its first frame.

    >>> import funcollect as fc
    >>> sampler = PrioritizedSliceSampler(1_000, alpha=0.6, beta=0.4, slice_len=5)
    >>> buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(1_000), sampler=sampler, batch_size=20)
    >>> with fc.SyncDataCollector("CartPole-v1", frames_per_batch=100, total_frames=300, seed=0) as collector:
    ...     for batch in collector:
    ...         indices = buffer.extend(batch)
    >>> batch, info = buffer.sample(return_info=True)
    >>> batch.shape, info["priority_weight"].shape
    (torch.Size([20]), torch.Size([20]))
    """

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        traj_key: str | Path | None = None,
        trajectory_key: str | Path | None = None,
        end_key: str | Path | None = None,
        strict_length: bool = True,
        pad_output: bool = False,
        init_key: str | Path | None = "is_init",
    ) -> None:
        super().__init__(max_capacity, alpha, beta, eps)
        self._slices = SliceSampler(
            num_slices=num_slices, slice_len=slice_len, traj_key=traj_key, trajectory_key=trajectory_key,
            end_key=end_key, strict_length=strict_length, pad_output=pad_output, init_key=init_key, over="windows",
        )  # fmt: skip
        self.trajectories = self._slices.trajectories

    @override
    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        self._check(memory)
        spec, index, uniform = self._slices.spec(batch_size), trajectory_index_of(memory), random_source.uniform
        slots = completed(
            self._priorities.find(uniform(4 * spec.num_slices)), spec.num_slices, len(memory),
            partial(spec.begins, index), lambda begins, count: self._among(begins, uniform(count)),
        )  # fmt: skip
        return spec.sample(index, *index.places(slots), self._corrections(slots.repeat(spec.slice_len)))

    def _among(self, slots: Ints, places: Floats) -> Ints:
        """Do the same as `SumTree.find`, but over the weights of `slots` [M] alone; ValueError if all of them are 0."""
        upto = self._priorities.get(slots).cumsum()
        if not upto[-1] > 0:
            raise ValueError("every frame at which a slice can begin has priority 0: give some frame a positive one")
        places = np.minimum(places * upto[-1], math.nextafter(upto[-1], 0.0))
        return slots[np.searchsorted(upto, places, side="right")]

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {repr(self._slices).partition('(')[2]}"


class SumTree:
    """A weight of at least 0 for each of `capacity` slots. Weights are 0 at first, and a slot of weight 0 is not drawn.

    Blocks of weights have sums, blocks of these sums again, until few enough numbers are left that all their running
    sums are made again after a change. A buffer of a million frames needs two levels above the weights.
    """

    def __init__(self, capacity: int) -> None:
        sizes = [capacity]
        while sizes[-1] > _MOST_AT_TOP:
            sizes[-1] += -sizes[-1] % _WIDTH
            sizes.append(sizes[-1] // _WIDTH)
        # Each list has one array per level, the weights of the slots first.
        self._sums: list[Floats] = [np.zeros(size) for size in sizes]
        self._least: list[Floats] = [np.full(size, np.inf) for size in sizes]  # positive weight below each, if any
        self._top: Floats | None = None  # 0 and the running sums of the last level, until a weight changes

    def put(self, slots: Ints, weights: Floats) -> None:
        """Set the weights of slots; if a slot is repeated, its last weight counts."""
        self._top = None
        self._sums[0][slots] = weights
        self._least[0][slots] = np.where(weights > 0, weights, np.inf)
        block = slots
        for (sums, least), (above, least_above) in pairwise(zip(self._sums, self._least, strict=True)):
            block = block // _WIDTH  # the same one may come several times
            # `reduce` is what `sum` and `min` call, but sooner.
            above[block] = np.add.reduce(sums.reshape(-1, _WIDTH).take(block, axis=0), axis=1)
            least_above[block] = np.minimum.reduce(least.reshape(-1, _WIDTH).take(block, axis=0), axis=1)

    def get(self, slots: Ints) -> Floats:
        """The weights of slots."""
        return self._sums[0].take(slots)

    @property
    def _running(self) -> Floats:
        if self._top is None:
            self._top = np.empty(len(self._sums[-1]) + 1)
            self._top[0] = 0.0
            torch.cumsum(torch.from_numpy(self._sums[-1]), -1, out=torch.from_numpy(self._top[1:]))
        return self._top

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self._running[-1])

    @property
    def least(self) -> float:
        """The least positive weight; infinite if there is none."""
        return float(np.minimum.reduce(self._least[-1]))

    def find(self, places: Floats) -> Ints:
        """The slots at the given places in ``[0, 1)``, if all weights are laid end to end on that interval."""
        upto = self._running
        rest = np.minimum(places * upto[-1], math.nextafter(upto[-1], 0.0))
        order = rest.argsort()  # sorted places are found sooner, by more than it takes to sort them
        found = np.empty(len(rest), np.int64)
        found[order] = upto.searchsorted(rest[order], side="right") - 1
        rest -= upto.take(found)
        rows, each = np.zeros((len(places), _WIDTH + 1)), np.arange(len(places))
        ends = torch.from_numpy(rows[:, 1:])
        for sums in self._sums[-2::-1]:
            some = torch.from_numpy(sums.reshape(-1, _WIDTH).take(found, axis=0))
            torch.cumsum(some, -1, out=ends)  # which takes a third of NumPy's time
            # Rounding must not move a place past the end of its block, where the next slot may have the weight 0.
            rest = np.minimum(rest, np.nextafter(rows[:, -1], 0.0))
            child = (rows[:, 1:] > rest[:, None]).argmax(axis=1)
            rest -= rows[each, child]
            found = found * _WIDTH + child
        return found
