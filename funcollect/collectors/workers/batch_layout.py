"""Lays out the leaves of a batch in one piece of memory, and joins the rollouts of several workers to one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor

from funcollect.processes.layout import LeafPlace, MemoryLayout
from funcollect.processes.shared_memory import Memory
from funcollect.tree import Path, flatten, to_batch

Join = Literal["stack", 0, -1]


def turned(leaf: Tensor, single: bool) -> Tensor:
    """A leaf [P, T, ...] of a batch, or [T, ...] of a `single` environment's, as a column [T, P, ...]."""
    return leaf.unsqueeze(1) if single else leaf.transpose(0, 1)


def columns_of(batch: TensorDictBase, single: bool) -> tuple[LeafPlace, ...]:
    """The columns that hold the leaves of a worker's batch."""
    leaves = {path: turned(leaf, single) for path, leaf in flatten(batch).items()}
    return tuple(LeafPlace(path, leaf.dtype, tuple(leaf.shape[1:])) for path, leaf in leaves.items())


def store(batch: TensorDictBase, columns: Mapping[Path, Tensor], single: bool) -> None:
    """Copy a worker's batch into `columns`, as `copy_into` does."""
    copy_into(columns, {path: turned(leaf, single) for path, leaf in flatten(batch).items()})


def copy_into(columns: Mapping[Path, Tensor], leaves: Mapping[Path, Tensor]) -> None:
    """Copy leaves into columns of the same paths, shapes and dtypes, unless they lie there already; else ValueError."""
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
class BatchLayout:
    """Places the rollouts of a group of workers in one memory, so that the batch is a view of it."""

    columns: tuple[LeafPlace, ...]  # the leaves of each worker's rollout, without T: [P, ...]
    lengths: tuple[int, ...]  # T of each worker
    join: Join | None  # how the rollouts make a batch; None for one rollout alone
    single: bool  # whether the environments have no batch dimension

    @property
    def _side_by_side(self) -> bool:
        """Whether the workers' rows of one step lie side by side, [T, W, P, ...], not one worker after another."""
        return self.join == 0 and not self.single

    @cached_property
    def whole(self) -> MemoryLayout:
        """Every column of all workers: [T, W, P, ...], or [sum of T, P, ...]."""
        lead = (self.lengths[0], len(self.lengths)) if self._side_by_side else (sum(self.lengths),)
        return MemoryLayout(tuple(column._replace(shape=(*lead, *column.shape)) for column in self.columns))

    def part(self, memory: Memory, index: int) -> dict[Path, Tensor]:
        """One worker's columns, each [T, P, ...]."""
        first = sum(self.lengths[:index])
        own = (slice(None), index) if self._side_by_side else slice(first, first + self.lengths[index])
        return {path: column[own] for path, column in self.whole.leaves(memory).items()}

    def leaves(self, memory: Memory) -> dict[Path, Tensor]:
        """The leaves of the batch that the rollouts make, views of one storage."""
        return {path: self._joined(column) for path, column in self.whole.leaves(memory).items()}

    def _joined(self, column: Tensor) -> Tensor:
        if self._side_by_side:
            return column.flatten(1, 2).transpose(0, 1)
        if self.join == "stack":
            column = column.view(len(self.lengths), self.lengths[0], *column.shape[1:])
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
