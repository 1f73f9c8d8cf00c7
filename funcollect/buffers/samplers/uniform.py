"""The interface of samplers, which choose the frames of a sample, and samplers that draw uniformly."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
from typing_extensions import override

from funcollect.arguments import check_flags, check_key, check_positive
from funcollect.buffers.arrays import Arrays, Ints
from funcollect.buffers.samplers.indices import BufferView, Flat, SampleIndices, Slices, check_filled
from funcollect.buffers.samplers.randomness import RandomSource
from funcollect.buffers.trajectory_index.trajectory_keys import Trajectories
from funcollect.tree import Path

__all__ = ["RandomSampler", "Sampler", "SamplerWithoutReplacement", "SliceSampler"]


class Sampler(Protocol):
    """The interface of samplers for a `ReplayBuffer`.

    A class that derives from this one must define `draw`. The other methods have defaults for samplers without state.
    """

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
        return

    def state(self) -> Arrays:
        """The sampler's state, as arrays by name."""
        return {}

    def load(self, state: Arrays) -> None:
        """Replace the sampler's state by one that `state` returned, here or for the sampler of another buffer."""
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
    """Every frame once per round, in random order. Each `extend` begins a new round.

    Iteration over the buffer ends after one round.

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
        self._left = np.zeros(0, np.int64)

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
    def empty(self) -> None:
        self._left = self._left[:0]

    @override
    def state(self) -> Arrays:
        return {"left": self._left}

    @override
    def load(self, state: Arrays) -> None:
        self._left = state["left"]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(drop_last={self.drop_last}, shuffle={self.shuffle})"


class SliceSampler(RandomSampler):
    """Slices of trajectories, concatenated to ``batch_size`` frames. See `ring.Slices`.

    Args:
        num_slices: the number of slices in a sample, each of ``batch_size / num_slices`` frames. Give either this or
            `slice_len`.
        slice_len: the number of frames in a slice; a sample has ``batch_size / slice_len`` slices.
        traj_key: the key of the trajectory ids; by default ``("collector", "traj_ids")``, see `ring.Trajectories`.
        trajectory_key: another name for `traj_key`.
        end_key: the key of the end flags; by default ``("next", "done")``.
        strict_length: whether to draw only from trajectories that are long enough. If False, shorter ones are returned
            whole, and the sample has fewer than ``batch_size`` frames then.
        pad_output: pad them with zeros instead, see `ring.Slices`.
        init_key: the flags that are True where a slice begins, nested ones included; None leaves them as stored.
        over: whether all ``"trajectories"`` or all ``"windows"`` (possible slices) are equally likely.
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
            got = "neither" if num_slices is None else "both"
            raise ValueError(
                f"{got} of num_slices and slice_len is given, expected one: the other follows from the batch size"
            )
        if traj_key is not None and trajectory_key is not None:
            raise ValueError("traj_key and trajectory_key are two names of one key, expected one: leave one out")
        check_key("trajectory_key", trajectory_key)
        check_flags(cache_values=cache_values)
        self.trajectories = Trajectories(traj_key=trajectory_key if traj_key is None else traj_key, end_key=end_key)
        self.num_slices, self.slice_len = num_slices, slice_len
        self.strict_length, self.pad_output, self.init_key, self.over = strict_length, pad_output, init_key, over
        # This checks the arguments. The number that is not given follows from the batch size, so it is 1 here.
        Slices(
            num_slices=1 if num_slices is None else num_slices,
            slice_len=1 if slice_len is None else slice_len,
            strict_length=strict_length,
            pad_output=pad_output,
            init_key=init_key,
            over=over,
        )

    def spec(self, batch_size: int) -> Slices:
        """The slices of a sample; ValueError if their number or length does not divide `batch_size`."""
        given = self.num_slices or self.slice_len or 1
        if batch_size % given:
            name = "num_slices" if self.slice_len is None else "slice_len"
            raise ValueError(
                f"batch_size is {batch_size}, {name} {given}, expected a positive multiple: sample for example "
                f"{max(batch_size // given, 1) * given} frames"
            )
        other = batch_size // given
        num_slices, slice_len = (other, given) if self.num_slices is None else (given, other)
        return Slices(
            num_slices=num_slices,
            slice_len=slice_len,
            strict_length=self.strict_length,
            pad_output=self.pad_output,
            init_key=self.init_key,
            over=self.over,
        )

    @override
    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        return self.spec(batch_size).draw(memory, random_source)

    def __repr__(self) -> str:
        size = f"num_slices={self.num_slices}" if self.slice_len is None else f"slice_len={self.slice_len}"
        padded = ", pad_output=True" if self.pad_output else ""
        return f"{type(self).__name__}({size}, strict_length={self.strict_length}{padded}, over={self.over!r})"
