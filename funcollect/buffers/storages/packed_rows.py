"""Packs frames into rows of bytes, so that a sample needs one gather, and its leaves are typed views of the result.

A row has the widest dtypes first, for alignment, and is padded to 64-bit words. NumPy copies the bytes of a leaf as one
element, several times faster than Torch copies short rows.
"""

from __future__ import annotations

import ast
import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import optree
import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor, is_tensorclass
from torch import Tensor

from funcollect.buffers import Bools, Ints
from funcollect.specs import RESERVED
from funcollect.trajectories.split import readable
from funcollect.tree import Path, nest

_WORD = 8  # bytes
_LEAST_SHARED = 64  # bytes: to find an equal one among smaller observations would take as much memory as it saves

# Integers of the same width carry dtypes that NumPy lacks.
_FLOATS8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
_CARRIERS = {torch.bfloat16: torch.int16, **dict.fromkeys(_FLOATS8, torch.uint8)}

_Form = tuple[tuple[int, ...], torch.dtype]  # the shape and the dtype of a leaf in one frame
Records = npt.NDArray[np.void]  # rows [N], each as a struct with a field per column


@dataclass(frozen=True)
class PackedLeaf:
    """The place of a leaf in a row."""

    path: Path
    shape: tuple[int, ...]  # of one frame
    dtype: torch.dtype
    offset: int  # bytes from the beginning of the row
    count: int  # the number of values
    nbytes: int
    element: np.dtype[np.void]  # all values of a frame, as nothing but their bytes


def leaves_of(data: Any, prefix: Path = ()) -> dict[Path, Tensor]:
    """The leaves of a TensorDict or another tree of tensors, by path; TypeError if a leaf is not a tensor."""
    if not isinstance(data, TensorDictBase):
        paths, leaves, _ = optree.tree_flatten_with_path(data)
        named = zip((tuple(map(str, path)) for path in paths), leaves, strict=True)
        return {path: _checked(path, leaf) for path, leaf in named}
    found: dict[Path, Tensor] = {}
    for name, value in data.items():
        path = (*prefix, name)
        if type(value) is Tensor:
            found[path] = value
        elif isinstance(value, TensorDictBase) and not is_non_tensor(value):
            found |= leaves_of(value, path)
        else:
            found[path] = _checked(path, value)
    return found


def form_of(batch: TensorDict, leaves: list[Tensor]) -> list[Any]:
    """The size, keys, shapes and dtypes of a batch, whose leaves are added to `leaves`; unique if it holds others."""
    form: list[Any] = [batch.batch_size]
    for name, value in batch.items():
        if type(value) is Tensor:
            leaves.append(value)
            form += name, value.shape, value.dtype
        else:
            form += name, form_of(value, leaves) if type(value) is TensorDict else object()
    return form


def _checked(path: Path, leaf: Any) -> Tensor:
    """The leaf as a tensor; TypeError unless it is one, or an array of numbers."""
    if isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
        plain = leaf.flags.writeable and leaf.dtype.isnative and min(leaf.strides, default=0) >= 0
        return torch.from_numpy(leaf if plain else leaf.astype(leaf.dtype.newbyteorder("=")))
    wanted = "a tensor" if path else "a TensorDict, a tensor, or a tree of tensors"
    mend = f"leave it out (batch.exclude({path!r})), make a tensor of it, or store it in a ListStorage"
    if not path:
        mend = "give its to_tensordict()" if is_tensorclass(leaf) else "store it in a ListStorage"
    elif isinstance(leaf, TensorDictBase) and not is_non_tensor(leaf):
        mend = "make one TensorDict of several, torch.stack(data)"
    raise TypeError(f"{readable(path) or 'the data'} is {type(leaf).__name__}, expected {wanted}: {mend}")


