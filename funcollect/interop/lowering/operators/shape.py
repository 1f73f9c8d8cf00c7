"""Shapes, joining, padding; constants and casts; indexing, gathering and scattering."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.operators import Table

jax = import_jax()
jnp, lax = jax.numpy, jax.lax

_NAMED_ALIKE = "diagonal flip full full_like ones ones_like squeeze stack tril triu"


def squeeze(x: Any, dims: Any) -> Any:
    wanted = dims if isinstance(dims, Sequence) else [dims]
    return jnp.squeeze(x, tuple(dim for dim in wanted if x.ndim and x.shape[dim] == 1))


def expand(x: Any, shape: Sequence[int], implicit: bool = False) -> Any:
    lead = len(shape) - x.ndim
    sizes = [x.shape[i - lead] if wanted == -1 else wanted for i, wanted in enumerate(shape)]
    return jnp.broadcast_to(x, sizes)


def unfold(x: Any, dim: int, size: int, step: int) -> Any:
    starts = jnp.arange(0, (x.shape[dim] if x.ndim else 1) - size + 1, step)
    windows = jnp.atleast_1d(x).take(starts[:, None] + jnp.arange(size), dim)
    return jnp.moveaxis(windows, dim % max(x.ndim, 1) + 1, -1) if x.ndim else windows[0]


def to_copy(x: Any, dtype: Any = None) -> Any:
    """Cast as Torch does: integers round towards zero, and of complex numbers the real part is kept."""
    if dtype is None:
        return x
    if jnp.iscomplexobj(x) and not jnp.issubdtype(dtype, jnp.complexfloating):
        return x != 0 if jnp.issubdtype(dtype, jnp.bool_) else x.real.astype(dtype)
    return x.astype(dtype)


def _widths(x: Any, pad: Sequence[int]) -> list[tuple[int, int]]:
    """Torch's padding, which begins with the last axis, as one pair for each axis."""
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    return [(0, 0)] * (x.ndim - len(pairs)) + pairs[::-1]


_REDUCE = {"sum": "add", "prod": "multiply", "amax": "max", "amin": "min"}
_MEAN, _MAXIMUM = 1, 2  # modes of an embedding bag in Torch, where 0 is the sum


def embedding(weight: Any, indices: Any, padding: int = -1, scale: bool = False, sparse: bool = False) -> Any:
    """Rows of a table; the row of the padding has no gradient."""
    rows = jnp.take(weight, indices, 0)
    if padding < 0:
        return rows
    return jnp.where((indices == padding)[..., None], jax.lax.stop_gradient(rows), rows)


def embedding_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale: bool = False,
    mode: int = 0,
    sparse: bool = False,
    weights: Any = None,
    last_offset: bool = False,
    padding: int = -1,
) -> Any:
    if scale:
        raise ValueError("gradients scaled by frequency are not covered: leave out scale_grad_by_freq=True")
    bags = offsets.shape[0] - last_offset
    bag = jnp.searchsorted(offsets, jnp.arange(indices.shape[0]), side="right") - 1
    bag = jnp.where((indices == padding) | (bag < 0), bags, bag)  # segment_sum omits rows without a bag
    rows = jnp.take(weight, indices, 0)
    rows = rows if weights is None else rows * weights[:, None]
    counts = jax.ops.segment_sum(jnp.ones(bag.shape, weight.dtype), bag, bags)[:, None]
    if mode == _MAXIMUM:
        largest = jax.ops.segment_max(rows, bag, bags)
        return jnp.where(counts > 0, largest, 0), None, None, None
    total = jax.ops.segment_sum(rows, bag, bags)
    return total / jnp.maximum(counts, 1) if mode == _MEAN else total, None, None, None


def one_hot(indices: Any, num_classes: int = -1) -> Any:
    if num_classes < 0:
        raise ValueError("the number of classes would depend on data: pass num_classes")
    return jax.nn.one_hot(indices, num_classes, dtype=indices.dtype)


def _along(index: Any, dim: int) -> tuple[Any, ...]:
    """The full index of each element of `index`, which holds indices along one axis."""
    grid = list(jnp.indices(index.shape, sparse=True))
    grid[dim] = index
    return tuple(grid)


