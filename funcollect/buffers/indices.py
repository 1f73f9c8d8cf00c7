"""The frames of a sample: their specification, how they are drawn, and the flags of slices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.arguments import check_choice, check_count, check_flags, check_key, check_kind, check_positive
from funcollect.buffers import Bools, Floats, Ints
from funcollect.buffers.trajectory_index import TrajectoryIndex
from funcollect.trajectories.split import IS_FIRST, MASK, STEP, STEPS_AHEAD, TRAJECTORY_IDS
from funcollect.tree import Path, as_path

_TRUNCATED: Path = ("next", "truncated")
_LEARN, _BURN_IN = ("collector", "learn"), ("collector", "burn_in")
_INIT = "is_init"  # where TorchRL's recurrent modules begin with the recorded hidden state
_NO_STARTS = ("next", "collector")  # nodes with flags of later frames, or not from the environment


class BufferView(Protocol):
    """The part of a ring's memory that samplers read."""

    capacity: int
    written: int  # frames written; frame n is in slot n % capacity

    @property
    def index(self) -> TrajectoryIndex | None:
        """The trajectory index, up to date; None if the ring has none."""

    def __len__(self) -> int: ...


class RandomSource(NamedTuple):
    """The source of a sampler's random numbers."""

    below: Callable[[int, int], Ints]  # (limit, count): `count` uniform integers in [0, limit)
    uniform: Callable[[int], Floats]  # (count): uniform numbers in [0, 1)
    permutation: Callable[[int], Ints]  # (count): the integers below `count` in random order


def from_generator(generator: torch.Generator | None) -> RandomSource:
    """Random numbers from a Torch generator, which advances; None means Torch's global generator."""
    check_kind("generator", generator, (torch.Generator, type(None)), "pass torch.Generator().manual_seed(0), say")
    source: dict[str, Any] = {"generator": generator, "device": generator.device if generator else torch.device("cpu")}
    return RandomSource(
        lambda limit, count: torch.randint(limit, (count,), **source).numpy(force=True),
        lambda count: torch.rand(count, dtype=torch.float64, **source).numpy(force=True),
        lambda count: torch.randperm(count, **source).numpy(force=True),
    )


@dataclass(kw_only=True, slots=True)  # a frozen one would take three times as long to make
class SampleIndices:
    """The frames of a sample of N rows."""

    slots: Ints  # [N]
    mask: Bools | None = None  # [N]: False for padding; None if there is none
    spec: Slices | None = None  # of slices; None for single frames
    first: Ints | slice | None = None  # the rows that begin a slice
    last: Ints | slice | None = None  # the rows that end a slice
    taken: Ints | None = None  # the numbers that a sampler without replacement used; None if they are the slots
    written: int | None = None  # the frames written to the ring by then, if the sampler needs that in `give_back`
    info: Mapping[str, Tensor] = field(default_factory=dict)  # [N] by name, such as importance weights
    marks: Mapping[Path, Bools] = field(default_factory=dict)  # further flags [N] of slices, by path
    of: SampleIndices | None = None  # the sample that the caller gets, if further frames are read for it
    made: Callable[[Any], Any] | None = None  # makes that sample of all these frames

    @property
    def index(self) -> Ints:
        """The slots [N] by which the caller knows the rows of the finished sample; -1 for padding."""
        if self.of is not None:
            return self.of.index
        return self.slots if self.mask is None else np.where(self.mask, self.slots, -1)

    def shortened(self) -> SampleIndices:
        """The same slices without their padding."""
        if self.mask is None:
            return self
        slots, row = self.slots[self.mask], self.mask.cumsum() - 1
        info = {name: leaf[torch.from_numpy(self.mask)] for name, leaf in self.info.items()}
        marks, ends = {path: flags[self.mask] for path, flags in self.marks.items()}, row[self.last]
        return replace(self, slots=slots, mask=None, first=row[self.first], last=ends, info=info, marks=marks)

    def finish(self, batch: Any) -> Any:
        """Mark the beginnings and ends of slices and the padding in a batch that was read."""
        if (spec := self.spec) is None or self.first is None or self.last is None:
            return batch if self.made is None else self.made(batch)
        if type(batch) is not TensorDict:
            batch = batch.to_tensordict()
        first = _with_episodes(batch, self.first, self.mask) if spec.across_episodes else self.first
        for path in spec.cut:
            _set_rows(_flags_at(batch, path, (1,)), self.last)
        _set_rows(_flags_at(batch, IS_FIRST, (), fresh=True), first)
        if (key := spec.init_key) is not None:
            if isinstance(key, str):
                found = _mark(batch._tensordict, key, first)
            elif found := isinstance(starts := batch.get(key, None), Tensor):
                _set_rows(starts, first)
            if not found and key != _INIT:
                raise ValueError(f"init_key is {key!r}, but frames have no such tensor: check the spelling")
        for path, rows in (self.marks if self.mask is None else {MASK: self.mask, **self.marks}).items():
            batch.set(path, torch.from_numpy(rows).to(batch.device))
        return batch


