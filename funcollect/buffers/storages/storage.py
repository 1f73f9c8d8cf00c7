"""The interface of storages.

A storage has the slots ``0 … max_size - 1``. It does not know the order of frames: the ring chooses the slots to write.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor

from funcollect.arguments import check_positive
from funcollect.buffers.arrays import Bools, Ints
from funcollect.buffers.storages.packed_rows import RowLayout
from funcollect.tree import Path as KeyPath


class Incoming(NamedTuple):
    """A batch that matches the storage."""

    lead: tuple[int, ...]  # the batch dimensions, time last
    leaves: Mapping[KeyPath, Tensor]  # of a TensorDict or a tree
    content: Any  # the items of a `ListStorage`; otherwise the leaves that are stored in rows
    layout: RowLayout | None = None
    beside: Mapping[KeyPath, Tensor] = MappingProxyType({})  # leaves stored outside of the rows
    stacks: Mapping[KeyPath, Tensor] = MappingProxyType({})  # leaves whose planes are stored


class Dumped(NamedTuple):
    """The frames of a dump in files."""

    directory: Path
    frames: Any  # the description that `Storage.dump` returned


class Storage(Protocol):
    """The interface of storages for a `ReplayBuffer`.

    The methods `allocate`, `announce`, `settle` and `empty` have defaults that change nothing.
    """

    max_size: int  # the capacity in frames
    ndim: int  # the number of batch dimensions, time last: 1 for [T], 2 for [P, T], 3 for [W, P, T]
    device: torch.device  # of samples
    compact_obs: bool  # whether next observations are read from the following frames
    frame_stack: int | None = None  # frames per stack, where each frame is stored once

    def admit(self, data: Any) -> Incoming:
        """Check a batch and prepare it for `write`; TypeError or ValueError if it does not match the storage."""

    def allocate(self, batch: Incoming) -> Incoming:
        """Allocate memory, before the first batch for `max_size` frames; return the batch as `write` takes it.

        If this raises, the stored frames are unchanged.
        """
        return batch

    def write(self, start: int, batch: Incoming, first: int, count: int) -> None:
        """Write `count` frames of a batch, beginning with its frame `first`, to the slots from `start` on.

        The frames of a batch are ordered by time, then by lane.
        """

    def announce(self, oldest: int, written: int) -> None:
        """Publish that exactly the frames with the numbers ``oldest … written - 1`` are complete.

        Called before frames are overwritten and after they were written. Frame ``n`` is in slot ``n % max_size``.
        """
        return

    def read(self, slots: Ints, mask: Bools | None = None, following: Ints | None = None) -> Any:
        """A copy of the frames in `slots` [N] as a batch; zeros where `mask` [N] is False.

        A storage with `compact_obs` also needs `following`, the slots of their successors (any slot if there is none).
        """

    def settle(self, slots: Ints, following: Ints) -> None:
        """Record that the frames in `slots` have the new successors `following`, each in its trajectory."""
        return

    def copy(self) -> Storage:
        """A storage in memory with the same frames."""

    def dump(self, directory: Path, frames: range, earlier: Dumped | None = None) -> Any:
        """Write the frames with these numbers, which are all there are, to files; return a description for JSON.

        Files of an `earlier` dump that hold some of these frames may be linked.
        """

    def load(self, frames: range, dumped: Dumped, allow_pickle: bool) -> None:
        """Read the frames with these numbers; ValueError for damaged files, or without a needed `allow_pickle`."""

    def empty(self) -> None:
        """Remove all frames; keys, shapes and dtypes are kept."""
        return


def check_size(max_size: Any) -> None:
    """Raise unless `max_size` is a number of frames that a storage can hold."""
    check_positive("max_size", max_size, example=100_000)
    if max_size >= 2**31:
        raise ValueError(f"max_size is {max_size}, expected less than 2**31 frames: pass for example max_size=100000")


def lead_of(data: Any, leaves: Any, ndim: int) -> tuple[int, ...]:
    """The sizes of the first `ndim` dimensions; ValueError unless all leaves share as many."""
    if not leaves:
        raise ValueError("the batch has no leaves, expected at least one tensor: nothing would be stored")
    if isinstance(data, TensorDictBase):
        shape = tuple(data.batch_size)
    else:
        shapes = {tuple(leaf.shape[:ndim]) for leaf in leaves.values()}
        shape = shapes.pop() if len(shapes) == 1 else ()
    if len(shape) < ndim:
        mend = "stack single frames, or give them to add"
        if shape:
            mend = f"build it with ndim={len(shape)}, make the environments with num_envs, or reshape the batch"
        raise ValueError(
            f"the batch has batch dimensions {list(shape)}, the storage takes {ndim} (ndim={ndim}), time last: {mend}"
        )
    ids = leaves.get(("collector", "traj_ids"))
    if ndim > 1 and ids is not None and ids.ndim > ndim:
        raise ValueError(
            f"the batch has a frame for each of {list(ids.shape)}, the storage takes {ndim} dimensions (ndim={ndim}): "
            f"build it with ndim={ids.ndim}, or flatten the first ones, as cat_results=0 of a collector does"
        )
    return shape[:ndim]
