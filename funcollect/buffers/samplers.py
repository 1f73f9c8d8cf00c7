"""Samplers for `ReplayBuffer`, which choose the frames of a sample: uniformly, in slices, or by priority."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
import torch
from typing_extensions import override

from funcollect.arguments import check_flags, check_key, check_number, check_positive
from funcollect.buffers import Arrays, Floats, Ints, indices
from funcollect.buffers.indices import BufferView, RandomSource, SampleIndices, Sampler, Slices
from funcollect.buffers.priorities import SumTree, later, numbers_of
from funcollect.buffers.trajectory_index import Trajectories
from funcollect.trajectories.returns import MultiStep
from funcollect.trajectories.split import MASK
from funcollect.tree import Path

__all__ = [
    "MultiStepSampler", "PrioritizedSampler", "PrioritizedSliceSampler", "RandomSampler", "Sampler",
    "SamplerWithoutReplacement", "SliceSampler",
]  # fmt: skip

_flat = lru_cache(typed=True)(indices.Flat)  # to check the arguments again would take as long as to draw


class RandomSampler(Sampler):
    """Single frames, drawn uniformly with replacement.

    >>> import funcollect as fc
    >>> buffer = fc.ReplayBuffer(sampler=RandomSampler(), batch_size=4)
    >>> buffer.extend([5, 5, 5]), buffer.sample()
    (tensor([0, 1, 2]), tensor([5, 5, 5, 5]))
    """

    def __init__(self) -> None:
        pass  # without this, its signature would be that of a protocol: any arguments

    def spec(self, batch_size: int) -> indices.SampleSpec:
        """The description of a sample of so many frames."""
        return _flat(batch_size)

    @override
    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        return self.spec(batch_size).draw(memory, random_source)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class SamplerWithoutReplacement(RandomSampler):
    """Every frame once per round, in random order. An `extend` begins a new round; iteration ends after one.

    `drop_last` omits the last frames of a round if they do not fill a batch; else the last batch is shorter. Without
    `shuffle`, slots are drawn in their order. Raises TypeError for other values than bools.

    >>> import funcollect as fc, torch
    >>> sampler = SamplerWithoutReplacement(shuffle=False)
    >>> buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(10), sampler=sampler, batch_size=2)
    >>> indices = buffer.extend({"x": torch.arange(5)})
    >>> [batch["x"].tolist() for batch in buffer]
    [[0, 1], [2, 3], [4]]
    """

    def __init__(self, *, drop_last: bool = False, shuffle: bool = True) -> None:
        check_flags(drop_last=drop_last, shuffle=shuffle)
        self.drop_last, self.shuffle = drop_last, shuffle
        self.load({})

    @override
    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        indices.check_filled(memory)
        if self.drop_last and batch_size > (held := len(memory)):
            what = f"batch_size is {batch_size}, the buffer holds {held} frames"
            raise ValueError(f"{what}: sample fewer, or pass drop_last=False")
        if self.ran_out(batch_size):
            self._left = (random_source.permutation if self.shuffle else np.arange)(len(memory))
        slots, self._left = self._left[:batch_size], self._left[batch_size:]
        return SampleIndices(slots=slots)

    @override
    def ran_out(self, batch_size: int) -> bool:
        return len(self._left) < (batch_size if self.drop_last else 1)

    @override
    def give_back(self, drawn: SampleIndices) -> None:
        self._left = np.concatenate([drawn.slots, self._left])

    @override
    def extended(self, memory: BufferView, slots: Ints) -> None:
        self.empty()  # remaining frames of the round may have been overwritten

    @override
    def state(self) -> Arrays:
        return {"left": self._left}

    @override
    def load(self, state: Arrays) -> None:
        self._left = state.get("left", np.zeros(0, np.int64))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(drop_last={self.drop_last}, shuffle={self.shuffle})"


class SliceSampler(RandomSampler):
    """Slices of trajectories, concatenated to ``batch_size`` frames. See `ring.Slices`.

    Raises ValueError unless exactly one of `num_slices` and `slice_len` is given, if both `traj_key` and
    `trajectory_key` are, and for `pad_output` with `strict_length`.

    Args:
        num_slices: the number of slices in a sample.
        slice_len: the number of frames in a slice; the other of both follows from ``batch_size``.
        traj_key, end_key: the keys of trajectory ids and end flags, see `ring.Trajectories`.
        trajectory_key: another name for `traj_key`.
        strict_length, pad_output, init_key, over: see `ring.Slices`. If `strict_length` is False, a sample may have
            fewer than ``batch_size`` frames.
        cache_values: accepted as by TorchRL, without effect: the trajectories are always known.

    >>> import funcollect as fc
    >>> sampler = SliceSampler(slice_len=3)
    >>> buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(1000), sampler=sampler, batch_size=6)
    >>> with fc.SyncDataCollector("CartPole-v1", frames_per_batch=300, total_frames=300, seed=0) as collector:
    ...     indices = buffer.extend(next(collector))
    >>> buffer.sample()["collector", "step"].view(2, 3).diff().tolist()
    [[1, 1], [1, 1]]
    """

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        traj_key: str | Path | None = None,
        trajectory_key: str | Path | None = None,
        end_key: str | Path | None = None,
        strict_length: bool = True,
        pad_output: bool = False,
        init_key: str | Path | None = "is_init",
        over: Literal["trajectories", "windows"] = "trajectories",
        cache_values: bool = False,
    ) -> None:
        if (num_slices is None) == (slice_len is None):
            got = "neither of num_slices and slice_len" if num_slices is None else "both of num_slices and slice_len"
            raise ValueError(f"{got} is given, expected one: the other follows from the batch size")
        if traj_key is not None and trajectory_key is not None:
            raise ValueError("traj_key and trajectory_key are two names of one key, expected one: leave one out")
        check_key("trajectory_key", trajectory_key)
        check_flags(cache_values=cache_values)
        self.trajectories = Trajectories(traj_key=trajectory_key if traj_key is None else traj_key, end_key=end_key)
        self.num_slices, self.slice_len = num_slices, slice_len
        self.options: dict[str, Any] = {
            "strict_length": strict_length, "pad_output": pad_output, "init_key": init_key, "over": over,
        }  # fmt: skip
        one, other = (1 if size is None else size for size in (num_slices, slice_len))
        Slices(num_slices=one, slice_len=other, **self.options)  # checks the arguments

    @override
    def spec(self, batch_size: int) -> Slices:
        """The slices of a sample; ValueError if their number or length does not divide `batch_size`."""
        given = self.num_slices or self.slice_len or 1
        other, rest = divmod(batch_size, given)
        if rest:
            what = f"batch_size is {batch_size}, {'num_slices' if self.slice_len is None else 'slice_len'} {given}"
            near = max(other, 1) * given
            raise ValueError(f"{what}, expected a positive multiple: sample for example {near} frames")
        num_slices, slice_len = (other, given) if self.num_slices is None else (given, other)
        return Slices(num_slices=num_slices, slice_len=slice_len, **self.options)

    def __repr__(self) -> str:
        size = f"num_slices={self.num_slices}" if self.slice_len is None else f"slice_len={self.slice_len}"
        strict, padded, over = (self.options[name] for name in ("strict_length", "pad_output", "over"))
        padding = ", pad_output=True" if padded else ""
        return f"{type(self).__name__}({size}, strict_length={strict}{padding}, over={over!r})"


@dataclass(kw_only=True, slots=True)
class _Lookahead(SampleIndices):
    returns: MultiStep  # the slots are those of N frames, each with the `n_steps - 1` that follow it

    @property
    @override
    def index(self) -> Ints:
        return self.slots[:: self.returns.n_steps]

    @override
    def finish(self, batch: Any) -> Any:
        table = batch.reshape(-1, self.returns.n_steps)
        had = table.get("collector", None)
        if had is not None:
            table.set("collector", had.clone(False))
        table.set(MASK, torch.from_numpy(self.mask).to(batch.device).reshape(table.shape))
        return self.returns(table)[:, 0].exclude("collector" if had is None else MASK)


class MultiStepSampler(RandomSampler):
    """Single frames, drawn uniformly with replacement, with the n-step returns and next observations of `MultiStep`.

    They are computed from the trajectories in the buffer, also across batches, up to the newest frame of each. For
    `gamma`, `n_steps` and the errors, see `MultiStep`; for `traj_key` and `end_key`, see `SliceSampler`.

    >>> import funcollect as fc
    >>> sampler = MultiStepSampler(gamma=0.9, n_steps=3)
    >>> buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(1000), sampler=sampler, batch_size=64)
    >>> with fc.SyncDataCollector("CartPole-v1", frames_per_batch=2, total_frames=200, seed=0) as collector:
    ...     for batch in collector:
    ...         indices = buffer.extend(batch)
    >>> buffer.sample()["next", "reward"].max()
    tensor(2.7100)
    """

    def __init__(
        self, *, gamma: float, n_steps: int, traj_key: str | Path | None = None, end_key: str | Path | None = None
    ) -> None:
        self.returns = MultiStep(gamma, n_steps)
        self.trajectories = Trajectories(traj_key=traj_key, end_key=end_key)

    @override
    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        index, slots = indices.trajectory_index_of(memory), random_source.below(len(memory), batch_size)
        spec = Slices(num_slices=batch_size, slice_len=self.returns.n_steps, strict_length=False, pad_output=True)
        drawn = spec.along(index, *index.places(slots))
        return _Lookahead(slots=drawn.slots, mask=drawn.mask, returns=self.returns)

    def __repr__(self) -> str:
        return f"MultiStepSampler(gamma={self.returns.gamma}, n_steps={self.returns.n_steps})"


class PrioritizedSampler(RandomSampler):
    """Single frames, with probabilities in proportion to ``(priority + eps) ** alpha`` (Schaul et al., 2016).

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
    >>> buffer.sample(return_info=True)[1]["priority_weight"]
    tensor([1., 1., 1., 1.])
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
            what = f"max_capacity is {self.max_capacity}, the storage holds {capacity} frames"
            raise ValueError(f"{what}: give the sampler max_capacity={capacity}")

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

    def update_priority(self, memory: BufferView, index: Any, priority: Any, written: Any, before: int) -> None:
        """See `ReplayBuffer.update_priority`; `memory` is the buffer's ring, which began after `before` frames."""
        slots = numbers_of("index", index, "iu").astype(np.int64)
        given = numbers_of("priority", priority, "fiub").astype(np.float64)
        if len(given) not in (1, len(slots)):
            what = f"{len(given)} priorities are given for {len(slots)} frames"
            raise ValueError(f"{what}: give one for each, or one for all")
        after = 0 if written is None else later(written, before + memory.written, len(slots))
        late = bool(np.any(after > 0)) if isinstance(after, np.ndarray) else after > 0
        if len(slots) and (late or slots.view(np.uint64).max() >= len(memory)):  # a negative one is huge there
            present = slots != -1
            if late:  # the frame that a slot held then is still there
                present &= ((memory.written - 1 - slots) % memory.capacity >= after) & (after < memory.written)
            slots, given = slots[present], given if len(given) == 1 else given[present]
            if len(slots) and slots.view(np.uint64).max() >= len(memory):
                what = f"index holds slots from {slots.min()} to {slots.max()}"
                where = f"the buffer has frames in 0 … {len(memory) - 1}"
                raise ValueError(f'{what}, {where}: give slots that extend returned, or those in info["index"]')
        lowest, highest = (float(given.min()), float(given.max())) if len(given) else (0.0, 0.0)
        if not (lowest >= 0 and highest < np.inf):
            what = f"priorities lie between {lowest} and {highest}, expected finite numbers of at least 0"
            raise ValueError(f"{what}: give for example the absolute TD error")
        if len(slots):
            self._priorities.put(slots, self._weights(given))
            self._highest = max(self._highest, highest)

    def _weights(self, priority: Floats) -> Floats:
        return np.asarray((priority + self.eps) ** self.alpha)

    def _check(self, memory: BufferView) -> None:
        indices.check_filled(memory)
        if self._priorities.total <= 0:
            mend = "give some frame a positive one, or the sampler a positive eps"
            raise ValueError(f"every priority is 0, so nothing can be drawn: {mend}")

    @override
    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        self._check(memory)
        slots = self._priorities.find(random_source.uniform(batch_size))
        return SampleIndices(slots=slots, info={"priority_weight": self._corrections(slots)})

    def _corrections(self, slots: Ints) -> torch.Tensor:
        """The importance weights [N] float32 of the frames in `slots` [N]."""
        ratio = self._priorities.get(slots) / self._priorities.least
        return torch.from_numpy((ratio**-self.beta).astype(np.float32))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_capacity={self.max_capacity}, alpha={self.alpha}, beta={self.beta})"