def _with_episodes(batch: TensorDict, first: Ints | slice, mask: Bools | None) -> Ints:
    """The rows that begin a slice, or an episode: by ids and steps, or by the end flag of the row before."""
    begins = np.zeros(len(batch), np.bool_)
    begins[first] = True
    ids, steps, done = (batch.get(path, None) for path in (TRAJECTORY_IDS, STEP, ("next", "done")))
    if ids is not None:
        begins[1:] |= ids.reshape(-1).diff().numpy(force=True) != 0
    if steps is not None:  # other runs may have the same ids
        begins[1:] |= steps.reshape(-1).diff().numpy(force=True) != 1
    if ids is None and steps is None and done is not None:
        ended, ahead = done.reshape(len(batch)), batch.get(STEPS_AHEAD, None)
        if ahead is not None:  # frames of `MultiStep`, which have the flags of later ones
            ended = ended & (ahead.reshape(-1) == 1)
        begins[1:] |= ended[:-1].numpy(force=True)
    return np.flatnonzero(begins if mask is None else begins & mask)


def _flags_at(batch: TensorDict, path: Path, tail: tuple[int, ...], fresh: bool = False) -> Tensor:
    """The flags ``[N, *tail]`` of a batch at a path; new ones, all False, if there are none, or if `fresh`."""
    node = batch._tensordict  # several times faster than `get` and `set`
    for part in path[:-1]:
        if part not in node:
            node[part] = TensorDict({}, batch.batch_size, batch.device)
        node = node[part]._tensordict
    flags: Tensor | None = node.get(path[-1])
    if flags is None or fresh:
        zeros = torch.from_numpy(np.zeros((*batch.batch_size, *tail), np.bool_))
        flags = node[path[-1]] = zeros if batch.device is None else zeros.to(batch.device)
    return flags


def _mark(node: dict[str, Any], name: str, rows: Ints | slice) -> bool:
    """Set these rows to True in all leaves with a name, except those of next frames; return whether there are any."""
    leaf = node.get(name)
    if found := isinstance(leaf, Tensor):
        _set_rows(leaf, rows)
    for key, value in node.items():
        if type(value) is TensorDict and key not in _NO_STARTS:
            found |= _mark(value._tensordict, name, rows)
    return found


def _set_rows(flags: Tensor, rows: Ints | slice) -> None:
    """Set these rows of flags to True."""
    if flags.is_cpu:
        flags.numpy()[rows] = True  # Torch takes twice as long
    else:
        flags[rows if isinstance(rows, slice) else torch.from_numpy(rows)] = True


def wanted_size(given: int | None, usual: int | None) -> int:
    """The number of frames in a sample, checked: `given` by the call, else the `usual` one."""
    wanted = usual if given is None else given
    if wanted is None:
        raise ValueError("no batch_size is given, neither here nor to the buffer: pass for example batch_size=256")
    check_positive("batch_size", wanted)
    return wanted


