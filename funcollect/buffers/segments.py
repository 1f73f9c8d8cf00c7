"""Segments: a compact record of an extend, with a few numbers per sequence of successive frames of one trajectory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tensordict import TensorDictBase
from torch import Tensor

from funcollect.arguments import check_key
from funcollect.buffers import Bools, Ints
from funcollect.trajectories.split import STEP, STEPS_AHEAD, TRAJECTORY_IDS, readable
from funcollect.tree import Path, as_path

__all__ = ["Trajectories"]

# The default keys. If there are several, the first that the batch has is used.
_IDS: tuple[Path, ...] = (TRAJECTORY_IDS, ("episode",))
_ENDS: tuple[Path, ...] = (("next", "done"),)


class Frames(NamedTuple):
    """The frames of one extend, ordered by lane, then by time; all arrays are [N]."""

    number: Ints  # the number of frames written before; increases evenly within a lane
    key: Ints  # equal for frames of one trajectory
    begins: Bools  # whether the frame is the first of its lane in this extend
    ends: Bools | None  # whether the trajectory ends with the frame
    step: Ints | None  # increases by one within a trajectory


@dataclass(frozen=True, kw_only=True)
class Trajectories:
    """The keys that link frames to trajectories.

    Successive frames of a lane with the same id belong to one trajectory, also across batches. A trajectory ends with a
    frame whose end flag is True, and where ``collector.step``, if the batch has it, does not increase by one. Without
    ids, lane ``i`` of a batch continues in lane ``i`` of the next batch.

    Attributes:
        traj_key: the key of the ids, one number per frame. By default ``("collector", "traj_ids")`` or, if there is
            none, ``"episode"``. If a batch has neither, lanes and end flags determine the trajectories.
        end_key: the key of the end flags; by default ``("next", "done")``.

    >>> import torch, funcollect as fc
    >>> from funcollect.keys import key_from_seed
    >>> from tensordict import TensorDict
    >>> state = fc.ring.init(100, trajectories=Trajectories(traj_key="run", end_key="end"))
    >>> frames = {"run": torch.tensor([1, 1, 2, 2]), "end": torch.tensor([False, True, False, False])}
    >>> state, indices = fc.ring.extend(state, TensorDict(frames, batch_size=[4]))
    >>> slices = fc.ring.sample(state, key_from_seed(0), fc.ring.Slices(num_slices=4, slice_len=2))
    >>> bool(slices["run"].view(4, 2).diff().any())
    False
    """

    traj_key: str | Path | None = None
    end_key: str | Path | None = None

    def __post_init__(self) -> None:
        check_key("traj_key", self.traj_key)
        check_key("end_key", self.end_key)

    def frames(self, leaves: Mapping[Path, Tensor], lead: tuple[int, ...], start: int) -> Frames:
        """The frames of a batch ``[*lead]``, ordered by lane, then by time; the arrays may be views of the batch.

        They are numbered from `start` on, by time, then by lane. Raises ValueError if the batch lacks a key, if a leaf
        is not one number per frame, or if lanes have the same id.
        """
        ids = _column(leaves, lead, self.traj_key, _IDS)
        ends = _column(leaves, lead, self.end_key, _ENDS)
        ahead = _column(leaves, lead, None, (STEPS_AHEAD,))
        if ahead is not None and ends is not None and self.end_key is None:
            ends = ends.astype(np.bool_, copy=False) & (ahead == 1)  # the flags are those of later frames
        if ids is None and ends is None:
            raise ValueError(
                f"the batch has neither {', '.join(map(readable, _IDS))} nor next.done, which slices need to "
                f"tell trajectories apart; it has {_keys(leaves)}: name a key with traj_key= or end_key="
            )
        step = _column(leaves, lead, None, (STEP,))
        steps, count = lead[-1], math.prod(lead)
        lanes = count // steps
        if ids is not None and lanes > 1 and len(set(ids[::steps].tolist())) < lanes:
            raise ValueError(
                f"lanes of the batch {list(lead)} have the same trajectory id, as the runs of a vmap over seeds have, "
                "so slices cannot distinguish them: store each run in a separate buffer, or make the ids differ"
            )
        begins = np.zeros(count, np.bool_)
        begins[::steps] = True
        return Frames(
            number=np.arange(start, start + count).reshape(steps, lanes).T.reshape(-1),
            key=np.arange(lanes).repeat(steps) if ids is None else _as_ints(ids),
            begins=begins,
            ends=None if ends is None else ends.astype(np.bool_, copy=False),
            step=None if step is None else _as_ints(step),
        )

    def check_ids(self, leaves: Mapping[Path, Tensor]) -> None:
        """Raise ValueError if the frames have no ids: a reader cannot use lanes instead, which it does not know."""
        paths = _IDS if self.traj_key is None else (as_path(self.traj_key),)
        if leaves.keys().isdisjoint(paths):
            raise ValueError(
                f"the frames have no {' or '.join(map(readable, paths))}, which a reader needs to identify "
                f"trajectories; they have {_keys(leaves)}: name the ids with traj_key="
            )


def check_linked(data: Any) -> None:
    """Raise TypeError unless the data is a TensorDict: other data has no keys that link frames."""
    if not isinstance(data, TensorDictBase):
        raise TypeError(
            f"the data is {type(data).__name__}, expected a TensorDict with keys that identify trajectories: extend "
            "with one, or sample with a RandomSampler"
        )


def _column(
    leaves: Mapping[Path, Tensor], lead: tuple[int, ...], given: str | Path | None, usual: tuple[Path, ...]
) -> npt.NDArray[Any] | None:
    """One number per frame, ordered by lane; None if no key was given and the batch has none of the usual ones."""
    for path in usual if given is None else (as_path(given),):
        leaf = leaves.get(path)
        if isinstance(leaf, Tensor):
            if leaf.shape not in (lead, (*lead, 1)):
                dims = leaf.ndim - (leaf.shape[-1:] == (1,))
                raise ValueError(
                    f"{readable(path)} has shape {list(leaf.shape)}, expected one number per frame, {list(lead)}: give "
                    f"the storage as many dimensions as the batch has, ndim={dims}, or name another key"
                )
            return leaf.numpy(force=True).reshape(-1)
    if given is not None:
        raise ValueError(
            f"the batch has no tensor {readable(given)}, which slices need to identify trajectories; it has "
            f"{_keys(leaves)}: name one of these"
        )
    return None


def _as_ints(column: npt.NDArray[Any]) -> Ints:
    """Ids as integers; floating ones as their bits, since only equality matters."""
    return column.astype(np.float64).view(np.int64) if column.dtype.kind == "f" else column.astype(np.int64, copy=False)


def _keys(leaves: Mapping[Path, Tensor]) -> list[str]:
    return sorted(map(readable, leaves))


class Segments(NamedTuple):
    """Successive frames of one trajectory in one extend; all arrays are [S]."""

    number: Ints  # of the first frame
    stride: Ints  # the increase of numbers from frame to frame
    length: Ints
    key: Ints
    step: Ints | None  # of the first frame
    ended: Bools  # whether the trajectory ends with the segment's last frame

    @classmethod
    def of(cls, frames: Frames) -> Segments:
        """The segments of one extend, which must not be empty."""
        begins = frames.begins.copy()
        begins[1:] |= frames.key[1:] != frames.key[:-1]
        if frames.ends is not None:
            begins[1:] |= frames.ends[:-1]
        if frames.step is not None:
            begins[1:] |= frames.step[1:] != frames.step[:-1] + 1
        start = np.flatnonzero(begins)
        stop = np.empty_like(start)
        stop[:-1], stop[-1] = start[1:], len(begins)
        number = frames.number.take(start)
        return cls(
            number=number,
            stride=frames.number.take(np.minimum(start + 1, stop - 1)) - number,
            length=stop - start,
            key=frames.key[start],
            step=None if frames.step is None else frames.step[start],
            ended=np.zeros(len(start), np.bool_) if frames.ends is None else frames.ends[stop - 1],
        )

    @staticmethod
    def joined(parts: Sequence[Segments]) -> Segments:
        """The segments of several extends, oldest first. Either all of them have steps, or none."""
        if len(parts) == 1:
            return parts[0]
        columns = zip(*parts, strict=True)
        return Segments._make(None if some[0] is None else np.concatenate(some) for some in columns)

    def take(self, index: Ints | Bools) -> Segments:
        """The segments at `index`."""
        return Segments._make(None if column is None else column[index] for column in self)

    def since(self, number: int) -> Segments:
        """The segments without the frames before `number`."""
        gone: Ints = (-((self.number - number) // np.maximum(self.stride, 1))).clip(0, self.length)
        if not gone.any():
            return self
        left = self._replace(
            number=self.number + gone * self.stride,
            length=self.length - gone,
            step=None if self.step is None else self.step + gone,
        )
        return left.take(left.length > 0)

    def in_order(self) -> Segments:
        """The segments sorted by key, then by time."""
        if (self.key[1:] > self.key[:-1]).all():
            return self
        return self.take(np.lexsort((self.number, self.key)))

    def linked(self) -> Bools:
        """Whether each segment continues the one before it: [S]. The segments must be sorted."""
        linked = np.zeros(len(self.key), np.bool_)
        last = self.number + (self.length - 1) * self.stride
        linked[1:] = (self.key[1:] == self.key[:-1]) & ~self.ended[:-1] & (self.number[1:] > last[:-1])
        if self.step is not None:
            linked[1:] &= self.step[1:] == self.step[:-1] + self.length[:-1]
        return linked

    def numbers(self) -> Ints:
        """The numbers of all frames, segment after segment."""
        before = self.length.cumsum() - self.length
        index = np.arange(self.length.sum())
        if (self.stride > 1).any():
            index = (index - before.repeat(self.length)) * self.stride.repeat(self.length)
            before = np.zeros_like(before)
        index += (self.number - before).repeat(self.length)
        return index
