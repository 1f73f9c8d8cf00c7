"""What the ring asks of a storage.

A storage knows slots, ``0 … max_size - 1``, and nothing of order: the ring above it says which slot is written next.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from funcollect.buffers.storages.packed_rows import RowLayout
from funcollect.tree import Path as KeyPath

Slots = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class Incoming(NamedTuple):
    """A batch that fits a storage."""

    lead: tuple[int, ...]  # its leading dimensions, time last
    leaves: Mapping[KeyPath, Tensor]  # of a TensorDict or a tree
    content: Any
    layout: RowLayout | None = None
    beside: Mapping[KeyPath, Tensor] = MappingProxyType({})  # leaves that are not part of the rows


class Storage(Protocol):
    """What the ring asks of a storage.

    `ndim` is the number of leading dimensions that a batch brings, time last: 1 for ``[T]``, 2 for ``[P, T]``, 3 for
    ``[W, P, T]``. `max_size` counts frames in all cases. `device` is where samples come out.
    """

    max_size: int
    ndim: int
    device: torch.device
    compact_obs: bool

    def admit(self, data: Any) -> Incoming:
        """A batch, after a check that it fits; changes nothing."""
        ...

    def allocate(self, batch: Incoming) -> None:
        """Make room for `max_size` frames, before the first batch is written."""
        ...

    def write(self, start: int, batch: Incoming, first: int, count: int) -> None:
        """Write `count` frames of a batch, from its `first` on, into the slots from `start` on.

        Frames count in the order of time, then of lanes.
        """
        ...

    def announce(self, oldest: int, written: int) -> None:
        """Of all frames given so far, those numbered ``oldest … written - 1`` are whole, and no others.

        Said before frames are overwritten and after they are written. Frame ``n`` lies in slot ``n % max_size``.
        """
        ...

    def read(self, slots: Slots, mask: Mask | None = None, following: Slots | None = None) -> Any:
        """A batch of the frames in `slots`, [N], in memory of its own; zeros where `mask`, [N], is False.

        A storage with `compact_obs` needs the slots of the frames that follow them, any where none does.
        """
        ...

    def settle(self, slots: Slots, following: Slots) -> None:
        """Frames in `slots` are followed, each in its trajectory, by those in `following`, which are new."""
        ...

    def copy(self) -> Storage:
        """A storage in memory with the same frames."""
        ...

    def dump(self, directory: Path, count: int) -> Any:
        """Write the first `count` slots to files; returns what JSON can say of them."""
        ...

    def load(self, directory: Path, count: int, frames: Any, allow_pickle: bool) -> None:
        """Read what `dump` wrote."""
        ...

    def empty(self) -> None:
        """Forget every frame."""
        ...


def check_size(storage: Any, max_size: Any) -> None:
    """Raise unless `max_size` is a number of frames that a storage can hold."""
    name = type(storage).__name__
    if isinstance(max_size, bool) or not isinstance(max_size, (int, np.integer)):
        raise TypeError(f"max_size is {max_size!r}, expected the frames to hold: pass for example {name}(100_000)")
    if not 1 <= max_size < 2**31:
        raise ValueError(
            f"max_size is {max_size}, expected 1 <= max_size < 2**31 frames: pass for example {name}(100_000)"
        )
