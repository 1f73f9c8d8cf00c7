"""Indexing, gathering and scattering."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.operators import Table

jax = import_jax()
jnp = jax.numpy

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


def gather(x: Any, dim: int, index: Any, sparse_grad: bool = False) -> Any:
    if x.ndim == 0:
        return jnp.broadcast_to(x, index.shape)
    return x[_along(index, dim)]


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
    """`x` with slices along one axis written, or combined with its own; a number selects one slice."""
    moved = jnp.moveaxis(src, dim, 0) if src.ndim == x.ndim else src
    return jnp.moveaxis(getattr(jnp.moveaxis(x, dim, 0).at[at], reduce)(moved), 0, dim)


def searchsorted(
    edges: Any, x: Any, *, out_int32: bool = False, right: bool = False, side: str | None = None, sorter: Any = None
) -> Any:
    if edges.ndim > 1 or sorter is not None:
        raise ValueError("only one sorted sequence is covered: give it as a vector")
    return jnp.searchsorted(edges, x, side="right" if right or side == "right" else "left")


TABLE: Table = {
    "embedding": embedding,
    "_embedding_bag _embedding_bag_forward_only": embedding_bag,
    "one_hot": one_hot,
    "gather": gather,
    "index_put": index_put,
    "scatter.src|value|reduce|value_reduce": scatter,
    "scatter_reduce.two": scatter_reduce,
    "searchsorted.Tensor|Scalar": searchsorted,
    "index_select": lambda x, dim, index: jnp.take(x, index, dim),
    "index.Tensor _unsafe_index.Tensor": lambda x, indices: x[_full(indices)],
    "scatter_add": lambda x, dim, index, src: scatter(x, dim, index, src, reduce="add"),
    "select_scatter": lambda x, src, dim, index: _slices(x, dim, index, src),
    "slice_scatter": lambda x, src, dim=0, start=None, end=None, step=1: _slices(x, dim, slice(start, end, step), src),
    "index_add": lambda x, dim, index, src, alpha=1: _slices(x, dim, index, alpha * src, "add"),
    "bucketize.Tensor|Scalar": lambda x, edges, **options: searchsorted(edges, x, **options),
}
