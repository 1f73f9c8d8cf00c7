"""Packs frames into rows of bytes, so that a sample needs one gather, and its leaves are typed views of the result.

A row has the widest dtypes first, for alignment, and is padded to 64-bit words. NumPy copies the bytes of a leaf as one
element, several times faster than Torch copies short rows.
"""

from __future__ import annotations

import ast
import contextlib
import math
from collections.abc import Mapping, Sequence
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
from funcollect.trajectories.split import ASSIGNABLE, readable
from funcollect.tree import Path, nest

_WORD = 8  # bytes
_LEAST_SHARED = 64  # bytes: for smaller observations, the tables to find equal ones take as much memory as is saved

# Integers of the same width carry dtypes that NumPy lacks.
_FLOATS8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
_CARRIERS = {torch.bfloat16: torch.int16, **dict.fromkeys(_FLOATS8, torch.uint8)}

_Form = tuple[tuple[int, ...], torch.dtype]  # the shape and the dtype of a leaf in one frame
Records = npt.NDArray[np.void]  # rows [N], each as a struct with a field per column


@dataclass(frozen=True)
class PackedLeaf:
    """The place of a leaf in a row; of a shared leaf, a row has the numbers of its planes (see `SharedLeaves`)."""

    index: int  # of its column
    path: Path
    form: _Form  # in a batch; the next fields describe it in the row
    shape: tuple[int, ...]  # of one frame
    dtype: torch.dtype
    offset: int  # bytes from the beginning of the row
    count: int  # the number of values
    element: np.dtype[np.void]  # all values of a frame, as nothing but their bytes


def leaves_of(data: Any, prefix: Path = ()) -> dict[Path, Tensor]:
    """The leaves of a TensorDict or another tree of tensors, by path; TypeError if a leaf is not a tensor."""
    if not isinstance(data, TensorDictBase):
        paths, leaves, _ = optree.tree_flatten_with_path(data)
        return {(path := tuple(map(str, each))): _checked(path, leaf) for each, leaf in zip(paths, leaves, strict=True)}
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
    """The size, keys, shapes and dtypes of a batch; unique if it holds other objects. Adds its leaves to `leaves`."""
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
        raise ValueError(f"{what}: build it with ndim={ids.ndim}, or flatten the first ones, as cat_results=0 does")
    return shape[:ndim]


