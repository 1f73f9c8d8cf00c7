"""Samplers of single frames and of slices, drawn uniformly: with replacement, or once per round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from typing_extensions import override

from funcollect.arguments import check_flags, check_key, check_not_given
from funcollect.buffers import Arrays, Ints, indices
from funcollect.buffers.indices import BufferView, RandomSource, SampleIndices, Slices
from funcollect.buffers.keywords import Init, takes_foreign
from funcollect.buffers.trajectory_index import Trajectories
from funcollect.messages import shown
from funcollect.trajectories.returns import MultiStep
from funcollect.trajectories.split import MASK
from funcollect.tree import Path, as_path


def takes_replacement(init: Init) -> Init:
    """Let a sampler's constructor accept TorchRL's keywords. ``replacement=False`` makes an object of another class."""
    init = takes_foreign("sampler")(init)

    @wraps(init)
    def outer(self: Any, *args: Any, replacement: bool = True, **given: Any) -> None:
        check_flags(replacement=replacement)
        if replacement or isinstance(self, SamplerWithoutReplacement):
            init(self, *args, **given)
            return
        if (other := _WITHOUT_REPLACEMENT.get(type(self))) is None:
            raise TypeError(f"{type(self).__name__} has no without-replacement variant: leave replacement=False out")
        self.__class__ = other
        self.__init__(*args, **given)

    return outer  # type: ignore[return-value]


class Sampler(Protocol):
    """The interface of samplers for a `ReplayBuffer`. Methods but `draw` have defaults, for samplers without state."""

    trajectories: Trajectories | None = None  # the keys that link frames; None for a sampler of single frames

    def fit(self, capacity: int) -> None:
        """Raise ValueError if the sampler cannot be used with a storage of `capacity` frames."""
        return

    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        """Choose the frames of one sample."""

    def ran_out(self, batch_size: int) -> bool:
        """Whether a round has ended: every frame was returned once, or too few are left for a batch."""
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

    @property
    def settings(self) -> tuple[Any, ...]:
        """The settings of samples that may be changed at any time."""
        return ()

    def state(self) -> Arrays:
        """The sampler's state, as arrays by name."""
        return {}

    def load(self, state: Arrays) -> None:
        """Continue from the result of `state`, here or in another buffer; {} is the initial state."""
        return

    def load_moved(self, memory: BufferView, state: Arrays, source: Ints, slots: Ints) -> None:
        """Take over the state of a buffer of another capacity, whose frames in `source` [N] are here in `slots` [N]."""
        return


class RandomSampler(Sampler):
    """Single frames, drawn uniformly with replacement; ``replacement=False`` makes a `SamplerWithoutReplacement`.

    >>> import funcollect as fc
    >>> buffer = fc.ReplayBuffer(sampler=RandomSampler(), batch_size=4)
    >>> buffer.extend([5, 5, 5]), buffer.sample()
    (tensor([0, 1, 2]), tensor([5, 5, 5, 5]))
    """

    replacement: ClassVar[bool] = True
    returns: MultiStep | None = None  # of the steps that follow a frame; the sampler has `trajectories` then

    @takes_replacement
    def __init__(self) -> None:
        pass  # otherwise the signature would be a protocol's, which takes any arguments

    @override
    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        drawn = SampleIndices(slots=random_source.below(indices.check_filled(memory), batch_size))
        return drawn if self.returns is None else self.with_returns(memory, drawn)  # saves a call

    def with_returns(self, memory: BufferView, drawn: SampleIndices) -> SampleIndices:
        """The sample with the n-step returns of its frames, if the sampler computes them."""
        if (returns := self.returns) is None:
            return drawn
        index, count = indices.trajectory_index_of(memory), returns.n_steps
        ahead = Slices(num_slices=len(drawn.slots), slice_len=count, strict_length=False, pad_output=True)
        rows = ahead.along(index, *index.places(drawn.slots))
        mask: Any = rows.mask
        if drawn.mask is not None:
            mask = mask & drawn.mask.repeat(count)

        def made(batch: Any) -> Any:
            table = batch.reshape(-1, count)
            stored = table.get("collector", None)
            if stored is not None:
                table.set("collector", stored.clone(False))
            # `MultiStep` ends sums where the mask changes, which is at the end of an episode.
            table.set(MASK, torch.from_numpy(mask).to(batch.device).reshape(table.shape))
            return drawn.finish(returns(table)[:, 0].exclude("collector" if stored is None else MASK))

        return SampleIndices(slots=rows.slots, mask=mask, info=drawn.info, of=drawn, made=made)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def returns_of(n_steps: int | None, gamma: float | None) -> MultiStep | None:
    """The `MultiStep` of these arguments, or None without them; ValueError if only one is given."""
    if (n_steps is None) != (gamma is None):
        raise ValueError(f"n_steps is {n_steps} and gamma {gamma}, expected both or neither: give the other, too")
    return None if n_steps is None or gamma is None else MultiStep(gamma, n_steps)


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

    replacement = False

    @takes_replacement
    def __init__(self, *, drop_last: bool = False, shuffle: bool = True) -> None:
        check_flags(drop_last=drop_last, shuffle=shuffle)
        self.drop_last, self.shuffle = drop_last, shuffle
        self._left: Ints | None = None  # the numbers left in the round; None if a new round has to begin

    @override
    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        return SampleIndices(slots=self._take(batch_size, indices.check_filled(memory), random_source, "frames"))

    def _take(self, count: int, size: int, random_source: RandomSource, what: str) -> Ints:
        """The next `count` numbers of the round; a new round has the numbers below `size`, which counts `what`."""
        if self.drop_last and count > size:
            raise ValueError(f"{count} are wanted, there are {size} {what}: sample fewer, or pass drop_last=False")
        if self._left is None or len(self._left) < (count if self.drop_last else 1):
            self._left = (random_source.permutation if self.shuffle else np.arange)(size)
        taken, self._left = self._left[:count], self._left[count:]
        return taken

    @override
    def ran_out(self, batch_size: int) -> bool:
        return self._left is not None and len(self._left) < (batch_size if self.drop_last else 1)

    @override
    def give_back(self, drawn: SampleIndices) -> None:
        if self._left is not None:
            self._left = np.concatenate([drawn.slots if drawn.taken is None else drawn.taken, self._left])

    @override
    def extended(self, memory: BufferView, slots: Ints) -> None:
        self.empty()  # remaining frames of the round may have been overwritten

    @override
    def state(self) -> Arrays:
        return {} if self._left is None else {"left": self._left}

    @override
    def load(self, state: Arrays) -> None:
        self._left = state.get("left")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(drop_last={self.drop_last}, shuffle={self.shuffle})"


