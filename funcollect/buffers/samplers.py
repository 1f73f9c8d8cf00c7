"""Samplers for `ReplayBuffer`, which choose the frames of a sample; here those that draw by priority."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from tensordict import is_tensor_collection
from typing_extensions import override

from funcollect.arguments import check_choice, check_flags, check_not_given, check_number, check_positive
from funcollect.buffers import Arrays, Bools, Floats, Ints, indices
from funcollect.buffers.indices import BufferView, RandomSource, SampleIndices, Sampler
from funcollect.buffers.recent_sampler import RecentSampler
from funcollect.buffers.trajectory_index import Trajectories
from funcollect.buffers.uniform_samplers import (
    MultiStepSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    returns_of,
    takes_replacement,
)
from funcollect.messages import shown
from funcollect.tree import Path

__all__ = [
    "MultiStepSampler", "PrioritizedSampler", "PrioritizedSliceSampler", "RandomSampler", "RecentSampler",
    "Sampler", "SamplerWithoutReplacement", "SliceSampler", "SliceSamplerWithoutReplacement",
]  # fmt: skip


_WIDTH = 16  # of the blocks in a `SumTree`; 32 and 64 are slower
_MOST_AT_TOP = 1 << 14  # numbers whose running sums are made again after each change


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

    def find_among(self, slots: Ints, places: Floats) -> Ints:
        """The same over the weights of `slots` [M] alone; ValueError if all of them are 0."""
        upto = self.get(slots).cumsum()
        if not upto[-1] > 0:
            raise ValueError("every frame at which a slice can begin has priority 0: give some frame a positive one")
        places = np.minimum(places * upto[-1], math.nextafter(upto[-1], 0.0))
        return slots[np.searchsorted(upto, places, side="right")]


def numbers_of(name: str, values: Any, kinds: str) -> npt.NDArray[Any]:
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


def later(written: Any, now: int, count: int) -> Any:
    """How many frames were written after these numbers of frames, one or [N]; ValueError for impossible ones."""
    least = most = written
    if type(written) is not int:
        written = numbers_of("written", written, "iu").astype(np.int64)
        if len(written) not in (1, count):
            raise ValueError(f"written has {len(written)} numbers for {count} frames: give one for each, or for all")
        least, most = written.min(initial=now), written.max(initial=0)
    if not 0 <= least <= most <= now:
        raise ValueError(f"written is {shown(written)}, expected 0 to {now}, the frames so far: pass written_at(index)")
    return now - written


def present_in(memory: BufferView, slots: Ints, written: Any, before: int) -> Bools | None:
    """Whether the frames that were in `slots` [N] are still there; None if all are. Those of -1 are not.

    They were there when a buffer had been given `written` frames, one number or [N], or None if they are there now. The
    ring began after `before` of them. ValueError for slots that have no frame, and for an impossible `written`.
    """
    after = 0 if written is None else later(written, before + memory.written, len(slots))
    late = bool(np.any(after > 0)) if isinstance(after, np.ndarray) else after > 0
    if not len(slots) or (not late and slots.view(np.uint64).max() < len(memory)):  # a negative one is huge there
        return None
    present: Bools = slots != -1
    if late:  # the frame that a slot held then is still there
        present &= ((memory.written - 1 - slots) % memory.capacity >= after) & (after < memory.written)
    rest = slots[present]
    if len(rest) and rest.view(np.uint64).max() >= len(memory):
        what = f"index holds slots from {rest.min()} to {rest.max()}"
        where = f"the buffer has frames in 0 … {len(memory) - 1}"
        raise ValueError(f'{what}, {where}: give slots that extend returned, or those in info["index"]')
    return present


def check_priorities(given: Floats) -> float:
    """The highest of these priorities; ValueError for one that is negative or not finite."""
    lowest, highest = (float(given.min()), float(given.max())) if len(given) else (0.0, 0.0)
    if not (lowest >= 0 and highest < np.inf):
        what = f"priorities lie between {lowest} and {highest}, expected finite numbers of at least 0"
        raise ValueError(f"{what}: give for example the absolute TD error")
    return highest


class PrioritizedSampler(RandomSampler):
    """Single frames, with probabilities in proportion to ``(priority + eps) ** alpha`` (Schaul et al., 2016).

    A new frame gets the highest priority given so far, but at least 1. ``info["priority_weight"]`` ``[N]``
    float32 is the importance weight ``(probability / lowest probability in the buffer) ** -beta``, at most 1.
    Raises TypeError or ValueError for a capacity below 1, and for negative numbers.

    Args:
        max_capacity: the capacity of the storage.
        alpha: the exponent of priorities; 0 makes all frames equally likely. It and `beta` may be changed later.
        beta: the exponent of the importance weights; 1 corrects the sampling bias fully.
        eps: a small number added to every priority. With ``eps=0``, frames of priority 0 are never drawn.
        max_priority_within_buffer: a new frame gets the highest priority of the frames in the buffer, and 1 if there is
            none. This takes time in proportion to the capacity at each extend.
        reduction: ``"max"``, ``"min"``, ``"mean"`` or ``"median"``: how a `TensorDictReplayBuffer` makes one priority
            of several numbers per frame.
        n_steps, gamma: with both, frames have the n-step returns of `MultiStepSampler`.
        traj_key, end_key: for these, see `ring.Trajectories`.

    >>> import funcollect as fc, torch
    >>> sampler = PrioritizedSampler(max_capacity=10, alpha=0.6, beta=0.4, eps=0)
    >>> buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(10), sampler=sampler, batch_size=4)
    >>> indices = buffer.extend(torch.arange(3))
    >>> buffer.update_priority(indices, torch.tensor([0.0, 2.0, 0.0]))
    >>> buffer.sample(return_info=True)[1]["priority_weight"]
    tensor([1., 1., 1., 1.])
    """

    @takes_replacement
    def __init__(
        self,
        max_capacity: int,
        alpha: float | torch.Tensor,
        beta: float | torch.Tensor,
        eps: float = 1e-8,
        *,
        max_priority_within_buffer: bool = False,
        reduction: Literal["max", "min", "mean", "median"] = "max",
        n_steps: int | None = None,
        gamma: float | None = None,
        traj_key: str | Path | None = None,
        end_key: str | Path | None = None,
    ) -> None:
        check_positive("max_capacity", max_capacity)
        for name, value in (("alpha", alpha), ("beta", beta), ("eps", eps)):
            _check_exponent(name, value)
        check_flags(max_priority_within_buffer=max_priority_within_buffer)
        check_choice("reduction", reduction, ("max", "min", "mean", "median"))
        self.max_capacity, self._alpha, self.beta, self.eps = max_capacity, alpha, beta, eps
        self.max_priority_within_buffer, self.reduction = max_priority_within_buffer, reduction
        if (returns := returns_of(n_steps, gamma)) is not None:
            self.returns, self.trajectories = returns, Trajectories(traj_key=traj_key, end_key=end_key)
        elif not traj_key is end_key is None:
            raise ValueError(f"traj_key={traj_key!r} and end_key={end_key!r} are for n_steps: leave them out")
        self.load({})

    @property
    def alpha(self) -> float | torch.Tensor:
        """The exponent of priorities. A new one applies to those that are stored; from 0 on, these count as 1.

        It must not be changed while another thread extends the buffer, which `collector.pause()` prevents.
        """
        return self._alpha

    @alpha.setter
    def alpha(self, alpha: float | torch.Tensor) -> None:
        _check_exponent("alpha", alpha)
        if self._alpha > 0:
            weights, highest = self.stored()
            changed = weights ** (float(alpha) / float(self._alpha))
            self.begin(np.where(weights > 0, changed, 0.0), highest)
        self._alpha = alpha

    @override
    def fit(self, capacity: int) -> None:
        if capacity > self.max_capacity:
            raise ValueError(f"max_capacity is {self.max_capacity}, the storage holds {capacity} frames: give as many")

    @override
    def extended(self, memory: BufferView, slots: Ints) -> None:
        held = slots[slots >= 0]
        if self.max_priority_within_buffer:
            self._priorities.put(held, np.zeros(len(held)))
            most = self._priorities.get(np.arange(self.max_capacity)).max() or self._weights(np.ones(1))
            self._priorities.put(held, np.broadcast_to(most, len(held)))
        else:
            self._priorities.put(held, self._weights(np.full(len(held), self._highest)))

    @override
    def state(self) -> Arrays:
        exponents = np.array([float(self.alpha), float(self.beta)])
        weights, highest = self.stored()
        return {"weights": weights, "highest": np.array(highest), "exponents": exponents}

    @override
    def load(self, state: Arrays) -> None:
        if "exponents" in state:
            self._alpha, self.beta = state["exponents"].tolist()
        # The dump may come from a sampler with a larger max_capacity, whose further slots hold no frames.
        self.begin(state.get("weights", np.zeros(0))[: self.max_capacity], float(state.get("highest", 1.0)))

    def stored(self) -> tuple[Floats, float]:
        """The weights of all slots, and the highest priority given."""
        return self._priorities.get(np.arange(self.max_capacity)), self._highest

    def begin(self, weights: Floats, highest: float) -> None:
        """Begin with these weights of the first slots."""
        self._priorities, self._highest = SumTree(self.max_capacity), highest
        self._priorities.put(np.arange(len(weights)), weights)

    def update_priority(self, memory: BufferView, index: Any, priority: Any, written: Any, before: int) -> None:
        """See `ReplayBuffer.update_priority`; `memory` is the buffer's ring, which began after `before` frames."""
        slots = numbers_of("index", index, "iu").astype(np.int64)
        given = numbers_of("priority", priority, "fiub").astype(np.float64)
        if len(given) not in (1, len(slots)):
            raise ValueError(f"{len(given)} priorities are given for {len(slots)} frames: give one each, or for all")
        if (present := present_in(memory, slots, written, before)) is not None:
            slots, given = slots[present], given if len(given) == 1 else given[present]
        highest = check_priorities(given)
        if len(slots):
            self._priorities.put(slots, self._weights(given))
            self._highest = max(self._highest, highest)

    def _weights(self, priority: Floats) -> Floats:
        return np.asarray((priority + self.eps) ** float(self.alpha))

    def _check(self, memory: BufferView) -> None:
        indices.check_filled(memory)
        if self._priorities.total <= 0:
            raise ValueError("every priority is 0: give some frame a positive one, or the sampler a positive eps")

    @override
    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        self._check(memory)
        slots = self._priorities.find(random_source.uniform(batch_size))
        drawn = SampleIndices(slots=slots, info={"priority_weight": self._corrections(slots)})
        return drawn if self.returns is None else self.with_returns(memory, drawn)

    def _corrections(self, slots: Ints) -> torch.Tensor:
        """The importance weights [N] float32 of the frames in `slots` [N]."""
        ratio = self._priorities.get(slots) / self._priorities.least
        return torch.from_numpy((ratio ** -float(self.beta)).astype(np.float32))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_capacity={self.max_capacity}, alpha={self.alpha}, beta={self.beta})"