class RowLayout:
    """The arrangement of a frame's leaves in a row of `words` 64-bit words; the `columns` are in the batch's order."""

    def __init__(
        self,
        forms: Mapping[Path, _Form],
        item_dims: tuple[int, ...] = (),
        structure: Any = None,
        planes: Mapping[Path, int] | None = None,
        item_names: Sequence[str | None] = (),
    ) -> None:
        self.item_dims = item_dims  # the batch dimensions of a single frame, which may be a sequence
        self.item_names = tuple(item_names) if any(item_names) else ()  # of these dimensions, such as "time"
        self.structure = structure  # of a frame that is a tree; None for TensorDicts
        self.planes = planes or {}  # the number of planes of each shared leaf
        stored = {**forms, **{path: ((count,), torch.int32) for path, count in self.planes.items()}}
        order, offset, columns = {path: index for index, path in enumerate(forms)}, 0, dict[Path, PackedLeaf]()
        for path, (shape, dtype) in sorted(stored.items(), key=lambda leaf: (-leaf[1][1].itemsize, str(leaf[1][1]))):
            element = np.dtype(f"V{(count := math.prod(shape)) * dtype.itemsize}")
            columns[path] = PackedLeaf(order[path], path, forms[path], shape, dtype, offset, count, element)
            offset += element.itemsize
        self.columns = [columns[path] for path in forms]
        self._nested = nest(order) if structure is None else {}
        # tensordict cannot clone floats of eight bits if a device is set.
        dtypes = {dtype for _, dtype in stored.values()}
        self._placed = bool(dtypes) and all(dtype.itemsize > 1 or not dtype.is_floating_point for dtype in dtypes)
        self._carried = [leaf.index for leaf in self.columns if leaf.dtype in _CARRIERS]
        widest = max([_WORD, *(dtype.itemsize for dtype in dtypes)])
        self.nbytes = max(-(-offset // widest), 1) * widest
        self.words, self.names = self.nbytes // _WORD, [*map(str, forms)]
        carriers = [torch.empty(0, dtype=_CARRIERS.get(leaf.dtype, leaf.dtype)).numpy() for leaf in self.columns]
        typed = [(array.dtype, leaf.shape) for array, leaf in zip(carriers, self.columns, strict=True)]
        # A row as a struct with a field per column, which has the typed values, or only their bytes.
        offsets = [leaf.offset for leaf in self.columns]
        self._typed, self.opaque = (
            np.dtype({"names": self.names, "formats": formats, "offsets": offsets, "itemsize": self.nbytes})
            for formats in (typed, [leaf.element for leaf in self.columns])
        )

    @classmethod
    def of(cls, data: Any, ndim: int, compact_obs: bool = False, frame_stack: int | None = None) -> RowLayout:
        """The layout for batches like this one; ValueError if it has no leaf to which an option applies."""
        leaves = leaves_of(data)
        planes = _observations(leaves, ndim) if compact_obs else {}
        planes |= _stacks(leaves, ndim, frame_stack) if frame_stack is not None else {}
        forms = {path: (tuple(leaf.shape[ndim:]), leaf.dtype) for path, leaf in leaves.items()}
        if isinstance(data, TensorDictBase):
            return cls(forms, tuple(data.batch_size[ndim:]), planes=planes, item_names=data.names[ndim:])
        return cls(forms, structure=optree.tree_structure(data), planes=planes)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> RowLayout:
        """The layout described by `to_json`."""
        batch = saved["batch"]
        forms = {tuple(path): (tuple(shape), getattr(torch, dtype)) for path, shape, dtype in batch["leaves"]}
        structure = optree.tree_structure(ast.literal_eval(batch["tree"])) if "tree" in batch else None
        planes = {tuple(path): n for path, n in saved["planes"]}
        return cls(forms, tuple(batch["item_dims"]), structure, planes, batch.get("item_names", ()))

    def to_json(self) -> dict[str, Any]:
        """A description in numbers and strings; TypeError for a tree of other nodes than dicts, lists and tuples."""
        leaves = [(leaf.path, leaf.form[0], str(leaf.form[1]).removeprefix("torch.")) for leaf in self.columns]
        saved: dict[str, Any] = {"leaves": leaves, "item_dims": self.item_dims, "item_names": self.item_names}
        if self.structure is not None:
            saved["tree"] = _text_of(self.structure)
        return {"batch": saved, "planes": [*self.planes.items()]}

    def kinds(self) -> dict[tuple[int, int, torch.dtype], list[PackedLeaf]]:
        """The shared leaves by the number of their planes, and the planes' number of values and dtype."""
        found: dict[tuple[int, int, torch.dtype], list[PackedLeaf]] = {}
        for leaf in self.columns:
            if count := self.planes.get(leaf.path):
                shape, dtype = leaf.form
                found.setdefault((count, math.prod(shape) // count, dtype), []).append(leaf)
        return found

    def check(self, leaves: Mapping[Path, Tensor], ndim: int) -> None:
        """Raise ValueError if the keys, shapes or dtypes of a batch of `ndim` dimensions differ from this layout."""
        if leaves.keys() != (own := {column.path for column in self.columns}):
            differences = {"lacks": own - leaves.keys(), "adds": leaves.keys() - own}
            parts = [f"{verb} {sorted(map('.'.join, paths))}" for verb, paths in differences.items() if paths]
            what = f"the batch {' and '.join(parts)}, expected the keys of the storage's first batch"
            raise ValueError(f"{what}: select the same keys for every batch, or make another buffer")
        for column in self.columns:
            shape, dtype = leaves[column.path].shape[ndim:], leaves[column.path].dtype
            if (shape, dtype) != column.form:
                what = f"{readable(column.path) or 'the data'} is {list(shape)} {dtype} in each frame"
                held = f"the storage holds {list(column.form[0])} {column.form[1]}, as the first batch had it"
                raise ValueError(f"{what}, {held}: convert it before extending, or store it in another buffer")

    def check_some(self, leaves: Mapping[Path, Tensor]) -> None:
        """Raise ValueError unless these leaves [N, ...] are some of the frames', and not shared between frames."""
        own = {leaf.path: leaf.form for leaf in self.columns if leaf.path not in self.planes}
        for path, leaf in leaves.items():
            if path not in own:
                what = f"values has {readable(path)}, which frames {'share' if path in self.planes else 'lack'}"
                raise ValueError(f"{what}, expected some of {sorted(map(readable, own))}: leave it out")
            if (shape := tuple(leaf.shape[1:]), leaf.dtype) != own[path]:
                what = f"values has {list(shape)} {leaf.dtype} at {readable(path)} for each frame"
                raise ValueError(f"{what}, expected {list(own[path][0])} {own[path][1]}: convert it, as it is stored")

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
        """The batch in `rows` [N, words] int64, contiguous; `leaves` by column are by default views of the rows."""
        if leaves is None:
            leaves = self.views(rows) if isinstance(rows, Tensor) else self.leaves(rows)
        if self.structure is not None:
            return optree.tree_unflatten(self.structure, leaves)
        device = leaves[0].device if self._placed else None
        size = torch.Size((rows.shape[0], *self.item_dims))
        return _build(self._nested, leaves, _attributes(size, device, self.item_names))

    def leaves(self, rows: Records) -> list[Tensor]:
        """Views of the leaves [N, ...] in `rows` [N], by column."""
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
        return ViewedRows, (self.layout, self.tensor)  # copied views would not be views of the copied rows

    def write(self, slot: int, count: int, leaves: Mapping[Path, Tensor], ndim: int, first: int = 0) -> None:
        """Write frames of leaves ``[*B, T, ...]`` from `first` on, by time, then by lane, to rows from `slot` on."""
        at, some = slice(slot, slot + count), slice(first, first + count)
        if self.tensor.is_cpu:
            for field, column in zip(self._fields, self.layout.columns, strict=True):
                if column.element.itemsize and count:
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

    def amend(self, slots: Ints, leaves: Mapping[Path, Tensor]) -> None:
        """Overwrite some leaves [N, ...] of the rows in `slots` [N], each once; on any device."""
        at = torch.from_numpy(slots).to(self.tensor.device)
        for column in self.layout.columns:
            if (leaf := leaves.get(column.path)) is not None:
                carrier = (_CARRIERS | ASSIGNABLE).get(column.dtype, column.dtype)
                offset = column.offset // carrier.itemsize
                words = leaf.detach().to(at.device).contiguous().view(carrier).reshape(len(slots), column.count)
                self.tensor.view(carrier).narrow(1, offset, column.count)[at] = words


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
def _attributes(size: torch.Size, device: torch.device | None, item_names: tuple[str | None, ...]) -> dict[str, Any]:
    """The attributes of a TensorDict as tensordict makes it. Copying them takes a third of the time."""
    names = [None, *item_names] if item_names else None
    return {**vars(TensorDict._new_unsafe({}, batch_size=size, device=device, names=names))}


def gather(records: Records, slots: Ints, mask: Bools | None = None) -> Records:
    """A copy of the records in `slots` [N]; zeros where `mask` [N] is False."""
    found = records.take(slots, mode="clip")
    if mask is not None:
        found.view(np.int64).reshape(len(found), -1)[~mask] = 0
    return found


def _text_of(structure: Any) -> str:
    """A structure as the text of a tree of zeros; TypeError unless the text can be read without running code."""
    text = repr(optree.tree_unflatten(structure, [0] * structure.num_leaves))
    with contextlib.suppress(ValueError, SyntaxError):
        if optree.tree_structure(ast.literal_eval(text)) == structure:
            return text
    raise TypeError(f"the frames are trees {structure}, which have no file format: store TensorDicts")


def _observations(leaves: Mapping[Path, Tensor], ndim: int) -> dict[Path, int]:
    """By path, 1 plane for observations and next observations of one shape and dtype; ValueError without any."""
    found = list[Path]()
    for path, leaf in leaves.items():
        root = leaves.get(path[1:]) if path[:1] == ("next",) and path[1:] and path[1] not in RESERVED else None
        if root is not None and root.shape == leaf.shape and root.dtype == leaf.dtype:
            found += path, path[1:]
    if not found:
        what = "the batch has no next observation of the same shape and dtype as one at its root, which would be shared"
        raise ValueError(f"{what}; it has {sorted(map(readable, leaves))}: leave compact_obs out")
    return {path: 1 for path in found if leaves[path].shape[ndim:].numel() * leaves[path].itemsize >= _LEAST_SHARED}


def _stacks(leaves: Mapping[Path, Tensor], ndim: int, frame_stack: int) -> dict[Path, int]:
    """By path, `frame_stack` planes for observations that are stacks, also below ``next``; ValueError without any."""
    found, shapes = {}, {path: leaf.shape[ndim:] for path, leaf in leaves.items()}
    for path, shape in shapes.items():
        root = path[1:] if path[:1] == ("next",) else path
        if root and root[0] not in RESERVED and shape[:1] == (frame_stack,) and len(shape) > 1 and 0 not in shape:
            found[path] = frame_stack
    if not found:
        held = {readable(path): list(shape) for path, shape in shapes.items()}
        what = f"frame_stack is {frame_stack}, and no observation has a shape [{frame_stack}, ...] of several axes"
        raise ValueError(f"{what} in {held}: pass the number of stacked frames, the first dimension, or leave it out")
    return found
