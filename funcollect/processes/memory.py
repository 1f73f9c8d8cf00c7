"""Memory that processes share, and layouts of tensors in it. It is anonymous, so nothing is left behind."""

from __future__ import annotations

import itertools
import math
import mmap
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from funcollect.files import allocate
from funcollect.processes.system import PORTABLE
from funcollect.tree import Path

Memory = npt.NDArray[np.uint8]

_MAPPING = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # else each page costs a fault in each process
_ALIGNMENT = 64  # bytes, so that XLA takes a tensor without a copy


def shared_memory(count: int, size: int) -> tuple[int, list[Memory]]:
    """Allocate `count` pieces of `size` bytes each; return the descriptor and the pieces.

    MemoryError if there is not enough: if it were not allocated, a process could be killed as it writes.
    """
    fd = _portable_memory() if PORTABLE else os.memfd_create("funcollect")
    try:
        allocate(fd, count * size)
    except OSError as error:
        os.close(fd)
        mebibytes = count * size / 2**20
        raise MemoryError(f"there is no shared memory for {mebibytes:.1f} MiB ({error.strerror})") from error
    return fd, mapped(fd, count, size)


def _portable_memory() -> int:
    """The descriptor of shared memory, whose name is already unlinked."""
    # `multiprocessing.shared_memory`, which calls the same functions, would start a process to track names.
    from _posixshmem import shm_open, shm_unlink  # type: ignore[import-not-found]

    name = f"/fc{secrets.token_hex(12)}"  # macOS takes 31 characters
    fd: int = shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    shm_unlink(name)
    return fd


def mapped(fd: int, count: int, size: int) -> list[Memory]:
    """Map `count` pieces of `size` bytes each. The memory stays mapped as long as one of them lives."""
    whole = mmap.mmap(fd, count * size, flags=_MAPPING)
    return [np.frombuffer(whole, np.uint8, size, place * size) for place in range(count)]


class LeafPlace(NamedTuple):
    """A leaf in memory; it is contiguous."""

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
        """The leaves by path, as views of the memory; with `count`, of consecutive pieces: [count, ...]."""
        flat = torch.from_numpy(memory)
        flat = flat if count is None else flat.view(count, -1)
        views = {}
        for start, (path, dtype, shape) in zip(self._offsets, self.columns, strict=False):
            content = flat[..., start : start + math.prod(shape) * dtype.itemsize]
            views[path] = content.view(dtype).view((*flat.shape[:-1], *shape))
        return views