class PrioritizedSliceSampler(PrioritizedSampler):
    """Slices of trajectories. Their first frames are drawn by priority from those at which a slice can begin.

    `PrioritizedSampler` and `SliceSampler` describe the arguments and errors. In ``info["priority_weight"]``, all
    frames of a slice have the weight of its first frame.

    >>> import funcollect as fc
    >>> sampler = PrioritizedSliceSampler(1_000, alpha=0.6, beta=0.4, slice_len=5)
    >>> buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(1_000), sampler=sampler, batch_size=20)
    >>> with fc.SyncDataCollector("CartPole-v1", frames_per_batch=300, total_frames=300, seed=0) as collector:
    ...     indices = buffer.extend(next(collector))
    >>> buffer.sample(return_info=True)[1]["priority_weight"].shape
    torch.Size([20])
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
        spec, index = self._slices.spec(batch_size), indices.trajectory_index_of(memory)
        uniform, tree = random_source.uniform, self._priorities
        slots = indices.completed(
            tree.find(uniform(4 * spec.num_slices)), spec.num_slices, len(memory), partial(spec.begins, index),
            lambda begins, count: tree.find_among(begins, uniform(count)),
        )  # fmt: skip
        weights = self._corrections(slots.repeat(spec.slice_len))
        return spec.sample(index, *index.places(slots), priority_weight=weights)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {repr(self._slices).partition('(')[2]}"
