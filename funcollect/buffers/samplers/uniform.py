"""The interface of samplers, which choose the frames of a sample, and samplers that draw uniformly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from typing_extensions import override

from funcollect.arguments import check_flags, check_key, check_positive
from funcollect.buffers import Arrays, Ints
from funcollect.buffers.samplers.indices import (
    BufferView,
    Flat,
    RandomSource,
    SampleIndices,
    Slices,
    check_filled,
    trajectory_index_of,
)
from funcollect.buffers.trajectory_index import Trajectories
from funcollect.trajectories.returns import MultiStep
from funcollect.trajectories.split import MASK
from funcollect.tree import Path

__all__ = ["MultiStepSampler", "RandomSampler", "Sampler", "SamplerWithoutReplacement", "SliceSampler"]


class Sampler(Protocol):
    """The interface of samplers for a `ReplayBuffer`. All methods but `draw` have defaults, for those without state."""

    trajectories: Trajectories | None = None  # the keys that link frames; None for a sampler of single frames

    def fit(self, capacity: int) -> None:
        """Raise ValueError if the sampler cannot be used with a storage of `capacity` frames."""
        return

    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        """Choose the frames of one sample."""

    def ran_out(self, batch_size: int) -> bool:
        """Whether every frame was returned once, so that the next sample begins a new round."""
        return False

    def give_back(self, drawn: SampleIndices) -> None:
        """Undo the last `draw`: its frames were not returned to the caller."""
        return

    def extended(self, memory: BufferView, slots: Ints) -> None:
        """Update after frames were written to `slots` ``[*B, T]``; -1 marks frames that were not stored."""
        return

    def empty(self) -> None:
        """Reset after the buffer was emptied."""
        self.load({})

    def state(self) -> Arrays:
        """The sampler's state, as arrays by name."""
        return {}

    def load(self, state: Arrays) -> None:
        """Replace the sampler's state by one that `state` returned, here or in another buffer; {} is that at first."""
        return


def wanted_size(given: int | None, usual: int | None) -> int:
    """The number of frames in a sample, checked: `given` by the call, else the `usual` one."""
    wanted = usual if given is None else given
    if wanted is None:
        raise ValueError("no batch_size is given, neither here nor to the buffer: pass for example batch_size=256")
    check_positive("batch_size", wanted)
    return wanted


class RandomSampler(Sampler):
    """Single frames, drawn uniformly with replacement.

    >>> from funcollect import ReplayBuffer, ListStorage
    >>> buffer = ReplayBuffer(storage=ListStorage(10), sampler=RandomSampler(), batch_size=4)
    >>> _ = buffer.extend([5, 5, 5])
    >>> buffer.sample()
    tensor([5, 5, 5, 5])
    """

    def __init__(self) -> None:
        pass  # without this, its signature would be that of a protocol: any arguments

    @override
    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        return Flat(batch_size).draw(memory, random_source)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class SamplerWithoutReplacement(RandomSampler):
    """Every frame once per round, in random order. An `extend` begins a new round; iteration ends after one.

    Args:
        drop_last: omit the last frames of a round if they do not fill a batch; else the last batch is shorter.
        shuffle: whether the order is random; if False, slots are drawn in their order.

    Raises:
        TypeError: if one of them is no bool.

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
        check_filled(memory)
        held = len(memory)
        if self.drop_last and batch_size > held:
            raise ValueError(
                f"batch_size is {batch_size}, the buffer holds {held} frames: sample fewer, or pass drop_last=False"
            )
        if self.ran_out(batch_size):
            self._left = random_source.permutation(held) if self.shuffle else np.arange(held)
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

    Args:
        num_slices: the number of slices in a sample, each of ``batch_size / num_slices`` frames. Give either this or
            `slice_len`.
        slice_len: the number of frames in a slice; a sample has ``batch_size / slice_len`` slices.
        traj_key, end_key: the keys of trajectory ids and end flags, see `ring.Trajectories`.
        trajectory_key: another name for `traj_key`.
        strict_length, pad_output, init_key, over: see `ring.Slices`. If `strict_length` is False, a sample may have
            fewer than ``batch_size`` frames.
        cache_values: accepted as by TorchRL, without effect: the trajectories are always known.

    Raises:
        ValueError: unless exactly one of `num_slices` and `slice_len` is given, if both `traj_key` and `trajectory_key`
            are, and for `pad_output` with `strict_length`.

    >>> import funcollect as fc
    >>> sampler = SliceSampler(slice_len=5)
    >>> buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(1000), sampler=sampler, batch_size=20)
    >>> with fc.SyncDataCollector("CartPole-v1", frames_per_batch=100, total_frames=300, seed=0) as collector:
    ...     for batch in collector:
    ...         indices = buffer.extend(batch)
    >>> buffer.sample()["collector", "step"].view(4, 5).diff()
    tensor([[1, 1, 1, 1],
            [1, 1, 1, 1],
            [1, 1, 1, 1],
            [1, 1, 1, 1]])
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

    def spec(self, batch_size: int) -> Slices:
        """The slices of a sample; ValueError if their number or length does not divide `batch_size`."""
        given = self.num_slices or self.slice_len or 1
        other, rest = divmod(batch_size, given)
        if rest:
            name, near = "num_slices" if self.slice_len is None else "slice_len", max(other, 1) * given
            raise ValueError(
                f"batch_size is {batch_size}, {name} {given}, expected a positive multiple: sample for example {near} "
                "frames"
            )
        num_slices, slice_len = (other, given) if self.num_slices is None else (given, other)
        return Slices(num_slices=num_slices, slice_len=slice_len, **self.options)

    @override
    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        return self.spec(batch_size).draw(memory, random_source)

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
        index, slots = trajectory_index_of(memory), random_source.below(len(memory), batch_size)
        spec = Slices(num_slices=batch_size, slice_len=self.returns.n_steps, strict_length=False, pad_output=True)
        drawn = spec.along(index, *index.places(slots))
        return _Lookahead(slots=drawn.slots, mask=drawn.mask, returns=self.returns)

    def __repr__(self) -> str:
        return f"MultiStepSampler(gamma={self.returns.gamma}, n_steps={self.returns.n_steps})"