def lead_of(data: Any, leaves: Mapping[Path, Tensor], ndim: int) -> tuple[int, ...]:
    """The sizes of the first `ndim` dimensions; ValueError unless all leaves share as many."""
    if not leaves:
        raise ValueError("the batch has no leaves, expected at least one tensor: nothing would be stored")
    if isinstance(data, TensorDictBase):
        shape = tuple(data.batch_size)
    else:
        shapes = {tuple(leaf.shape[:ndim]) for leaf in leaves.values()}
        shape = shapes.pop() if len(shapes) == 1 else ()
    if len(shape) < ndim:
        what = f"the batch has batch dimensions {list(shape)}, the storage takes {ndim} (ndim={ndim}), time last"
        mend = f"build it with ndim={len(shape)}, make the environments with num_envs, or reshape the batch"
        raise ValueError(f"{what}: {mend if shape else 'stack single frames, or give them to add'}")
    ids = leaves.get(("collector", "traj_ids"))
    if ndim > 1 and ids is not None and ids.ndim > ndim:
        what = f"the batch has a frame for each of {list(ids.shape)}, the storage takes {ndim} dimensions (ndim={ndim})"
        mend = f"build it with ndim={ids.ndim}, or flatten the first ones, as cat_results=0 of a collector does"
        raise ValueError(f"{what}: {mend}")
    return shape[:ndim]


