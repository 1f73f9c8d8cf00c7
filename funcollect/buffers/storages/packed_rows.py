"""Packs frames into rows of bytes, so that a sample needs one gather, and its leaves are typed views of the result.

A row contains all leaves of one frame, the widest dtypes first for alignment, padded to 64-bit words. NumPy copies the
bytes of a leaf as one element, which is several times faster than Torch's copies of short rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import optree
import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor, is_tensorclass
from torch import Tensor

from funcollect.buffers import Ints
from funcollect.specs import RESERVED
from funcollect.tree import Path, nest

_WORD = 8  # bytes

# Integers of the same width carry dtypes that NumPy lacks.
_CARRIERS = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
}


@dataclass(frozen=True)
class PackedLeaf:
    """The place of a leaf in a row."""

    path: Path
    shape: tuple[int, ...]  # of one frame
    dtype: torch.dtype
    offset: int  # bytes from the beginning of the row

    @cached_property
    def count(self) -> int:
        """The number of values."""
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.count * self.dtype.itemsize


def leaves_of(data: Any) -> dict[Path, Tensor]:
    """The leaves of a TensorDict or another tree of tensors, by path; TypeError if a leaf is not a tensor."""
    if isinstance(data, TensorDictBase):
        return _add_leaves(data, (), {})
    paths, leaves, _ = optree.tree_flatten_with_path(data)
    named = zip((tuple(map(str, path)) for path in paths), leaves, strict=True)
    return {path: _checked(path, leaf) for path, leaf in named}


def _add_leaves(node: TensorDictBase, prefix: Path, found: dict[Path, Tensor]) -> dict[Path, Tensor]:
    for name, value in node.items():
        path = (*prefix, name)
        if type(value) is Tensor:
            found[path] = value
        elif isinstance(value, TensorDictBase) and not is_non_tensor(value):
            _add_leaves(value, path, found)
        else:
            found[path] = _checked(path, value)
    return found


def _checked(path: Path, leaf: Any) -> Tensor:
    """The leaf; TypeError unless it is a tensor."""
    if isinstance(leaf, Tensor):
        return leaf
    if not path:
        wanted, mend = "a TensorDict, a tensor, or a tree of tensors", "store it in a ListStorage"
        if is_tensorclass(leaf):
            mend = "give its to_tensordict()"
    elif isinstance(leaf, TensorDictBase) and not is_non_tensor(leaf):
        wanted, mend = "a tensor", "make one TensorDict of several, torch.stack(data)"
    else:
        wanted = "a tensor"
        mend = f"leave it out (batch.exclude({path!r})), make a tensor of it, or store it in a ListStorage"
    raise TypeError(f"{_name(path)} is {type(leaf).__name__}, expected {wanted}: {mend}")


def _name(path: Path) -> str:
    return ".".join(path) or "the data"


class RowLayout:
    """The arrangement of a frame's leaves in a row of `words` 64-bit words.

    The `columns` are in the order of the batch. `item_dims` are the batch dimensions of a single frame, which may be a
    sequence. `structure` is that of a frame that is a tree; None for TensorDicts.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> batch = TensorDict({"reward": torch.ones(2, 1), "step": torch.arange(2)}, [2])
    >>> layout = RowLayout.of(batch, 1)
    >>> rows = torch.zeros(2, layout.words, dtype=torch.int64)
    >>> layout.pack(rows, leaves_of(batch), 1)
    >>> layout.unpack(rows)["step"]
    tensor([0, 1])
    """

    def __init__(self, columns: Sequence[PackedLeaf], item_dims: tuple[int, ...] = (), structure: Any = None) -> None:
        self.columns, self.item_dims, self.structure = tuple(columns), item_dims, structure
        self._paths = {column.path for column in columns}
        self._nested = nest({column.path: index for index, column in enumerate(columns)}) if structure is None else {}
        # tensordict cannot clone floats of eight bits if a device is set.
        dtypes = {column.dtype for column in columns}
        self._placed = bool(dtypes) and all(dtype.itemsize > 1 or not dtype.is_floating_point for dtype in dtypes)
        self._carried = [index for index, column in enumerate(columns) if column.dtype in _CARRIERS]
        end = max((column.offset + column.nbytes for column in columns), default=0)
        widest = max([_WORD, *(column.dtype.itemsize for column in columns)])
        self.nbytes = max(-(-end // widest), 1) * widest
        self.words = self.nbytes // _WORD
        self._names = [str(column.path) for column in columns]
        self._bytes = [np.dtype(f"V{column.nbytes}") for column in columns]
        arrays = [torch.empty(0, dtype=_CARRIERS.get(column.dtype, column.dtype)).numpy() for column in columns]
        self._typed = self._struct([(each.dtype, column.shape) for each, column in zip(arrays, columns, strict=True)])
        self._opaque = self._struct(self._bytes)
        self.row = np.dtype(f"V{self.nbytes}")

    def _struct(self, formats: Sequence[Any]) -> np.dtype[np.void]:
        """The NumPy dtype of a row as a struct, whose fields, one per column, have these formats."""
        offsets = [column.offset for column in self.columns]
        return np.dtype({"names": self._names, "formats": formats, "offsets": offsets, "itemsize": self.nbytes})

    @classmethod
    def of(cls, data: Any, ndim: int, leaves: Mapping[Path, Tensor] | None = None) -> RowLayout:
        """The layout of `leaves`, by default all of `data`, which have `ndim` batch dimensions."""
        leaves = leaves_of(data) if leaves is None else leaves
        offset, columns = 0, {}
        for path, leaf in sorted(leaves.items(), key=lambda pair: (-pair[1].dtype.itemsize, str(pair[1].dtype))):
            columns[path] = PackedLeaf(path, tuple(leaf.shape[ndim:]), leaf.dtype, offset)
            offset += columns[path].nbytes
        ordered = [columns[path] for path in leaves]
        if isinstance(data, TensorDictBase):
            return cls(ordered, tuple(data.batch_size[ndim:]))
        return cls(ordered, structure=optree.tree_structure(data))

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> RowLayout:
        """The layout described by `to_json`."""
        columns = [
            PackedLeaf(tuple(path), tuple(shape), getattr(torch, dtype), offset)
            for path, shape, dtype, offset in saved["columns"]
        ]
        return cls(columns, tuple(saved["item_dims"]))

    def to_json(self) -> dict[str, Any]:
        """A description in numbers and strings; TypeError for the structure of a tree, which has none."""
        if self.structure is not None:
            raise TypeError(f"the frames are trees {self.structure}, which have no file format: store TensorDicts")
        columns = [
            (each.path, each.shape, str(each.dtype).removeprefix("torch."), each.offset) for each in self.columns
        ]
        return {"columns": columns, "item_dims": self.item_dims}

    def check(self, leaves: Mapping[Path, Tensor], ndim: int) -> None:
        """Raise ValueError if the keys, shapes or dtypes of a batch differ from this layout."""
        if leaves.keys() != self._paths:
            differences = {"lacks": self._paths - leaves.keys(), "adds": leaves.keys() - self._paths}
            parts = [f"{verb} {sorted(map('.'.join, paths))}" for verb, paths in differences.items() if paths]
            raise ValueError(
                f"the batch {' and '.join(parts)}, expected the keys of the storage's first batch: select the same "
                "keys for every batch, or make another buffer"
            )
        for column in self.columns:
            leaf = leaves[column.path]
            if leaf.shape[ndim:] != column.shape or leaf.dtype != column.dtype:
                raise ValueError(
                    f"{_name(column.path)} is {list(leaf.shape[ndim:])} {leaf.dtype} in each frame, the storage holds "
                    f"{list(column.shape)} {column.dtype}, as the first batch had it: convert it before extending, or "
                    "store it in another buffer"
                )

    def pack(self, rows: Tensor, leaves: Mapping[Path, Tensor], ndim: int, first: int = 0) -> None:
        """Write N frames of ``[*B, ...]`` leaves, beginning with frame `first`, to `rows` [N, words].

        The `ndim` dimensions ``*B`` have time last. Frames are ordered by time, then by lane.
        """
        number = len(rows)
        if not rows.is_cpu:
            for view, column in zip(self._views(rows), self.columns, strict=True):
                leaf = time_major(leaves[column.path], ndim).reshape(-1, *column.shape)
                view.copy_(leaf[first : first + number])
            return
        records = self.records(rows)
        for name, column, bytes_ in zip(self._names, self.columns, self._bytes, strict=True):
            if column.nbytes and number:
                elements = _elements(time_major(leaves[column.path], ndim), column, bytes_)
                records[name] = elements[first : first + number]

    def gather(self, rows: Ints, slots: Ints) -> Tensor:
        """A copy [N, words] of the `rows` in `slots`; on the CPU."""
        packed = rows.view(self.row)[:, 0].take(slots, mode="clip").view(np.int64)
        return torch.from_numpy(packed.reshape(len(slots), self.words))

    def numbers(self, rows: Ints, slots: Ints) -> dict[Path, Tensor]:
        """The leaves with one number per frame, of the frames in `slots` [N]; on the CPU."""
        records = rows.view(self._typed)[:, 0]
        return {
            column.path: torch.from_numpy(records[name][slots])  # `take` would copy all rows
            for name, column in zip(self._names, self.columns, strict=True)
            if column.count == 1 and column.dtype not in _CARRIERS
        }

    def unpack(self, rows: Tensor) -> Any:
        """The batch in `rows` [N, words] int64, contiguous; its leaves are views of them."""
        return self.build(self.leaves(rows), len(rows))

    def build(self, leaves: list[Tensor], number: int) -> Any:
        """The batch of `number` frames with these leaves, by column."""
        if self.structure is not None:
            return optree.tree_unflatten(self.structure, leaves)
        device = leaves[0].device if self._placed else None
        return _build(self._nested, leaves, torch.Size((number, *self.item_dims)), device)

    def leaves(self, rows: Tensor) -> list[Tensor]:
        """Views of the leaves in `rows`, by column."""
        if not rows.is_cpu:
            return self._views(rows)
        records = rows.numpy().view(self._typed)[:, 0]
        leaves = [torch.from_numpy(records[name]) for name in self._names]
        for index in self._carried:
            leaves[index] = leaves[index].view(self.columns[index].dtype)
        return leaves

    def records(self, rows: Tensor) -> npt.NDArray[np.void]:
        """The `rows` [N, words] as a structured array, in which field ``str(path)`` is a leaf's bytes; on the CPU."""
        records: npt.NDArray[np.void] = rows.numpy().view(self._opaque)[:, 0]
        return records

    def _views(self, rows: Tensor) -> list[Tensor]:
        """Views of the leaves [N, ...] in `rows` [N, words], by column; on any device."""
        typed = {dtype: rows.view(dtype) for dtype in {column.dtype for column in self.columns}}
        return [
            typed[leaf.dtype].narrow(1, leaf.offset // leaf.dtype.itemsize, leaf.count).view(len(rows), *leaf.shape)
            for leaf in self.columns
        ]


def time_major(leaf: Tensor, ndim: int) -> Tensor:
    """``[*B, T, ...]`` with `ndim` batch dimensions as ``[T, *B, ...]``."""
    return leaf.movedim(ndim - 1, 0) if ndim > 1 else leaf


def _elements(leaf: Tensor, column: PackedLeaf, bytes_: np.dtype[np.void]) -> npt.NDArray[np.void]:
    """The frames of a leaf ``[*B, ...]``, which is not empty, each as one element of bytes: [N]."""
    if column.dtype in _CARRIERS:
        leaf = leaf.view(_CARRIERS[column.dtype])
    array = leaf.numpy(force=True)
    if not array.flags.c_contiguous:
        array = array.reshape(-1, column.count)
        if array.strides[1] == array.itemsize:  # the values of each frame are contiguous
            return array.view(bytes_)[:, 0]
        array = np.ascontiguousarray(array)
    return np.frombuffer(array, bytes_)


def _build(nested: Mapping[str, Any], leaves: list[Tensor], size: torch.Size, device: Any) -> TensorDict:
    """A TensorDict with the keys of `nested`, a nested dict, and the leaves at the indices that it holds."""
    filled = {
        name: leaves[value] if isinstance(value, int) else _build(value, leaves, size, device)
        for name, value in nested.items()
    }
    built = TensorDict._new_unsafe(filled, batch_size=size)
    built._device = device  # as an argument it costs as much as all the rest
    return built


class FrameLayout:
    """The layouts of the frames in a storage.

    Args:
        rows: of the rows. Stacks are replaced by the numbers of their planes, [k] int32.
        aside: of the next observations that are stored aside, with ``compact_obs``; the same holds for stacks.
        stacks: of the stacks themselves, with ``frame_stack``.
    """

    def __init__(self, rows: RowLayout, aside: RowLayout | None, stacks: RowLayout | None) -> None:
        self.rows, self.aside, self.stacks = rows, aside, stacks
        self._parts = {"rows": rows, "aside": aside, "stacks": stacks}
        columns = {column.path: column for part in self._parts.values() if part for column in part.columns}
        self.batch = RowLayout([*columns.values()], structure=rows.structure)  # the leaves as batches have them

    @classmethod
    def of(
        cls, data: Any, leaves: Mapping[Path, Tensor], ndim: int, compact_obs: bool, frame_stack: int | None
    ) -> FrameLayout:
        """The layout for batches like this one; ValueError if it has no leaf to which an option applies."""
        stacks = [] if frame_stack is None else _stack_paths(leaves, ndim, frame_stack)
        aside = _next_paths(leaves) if compact_obs else []
        number = torch.zeros((), dtype=torch.int32)
        stored = {**leaves, **{path: number.expand(leaves[path].shape[: ndim + 1]) for path in stacks}}
        rows = RowLayout.of(data, ndim, {path: leaf for path, leaf in stored.items() if path not in aside})
        others = (
            RowLayout.of(TensorDict({}), ndim, {path: some[path] for path in paths}) if paths else None
            for paths, some in ((aside, stored), (stacks, leaves))
        )
        return cls(rows, *others)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> FrameLayout:
        """The layout described by `to_json`."""
        aside, stacks = (RowLayout.from_json(saved[name]) if name in saved else None for name in ("aside", "stacks"))
        return cls(RowLayout.from_json(saved["rows"]), aside, stacks)

    def to_json(self) -> dict[str, Any]:
        """A description in numbers and strings; TypeError for trees."""
        return {name: part.to_json() for name, part in self._parts.items() if part is not None}


def _next_paths(leaves: Mapping[Path, Tensor]) -> list[Path]:
    """The paths below ``next`` to whose leaf the root has one of the same shape and dtype; ValueError if none."""
    found = []
    for path, leaf in leaves.items():
        root = leaves.get(path[1:]) if path[0] == "next" and path[1:] and path[1] not in RESERVED else None
        if root is not None and root.shape == leaf.shape and root.dtype == leaf.dtype:
            found.append(path)
    if not found:
        raise ValueError(
            "the batch has no next observation of the same shape and dtype as an observation at its root, so "
            f"compact_obs would save nothing; it has {sorted('.'.join(path) for path in leaves)}: leave compact_obs out"
        )
    return found


def _stack_paths(leaves: Mapping[Path, Tensor], ndim: int, frame_stack: int) -> list[Path]:
    """The paths of observations, also below ``next``, that are stacks of `frame_stack` planes; ValueError if none."""
    found = []
    for path, leaf in leaves.items():
        root, shape = path[1:] if path[0] == "next" else path, leaf.shape[ndim:]
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
