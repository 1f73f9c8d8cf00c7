"""Samplers of single frames: uniformly with replacement, or each frame once per round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from typing_extensions import override

from funcollect.arguments import check_flags
from funcollect.buffers import Arrays, Ints, indices
from funcollect.buffers.indices import BufferView, RandomSource, SampleIndices, Sampler, Slices
from funcollect.buffers.keywords import takes_foreign
from funcollect.trajectories.returns import MultiStep
from funcollect.trajectories.split import MASK

_Init = TypeVar("_Init", bound=Callable[..., None])
_flat = lru_cache(typed=True)(indices.Flat)  # to check the arguments again would take as long as to draw


def takes_replacement(init: _Init) -> _Init:
    """Let a sampler's constructor accept TorchRL's keywords, of which ``replacement=False`` chooses another class."""
    init = takes_foreign("sampler")(init)

    @wraps(init)
    def outer(self: Any, *args: Any, replacement: bool = True, **given: Any) -> None:
        check_flags(replacement=replacement)
        if replacement or isinstance(self, SamplerWithoutReplacement):
            init(self, *args, **given)
            return
        if (other := vars(type(self)).get("without_replacement")) is None:
            raise TypeError(f"{type(self).__name__} has no without-replacement variant: leave replacement=False out")
        self.__class__ = other
        self.__init__(*args, **given)

    return outer  # type: ignore[return-value]


class RandomSampler(Sampler):
    """Single frames, drawn uniformly with replacement; ``replacement=False`` makes a `SamplerWithoutReplacement`.

    >>> import funcollect as fc
    >>> buffer = fc.ReplayBuffer(sampler=RandomSampler(), batch_size=4)
    >>> buffer.extend([5, 5, 5]), buffer.sample()
    (tensor([0, 1, 2]), tensor([5, 5, 5, 5]))
    """

    without_replacement: ClassVar[type[RandomSampler]]
    replacement: ClassVar[bool] = True
    returns: MultiStep | None = None  # of the steps that follow a frame; the sampler has `trajectories` then

    @takes_replacement
    def __init__(self) -> None:
        pass  # without this, its signature would be that of a protocol: any arguments

    def spec(self, batch_size: int) -> indices.SampleSpec:
        """The description of a sample of so many frames."""
        return _flat(batch_size)

    @override
    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        drawn = self.spec(batch_size).draw(memory, random_source)
        return drawn if self.returns is None else self.with_returns(memory, drawn)  # one call of a function less

    def with_returns(self, memory: BufferView, drawn: SampleIndices) -> SampleIndices:
        """A sample whose frames get the returns of the steps that follow them, if the sampler computes these."""
        if self.returns is None:
            return drawn
        index, count = indices.trajectory_index_of(memory), self.returns.n_steps
        ahead = Slices(num_slices=len(drawn.slots), slice_len=count, strict_length=False, pad_output=True)
        rows = ahead.along(index, *index.places(drawn.slots))
        mask: Any = rows.mask
        if drawn.mask is not None:
            mask = mask & drawn.mask.repeat(count)
        return _Lookahead(slots=rows.slots, mask=mask, info=drawn.info, returns=self.returns, of=drawn)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def returns_of(n_steps: int | None, gamma: float | None) -> MultiStep | None:
    """What sums the rewards of `n_steps` steps; ValueError if only one of both is given."""
    if (n_steps is None) != (gamma is None):
        what = f"n_steps is {n_steps} and gamma {gamma}"
        raise ValueError(f"{what}, expected both or neither: pass for example n_steps=3, gamma=0.99")
    return None if n_steps is None or gamma is None else MultiStep(gamma, n_steps)


@dataclass(kw_only=True, slots=True)
class _Lookahead(SampleIndices):
    """The frames of another sample, each with the `n_steps - 1` that follow it."""

    returns: MultiStep
    of: SampleIndices

    @property
    @override
    def index(self) -> Ints:
        return self.of.index

    @override
    def finish(self, batch: Any) -> Any:
        table = batch.reshape(-1, self.returns.n_steps)
        had = table.get("collector", None)
        if had is not None:
            table.set("collector", had.clone(False))
        # `MultiStep` ends sums where the mask changes, which is at the end of an episode.
        table.set(MASK, torch.from_numpy(self.mask).to(batch.device).reshape(table.shape))
        return self.of.finish(self.returns(table)[:, 0].exclude("collector" if had is None else MASK))


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
        self.drop_last, self.shuffle, self._left = drop_last, shuffle, np.zeros(0, np.int64)

    @override
    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        slots = self._take(batch_size, indices.check_filled(memory), random_source)
        return SampleIndices(slots=slots)

    def _take(self, count: int, size: int, random_source: RandomSource) -> Ints:
        """The next `count` numbers of the round; a new one has the numbers below `size`."""
        if self.drop_last and count > size:
            what = f"batch_size is {count}, the buffer holds {size} frames"
            raise ValueError(f"{what}: sample fewer, or pass drop_last=False")
        if len(self._left) < (count if self.drop_last else 1):
            self._left = (random_source.permutation if self.shuffle else np.arange)(size)
        taken, self._left = self._left[:count], self._left[count:]
        return taken

    @override
    def ran_out(self, batch_size: int) -> bool:
        return len(self._left) < (batch_size if self.drop_last else 1)

    @override
    def give_back(self, drawn: SampleIndices) -> None:
        self._left = np.concatenate([drawn.slots if drawn.taken is None else drawn.taken, self._left])

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


RandomSampler.without_replacement = SamplerWithoutReplacement
