"""How a `ReplayBuffer` chooses what it samples. A sampler remembers what its kind needs, and nothing of the frames."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from funcollect.arguments import check_flags, check_key, check_optional_positive, check_positive
from funcollect.buffers.samplers.indices import BufferView, Flat, SampleIndices, Slices, check_filled
from funcollect.buffers.samplers.randomness import RandomSource
from funcollect.buffers.trajectory_index.trajectory_keys import Trajectories
from funcollect.tree import Path

__all__ = ["RandomSampler", "Sampler", "SamplerWithoutReplacement", "SliceSampler"]

Ints = npt.NDArray[np.int64]


class Sampler(Protocol):
    """What a `ReplayBuffer` asks of a sampler.

    `trajectories` names the keys by which frames are linked; None for a sampler that takes single frames.
    """

    trajectories: Trajectories | None

    def fit(self, capacity: int) -> None:
        """Raise ValueError where it cannot serve a storage of so many frames."""
        ...

    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        """Choose the frames of one sample."""
        ...

    def ran_out(self, batch_size: int) -> bool:
        """Whether every frame has come, and the next sample begins a new round."""
        ...

    def give_back(self, drawn: SampleIndices) -> None:
        """The sample drawn last was not used."""
        ...

    def extended(self, memory: BufferView, slots: Ints) -> None:
        """Frames were written into `slots`, ``[*B, T]``; -1 for those that did not fit."""
        ...

    def empty(self) -> None:
        """The buffer was emptied."""
        ...

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """What it remembers, as arrays by name."""
        ...

    def load(self, state: dict[str, npt.NDArray[Any]]) -> None:
        """Restore what `state` returned."""
        ...


def wanted_size(given: int | None, usual: int | None) -> int:
    """The frames of a sample: as `given` to the call, else as `usual`.

    Raises:
        TypeError, ValueError: for no number at all, and for a bad one.
    """
    wanted = usual if given is None else given
    if wanted is None:
        raise ValueError("no batch_size is given, neither here nor to the buffer: pass for example batch_size=256")
    check_positive("batch_size", wanted)
    return wanted


class RandomSampler:
    """Single frames, uniform over all that are held, with replacement.

    >>> from funcollect import ReplayBuffer, ListStorage
    >>> buffer = ReplayBuffer(storage=ListStorage(10), sampler=RandomSampler(), batch_size=4)
    >>> _ = buffer.extend([5, 5, 5])
    >>> buffer.sample()
    tensor([5, 5, 5, 5])
    """

    trajectories: Trajectories | None = None

    def fit(self, capacity: int) -> None:
        """It serves storages of any size."""

    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        """Choose the frames of one sample."""
        return Flat(batch_size).draw(memory, random_source)

    def ran_out(self, batch_size: int) -> bool:
        """There are no rounds."""
        return False

    def give_back(self, drawn: SampleIndices) -> None:
        """Nothing to remember."""

    def extended(self, memory: BufferView, slots: Ints) -> None:
        """Nothing to remember."""

    def empty(self) -> None:
        """Nothing to forget."""

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """What it remembers, as arrays by name."""
        return {}

    def load(self, state: dict[str, npt.NDArray[Any]]) -> None:
        """Restore what `state` returned."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class SamplerWithoutReplacement(RandomSampler):
    """Every frame once, in random order, then all again; each extend begins anew.

    Args:
        drop_last: leave out the frames that do not fill a last batch. If False, that batch is shorter.
        shuffle: False for the order of the slots.

    Iteration over the buffer ends when every frame has come.
    """

    def __init__(self, *, drop_last: bool = False, shuffle: bool = True) -> None:
        check_flags(drop_last=drop_last, shuffle=shuffle)
        self.drop_last, self.shuffle = drop_last, shuffle
        self._left = np.zeros(0, np.int64)

    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        """Choose the frames of one sample.

        Raises:
            ValueError: for an empty buffer, and for more than it holds with ``drop_last=True``.
        """
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

    def ran_out(self, batch_size: int) -> bool:
        """Whether every frame has come, and the next sample begins a new round."""
        return len(self._left) < (batch_size if self.drop_last else 1)

    def give_back(self, drawn: SampleIndices) -> None:
        """Its frames come next."""
        self._left = np.concatenate([drawn.slots, self._left])

    def extended(self, memory: BufferView, slots: Ints) -> None:
        """Begin anew: some of what was left may be gone."""
        self._left = self._left[:0]

    def empty(self) -> None:
        """Begin anew."""
        self._left = self._left[:0]

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """What is left of this round."""
        return {"left": self._left}

    def load(self, state: dict[str, npt.NDArray[Any]]) -> None:
        """Go on with that round."""
        self._left = state["left"]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(drop_last={self.drop_last}, shuffle={self.shuffle})"


class SliceSampler(RandomSampler):
    """Slices of trajectories, one after another: ``batch_size`` frames in all. See `Slices`.

    Args:
        num_slices: slices in a sample, each ``batch_size / num_slices`` frames long; or
        slice_len: frames of a slice, ``batch_size / slice_len`` of which make up a sample.
        traj_key: where the trajectories' ids are: ``("collector", "traj_ids")``, else ``"episode"``, unless given.
        trajectory_key: the same by another name.
        end_key: where the flags of a trajectory's last frame are; ``("next", "done")`` unless given.
        strict_length: only trajectories that are long enough; if False, shorter ones are padded, with a mask.
        over: what is uniform, ``"trajectories"`` or ``"windows"``.
        cache_values: taken, and not needed: trajectories are always known.

    Raises:
        ValueError: unless one of `num_slices` and `slice_len` is given, and for two names of one key.

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
        check_flags(strict_length=strict_length, cache_values=cache_values)
        check_optional_positive("num_slices", num_slices)
        check_optional_positive("slice_len", slice_len)
        self.trajectories = Trajectories(traj_key=trajectory_key if traj_key is None else traj_key, end_key=end_key)
        self.num_slices, self.slice_len = num_slices, slice_len
        self.strict_length, self.over = strict_length, over
        self.spec(num_slices or slice_len or 0)  # checks the numbers here

    def spec(self, batch_size: int) -> Slices:
        """The slices of a sample of `batch_size` frames.

        Raises:
            ValueError: for a batch size that is not a multiple of the number or length of slices.
        """
        given = self.num_slices or self.slice_len or 0
        if given < 1 or batch_size % given:
            name = "num_slices" if self.slice_len is None else "slice_len"
            raise ValueError(
                f"batch_size is {batch_size}, {name} {given}, expected a positive multiple: sample for example "
                f"{max(batch_size // max(given, 1), 1) * max(given, 1)} frames"
            )
        other = batch_size // given
        num_slices, slice_len = (other, given) if self.num_slices is None else (given, other)
        return Slices(num_slices=num_slices, slice_len=slice_len, strict_length=self.strict_length, over=self.over)

    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        """Choose the slices of one sample."""
        return self.spec(batch_size).draw(memory, random_source)

    def __repr__(self) -> str:
        size = f"num_slices={self.num_slices}" if self.slice_len is None else f"slice_len={self.slice_len}"
        return f"{type(self).__name__}({size}, strict_length={self.strict_length}, over={self.over!r})"