class SliceSampler(RandomSampler):
    """Slices of trajectories, concatenated to ``batch_size`` frames. See `ring.Slices`.

    Raises ValueError unless exactly one of `num_slices` and `slice_len` is given, if both `traj_key` and
    `trajectory_key` are, and for `pad_output` with `strict_length`.

    Args:
        num_slices: the number of slices in a sample.
        slice_len: the number of frames in a slice; the other of both follows from ``batch_size``.
        traj_key, trajectory_key, end_key: the key of trajectory ids, by either name, and that of end flags, see
            `ring.Trajectories`.
        end_keys: several keys of end flags, any of which ends a trajectory; those that the frames lack are left out.
        across_episodes: whether slices go on across the ends of episodes, over all frames of a lane (`traj_key` names
            lanes then). ``("collector", "is_first")`` and `init_key` are True where an episode begins, too.
        n_steps, gamma: with both, frames have the n-step returns of `MultiStepSampler`.
        burn_in, bootstrap: the number of frames that come with each slice, before and after it, in addition to
            ``batch_size``: see `ring.Slices`.
        strict_length, pad_output, init_key, over, truncated_key, span: see `ring.Slices`. With `span`, or without
            `strict_length`, a sample may have fewer than ``batch_size`` frames. Of windows, one number of `span` is
            that at the end.

    With ``replacement=False``, this makes a `SliceSamplerWithoutReplacement`.

    >>> import funcollect as fc
    >>> sampler = SliceSampler(slice_len=3)
    >>> buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(1000), sampler=sampler, batch_size=6)
    >>> with fc.SyncDataCollector("CartPole-v1", frames_per_batch=300, total_frames=300, seed=0) as collector:
    ...     indices = buffer.extend(next(collector))
    >>> buffer.sample()["collector", "step"].view(2, 3).diff().tolist()
    [[1, 1], [1, 1]]
    """

    @takes_replacement
    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        traj_key: str | Path | None = None,
        trajectory_key: str | Path | None = None,
        end_key: str | Path | None = None,
        end_keys: Sequence[str | Path] | None = None,
        strict_length: bool = True,
        pad_output: bool = False,
        init_key: str | Path | None = "is_init",
        over: Literal["trajectories", "windows"] = "trajectories",
        truncated_key: str | Path | None = ("next", "truncated"),
        span: bool | int | Sequence[bool | int] = False,
        across_episodes: bool = False,
        n_steps: int | None = None,
        gamma: float | None = None,
        burn_in: int = 0,
        bootstrap: int = 0,
    ) -> None:
        if (num_slices is None) == (slice_len is None):
            got = "neither of num_slices and slice_len" if num_slices is None else "both of num_slices and slice_len"
            raise ValueError(f"{got} is given, expected one: the other follows from the batch size")
        if traj_key is not None and trajectory_key is not None:
            raise ValueError("traj_key and trajectory_key are two names of one key, expected one: leave one out")
        check_key("trajectory_key", trajectory_key)
        if end_key is not None and end_keys is not None:
            raise ValueError("end_key and end_keys are exclusive, expected one: leave one out")
        if end_keys is not None and (not isinstance(end_keys, (list, tuple)) or not end_keys):
            raise TypeError(f"end_keys is {shown(end_keys)}, expected a list of keys: pass one alone as end_key")
        ends = end_key if end_keys is None else tuple(map(as_path, end_keys))
        ids = trajectory_key if traj_key is None else traj_key
        self.trajectories = Trajectories(traj_key=ids, end_key=ends, across_episodes=across_episodes)
        self.returns = returns_of(n_steps, gamma)
        self.num_slices, self.slice_len = num_slices, slice_len
        spans = tuple(span) if isinstance(span, (tuple, list)) else (span if over == "trajectories" else False, span)
        count, length = (1 << 30 if size is None else size for size in (num_slices, slice_len))
        self._base = Slices(
            num_slices=count, slice_len=length, strict_length=strict_length, pad_output=pad_output, init_key=init_key,
            over=over, truncated_key=truncated_key, span=spans, across_episodes=across_episodes, burn_in=burn_in,
            bootstrap=bootstrap,
        )  # fmt: skip
        self._specs: dict[tuple[int, int], Slices] = {}
        # The arguments, by TorchRL's names.
        self.traj_key, self.end_key = ids, ends
        self.strict_length, self.pad_output, self.init_key = strict_length, pad_output, init_key
        self.over, self.truncated_key, self.span = over, truncated_key, spans

    @override
    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        drawn = self.spec(batch_size).draw(memory, random_source)
        return drawn if self.returns is None else self.with_returns(memory, drawn)

    def spec(self, batch_size: int) -> Slices:
        """The slices of a sample; ValueError if their number or length does not divide `batch_size`."""
        divisor = self.num_slices or self.slice_len or 1
        quotient, rest = divmod(batch_size, divisor)
        if rest:
            what = f"batch_size is {batch_size}, {'num_slices' if self.slice_len is None else 'slice_len'} {divisor}"
            near = max(quotient, 1) * divisor
            raise ValueError(f"{what}, expected a positive multiple: sample for example {near} frames")
        num_slices, slice_len = (quotient, divisor) if self.num_slices is None else (divisor, quotient)
        if (found := self._specs.get((num_slices, slice_len))) is None:  # checking it takes as long as drawing
            found = self._specs[num_slices, slice_len] = replace(self._base, num_slices=num_slices, slice_len=slice_len)
        return found

    def __repr__(self) -> str:
        size = f"num_slices={self.num_slices}" if self.slice_len is None else f"slice_len={self.slice_len}"
        padding = ", pad_output=True" if self.pad_output else ""
        return f"{type(self).__name__}({size}, strict_length={self.strict_length}{padding}, over={self.over!r})"