class RowLayout:
    """The arrangement of a frame's leaves in a row of `words` 64-bit words; the `columns` are in the batch's order."""

    def __init__(self, leaves: Mapping[Path, _Form], item_dims: tuple[int, ...] = (), structure: Any = None) -> None:
        self.item_dims = item_dims  # the batch dimensions of a single frame, which may be a sequence
        self.structure = structure  # that of a frame that is a tree; None for TensorDicts
        offset, columns = 0, dict[Path, PackedLeaf]()
        for path, (shape, dtype) in sorted(leaves.items(), key=lambda leaf: (-leaf[1][1].itemsize, str(leaf[1][1]))):
            nbytes = (count := math.prod(shape)) * dtype.itemsize
            columns[path] = PackedLeaf(path, shape, dtype, offset, count, nbytes, np.dtype(f"V{nbytes}"))
            offset += nbytes
        self.columns, self._paths = [columns[path] for path in leaves], {*leaves}
        self._nested = nest({path: index for index, path in enumerate(leaves)}) if structure is None else {}
        # tensordict cannot clone floats of eight bits if a device is set.
        dtypes = {dtype for _, dtype in leaves.values()}
        self._placed = bool(dtypes) and all(dtype.itemsize > 1 or not dtype.is_floating_point for dtype in dtypes)
        self._carried = [index for index, column in enumerate(self.columns) if column.dtype in _CARRIERS]
        widest = max([_WORD, *(dtype.itemsize for dtype in dtypes)])
        self.nbytes = max(-(-offset // widest), 1) * widest
        self.words, self.names = self.nbytes // _WORD, [*map(str, leaves)]
        carriers = [torch.empty(0, dtype=_CARRIERS.get(column.dtype, column.dtype)).numpy() for column in self.columns]
        typed = [(array.dtype, column.shape) for array, column in zip(carriers, self.columns, strict=True)]
        # A row as a struct with a field per column; as one, NumPy sees its values, or nothing but their bytes.
        offsets = [column.offset for column in self.columns]
        self._typed, self.opaque = (
            np.dtype({"names": self.names, "formats": formats, "offsets": offsets, "itemsize": self.nbytes})
            for formats in (typed, [column.element for column in self.columns])
        )

    @classmethod
    def of(cls, data: Any, ndim: int) -> RowLayout:
        """The layout of the leaves of `data`, which have `ndim` batch dimensions."""
        forms = {path: (tuple(leaf.shape[ndim:]), leaf.dtype) for path, leaf in leaves_of(data).items()}
        if isinstance(data, TensorDictBase):
            return cls(forms, tuple(data.batch_size[ndim:]))
        return cls(forms, structure=optree.tree_structure(data))

    def check(self, leaves: Mapping[Path, Tensor], ndim: int) -> None:
        """Raise ValueError if the keys, shapes or dtypes of a batch differ from this layout."""
        if leaves.keys() != self._paths:
            differences = {"lacks": self._paths - leaves.keys(), "adds": leaves.keys() - self._paths}
            parts = [f"{verb} {sorted(map('.'.join, paths))}" for verb, paths in differences.items() if paths]
            what = f"the batch {' and '.join(parts)}, expected the keys of the storage's first batch"
            raise ValueError(f"{what}: select the same keys for every batch, or make another buffer")
        for column in self.columns:
            leaf = leaves[column.path]
            if leaf.shape[ndim:] != column.shape or leaf.dtype != column.dtype:
                what = f"{readable(column.path) or 'the data'} is {list(leaf.shape[ndim:])} {leaf.dtype} in each frame"
                own = f"the storage holds {list(column.shape)} {column.dtype}, as the first batch had it"
                raise ValueError(f"{what}, {own}: convert it before extending, or store it in another buffer")

    def records(self, rows: Ints) -> Records:
        """A view [N] of the `rows` [N, words]; on the CPU."""
        return rows.view(self._typed)[:, 0]

    def numbers(self, rows: Ints, slots: Ints) -> dict[Path, Tensor]:
        """The leaves with one number per frame in `slots` [N]; on the CPU."""
        records = self.records(rows)
        return {
            column.path: torch.from_numpy(records[name][slots])  # `take` would copy all rows
            for name, column in zip(self.names, self.columns, strict=True)
            if column.count == 1 and column.dtype not in _CARRIERS
        }

    def unpack(self, rows: Tensor | Records, leaves: list[Tensor] | None = None) -> Any:
        """The batch in `rows` [N, words] int64, contiguous; by default its leaves, by column, are views of them."""
        leaves = self.leaves(rows) if leaves is None else leaves
        if self.structure is not None:
            return optree.tree_unflatten(self.structure, leaves)
        device = leaves[0].device if self._placed else None
        return _build(self._nested, leaves, _attributes(torch.Size((rows.shape[0], *self.item_dims)), device))

    def leaves(self, rows: Tensor | Records) -> list[Tensor]:
        """Views of the leaves in `rows`, by column."""
        if isinstance(rows, Tensor):
            return self.views(rows)
        leaves = [torch.from_numpy(rows[name]) for name in self.names]
        for index in self._carried:
            leaves[index] = leaves[index].view(self.columns[index].dtype)
        return leaves

    def views(self, rows: Tensor) -> list[Tensor]:
        """Views of the leaves [N, ...] in `rows` [N, words], by column; on any device."""
        typed = {dtype: rows.view(dtype) for dtype in {column.dtype for column in self.columns}}
        return [
            typed[leaf.dtype].narrow(1, leaf.offset // leaf.dtype.itemsize, leaf.count).view(len(rows), *leaf.shape)
            for leaf in self.columns
        ]


def time_major(leaf: Tensor, ndim: int) -> Tensor:
    """``[*B, T, ...]`` with `ndim` batch dimensions as ``[T, *B, ...]``."""
    return leaf.movedim(ndim - 1, 0) if ndim > 1 else leaf


def _elements(leaf: Tensor, ndim: int, column: PackedLeaf) -> npt.NDArray[np.void]:
    """The frames of a leaf ``[*B, T, ...]``, not empty, by time, then by lane, each as one element of bytes: [N]."""
    if column.dtype in _CARRIERS:
        leaf = leaf.view(_CARRIERS[column.dtype])
    array = leaf.numpy(force=True)
    if ndim > 1 and array.shape[ndim - 1] != 1:  # the lanes of one step are in order
        array = array.transpose(ndim - 1, *range(ndim - 1), *range(ndim, array.ndim))
    if not array.flags.c_contiguous:
        array = array.reshape(-1, column.count)
        if array.strides[1] == array.itemsize:  # the values of each frame are contiguous
            return array.view(column.element)[:, 0]
        array = np.ascontiguousarray(array)
    return np.frombuffer(array, column.element)


class ViewedRows:
    """Rows [capacity, words] int64 of a layout, and on the CPU the views by which NumPy writes and reads them."""

    def __init__(self, layout: RowLayout, tensor: Tensor) -> None:
        self.layout, self.tensor, self.nbytes = layout, tensor, tensor.nbytes
        if tensor.is_cpu:
            self.records = layout.records(tensor.numpy())
            self._fields = [self.records.view(layout.opaque)[name] for name in layout.names]

    def __reduce__(self) -> Any:
        return ViewedRows, (self.layout, self.tensor)  # a copy of the views would be none of the copied rows

    def write(self, slot: int, count: int, leaves: Mapping[Path, Tensor], ndim: int, first: int = 0) -> None:
        """Write frames of leaves ``[*B, T, ...]`` from `first` on, by time, then by lane, to rows from `slot` on."""
        at, some = slice(slot, slot + count), slice(first, first + count)
        if self.tensor.is_cpu:
            for field, column in zip(self._fields, self.layout.columns, strict=True):
                if column.nbytes and count:
                    field[at] = _elements(leaves[column.path], ndim, column)[some]
            return
        rows, source = self.tensor[at], next(iter(leaves.values())).device
        if source != rows.device:
            staged = torch.empty_like(rows, device=source, pin_memory=source.type == "cpu")
            ViewedRows(self.layout, staged).write(0, count, leaves, ndim, first)
            rows.copy_(staged, non_blocking=True)
            return
        for view, column in zip(self.layout.views(rows), self.layout.columns, strict=True):
            view.copy_(time_major(leaves[column.path], ndim).reshape(-1, *column.shape)[some])

    def put(self, slots: Ints, leaves: Mapping[Path, Tensor]) -> None:
        """Overwrite the rows in `slots` [N] by the frames of leaves ``[N, ...]``."""
        staged = torch.zeros(len(slots), self.layout.words, dtype=torch.int64)
        ViewedRows(self.layout, staged).write(0, len(slots), leaves, 1)
        self.tensor[torch.from_numpy(slots)] = staged.to(self.tensor.device)


def _build(nested: Mapping[str, Any], leaves: list[Tensor], attributes: Mapping[str, Any]) -> TensorDict:
    """A TensorDict with the keys of `nested`, a nested dict, and the leaves at the indices that it holds."""
    filled = {
        name: leaves[value] if value.__class__ is int else _build(value, leaves, attributes)
        for name, value in nested.items()
    }
    built: TensorDict = object.__new__(TensorDict)
    vars(built).update(attributes, _tensordict=filled)
    return built


@lru_cache
def _attributes(size: torch.Size, device: torch.device | None) -> dict[str, Any]:
    """Those of a TensorDict as tensordict makes it; to copy them takes a third of the time."""
    return {**vars(TensorDict._new_unsafe({}, batch_size=size, device=device))}


def gather(records: Records, slots: Ints, mask: Bools | None = None) -> Records:
    """A copy of the records in `slots` [N]; zeros where `mask` [N] is False."""
    found = records.take(slots, mode="clip")
    if mask is not None:
        found.view(np.int64).reshape(len(found), -1)[~mask] = 0
    return found


class FrameLayout:
    """The layout of frames, `batch`, and of the `rows` that store them.

    Rows have the numbers of planes, [k] int32, instead of a shared leaf (see `SharedLeaves`); `planes` has each k.
    """

    def __init__(self, batch: RowLayout, planes: Mapping[Path, int]) -> None:
        self.batch, self.planes = batch, planes
        stored: dict[Path, _Form] = {leaf.path: (leaf.shape, leaf.dtype) for leaf in batch.columns}
        stored |= {path: ((count,), torch.int32) for path, count in planes.items()}
        self.rows = RowLayout(stored, batch.item_dims, batch.structure)

    @classmethod
    def of(
        cls, data: Any, leaves: Mapping[Path, Tensor], ndim: int, compact_obs: bool, frame_stack: int | None
    ) -> FrameLayout:
        """The layout for batches like this one; ValueError if it has no leaf to which an option applies."""
        planes = _observations(leaves, ndim) if compact_obs else {}
        planes |= _stacks(leaves, ndim, frame_stack) if frame_stack is not None else {}
        return cls(RowLayout.of(data, ndim), planes)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> FrameLayout:
        """The layout described by `to_json`."""
        batch = saved["batch"]
        forms = {tuple(path): (tuple(shape), getattr(torch, dtype)) for path, shape, dtype in batch["leaves"]}
        planes = {tuple(path): count for path, count in saved["planes"]}
        structure = optree.tree_structure(ast.literal_eval(batch["tree"])) if "tree" in batch else None
        return cls(RowLayout(forms, tuple(batch["item_dims"]), structure), planes)

    def to_json(self) -> dict[str, Any]:
        """A description in numbers and strings; TypeError for a tree of other nodes than dicts, lists and tuples."""
        batch, planes = self.batch, [*self.planes.items()]
        leaves = [(leaf.path, leaf.shape, str(leaf.dtype).removeprefix("torch.")) for leaf in batch.columns]
        saved: dict[str, Any] = {"leaves": leaves, "item_dims": batch.item_dims}
        if batch.structure is not None:
            saved["tree"] = _written(batch.structure)
        return {"batch": saved, "planes": planes}

    def kinds(self) -> dict[tuple[int, int, torch.dtype], list[PackedLeaf]]:
        """The shared leaves by the number of their planes, and the planes' number of values and dtype."""
        found: dict[tuple[int, int, torch.dtype], list[PackedLeaf]] = {}
        for leaf in self.batch.columns:
            if count := self.planes.get(leaf.path):
                found.setdefault((count, leaf.count // count, leaf.dtype), []).append(leaf)
        return found


def _written(structure: Any) -> str:
    """A structure as Python writes a tree of zeros; TypeError unless that can be read without running code."""
    text = repr(optree.tree_unflatten(structure, [0] * structure.num_leaves))
    with contextlib.suppress(ValueError, SyntaxError):
        if optree.tree_structure(ast.literal_eval(text)) == structure:
            return text
    raise TypeError(f"the frames are trees {structure}, which have no file format: store TensorDicts")


def _observations(leaves: Mapping[Path, Tensor], ndim: int) -> dict[Path, int]:
    """The number of planes, 1, of observations and next observations of one shape and dtype; ValueError if none."""
    found = list[Path]()
    for path, leaf in leaves.items():
        root = leaves.get(path[1:]) if path[:1] == ("next",) and path[1:] and path[1] not in RESERVED else None
        if root is not None and root.shape == leaf.shape and root.dtype == leaf.dtype:
            found += path, path[1:]
    if not found:
        what = "the batch has no next observation of the same shape and dtype as an observation at its root"
        held = sorted(map(readable, leaves))
        raise ValueError(f"{what}, so compact_obs would save nothing; it has {held}: leave compact_obs out")
    sizes = {path: leaves[path].shape[ndim:].numel() * leaves[path].dtype.itemsize for path in found}
    return {path: 1 for path, size in sizes.items() if size >= _LEAST_SHARED}


def _stacks(leaves: Mapping[Path, Tensor], ndim: int, frame_stack: int) -> dict[Path, int]:
    """The number of planes, `frame_stack`, of observations that are stacks, also below ``next``; ValueError if none."""
    found, shapes = {}, {path: leaf.shape[ndim:] for path, leaf in leaves.items()}
    for path, shape in shapes.items():
        root = path[1:] if path[:1] == ("next",) else path
        if root and root[0] not in RESERVED and shape[:1] == (frame_stack,) and len(shape) > 1 and 0 not in shape:
            found[path] = frame_stack
    if not found:
        held = {readable(path): list(shape) for path, shape in shapes.items()}
        what = f"frame_stack is {frame_stack}, and no observation of the batch has a shape [{frame_stack}, ...]"
        mend = "pass the number of stacked frames, which must be the first dimension, or leave frame_stack out"
        raise ValueError(f"{what} of at least two dimensions in each frame; it has {held}: {mend}")
    return found
