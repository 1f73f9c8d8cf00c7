"""Samplers for `ReplayBuffer`, which choose the frames of a sample. Those in this file draw by priority, or by age."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from funcollect.arguments import check_choice, check_count, check_flags, check_not_given, check_positive
from funcollect.buffers import Arrays, Bools, Floats, Ints, indices, sum_tree
from funcollect.buffers.indices import BufferView, RandomSource, SampleIndices
from funcollect.buffers.sum_tree import DeviceSums, SumTree, check_one_each, later, numbers_of, present_in
from funcollect.buffers.trajectory_index import Trajectories
from funcollect.buffers.uniform_samplers import (
    MultiStepSampler,
    RandomSampler,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    returns_of,
    takes_replacement,
)
from funcollect.trajectories.split import VERSION, readable
from funcollect.tree import Path

__all__ = [
    "MultiStepSampler", "PrioritizedSampler", "PrioritizedSliceSampler", "RandomSampler", "RecentSampler",
    "Sampler", "SamplerWithoutReplacement", "SliceSampler", "SliceSamplerWithoutReplacement",
]  # fmt: skip


class PrioritizedSampler(RandomSampler):
    """Single frames, with probabilities in proportion to ``(priority + eps) ** alpha`` (Schaul et al., 2016).

    A new frame gets the highest priority given so far, but at least 1. ``info["priority_weight"]`` ``[N]``
    float32 is the importance weight ``(probability / lowest probability in the buffer) ** -beta``, at most 1.
    Raises TypeError or ValueError for a capacity below 1, and for negative numbers.

    Args:
        max_capacity: the capacity of the storage.
        alpha: the exponent of priorities; 0 makes all frames equally likely. It and `beta` may be changed later,
            `alpha` while no other thread extends the buffer, which `collector.pause()` prevents.
        beta: the exponent of the importance weights; 1 corrects the sampling bias fully.
        eps: a small number added to every priority. With ``eps=0``, frames of priority 0 are never drawn.
        max_priority_within_buffer: a new frame gets the highest priority of the frames in the buffer, and 1 if there is
            none. This takes time in proportion to the capacity at each extend.
        reduction: ``"max"``, ``"min"``, ``"mean"`` or ``"median"``, which makes one priority of several per frame.
        n_steps, gamma, traj_key, end_key: n-step returns, as in `MultiStepSampler`; keys, as in `ring.Trajectories`.

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
        alpha: float | Tensor,
        beta: float | Tensor,
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
            sum_tree.check_scalar(name, value)
        check_flags(max_priority_within_buffer=max_priority_within_buffer)
        check_choice("reduction", reduction, ("max", "min", "mean", "median"))
        self.max_capacity, self._alpha, self.beta, self.eps = max_capacity, alpha, beta, eps
        # The exponent of the stored weights, and the most that one may be, so that their sum is finite.
        self._exponent, self._most = float(alpha), torch.finfo(torch.float64).max / max_capacity
        self.max_priority_within_buffer, self.reduction = max_priority_within_buffer, reduction
        self._device: torch.device | None = None  # None for the host
        if (returns := returns_of(n_steps, gamma)) is not None:
            self.returns, self.trajectories = returns, Trajectories(traj_key=traj_key, end_key=end_key)
        elif traj_key is not None or end_key is not None:
            raise ValueError(f"traj_key={traj_key!r} and end_key={end_key!r} are for n_steps: leave them out")
        self.load({})

    @property
    def alpha(self) -> float | Tensor:
        """The exponent of priorities. A new one applies to those that are stored; from 0 on, these count as 1."""
        return self._alpha

    @alpha.setter
    def alpha(self, alpha: float | Tensor) -> None:
        sum_tree.check_scalar("alpha", alpha)
        self._alpha = alpha
        self._follow_alpha()

    def _follow_alpha(self) -> None:  # a tensor may have been changed in place
        former, self._exponent = self._exponent, float(self._alpha)
        if self._exponent != former > 0:
            weights, highest = self.stored()
            self.begin(np.where(weights > 0, weights ** (self._exponent / former), 0.0), highest)

    @override
    def fit(self, capacity: int) -> None:
        if capacity > self.max_capacity:
            raise ValueError(f"max_capacity is {self.max_capacity}, the storage holds {capacity} frames: give as many")

    def move_to(self, device: torch.device) -> None:
        """Keep the priorities on the storage's device, unless trajectories are needed: their index is on the host."""
        if type(self) is PrioritizedSampler and self.returns is None:
            stored, self._device = self.stored(), device
            self.begin(*stored)

    @override
    def extended(self, memory: BufferView, slots: Ints) -> None:
        self._follow_alpha()
        stored, sums, weight = slots[slots >= 0], self._priorities, self._weights(self._highest)
        if self.max_priority_within_buffer:
            sums.put(stored, sums.xp.zeros_like(weight))
            most = sums.weights.max()
            weight = sums.xp.where(most > 0, most, self._weights(sums.xp.ones_like(weight)))
        sums.put(stored, weight)

    @property
    @override
    def settings(self) -> tuple[Any, ...]:
        return float(self.alpha), float(self.beta)

    @override
    def state(self) -> Arrays:
        self._follow_alpha()
        (weights, highest), exponents = self.stored(), np.array([self._exponent, float(self.beta)])
        return {"weights": weights, "highest": np.array(highest), "exponents": exponents}

    @override
    def load(self, state: Arrays) -> None:
        if "exponents" in state:
            self._exponent, self.beta = state["exponents"].tolist()
            self._alpha = self._exponent
        # The state may be of a sampler with a larger max_capacity, whose other slots held no frames.
        self.begin(state.get("weights", np.zeros(0))[: self.max_capacity], float(state.get("highest", 1.0)))

    @override
    def load_moved(self, memory: BufferView, state: Arrays, source: Ints, slots: Ints) -> None:
        weights = np.zeros(memory.capacity)
        weights[slots] = state["weights"][source]
        self.load({**state, "weights": weights})

    def stored(self) -> tuple[Floats, float]:
        """The weights of all slots, and the highest priority given."""
        return torch.as_tensor(self._priorities.weights).numpy(force=True).copy(), self._highest.item()

    def begin(self, weights: Floats, highest: float) -> None:
        """Begin with these weights of the first slots."""
        size, device = self.max_capacity, self._device
        self._priorities: Any = SumTree(size) if device is None else DeviceSums(size, device)
        self._highest: Any = self._priorities.moved(np.array([highest]))
        self._priorities.put(np.arange(len(weights)), weights)

    def update_priority(self, memory: Any, index: Any, priority: Any, written: Any) -> None:
        """See `ReplayBuffer.update_priority`; `memory` is the buffer's ring."""
        self._follow_alpha()
        if self._device is not None:
            self._update_on_device(memory, index, priority, written)
            return
        slots = numbers_of("index", index, "iu").astype(np.int64)
        values = numbers_of("priority", priority, "fiub").astype(np.float64)
        check_one_each(values, len(slots))
        if (present := present_in(memory, slots, written)) is not None:
            slots, values = slots[present], values if len(values) == 1 else values[present]
        highest = self.checked(values)
        if len(slots):
            self._priorities.put(slots, self._weights(values))
            if highest > self._highest:
                self._highest = np.array([highest])

    def _update_on_device(self, memory: Any, index: Any, priority: Any, written: Any) -> None:
        """`update_priority` on a device. Bad priorities are ignored: an error would have to wait."""
        sums, device = self._priorities, self._device
        given = torch.as_tensor(index, device=device).reshape(-1)
        if given.dtype.is_floating_point or given.dtype == torch.bool:
            numbers_of("index", index, "iu")  # raises
        slots, values = given.long(), torch.as_tensor(priority, device=device).detach().reshape(-1).double()
        check_one_each(values, len(slots))
        after: Any = 0 if written is None else later(written, memory.before + memory.written, len(slots))
        after = sums.moved(after) if isinstance(after, np.ndarray) else after
        weights = self._weights(values)
        kept = (slots >= 0) & (slots < len(memory)) & (values >= 0) & (weights < self._most)
        kept &= ((memory.written - 1 - slots) % memory.capacity >= after) & (after < memory.written)
        sums.put_some(kept, slots, weights)
        self._highest = torch.cat([self._highest, torch.where(kept, values, 0.0)]).amax(0, keepdim=True)

    def checked(self, given: Floats) -> float:
        """The highest of these priorities; ValueError for one below 0, infinite, or of too large a weight."""
        lowest, highest = (float(given.min()), float(given.max())) if len(given) else (0.0, 0.0)
        with np.errstate(over="ignore", invalid="ignore"):
            weighs = self._weights(np.float64(highest)) < self._most
        if not (lowest >= 0 and highest < np.inf and weighs):
            rule = "expected finite numbers of at least 0, and a finite sum: give for example the absolute TD error"
            raise ValueError(f"priorities lie between {lowest} and {highest}, {rule}")
        return highest

    def _weights(self, priority: Any) -> Any:
        return (priority + self.eps) ** self._exponent

    @override
    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        indices.check_filled(memory)
        self._follow_alpha()
        slots = self._priorities.find(random_source.uniform(batch_size))
        drawn = SampleIndices(slots=slots, info={"priority_weight": self._corrections(slots)})
        return drawn if self.returns is None else self.with_returns(memory, drawn)

    def _corrections(self, slots: Ints) -> Tensor:
        """The importance weights [N] float32 of the frames in `slots` [N]."""
        weights = (self._priorities.get(slots) / self._priorities.least) ** -float(self.beta)
        return weights.float() if isinstance(weights, Tensor) else torch.from_numpy(weights.astype(np.float32))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_capacity={self.max_capacity}, alpha={self.alpha}, beta={self.beta})"


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
        alpha: float | Tensor,
        beta: float | Tensor,
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
        self._follow_alpha()
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


