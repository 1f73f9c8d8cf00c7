"""Reductions, scans and sorting; medians, running extremes and modes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.operators import Table, operator

jax = import_jax()
jnp, lax = jax.numpy, jax.lax

Operation = Callable[..., Any]


def axes_of(dim: Any) -> Any:
    """Torch's dimensions as axes of JAX: None stands for all of them, as Torch's empty list does."""
    return (tuple(dim) or None) if isinstance(dim, Sequence) else dim


def in_dtype(x: Any, dtype: Any) -> Any:
    """`x` in the dtype of a call, if there is one."""
    return x if dtype is None else x.astype(dtype)


def root(x: Any, degree: float = 2) -> Any:
    """A root of numbers that are not negative; as in Torch, the gradient of a norm or deviation is 0 at 0."""
    positive = x > 0
    safe = jnp.where(positive, x, 1)
    return jnp.where(positive, jnp.sqrt(safe) if degree == 2 else safe ** (1 / degree), x)


def _reduction(function: Operation) -> Operation:
    """A rule with Torch's arguments that reduces by a function of JAX with `axis` and `keepdims`."""
    return lambda x, dim=None, keepdim=False, dtype=None: function(
        in_dtype(x, dtype), axis=axes_of(dim), keepdims=keepdim
    )


def _with_place(places: Operation) -> Operation:
    """A rule for the extreme value along a dimension and its first place, which gets all the gradient."""
    return lambda x, dim, keepdim=False: (
        _picked(x, places(x, axis=dim, keepdims=True), dim, keepdim) if x.ndim else _only(x)
    )


def _picked(x: Any, place: Any, dim: int, keepdim: bool) -> tuple[Any, Any]:
    """The values at one place [..., 1, ...] along a dimension, and the places."""
    values = jnp.take_along_axis(x, place, dim)
    return (values, place) if keepdim else (values.squeeze(dim), place.squeeze(dim))


def _only(x: Any) -> tuple[Any, Any]:
    """The value of an array without dimensions, and its place, 0."""
    return x, jnp.zeros((), int)