def check_filled(memory: BufferView) -> int:
    """The number of frames in the ring; ValueError if there are none."""
    if not (held := len(memory)):
        raise ValueError("the buffer is empty: extend it before sampling")
    return held


@dataclass(frozen=True)
class Flat:
    """`batch_size` single frames, drawn uniformly with replacement.

    >>> import funcollect as fc, numpy as np, torch
    >>> state, _ = fc.ring.extend(fc.ring.init(4), {"x": torch.arange(3)})
    >>> fc.ring.sample(state, np.array([0, 7], np.uint32), fc.ring.Flat(5))["x"].shape
    torch.Size([5])
    """

    batch_size: int

    def __post_init__(self) -> None:
        check_positive("batch_size", self.batch_size)

    def draw(self, memory: BufferView, random_source: RandomSource) -> SampleIndices:
        """Draw the frames of one sample; ValueError if the ring is empty."""
        return SampleIndices(slots=random_source.below(check_filled(memory), self.batch_size))


@dataclass(frozen=True, kw_only=True)
class Slices:
    """Slices of trajectories, concatenated to ``num_slices * slice_len`` frames.

    A slice consists of successive frames of one trajectory. In the sample only, ``next.truncated`` and ``next.done``
    are True in its last row, and ``("collector", "is_first")`` ``[N]`` bool in its first row. So is ``is_init``, if
    frames have it, nested or not: TorchRL's recurrent modules begin each slice with the hidden state recorded there.

    Attributes:
        num_slices: the number of slices.
        slice_len: the number of frames in a slice.
        strict_length: if False, trajectories that are shorter are drawn as well, and the sample has fewer frames then.
        pad_output: pad those with zeros instead; ``("collector", "mask")`` ``[N]`` bool is False for padding.
        init_key: the flags that are set like ``is_init``: a string for all of this name, also in nested dicts; a tuple
            for one path; None for none.
        across_episodes: mark rows that begin an episode, too, for rings with ``Trajectories(across_episodes=True)``.
        over: ``"trajectories"`` draws the trajectory uniformly, then the slice's first frame in it; ``"windows"`` draws
            uniformly from all possible slices.
        truncated_key: the flag of a slice's last row, whose neighbour ``done`` is True there, too; None for neither.
        span: how many frames a slice may lack, because it begins before its trajectory or ends after it: one number, or
            two (at the beginning, at the end). True means all but one, False none. Windows begin in their trajectory;
            with a span at the end, they may be of shorter ones.
        burn_in, bootstrap: the numbers of frames before and after each slice that come with it. Frames that its
            trajectory lacks are padding, at the end. ``("collector", "learn")`` ``[N]`` bool is True for the slice
            itself, ``("collector", "burn_in")`` for frames before it. ``is_first`` is True where the burn-in begins.

    >>> import funcollect as fc, numpy as np, torch
    >>> frames = TensorDict({"episode": torch.arange(8) // 4, "x": torch.arange(8)}, [8])
    >>> state, _ = fc.ring.extend(fc.ring.init(100, trajectories=fc.ring.Trajectories()), frames)
    >>> slices = fc.ring.sample(state, np.array([0, 7], np.uint32), fc.ring.Slices(num_slices=2, slice_len=3))
    >>> slices["x"].view(2, 3).diff().tolist()
    [[1, 1], [1, 1]]
    """

    num_slices: int
    slice_len: int
    strict_length: bool = True
    pad_output: bool = False
    init_key: str | Path | None = _INIT
    across_episodes: bool = False
    over: Literal["trajectories", "windows"] = "trajectories"
    truncated_key: str | Path | None = _TRUNCATED
    span: bool | int | tuple[bool | int, bool | int] = False
    burn_in: int = 0
    bootstrap: int = 0

    def __post_init__(self) -> None:
        check_positive("num_slices", self.num_slices)
        check_positive("slice_len", self.slice_len)
        check_flags(strict_length=self.strict_length, pad_output=self.pad_output, across_episodes=self.across_episodes)
        check_count("burn_in", self.burn_in)
        check_count("bootstrap", self.bootstrap)
        missing = self.missing
        if self.pad_output and not self.ragged:
            what = "pad_output=True is incompatible with strict_length=True, by which no slice is short"
            raise ValueError(f"{what}: pass strict_length=False, too")
        check_key("init_key", self.init_key)
        check_choice("over", self.over, ("trajectories", "windows"))
        check_key("truncated_key", self.truncated_key)
        if not all(0 <= count < self.slice_len for count in missing):
            most = self.slice_len - 1
            raise ValueError(f"span is {self.span}, slices have {self.slice_len} frames: pass 0 to {most}, or True")
        if any(missing) and self.rows > self.slice_len:
            raise ValueError(f"span is {self.span} with burn_in or bootstrap, expected one of them: leave one out")
        if missing[0] and self.over == "windows":
            raise ValueError(f"span is {self.span}, but windows begin in their trajectory: pass (False, {missing[1]})")

    @cached_property
    def missing(self) -> tuple[int, int]:
        """How many frames of a slice may be missing at its beginning and its end; TypeError for another `span`."""
        spans = self.span if isinstance(self.span, tuple) else (self.span, self.span)
        if len(spans) != 2 or not all(isinstance(each, (bool, int)) for each in spans):
            raise TypeError(f"span is {self.span!r}, expected a bool, an int, or two of them: pass for example span=2")
        left, right = (self.slice_len - 1 if each is True else int(each) for each in spans)
        return left, right

    @cached_property
    def rows(self) -> int:
        """The largest number of frames of a slice, with those around it."""
        return self.burn_in + self.slice_len + self.bootstrap

    @cached_property
    def ragged(self) -> bool:
        """Whether a slice may have fewer than `rows`."""
        return not self.strict_length or self.rows > self.slice_len or any(self.missing)

    @cached_property
    def cut(self) -> tuple[Path, ...]:
        """The flags that are True in the last row of a slice."""
        if self.truncated_key is None:
            return ()
        path = as_path(self.truncated_key)
        return path, (*path[:-1], "done")

    def draw(self, memory: BufferView, random_source: RandomSource) -> SampleIndices:
        """Draw the frames of one sample; ValueError if the ring is empty, or no trajectory is long enough."""
        index, count, below = trajectory_index_of(memory), self.num_slices, random_source.below
        windows = self.over == "windows"
        size, valid = (len(memory), self.begins) if windows else (len(index.stop), self.fit)
        tried, redraw = below(size, 4 * count), lambda some, n: some[below(len(some), n)]
        drawn = completed(tried, count, size, partial(valid, index), redraw)
        return self.sample(index, *index.places(drawn)) if windows else self.draw_in(index, drawn, random_source)

    def fit(self, index: TrajectoryIndex, trajectory: Ints) -> Bools:
        """Whether these trajectories are long enough."""
        least = self.slice_len if self.strict_length else 1
        return index.stop.take(trajectory) - index.first.take(trajectory) >= least

    def draw_in(self, index: TrajectoryIndex, trajectory: Ints, random_source: RandomSource) -> SampleIndices:
        """A sample of one slice of each of these trajectories, which are long enough; ValueError if there are none."""
        first, stop = index.first.take(trajectory), index.stop.take(trajectory)
        places, missing = np.maximum(stop - first - self.slice_len, 0) + 1, self.missing
        if not any(missing):
            begin = first + (random_source.uniform(len(trajectory)) * places).astype(np.int64)
            return self.sample(index, trajectory, begin)
        length = np.minimum(stop - first, self.slice_len)
        left, right = (np.minimum(most, length - 1) for most in missing)
        begin = first - left + (random_source.uniform(len(trajectory)) * (places + left + right)).astype(np.int64)
        return self.sample(index, trajectory, np.maximum(begin, first), np.minimum(begin + length, stop))

    def sample(
        self, index: TrajectoryIndex, trajectory: Ints, begin: Ints, stop: Ints | None = None, **info: Tensor
    ) -> SampleIndices:
        """The sample of slices from position `begin` of `trajectory`; ValueError if there are none."""
        if not len(trajectory):
            longest = int((index.stop - index.first).max(initial=0))
            what = f"slices are {self.slice_len} frames long, the longest trajectory held has {longest}"
            raise ValueError(f"{what}: ask for shorter ones, collect more, or pass strict_length=False")
        drawn = self.along(index, trajectory, begin, stop)
        drawn.info = info
        return drawn if self.pad_output else drawn.shortened()

    def begins(self, index: TrajectoryIndex, slots: Ints) -> Bools:
        """Whether a slice can begin at the frames in `slots`."""
        trajectory, begin = index.member.take(slots), index.position.take(slots)
        fits: Bools = begin + (self.slice_len - self.missing[1]) <= index.stop.take(trajectory)
        return fits if self.strict_length else fits | (begin == index.first.take(trajectory))

    def along(self, index: TrajectoryIndex, trajectory: Ints, begin: Ints, end: Ints | None = None) -> SampleIndices:
        """Slices from position `begin` of `trajectory` to `end` at most, all [num_slices]; short ones are padded."""
        first = slice(0, None, self.rows)
        if not self.ragged:
            slots = index.get(trajectory[:, None], begin[:, None] + np.arange(self.slice_len))
            last = slice(self.slice_len - 1, None, self.slice_len)
            return SampleIndices(slots=slots.reshape(-1), spec=self, first=first, last=last)
        stop, own_begin = index.stop.take(trajectory) if end is None else end, begin
        if self.rows > self.slice_len:
            own_stop = np.minimum(own_begin + self.slice_len, stop)
            begin = np.maximum(own_begin - self.burn_in, index.first.take(trajectory))
            stop = np.minimum(own_stop + self.bootstrap, stop)
        position = begin[:, None] + np.arange(self.rows)
        slots = index.get(trajectory[:, None], np.minimum(position, stop[:, None] - 1)).reshape(-1)
        last_rows = np.arange(-1, len(slots) - 1, self.rows) + np.minimum(stop - begin, self.rows)
        mask = (position < stop[:, None]).reshape(-1)
        drawn = SampleIndices(slots=slots, mask=mask, spec=self, first=first, last=last_rows)
        if self.rows > self.slice_len:
            before = position < own_begin[:, None]
            drawn.marks = {_BURN_IN: before.reshape(-1), _LEARN: (~before & (position < own_stop[:, None])).reshape(-1)}
        return drawn


SampleSpec = Flat | Slices  # a description of a sample


def completed(
    tried: Ints, count: int, size: int, valid: Callable[[Ints], Bools], draw: Callable[[Ints, int], Ints]
) -> Ints:
    """The first `count` of the random numbers `tried` for which `valid` is True.

    If they are too few, ``draw(some, n)`` draws n more among all valid numbers below `size`. Empty if none is valid.
    """
    drawn = tried[valid(tried)][:count]
    if len(drawn) == count:
        return drawn
    candidates = np.flatnonzero(valid(np.arange(size)))
    return np.concatenate([drawn, draw(candidates, count - len(drawn))]) if len(candidates) else candidates


def trajectory_index_of(memory: BufferView) -> TrajectoryIndex:
    """The trajectory index of a ring; ValueError if it has none, or the ring is empty."""
    check_filled(memory)
    if (index := memory.index) is None:
        raise ValueError("the ring does not link its frames: make it with trajectories=ring.Trajectories()")
    return index
