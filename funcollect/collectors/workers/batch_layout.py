"""Lays out the leaves of a batch in one piece of memory, and joins the rollouts of several workers to one batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from funcollect.processes.shared_memory import Memory
from funcollect.tree import Path, aliased, flatten, nest, to_batch

Join = Literal["stack", 0, -1]

_ALIGNMENT = 64  # bytes: where XLA takes a tensor without a copy


class BatchColumn(NamedTuple):
    """One leaf over time: [T, P, ...]."""

    path: Path
    dtype: torch.dtype
    row: tuple[int, ...]  # [P, ...]


class LeafView(NamedTuple):
    """One leaf of a batch as a view of memory, in elements of its dtype."""

    path: Path
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def aligned(size: int) -> int:
    """A size in bytes, rounded up so that what follows is aligned."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def turned(leaf: Tensor, single: bool) -> Tensor:
    """A leaf [P, T, ...] of a batch, or [T, ...] of a `single` environment's, as a column [T, P, ...]."""
    return leaf.unsqueeze(1) if single else leaf.transpose(0, 1)


def columns_of(batch: TensorDictBase, single: bool) -> tuple[BatchColumn, ...]:
    """The columns that hold the leaves of a worker's batch."""
    leaves = {path: turned(leaf, single) for path, leaf in flatten(batch).items()}
    return tuple(BatchColumn(path, leaf.dtype, tuple(leaf.shape[1:])) for path, leaf in leaves.items())


def store(batch: TensorDictBase, columns: Mapping[Path, Tensor], single: bool) -> None:
    """Copy a worker's batch into `columns`; leaves that lie there already are left alone.

    Raises:
        ValueError: for a batch with other keys or shapes than the first one, or a dtype that would lose precision.
    """
    copy_into(columns, {path: turned(leaf, single) for path, leaf in flatten(batch).items()})


def copy_into(columns: Mapping[Path, Tensor], leaves: Mapping[Path, Tensor]) -> None:
    """Copy leaves into columns of the same paths, shapes and dtypes, unless they lie there already."""
    if leaves.keys() != columns.keys():
        differing = sorted(".".join(path) for path in leaves.keys() ^ columns.keys())
        raise ValueError(f"the keys {differing} are not in every batch: record the same ones in all")
    for path, leaf in leaves.items():
        column = columns[path]
        if leaf.data_ptr() == column.data_ptr():
            continue
        if leaf.shape != column.shape or not torch.can_cast(leaf.dtype, column.dtype):
            raise ValueError(
                f"{'.'.join(path)} is {leaf.dtype} {list(leaf.shape)}, in the first batch it was {column.dtype} "
                f"{list(column.shape)}: keep shapes and dtypes the same in all"
            )
        column.copy_(leaf)


