"""Stores the frames of stacked observations once: a row holds the numbers of a stack's planes instead of the stack.

Consecutive stacks of k frames share k - 1 of them, and so do an observation and its next observation. Each distinct
frame, called a plane here, is stored in a `PlanePool`. No order of frames is assumed, since planes are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from funcollect.buffers.arrays import Ints
from funcollect.buffers.storages.packed_rows import PackedLeaf, RowLayout, time_major
from funcollect.buffers.storages.plane_pool import PlaneMemory, PlanePool
from funcollect.specs import RESERVED
from funcollect.tree import Path

_AT_ONCE = 64  # frames whose planes are compared at once
_SPARE = 64  # room for one plane more per this number of frames: each episode has one more plane than frames
_PLANE = ("plane",)

_Numbers = npt.NDArray[np.int32]  # of planes


def stack_paths(leaves: Mapping[Path, Tensor], ndim: int, frame_stack: int) -> list[Path]:
    """The paths of observations, also below ``next``, that are stacks of `frame_stack` planes; ValueError if none."""
    found = []
    for path, leaf in leaves.items():
        root = path[1:] if path[0] == "next" else path
        shape = tuple(leaf.shape[ndim:])
        if root and root[0] not in RESERVED and shape[:1] == (frame_stack,) and len(shape) > 1 and 0 not in shape:
            found.append(path)
    if not found:
        shapes = {".".join(path): list(leaf.shape[ndim:]) for path, leaf in leaves.items()}
        raise ValueError(
            f"frame_stack is {frame_stack}, and no observation of the batch has a shape [{frame_stack}, ...] of at "
            f"least two dimensions in each frame; it has {shapes}: pass the number of stacked frames, which must be "
            "the first dimension, or leave frame_stack out"
        )
    return found


def numbers_leaf(leaf: Tensor, ndim: int) -> Tensor:
    """A leaf with the shape and dtype of the numbers of planes that are stored for stacks ``[*B, k, ...]``."""
    return torch.zeros((), dtype=torch.int32).expand(leaf.shape[: ndim + 1])


class StoredStacks:
    """Reads stacks whose planes are in a memory.

    Args:
        layout: the layout of the stacks, as batches have them.
        memories: the memory of each layout that `plane_layouts` returns.
    """

    def __init__(self, layout: RowLayout, memories: Sequence[PlaneMemory]) -> None:
        self.layout = layout
        self._planes: dict[Path, tuple[RowLayout, PlaneMemory]] = {}
        for (plane, paths), memory in zip(plane_layouts(layout), memories, strict=True):
            self._planes |= dict.fromkeys(paths, (plane, memory))

    def restore(self, path: Path, leaf: Tensor) -> Tensor:
        """The stacks [N, k, ...] at a path, copied, from the numbers of their planes [N, k]; other leaves unchanged."""
        if path not in self._planes:
            return leaf
        plane, memory = self._planes[path]
        (planes,) = plane.leaves(plane.gather(memory.rows, leaf.numpy().reshape(-1).astype(np.int64)))
        return planes.view(*leaf.shape, *planes.shape[1:])

    def unpack(self, layout: RowLayout, rows: Tensor) -> Any:
        """The batch in `rows` [N, words] int64, with its stacks; the other leaves are views."""
        pairs = zip(layout.columns, layout.leaves(rows), strict=True)
        return layout.build([self.restore(column.path, leaf) for column, leaf in pairs], len(rows))


class FrameStacks(StoredStacks):
    """Stores the planes of the stacks of up to `max_size` frames; the `memories` must be empty."""

    def __init__(self, layout: RowLayout, memories: Sequence[PlaneMemory], max_size: int) -> None:
        super().__init__(layout, memories)
        self.pools: list[PlanePool] = []
        self._pool: dict[Path, PlanePool] = {}
        for (plane, paths), memory in zip(plane_layouts(layout), memories, strict=True):
            following = sum(path[0] == "next" for path in paths)
            count = max(following, len(paths) - following) * max_size
            self.pools.append(PlanePool(plane, memory, count + count // _SPARE + _SPARE // 4))
            self._pool |= dict.fromkeys(paths, self.pools[-1])

    @property
    def nbytes(self) -> int:
        """The number of bytes allocated for planes."""
        return sum(pool.nbytes for pool in self.pools)

    def add(self, leaves: Mapping[Path, Tensor], ndim: int, first: int) -> dict[Path, Tensor]:
        """Store the planes of stacks ``[*B, T, k, ...]``; return their numbers, ``[*B, T, k]`` int32.

        Frames before `first`, by time, then by lane, are not stored, and have the numbers 0. OSError or MemoryError if
        there is no room; nothing has changed then.
        """
        leaves = {path: time_major(leaf, ndim) for path, leaf in leaves.items()}
        found: dict[Path, _Numbers] = {p: np.zeros(leaf.shape[: ndim + 1], np.int32) for p, leaf in leaves.items()}
        try:
            for pool in self.pools:
                paths = [path for path in leaves if self._pool[path] is pool]
                flat = [found[path].reshape(-1, found[path].shape[-1]) for path in paths]
                for frames, stacks in _parts([leaves[path] for path in paths], ndim, first):
                    numbers = pool.add(_packed(pool.layout, stacks)).reshape(len(paths), *flat[0][frames].shape)
                    for numbered, each in zip(flat, numbers, strict=True):
                        numbered[frames] = each
        except BaseException:
            for path, numbered in found.items():
                self._pool[path].release(numbered.reshape(-1))
            raise
        return {path: torch.from_numpy(numbered).movedim(0, ndim - 1) for path, numbered in found.items()}

    def release(self, layout: RowLayout, rows: Tensor) -> None:
        """Free the planes whose last uses were in `rows` [N, words]."""
        for pool, numbers in self.numbers(layout, rows):
            pool.release(numbers.reshape(-1))

    def numbers(self, layout: RowLayout, rows: Tensor) -> Iterator[tuple[PlanePool, _Numbers]]:
        """Views [N, k] of the numbers in `rows` [N, words], stack by stack, with the pools of their planes."""
        for column, leaf in zip(layout.columns, layout.leaves(rows), strict=True):
            if column.path in self._pool:
                yield self._pool[column.path], leaf.numpy()


def plane_layouts(layout: RowLayout) -> list[tuple[RowLayout, list[Path]]]:
    """The layouts of the planes of stacks, one per shape and dtype, each with the paths of its stacks."""
    found: dict[tuple[tuple[int, ...], torch.dtype], list[Path]] = {}
    for column in layout.columns:
        found.setdefault((column.shape[1:], column.dtype), []).append(column.path)
    return [(RowLayout([PackedLeaf(_PLANE, *plane, offset=0)]), paths) for plane, paths in found.items()]


def _parts(leaves: Sequence[Tensor], ndim: int, first: int) -> Iterator[tuple[slice, list[Tensor]]]:
    """Parts of leaves ``[T, *B, k, ...]`` from frame `first` on: the frames, and their stacks [N, k, ...], by leaf."""
    steps, lanes = len(leaves[0]), leaves[0].shape[1:ndim].numel()
    size = max(_AT_ONCE // lanes, 1) if lanes else 1
    for start in range(first // lanes if lanes else steps, steps, size):
        skipped = max(first - start * lanes, 0)
        some = [leaf[start : start + size].flatten(0, ndim - 1)[skipped:] for leaf in leaves]
        begin = start * lanes + skipped
        yield slice(begin, begin + len(some[0])), some


def _packed(plane: RowLayout, stacks: Sequence[Tensor]) -> Ints:
    """The planes of several leaves [N, k, ...] as rows [planes, words], leaf after leaf."""
    rows = np.zeros((len(stacks), stacks[0].shape[:2].numel(), plane.words), np.int64)
    for part, stack in zip(rows, stacks, strict=True):
        plane.pack(torch.from_numpy(part), {_PLANE: stack.flatten(0, 1)}, 1)
    return rows.reshape(-1, plane.words)