@operator("var.correction")
def var(x: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Any:
    """The variance, divided by the count less the correction."""
    return jnp.var(x, axis=axes_of(dim), ddof=1 if correction is None else correction, keepdims=keepdim)


@operator("std.correction")
def std(x: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Any:
    """The root of the variance."""
    return root(var(x, dim, correction, keepdim))


def _with_mean(spread: Operation) -> Operation:
    """A rule that returns the variance or standard deviation, as `spread` computes it, and the mean."""
    return lambda x, dim=None, correction=1, keepdim=False: (
        spread(x, dim, correction, keepdim),
        jnp.mean(x, axis=axes_of(dim), keepdims=keepdim),
    )


def _scan(function: Operation) -> Operation:
    """A rule for a cumulative sum or product, also of arrays without dimensions."""
    return lambda x, dim, dtype=None: function(jnp.atleast_1d(x), dim, dtype=dtype).reshape(x.shape)


@operator("topk")
def topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:  # noqa: A002
    """The k largest or smallest, and their places."""
    moved = jnp.moveaxis(x, dim, -1)
    order = jnp.argsort(moved, axis=-1, stable=True, descending=largest)[..., :k]
    values = jnp.take_along_axis(moved, order, -1)
    return jnp.moveaxis(values, -1, dim), jnp.moveaxis(order, -1, dim)


@operator("sort.default|stable")
def sort(x: Any, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> Any:
    """Sorted values and their places; equal values stay in order."""
    order = jnp.argsort(x, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, dim), order


def _missing(x: Any) -> Any:
    """Where a value is NaN; of integers nowhere."""
    return x != x


def _ranked(x: Any, rank: Any, dim: int) -> Any:
    """The place [..., 1, ...] of the element of this rank along a dimension; NaN ranks last."""
    order = jnp.argsort(lax.stop_gradient(x), axis=dim, stable=True)
    sizes = list(x.shape)
    sizes[dim] = 1
    return jnp.take_along_axis(order, jnp.broadcast_to(rank, sizes), dim)


@operator("nanmedian.dim")
def nanmedian_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    """The lower median along a dimension and its place; NaN does not count."""
    if not x.ndim:
        return _only(x)
    count = (~_missing(x)).sum(dim, keepdims=True)
    return _picked(x, _ranked(x, jnp.maximum(count - 1, 0) // 2, dim), dim, keepdim)


@operator("median.dim")
def median_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    """The lower median along a dimension and its place, or NaN if there is one."""
    if not x.ndim:
        return _only(x)
    place = _ranked(x, (x.shape[dim] - 1) // 2, dim)
    missing = _missing(x)
    place = jnp.where(missing.any(dim, keepdims=True), missing.argmax(dim, keepdims=True), place)
    return _picked(x, place, dim, keepdim)


def _shared_jvp(primals: Any, tangents: Any) -> Any:
    """The derivative rule of `_shared`: the tangent is the mean of those of the elements that equal the value."""
    value, x = primals
    same = (x == value) | (_missing(x) & _missing(value))
    return value, jnp.where(same, tangents[1], 0).sum() / same.sum()


_shared = jax.custom_jvp(lambda value, x: value)  # a value of an array: all elements that equal it share its gradient
_shared.defjvp(_shared_jvp)


def _of_all(of_dim: Operation) -> Operation:
    """A rule for the lower median of all elements; those that equal it share its gradient."""

    def of_all(x: Any) -> Any:
        if not x.size:
            return jnp.asarray(jnp.nan, x.dtype)
        return _shared(lax.stop_gradient(of_dim(x.ravel(), 0)[0]), x)

    return of_all


@operator("mode")
def mode(x: Any, dim: int = -1, keepdim: bool = False) -> Any:
    """The most frequent value along a dimension, of equally frequent ones the smallest, and its last place."""
    if not x.ndim:
        return _only(x)
    moved = lax.stop_gradient(jnp.moveaxis(x, dim, -1))
    same = moved[..., :, None] == moved[..., None, :]
    counts = same.sum(-1)
    smaller = (moved[..., None, :] < moved[..., :, None]).sum(-1)
    best = jnp.where(counts == counts.max(-1, keepdims=True), smaller, moved.shape[-1])
    last = moved.shape[-1] - 1 - jnp.flip(best, -1).argmin(-1, keepdims=True)
    return _picked(x, jnp.moveaxis(last, -1, dim), dim, keepdim)


def _running(further: Operation) -> Operation:
    """Return a scan for the running extreme and its place: the last of equal values, and NaN once there was one."""

    def scan(x: Any, dim: int) -> Any:
        if not x.ndim:
            return _only(x)

        def combine(left: Any, right: Any) -> Any:
            (one, at_one), (two, at_two) = left, right
            later = _missing(two) | (~_missing(one) & further(two, one))
            return jnp.where(later, two, one), jnp.where(later, at_two, at_one)

        places = lax.broadcasted_iota(jnp.int32, x.shape, dim % x.ndim)
        _, places = lax.associative_scan(combine, (lax.stop_gradient(x), places), axis=dim)
        return jnp.take_along_axis(x, places, dim), places

    return scan


TABLE: Table = {
    "sum.default|dim_IntList": _reduction(jnp.sum),
    "mean.default|dim": _reduction(jnp.mean),
    "prod.default|dim_int": _reduction(jnp.prod),
    "max amax": _reduction(jnp.max),
    "min amin": _reduction(jnp.min),
    "any.default|dim|dims": _reduction(jnp.any),
    "all.default|dim|dims": _reduction(jnp.all),
    "max.dim": _with_place(jnp.argmax),
    "min.dim": _with_place(jnp.argmin),
    "argmax": _reduction(jnp.argmax),
    "argmin": _reduction(jnp.argmin),
    "var_mean.correction": _with_mean(var),
    "std_mean.correction": _with_mean(std),
    "logsumexp": _reduction(jax.nn.logsumexp),
    "cumsum": _scan(jnp.cumsum),
    "cumprod": _scan(jnp.cumprod),
    "logcumsumexp": lambda x, dim: lax.cumlogsumexp(x, dim % x.ndim),
    "argsort.default|stable": lambda x, *arguments, **options: sort(x, *arguments, **options)[1],
    "median": _of_all(median_dim),
    "nanmedian": _of_all(nanmedian_dim),
    "kthvalue": lambda x, k, dim=-1, keepdim=False: (
        _picked(x, _ranked(x, k - 1, dim), dim, keepdim) if x.ndim else _only(x)  # k is counted from 1
    ),
    "cummax": _running(jnp.greater_equal),
    "cummin": _running(jnp.less_equal),
}
