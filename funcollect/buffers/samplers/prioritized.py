"""Sampling by priority (Schaul et al., 2016), of frames and of slices."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from funcollect.arguments import check_number, check_positive
from funcollect.buffers.samplers.indices import (
    BufferView,
    SampleIndices,
    Slices,
    check_filled,
    too_long,
    trajectory_index_of,
)
from funcollect.buffers.samplers.randomness import RandomSource
from funcollect.buffers.samplers.sum_tree import SumTree
from funcollect.buffers.samplers.uniform import RandomSampler, SliceSampler
from funcollect.messages import shown
from funcollect.tree import Path

__all__ = ["PrioritizedSampler", "PrioritizedSliceSampler"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class PrioritizedSampler(RandomSampler):
    """Single frames, with a chance in proportion to ``(priority + eps) ** alpha``; never those of priority 0.

    A new frame has the highest priority that was ever given, 1 before the first. ``info["priority_weight"]``, ``[N]``
    float32, is the importance weight ``(chance / least chance in the buffer) ** -beta``, at most 1.

    Args:
        max_capacity: the storage's size.
        alpha: how much priorities matter; 0 for not at all.
        beta: how much the weights make up for them; 1 for wholly. May be set anew at any time.
        eps: added to every priority that is not 0.

    Raises:
        TypeError, ValueError: for a size below 1, and for numbers that are negative.

    >>> import funcollect as fc
    >>> import torch
    >>> sampler = PrioritizedSampler(max_capacity=10, alpha=0.6, beta=0.4)
    >>> buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(10), sampler=sampler, batch_size=4)
    >>> indices = buffer.extend(torch.arange(3))
    >>> buffer.update_priority(indices, torch.tensor([0.0, 2.0, 0.0]))
    >>> batch, info = buffer.sample(return_info=True)
    >>> batch, info["priority_weight"]
    (tensor([1, 1, 1, 1]), tensor([1., 1., 1., 1.]))
    """

    def __init__(self, max_capacity: int, alpha: float, beta: float, eps: float = 1e-8) -> None:
        check_positive("max_capacity", max_capacity)
        numbers: dict[str, Any] = {"alpha": alpha, "beta": beta, "eps": eps}
        for name, value in numbers.items():
            check_number(name, value)
        self.max_capacity, self.alpha, self.beta, self.eps = max_capacity, alpha, beta, eps
        self.empty()

    def empty(self) -> None:
        """Forget all priorities."""
        self._priorities = SumTree(self.max_capacity)
        self._highest = 1.0

    def fit(self, capacity: int) -> None:
        """Check that there is a priority for each frame of a storage.

        Raises:
            ValueError: for a larger storage than `max_capacity`.
        """
        if capacity > self.max_capacity:
            raise ValueError(
                f"max_capacity is {self.max_capacity}, the storage holds {capacity} frames: give the sampler "
                f"max_capacity={capacity}"
            )

    def extended(self, memory: BufferView, slots: Ints) -> None:
        """Give new frames the highest priority there was."""
        held = slots[slots >= 0]
        self._priorities.put(held, self._weights(np.full(len(held), self._highest)))

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """All weights, and the highest priority there was."""
        return {"weights": self._priorities.get(np.arange(self.max_capacity)), "highest": np.array(self._highest)}

    def load(self, state: dict[str, npt.NDArray[Any]]) -> None:
        """Take these weights."""
        self.empty()
        weights = state["weights"][: self.max_capacity]  # there are no frames beyond
        self._priorities.put(np.arange(len(weights)), weights)
        self._highest = float(state["highest"])

    def update_priority(self, memory: BufferView, index: Any, priority: Any) -> None:
        """Set the priorities of the frames in these slots.

        Args:
            memory: the buffer's ring.
            index: ``[N]`` slots; of one given twice, the last counts.
            priority: ``[N]`` numbers, or one for all; finite, not negative.

        Raises:
            TypeError: for slots that are no integers, and priorities that are no numbers.
            ValueError: for slots without a frame, other shapes, and priorities that are negative or not finite.
        """
        slots = _numbers("index", index, "iu").astype(np.int64)
        given = _numbers("priority", priority, "fiub").astype(np.float64)
        if len(given) not in (1, len(slots)):
            raise ValueError(
                f"{len(given)} priorities are given for {len(slots)} frames: give one for each, or for all"
            )
        if len(slots) and not 0 <= slots.min() <= slots.max() < len(memory):
            raise ValueError(
                f"index holds slots from {slots.min()} to {slots.max()}, the buffer has frames in 0 … "
                f'{len(memory) - 1}: give those that extend or info["index"] named'
            )
        if not np.isfinite(given).all() or (given < 0).any():
            raise ValueError(
                f"priorities lie between {given.min()} and {given.max()}, expected finite numbers of at least 0: give "
                "for example the absolute TD error"
            )
        given = np.broadcast_to(given, slots.shape)
        self._priorities.put(slots, self._weights(given))
        self._highest = max(self._highest, float(given.max(initial=0.0)))

    def _weights(self, priority: Floats) -> Floats:
        return np.where(priority > 0, (priority + self.eps) ** self.alpha, 0.0)

    def _check(self, memory: BufferView) -> None:
        check_filled(memory)
        if self._priorities.total <= 0:
            raise ValueError("every priority is 0, so nothing can be drawn: give some frame a positive one")

    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        """Choose the frames of one sample.

        Raises:
            ValueError: for an empty buffer, and one where every priority is 0.
        """
        self._check(memory)
        slots = self._priorities.find(random_source.uniform(batch_size))
        return SampleIndices(slots=slots, info={"priority_weight": self._corrections(slots)})

    def _corrections(self, slots: Ints) -> Tensor:
        ratio = self._priorities.get(slots) / self._priorities.least
        return torch.from_numpy((ratio**-self.beta).astype(np.float32))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_capacity={self.max_capacity}, alpha={self.alpha}, beta={self.beta})"


def _numbers(name: str, values: Any, kinds: str) -> npt.NDArray[Any]:
    """The values as an array ``[N]`` of one of these kinds of dtype."""
    wanted = "integers: slots" if kinds == "iu" else "numbers: one for each frame, or one for all"
    try:
        array = torch.as_tensor(values).detach().cpu()
        numbers = (array.float() if array.dtype == torch.bfloat16 else array).numpy().reshape(-1)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} is {shown(values)}, expected {wanted}") from error
    if numbers.size and numbers.dtype.kind not in kinds:
        raise TypeError(f"{name} is {numbers.dtype}, expected {wanted}")
    return numbers


class PrioritizedSliceSampler(PrioritizedSampler):
    """Slices of trajectories whose first frame is chosen by priority, among those at which a slice can begin.

    Args:
        max_capacity: the storage's size.
        alpha: as of `PrioritizedSampler`.
        beta: as of `PrioritizedSampler`; the weight is that of a slice's first frame, for all its frames.
        eps: as of `PrioritizedSampler`.
        num_slices: as of `SliceSampler`, and so are the rest.
        slice_len: frames of a slice.
        traj_key: where the ids are.
        trajectory_key: the same by another name.
        end_key: where the end flags are.
        strict_length: whether shorter trajectories are left out, or padded.

    Raises:
        TypeError, ValueError: as those do.
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
    ) -> None:
        super().__init__(max_capacity, alpha, beta, eps)
        self._slices = SliceSampler(
            num_slices=num_slices,
            slice_len=slice_len,
            traj_key=traj_key,
            trajectory_key=trajectory_key,
            end_key=end_key,
            strict_length=strict_length,
            over="windows",
        )
        self.trajectories = self._slices.trajectories

    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        """Choose the slices of one sample.

        Raises:
            ValueError: for an empty buffer, slices longer than any trajectory, and priorities of 0 wherever one begins.
        """
        self._check(memory)
        spec, index = self._slices.spec(batch_size), trajectory_index_of(memory)
        tried = self._priorities.find(random_source.uniform(4 * spec.num_slices))
        slots = tried[spec.begins(index, tried)][: spec.num_slices]
        if missing := spec.num_slices - len(slots):
            slots = np.concatenate([slots, self._look_through(memory, spec, random_source, missing)])
        drawn = spec.along(index, index.member.take(slots).astype(np.int64), index.position.take(slots))
        weight = self._corrections(slots).repeat_interleave(spec.slice_len)
        return SampleIndices(slots=drawn.slots, mask=drawn.mask, last=drawn.last, info={"priority_weight": weight})

    def _look_through(self, memory: BufferView, spec: Slices, random_source: RandomSource, count: int) -> Ints:
        """Draws among all frames at which a slice can begin."""
        index = trajectory_index_of(memory)
        valid = np.flatnonzero(spec.begins(index, np.arange(len(memory))))
        if not len(valid):
            raise ValueError(too_long(spec, index))
        upto = self._priorities.get(valid).cumsum()
        if not upto[-1] > 0:
            raise ValueError("every frame at which a slice can begin has priority 0: give some frame a positive one")
        places = np.minimum(random_source.uniform(count) * upto[-1], np.nextafter(upto[-1], 0.0))
        chosen: Ints = valid[np.searchsorted(upto, places, side="right")]
        return chosen

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {repr(self._slices).partition('(')[2]}"