def _full(indices: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(slice(None) if each is None else each for each in indices)


def index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    mask = indices[0]
    if len(indices) == 1 and mask.dtype == bool and jnp.ndim(values) == 0:
        mask = mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
        return jnp.where(mask, x + values if accumulate else values, x)
    at = x.at[_full(indices)]
    return at.add(values) if accumulate else at.set(values)


def scatter(x: Any, dim: int, index: Any, src: Any, *, reduce: str = "set") -> Any:
    part = src[tuple(map(slice, index.shape))] if jnp.ndim(src) else src
    return getattr(x.at[_along(index, dim)], reduce)(part)


def scatter_reduce(x: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True) -> Any:
    if reduce not in _REDUCE or not include_self:
        raise ValueError(f"{reduce!r} with include_self={include_self} is not covered: use one of {list(_REDUCE)}")
    return scatter(x, dim, index, src, reduce=_REDUCE[reduce])


def _slices(x: Any, dim: int, at: Any, src: Any, reduce: str = "set") -> Any:
    """`x` with slices along one axis set to those of `src`, or combined with them; a number `at` selects one slice."""
    moved = jnp.moveaxis(src, dim, 0) if src.ndim == x.ndim else src
    return jnp.moveaxis(getattr(jnp.moveaxis(x, dim, 0).at[at], reduce)(moved), 0, dim)


def linspace(start: Any, end: Any, steps: int, *, dtype: Any = None) -> Any:
    """The same with Torch's integers, which are cut toward zero, counted from the nearer end."""
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        return jnp.linspace(start, end, steps, dtype=dtype)
    place, width = jnp.arange(steps), (end - start) / max(steps - 1, 1)
    return jnp.where(place < steps // 2, start + place * width, end - (steps - 1 - place) * width).astype(dtype)


def searchsorted(
    edges: Any, x: Any, *, out_int32: bool = False, right: bool = False, side: str | None = None, sorter: Any = None
) -> Any:
    if edges.ndim > 1 or sorter is not None:
        raise ValueError("only one sorted sequence is covered: give it as a vector")
    return jnp.searchsorted(edges, x, side="right" if right or side == "right" else "left")


TABLE: Table = {
    **{name: getattr(jnp, name) for name in _NAMED_ALIKE.split()},
    "squeeze.dim|dims": squeeze,
    "expand": expand,
    "unfold": unfold,
    "cat": lambda tensors, dim=0: jnp.concatenate([x for x in tensors if x.shape != (0,)] or tensors, dim),
    "split.Tensor": lambda x, size, dim=0: jnp.split(x, [*range(size, x.shape[dim], size)] if size else [], dim),
    "split_with_sizes": lambda x, sizes, dim=0: jnp.split(x, [*accumulate(sizes[:-1])], dim),
    "slice.Tensor": lambda x, dim=0, start=None, end=None, step=1: x[
        (*[slice(None)] * (dim % x.ndim), slice(start, end, step))
    ],
    "_to_copy": to_copy,
    "sym_size.int": lambda x, dim: int(x.shape[dim]),  # a number while a function is traced
    "view _unsafe_view": jnp.reshape,
    "view.dtype": lambda x, dtype: x.view(dtype),
    "permute t": jnp.transpose,
    "transpose.int": lambda x, one, two: jnp.swapaxes(x, one, two) if x.ndim else x,
    "unsqueeze": jnp.expand_dims,
    "repeat": jnp.tile,
    "repeat_interleave.self_int": lambda x, repeats, dim=None, output_size=None: jnp.repeat(x, repeats, dim),
    "repeat_interleave.Tensor": lambda repeats, *, output_size: jnp.repeat(
        jnp.arange(repeats.shape[0]), repeats, total_repeat_length=output_size
    ),
    "unbind.int": lambda x, dim=0: list(jnp.moveaxis(x, dim, 0)),
    "select.int": lambda x, dim, index: lax.index_in_dim(x, index, dim, keepdims=False),
    "roll": lambda x, shifts, dims=(): jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x, shifts[0]),
    "clone": lambda x: x,
    "constant_pad_nd": lambda x, pad, value=0: lax.pad(  # unlike `jnp.pad`, it takes negative widths, which cut
        x, jnp.asarray(value, x.dtype), [(*width, 0) for width in _widths(x, pad)]
    ),
    "reflection_pad1d reflection_pad2d reflection_pad3d": lambda x, pad: jnp.pad(x, _widths(x, pad), "reflect"),
    "replication_pad1d replication_pad2d replication_pad3d": lambda x, pad: jnp.pad(x, _widths(x, pad), "edge"),
    "new_full": lambda x, shape, value, dtype=None: jnp.full(shape, value, dtype or x.dtype),
    "zeros empty.memory_format": jnp.zeros,  # memory that Torch leaves unwritten is zeroed
    "zeros_like empty_like": jnp.zeros_like,
    "new_zeros new_empty": lambda x, shape, dtype=None: jnp.zeros(shape, dtype or x.dtype),
    "new_ones": lambda x, shape, dtype=None: jnp.ones(shape, dtype or x.dtype),
    "scalar_tensor": jnp.asarray,
    "arange.start_step": jnp.arange,
    "linspace": linspace,
    "linspace.Tensor_Tensor|Tensor_Scalar|Scalar_Tensor": lambda *arguments, **options: lax.stop_gradient(
        jnp.linspace(*arguments, **options)  # Torch gives the ends no gradient
    ),
    "eye.default|m": jnp.eye,
    "copy": lambda x, source: jnp.broadcast_to(source, x.shape).astype(x.dtype),
    "_assert_tensor_metadata": lambda *arguments, **options: None,  # dtypes were checked in the export
    "embedding": embedding,
    "_embedding_bag _embedding_bag_forward_only": embedding_bag,
    "one_hot": one_hot,
    "gather": lambda x, dim, index, *_, **__: x[_along(index, dim)] if x.ndim else jnp.broadcast_to(x, index.shape),
    "index_put": index_put,
    "scatter.src|value|reduce|value_reduce": scatter,
    "scatter_reduce.two": scatter_reduce,
    "searchsorted.Tensor|Scalar": searchsorted,
    "index_select": lambda x, dim, index: jnp.take(x, jnp.atleast_1d(index), dim),
    "index.Tensor _unsafe_index.Tensor": lambda x, indices: x[_full(indices)],
    "scatter_add": lambda x, dim, index, src: scatter(x, dim, index, src, reduce="add"),
    "select_scatter": lambda x, src, dim, index: _slices(x, dim, index, src),
    "slice_scatter": lambda x, src, dim=0, start=None, end=None, step=1: _slices(x, dim, slice(start, end, step), src),
    "index_add": lambda x, dim, index, src, alpha=1: _slices(x, dim, index, alpha * src, "add"),
    "bucketize.Tensor|Scalar": lambda x, edges, **options: searchsorted(edges, x, **options),
}