class RecentSampler(RandomSampler):
    """Single frames, drawn uniformly from those whose ``collector.policy_version`` is at most so many versions old.

    Ages count from the newest version that the buffer has had, or from `policy_version`: a learner ahead of its workers
    sets ``sampler.policy_version = collector.policy_version``. Raises TypeError or ValueError for bad arguments, and in
    a sample ValueError if there is no such frame.

    Args:
        max_age: the largest difference of versions; None for any.
        once: draw each frame once, for data that should be on policy. The last sample may have fewer frames, and
            iteration ends there; ``sampler.ran_out(1)`` is True until the buffer is extended.

    >>> import funcollect as fc, torch
    >>> from tensordict import TensorDict
    >>> buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(100), sampler=RecentSampler(max_age=1), batch_size=50)
    >>> indices = buffer.extend(TensorDict({"collector": {"policy_version": torch.arange(9) // 3}}, [9]))
    >>> buffer.sample()["collector", "policy_version"].unique()
    tensor([1, 2])
    """

    @takes_replacement
    def __init__(self, *, max_age: int | None = None, once: bool = False) -> None:
        check_count("max_age", 0 if max_age is None else max_age)
        check_flags(once=once)
        self.max_age, self.once = max_age, once
        self.policy_version: int | None = None  # the version of age 0; None for the newest in the buffer
        self.load({})

    @override
    def load(self, state: Arrays) -> None:
        self._versions: Ints = state.get("versions", np.zeros(0, np.int64))  # by slot
        self._used: Bools = state.get("used", np.zeros(0, np.bool_))  # by slot
        # The highest version so far, the number of frames whose versions were read, and the storage's edits then.
        self._newest, self._read = state.get("counts", np.array([np.iinfo(np.int64).min, 0])).tolist()
        self._edits = 0
        self._left: Ints | None = state.get("left")  # with `once`: of the round; None if a new one has to begin
        self._memory: Any = None  # which was extended last

    @override
    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        size, below = indices.check_filled(memory), random_source.below
        self._follow(memory)
        if self.once:
            if self._left is None:
                left = np.flatnonzero(~self._used[:size])
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

    def _follow(self, memory: Any) -> None:
        """Read the versions of the frames that were written since the last call."""
        if len(self._versions) != memory.capacity:
            self._versions, self._used = np.zeros(memory.capacity, np.int64), np.zeros(memory.capacity, np.bool_)
        fresh = np.arange(max(self._read, memory.written - len(memory)), memory.written) % memory.capacity
        edits = -1 if self.max_age is None else memory.storage.edits  # a reader takes other samplers
        slots = fresh if edits == self._edits else np.arange(len(memory))  # `update` may change versions
        if self.max_age is not None and len(slots):
            columns = memory.storage.numbers(slots)
            if (column := columns.get(VERSION)) is None:
                what = f"frames have the numbers {sorted(map(readable, columns))}, expected {readable(VERSION)}"
                raise ValueError(f"{what}: store batches of collectors whole, or pass max_age=None")
            self._versions[slots], self._newest = column.numpy(), max(self._newest, int(column.max()))
        self._used[fresh], self._read, self._edits = False, memory.written, edits

    def _recent(self, slots: Ints) -> Bools:
        if self.max_age is None:
            return np.ones(len(slots), np.bool_)
        newest = self._newest if self.policy_version is None else self.policy_version
        return np.asarray(self._versions.take(slots) >= newest - self.max_age)

    @override
    def ran_out(self, batch_size: int) -> bool:
        if not self.once:
            return False
        if (memory := self._memory) is None:  # a buffer without frames is an error of `draw`
            return self._left is not None and not self._recent(self._left).any()
        with memory.storage.lock:  # the buffer's, since another thread may extend it
            self._follow(memory)
            left = np.flatnonzero(~self._used[: len(memory)]) if self._left is None else self._left
            return not self._recent(left).any()

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
    def load_moved(self, memory: BufferView, state: Arrays, source: Ints, slots: Ints) -> None:
        self._follow(memory)
        if len(state["used"]):  # otherwise nothing has been drawn
            self._used[slots] = state["used"][source]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_age={self.max_age}, once={self.once})"
