"""Medians, running extremes, modes: values that are picked by their order."""

from __future__ import annotations

from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.registry import operator

jax = import_jax()
jnp, lax = jax.numpy, jax.lax


def _missing(x: Any) -> Any:
    """Where a value is NaN; of integers nowhere."""
    return x != x


def _shared_jvp(primals: Any, tangents: Any) -> Any:
    value, x = primals
    same = (x == value) | (_missing(x) & _missing(value))
    return value, jnp.where(same, tangents[1], 0).sum() / same.sum()


_shared = jax.custom_jvp(lambda value, x: value)  # a value of an array: all elements that equal it share its gradient
_shared.defjvp(_shared_jvp)


def _picked(x: Any, place: Any, dim: int, keepdim: bool) -> Any:
    """The values at one place [..., 1, ...] along a dimension, and the places."""
    values = jnp.take_along_axis(x, place, dim)
    return (values, place) if keepdim else (values.squeeze(dim), place.squeeze(dim))


def _ranked(x: Any, rank: Any, dim: int) -> Any:
    """The place of the element of this rank along a dimension; NaN ranks last."""
    order = jnp.argsort(lax.stop_gradient(x), axis=dim, stable=True)
    return jnp.take_along_axis(order, jnp.broadcast_to(rank, _reduced(x, dim)), dim)


def _reduced(x: Any, dim: int) -> tuple[int, ...]:
    sizes = list(x.shape)
    sizes[dim] = 1
    return tuple(sizes)


@operator("nanmedian.dim")
def nanmedian_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    """The lower median along a dimension and its place; NaN does not count."""
    if not x.ndim:
        return x, jnp.zeros((), int)
    count = (~_missing(x)).sum(dim, keepdims=True)
    return _picked(x, _ranked(x, jnp.maximum(count - 1, 0) // 2, dim), dim, keepdim)


@operator("median.dim")
def median_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    """The lower median along a dimension and its place, or NaN if there is one."""
    if not x.ndim:
        return x, jnp.zeros((), int)
    place = _ranked(x, (x.shape[dim] - 1) // 2, dim)
    missing = _missing(x)
    place = jnp.where(missing.any(dim, keepdims=True), missing.argmax(dim, keepdims=True), place)
    return _picked(x, place, dim, keepdim)


def _of_all(of_dim: Any) -> Any:
    def of_all(x: Any) -> Any:
        """The lower median of all elements; those that equal it share its gradient."""
        if not x.size:
            return jnp.asarray(jnp.nan, x.dtype)
        return _shared(lax.stop_gradient(of_dim(x.ravel(), 0)[0]), x)

    return of_all


operator("median.default")(_of_all(median_dim))
operator("nanmedian.default")(_of_all(nanmedian_dim))


@operator("kthvalue.default")
def kthvalue(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """The k-th smallest value along a dimension, counted from 1, and its place."""
    return _picked(x, _ranked(x, k - 1, dim), dim, keepdim) if x.ndim else (x, jnp.zeros((), int))


@operator("mode.default")
def mode(x: Any, dim: int = -1, keepdim: bool = False) -> Any:
    """The most frequent value along a dimension, of equally frequent ones the smallest, and its last place."""
    if not x.ndim:
        return x, jnp.zeros((), int)
    moved = lax.stop_gradient(jnp.moveaxis(x, dim, -1))
    same = moved[..., :, None] == moved[..., None, :]
    counts = same.sum(-1)
    smaller = (moved[..., None, :] < moved[..., :, None]).sum(-1)
    best = jnp.where(counts == counts.max(-1, keepdims=True), smaller, moved.shape[-1])
    last = moved.shape[-1] - 1 - jnp.flip(best, -1).argmin(-1, keepdims=True)
    return _picked(x, jnp.moveaxis(last, -1, dim), dim, keepdim)


def _running(further: Any) -> Any:
    """The running extreme and its place: the last of equal values, and NaN once there was one."""

    def scan(x: Any, dim: int) -> Any:
        if not x.ndim:
            return x, jnp.zeros((), int)

        def combine(left: Any, right: Any) -> Any:
            (one, at_one), (two, at_two) = left, right
            later = _missing(two) | (~_missing(one) & further(two, one))
            return jnp.where(later, two, one), jnp.where(later, at_two, at_one)

        places = lax.broadcasted_iota(jnp.int32, x.shape, dim % x.ndim)
        _, places = lax.associative_scan(combine, (lax.stop_gradient(x), places), axis=dim)
        return jnp.take_along_axis(x, places, dim), places

    return scan


operator("cummax.default")(_running(jnp.greater_equal))
operator("cummin.default")(_running(jnp.less_equal))
