"""Indexing, gathering and scattering."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.registry import operator

jax = import_jax()
jnp = jax.numpy

_REDUCE = {"sum": "add", "prod": "multiply", "amax": "max", "amin": "min"}
_MEAN, _MAXIMUM = 1, 2  # of Torch's modes of an embedding bag, of which 0 is the sum


@operator("embedding.default")
def embedding(weight: Any, indices: Any, padding: int = -1, scale: bool = False, sparse: bool = False) -> Any:
    """Rows of a table; the row of the padding has no gradient."""
    rows = jnp.take(weight, indices, 0)
    if padding < 0:
        return rows
    return jnp.where((indices == padding)[..., None], jax.lax.stop_gradient(rows), rows)


@operator("_embedding_bag.default", "_embedding_bag_forward_only.default")
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
    """Sums, means or maxima of rows of a table, in bags that begin at the offsets; zeros for an empty bag."""
    if scale:
        raise ValueError("gradients scaled by frequency are not covered: leave out scale_grad_by_freq=True")
    bags = offsets.shape[0] - last_offset
    bag = jnp.searchsorted(offsets, jnp.arange(indices.shape[0]), side="right") - 1
    bag = jnp.where((indices == padding) | (bag < 0), bags, bag)  # beyond the last: left out
    rows = jnp.take(weight, indices, 0)
    rows = rows if weights is None else rows * weights[:, None]
    counts = jax.ops.segment_sum(jnp.ones(bag.shape, weight.dtype), bag, bags)[:, None]
    if mode == _MAXIMUM:
        largest = jax.ops.segment_max(rows, bag, bags)
        return jnp.where(counts > 0, largest, 0), None, None, None
    total = jax.ops.segment_sum(rows, bag, bags)
    return total / jnp.maximum(counts, 1) if mode == _MEAN else total, None, None, None


@operator("one_hot.default")
def one_hot(indices: Any, num_classes: int = -1) -> Any:
    """Ones at the indices."""
    if num_classes < 0:
        raise ValueError("the number of classes would depend on data: pass num_classes")
    return jax.nn.one_hot(indices, num_classes, dtype=indices.dtype)


@operator("gather.default")
def gather(x: Any, dim: int, index: Any, sparse_grad: bool = False) -> Any:
    """Values along one axis; the index may be smaller than the array on the others."""
    if x.ndim == 0:
        return jnp.broadcast_to(x, index.shape)
    return x[_along(index, dim)]


def _along(index: Any, dim: int) -> tuple[Any, ...]:
    """The full index of each element of `index`, which counts along one axis."""
    grid = list(jnp.indices(index.shape, sparse=True))
    grid[dim] = index
    return tuple(grid)


@operator("index_select.default")
def index_select(x: Any, dim: int, index: Any) -> Any:
    """Slices along one axis."""
    return jnp.take(x, index, dim)


@operator("index.Tensor", "_unsafe_index.Tensor")
def index(x: Any, indices: Sequence[Any]) -> Any:
    """NumPy's indexing by arrays of integers."""
    return x[_full(indices)]


def _full(indices: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(slice(None) if each is None else each for each in indices)


@operator("index_put.default")
def index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    """With values written, or added, at the indices."""
    mask = indices[0]
    if len(indices) == 1 and mask.dtype == bool and jnp.ndim(values) == 0:
        mask = mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
        return jnp.where(mask, x + values if accumulate else values, x)
    at = x.at[_full(indices)]
    return at.add(values) if accumulate else at.set(values)


@operator("scatter.src", "scatter.value")
def scatter(x: Any, dim: int, index: Any, src: Any) -> Any:
    """With values written along one axis."""
    return x.at[_along(index, dim)].set(_part(src, index))


@operator("scatter.reduce", "scatter.value_reduce")
def scatter_combined(x: Any, dim: int, index: Any, src: Any, *, reduce: str) -> Any:
    """With values added or multiplied along one axis; the old way to say so."""
    return getattr(x.at[_along(index, dim)], reduce)(_part(src, index))


@operator("scatter_reduce.two")
def scatter_reduce(x: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True) -> Any:
    """With values combined along one axis."""
    if reduce not in _REDUCE or not include_self:
        raise ValueError(f"{reduce!r} with include_self={include_self} is not covered: use one of {list(_REDUCE)}")
    return getattr(x.at[_along(index, dim)], _REDUCE[reduce])(_part(src, index))


@operator("scatter_add.default")
def scatter_add(x: Any, dim: int, index: Any, src: Any) -> Any:
    """With values added along one axis."""
    return x.at[_along(index, dim)].add(_part(src, index))


def _part(src: Any, index: Any) -> Any:
    return src[tuple(map(slice, index.shape))] if jnp.ndim(src) else src


@operator("select_scatter.default")
def select_scatter(x: Any, src: Any, dim: int, index: int) -> Any:
    """With one slice replaced."""
    return jnp.moveaxis(jnp.moveaxis(x, dim, 0).at[index].set(src), 0, dim)


@operator("slice_scatter.default")
def slice_scatter(
    x: Any, src: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    """With a range of slices replaced."""
    moved = jnp.moveaxis(x, dim, 0).at[start:end:step]
    return jnp.moveaxis(moved.set(jnp.moveaxis(src, dim, 0)), 0, dim)


@operator("index_add.default")
def index_add(x: Any, dim: int, index: Any, src: Any, alpha: Any = 1) -> Any:
    """With slices added along one axis."""
    moved = jnp.moveaxis(x, dim, 0).at[index].add(alpha * jnp.moveaxis(src, dim, 0))
    return jnp.moveaxis(moved, 0, dim)


@operator("searchsorted.Tensor", "searchsorted.Scalar")
def searchsorted(
    edges: Any, x: Any, *, out_int32: bool = False, right: bool = False, side: str | None = None, sorter: Any = None
) -> Any:
    """Where each value belongs in one sorted sequence."""
    if edges.ndim > 1 or sorter is not None:
        raise ValueError("only one sorted sequence is covered: give it as a vector")
    return jnp.searchsorted(edges, x, side="right" if right or side == "right" else "left")


@operator("bucketize.Tensor", "bucketize.Scalar")
def bucketize(x: Any, edges: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    """Which bin each value is in."""
    return searchsorted(edges, x, right=right)