@dataclass(frozen=True)
class PackedLayout:
    """How leaves lie in one piece of memory."""

    views: tuple[LeafView, ...]
    batch_size: tuple[int, ...]  # of the batch that the leaves make
    size: int  # of the memory in bytes, a multiple of every leaf's alignment

    @classmethod
    def packed(cls, leaves: Mapping[Path, Tensor], batch_size: tuple[int, ...] = ()) -> PackedLayout:
        """One leaf after another, each contiguous."""
        views, size = [], 0
        for path, leaf in leaves.items():
            strides = torch.empty(leaf.shape, device="meta").stride()
            views.append(LeafView(path, leaf.dtype, tuple(leaf.shape), strides, size // leaf.dtype.itemsize))
            size += aligned(leaf.numel() * leaf.dtype.itemsize)
        return cls(tuple(views), batch_size, size)

    def leaves(self, memory: Memory, count: int | None = None) -> dict[Path, Tensor]:
        """The leaves by path, views of `memory`; with `count`, of as many batches one after another: [count, ...]."""
        flat = torch.from_numpy(memory)
        typed = {dtype: flat.view(dtype) for dtype in {view.dtype for view in self.views}}
        lead = () if count is None else (count,)
        return {
            view.path: typed[view.dtype].as_strided(
                (*lead, *view.size), (*[self.size // view.dtype.itemsize for _ in lead], *view.stride), view.offset
            )
            for view in self.views
        }

    def batch(self, memory: Memory, count: int | None = None) -> Any:
        """The batch, whose leaves keep `memory` alive; with `count`, as many packed batches, stacked."""
        lead = () if count is None else (count,)
        return aliased(nest(self.leaves(memory, count)), torch.Size((*lead, *self.batch_size)))


@dataclass(frozen=True)
class BatchLayout:
    """Places the rollouts of a group of workers in one memory, so that the batch is a view of it."""

    columns: tuple[BatchColumn, ...]  # the leaves of each worker's rollout
    lengths: tuple[int, ...]  # T of each worker
    join: Join | None  # how the rollouts make a batch; None for one rollout alone
    single: bool  # whether the environments have no batch dimension

    @property
    def _side_by_side(self) -> bool:
        """Whether the workers' rows of one step lie side by side, [T, W, P, ...], not one worker after another."""
        return self.join == 0 and not self.single

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        """The first byte of each column, and the end of the last one."""
        ends = [0]
        for _, dtype, row in self.columns:
            size = sum(self.lengths) * math.prod(row) * dtype.itemsize
            ends.append(ends[-1] + aligned(size))
        return tuple(ends)

    @property
    def size(self) -> int:
        """The size of the memory in bytes."""
        return self._offsets[-1]

    def _whole(self, memory: Memory) -> dict[Path, Tensor]:
        """Every column of all workers: [T, W, P, ...], or [sum of T, P, ...]."""
        steps = sum(self.lengths)
        workers = len(self.lengths)
        lead = (steps // workers, workers) if self._side_by_side else (steps,)
        whole = {}
        for offset, (path, dtype, row) in zip(self._offsets, self.columns, strict=False):
            count = steps * math.prod(row)
            flat = torch.from_numpy(memory[offset : offset + count * dtype.itemsize]).view(dtype)
            whole[path] = flat.reshape(*lead, *row)
        return whole

    def part(self, memory: Memory, index: int) -> dict[Path, Tensor]:
        """One worker's columns, each [T, P, ...]."""
        whole = self._whole(memory)
        if self._side_by_side:
            return {path: column[:, index] for path, column in whole.items()}
        first = sum(self.lengths[:index])
        return {path: column[first : first + self.lengths[index]] for path, column in whole.items()}

    @cached_property
    def packed(self) -> PackedLayout:
        """The layout of the batch that the rollouts make."""
        leaves = {path: self._joined(column) for path, column in self._whole(np.zeros(self.size, np.uint8)).items()}
        views = tuple(
            LeafView(path, leaf.dtype, tuple(leaf.shape), leaf.stride(), offset // leaf.dtype.itemsize)
            for offset, (path, leaf) in zip(self._offsets, leaves.items(), strict=False)
        )
        return PackedLayout(views, tuple(leaves["next", "done"].shape[:-1]), self.size)

    def _joined(self, column: Tensor) -> Tensor:
        """One column of all workers, as the batch's leaf."""
        if self._side_by_side:
            return column.flatten(1, 2).transpose(0, 1)
        if self.join == "stack":
            workers = len(self.lengths)
            column = column.reshape(workers, len(column) // workers, *column.shape[1:])
            return column.squeeze(2) if self.single else column.transpose(1, 2)
        return column.squeeze(1) if self.single else column.transpose(0, 1)


def joined(parts: Sequence[TensorDictBase], join: Join | None) -> Any:
    """Join several workers' batches in new memory; the batch of one worker is returned as it is."""
    if join is None:
        (batch,) = parts
        return batch
    leaves = [flatten(part) for part in parts]
    dims = parts[0].batch_dims
    if join == "stack":
        whole = {path: torch.stack([each[path] for each in leaves]) for path in leaves[0]}
        return to_batch(whole, tuple(whole["next", "done"].shape[: dims + 1]))
    dim = 0 if join == 0 else dims - 1
    whole = {path: torch.cat([each[path] for each in leaves], dim) for path in leaves[0]}
    return to_batch(whole, tuple(whole["next", "done"].shape[:dims]))