class SliceSamplerWithoutReplacement(SliceSampler, SamplerWithoutReplacement):
    """One slice of each trajectory per round, in random order. An `extend` begins a round; iteration ends after one.

    `drop_last` and `shuffle` are those of `SamplerWithoutReplacement`, for rounds of trajectories; the others are those
    of `SliceSampler`, except `over`. Raises its errors, and ValueError for `over`.

    >>> import funcollect as fc, torch
    >>> from tensordict import TensorDict
    >>> sampler = SliceSamplerWithoutReplacement(slice_len=2, shuffle=False)
    >>> buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(10), sampler=sampler, batch_size=2)
    >>> indices = buffer.extend(TensorDict({"episode": torch.arange(8) // 2}, [8]))
    >>> [batch["episode"].tolist() for batch in buffer]
    [[0, 0], [1, 1], [2, 2], [3, 3]]
    """

    @takes_replacement
    def __init__(self, *, drop_last: bool = False, shuffle: bool = True, **options: Any) -> None:
        check_not_given("a SliceSamplerWithoutReplacement", options, {"over": "each trajectory has one slice"})
        SliceSampler.__init__(self, **options)
        SamplerWithoutReplacement.__init__(self, drop_last=drop_last, shuffle=shuffle)

    @override
    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        spec, index = self.spec(batch_size), indices.trajectory_index_of(memory)
        long_enough = np.flatnonzero(spec.fit(index, np.arange(len(index.stop))))
        number = self._take(spec.num_slices, len(long_enough), random_source, "trajectories that are long enough")
        drawn = self.with_returns(memory, spec.draw_in(index, long_enough[number], random_source))
        drawn.taken = number
        return drawn

    @override
    def ran_out(self, batch_size: int) -> bool:
        return super().ran_out(self.spec(batch_size).num_slices)


_WITHOUT_REPLACEMENT = {RandomSampler: SamplerWithoutReplacement, SliceSampler: SliceSamplerWithoutReplacement}


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

    @takes_replacement
    def __init__(
        self, *, gamma: float, n_steps: int, traj_key: str | Path | None = None, end_key: str | Path | None = None
    ) -> None:
        self.returns = MultiStep(gamma, n_steps)
        self.trajectories = Trajectories(traj_key=traj_key, end_key=end_key)

    def __repr__(self) -> str:
        return str(self.returns).replace("MultiStep", "MultiStepSampler")