def _check_exponent(name: str, value: float | torch.Tensor) -> None:
    check_number(name, value.item() if isinstance(value, torch.Tensor) and value.ndim == 0 else value)


class PrioritizedSliceSampler(SliceSampler, PrioritizedSampler):
    """Slices of trajectories. Their first frames are drawn by priority from those at which a slice can begin.

    The arguments are those of `PrioritizedSampler` and, except `over`, of `SliceSampler`. Raises the errors of both. In
    ``info["priority_weight"]``, all frames of a slice have the weight of its first frame.

    >>> import funcollect as fc
    >>> sampler = PrioritizedSliceSampler(1_000, alpha=0.6, beta=0.4, slice_len=5)
    >>> buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(1_000), sampler=sampler, batch_size=20)
    >>> with fc.SyncDataCollector("CartPole-v1", frames_per_batch=300, total_frames=300, seed=0) as collector:
    ...     indices = buffer.extend(next(collector))
    >>> buffer.sample(return_info=True)[1]["priority_weight"].shape
    torch.Size([20])
    """

    @takes_replacement
    def __init__(
        self,
        max_capacity: int,
        alpha: float | torch.Tensor,
        beta: float | torch.Tensor,
        eps: float = 1e-8,
        *,
        max_priority_within_buffer: bool = False,
        reduction: Literal["max", "min", "mean", "median"] = "max",
        **options: Any,
    ) -> None:
        own: dict[str, Any] = {"max_priority_within_buffer": max_priority_within_buffer, "reduction": reduction}
        PrioritizedSampler.__init__(self, max_capacity, alpha, beta, eps, **own)
        check_not_given("a PrioritizedSliceSampler", options, {"over": "first frames are drawn from all windows"})
        SliceSampler.__init__(self, over="windows", **options)

    @override
    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        self._check(memory)
        spec, index = self.spec(batch_size), indices.trajectory_index_of(memory)
        uniform, tree = random_source.uniform, self._priorities
        slots = indices.completed(
            tree.find(uniform(4 * spec.num_slices)), spec.num_slices, len(memory), partial(spec.begins, index),
            lambda begins, count: tree.find_among(begins, uniform(count)),
        )  # fmt: skip
        weights = self._corrections(slots.repeat(spec.rows))
        return self.with_returns(memory, spec.sample(index, *index.places(slots), priority_weight=weights))

    def __repr__(self) -> str:
        return f"{PrioritizedSampler.__repr__(self)[:-1]}, {super().__repr__().partition('(')[2]}"
