"""Where tensors lie in a piece of memory: lanes, rollouts and weights that processes share, or that are sent whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor

from funcollect.processes.shared_memory import Memory
from funcollect.tree import Path

_ALIGNMENT = 64  # bytes: where XLA takes a tensor without a copy


class LeafPlace(NamedTuple):
    """One leaf in memory, where it is contiguous."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class MemoryLayout:
    """Leaves one after another in a piece of memory, each at a multiple of 64 bytes."""

    columns: tuple[LeafPlace, ...]

    @classmethod
    def of(cls, leaves: Mapping[Path, Tensor]) -> Self:
        """The layout for leaves of these dtypes and shapes."""
        return cls(tuple(LeafPlace(path, leaf.dtype, tuple(leaf.shape)) for path, leaf in leaves.items()))

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        """The first byte of each leaf, and the end of the last one."""
        sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in self.columns]
        return (0, *itertools.accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))

    @property
    def size(self) -> int:
        """The size of the memory in bytes."""
        return self._offsets[-1]

    def leaves(self, memory: Memory, count: int | None = None) -> dict[Path, Tensor]:
        """The leaves by path, views of one storage; with `count`, of as many pieces one after another: [count, ...]."""
        flat = torch.from_numpy(memory)
        flat = flat if count is None else flat.view(count, -1)
        views = {}
        for start, (path, dtype, shape) in zip(self._offsets, self.columns, strict=False):
            own = flat[..., start : start + math.prod(shape) * dtype.itemsize]
            views[path] = own.view(dtype).view((*flat.shape[:-1], *shape))
        return views
