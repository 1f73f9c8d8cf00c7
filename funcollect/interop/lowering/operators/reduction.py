"""Reductions, scans and sorting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.registry import operator, register_as

jax = import_jax()
jnp, lax = jax.numpy, jax.lax

_SIMPLE = {
    "sum": (jnp.sum, ("default", "dim_IntList")),
    "mean": (jnp.mean, ("default", "dim")),
    "prod": (jnp.prod, ("default", "dim_int")),
    "amax": (jnp.max, ("default",)),
    "amin": (jnp.min, ("default",)),
    "max": (jnp.max, ("default",)),
    "min": (jnp.min, ("default",)),
    "any": (jnp.any, ("default", "dim", "dims")),
    "all": (jnp.all, ("default", "dim", "dims")),
}
_WITH_PLACE = {"max": (jnp.max, jnp.argmax), "min": (jnp.min, jnp.argmin)}


def _axes(dim: Any) -> Any:
    """None for all axes; Torch has an empty list for it, too."""
    return (tuple(dim) or None) if isinstance(dim, Sequence) else dim


def _reduction(function: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
        return function(x if dtype is None else x.astype(dtype), axis=_axes(dim), keepdims=keepdim)

    return reduce


def _with_place(places: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(x: Any, dim: int, keepdim: bool = False) -> Any:
        """The extreme value and its first place; all the gradient goes there."""
        if x.ndim == 0:
            return x, jnp.zeros((), int)
        found = places(x, axis=dim, keepdims=True)
        values = jnp.take_along_axis(x, found, dim)
        return (values, found) if keepdim else (values.squeeze(dim), found.squeeze(dim))

    return reduce


def _place(function: Callable[..., Any]) -> Callable[..., Any]:
    def place(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        return function(x, axis=dim, keepdims=keepdim)

    return place


def _register() -> None:
    for name, (function, kinds) in _SIMPLE.items():
        for kind in kinds:
            register_as(f"{name}.{kind}", _reduction(function), __name__)
    for name, (_, places) in _WITH_PLACE.items():
        register_as(f"{name}.dim", _with_place(places), __name__)
        register_as(f"arg{name}.default", _place(places), __name__)


_register()


@operator("var.correction")
def var(x: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Any:
    """The variance, divided by the count less the correction."""
    return jnp.var(x, axis=_axes(dim), ddof=1 if correction is None else correction, keepdims=keepdim)


@operator("std.correction")
def std(x: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Any:
    """The root of the variance; as in Torch, its gradient is 0 at 0."""
    variance = var(x, dim, correction, keepdim)
    positive = variance > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, variance, 1)), variance)


@operator("var_mean.correction")
def var_mean(x: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Any:
    """The variance and the mean."""
    return var(x, dim, correction, keepdim), jnp.mean(x, axis=_axes(dim), keepdims=keepdim)


@operator("std_mean.correction")
def std_mean(x: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Any:
    """The root of the variance, and the mean."""
    return std(x, dim, correction, keepdim), jnp.mean(x, axis=_axes(dim), keepdims=keepdim)


@operator("logsumexp.default")
def logsumexp(x: Any, dim: Any, keepdim: bool = False) -> Any:
    """The logarithm of the sum of exponentials."""
    return jax.nn.logsumexp(x, axis=_axes(dim), keepdims=keepdim)


@operator("cumsum.default")
def cumsum(x: Any, dim: int, dtype: Any = None) -> Any:
    """Sums up to each place."""
    return jnp.cumsum(jnp.atleast_1d(x), dim, dtype=dtype).reshape(x.shape)


@operator("cumprod.default")
def cumprod(x: Any, dim: int, dtype: Any = None) -> Any:
    """Products up to each place."""
    return jnp.cumprod(jnp.atleast_1d(x), dim, dtype=dtype).reshape(x.shape)


@operator("logcumsumexp.default")
def logcumsumexp(x: Any, dim: int) -> Any:
    """Logarithms of the sums of exponentials up to each place."""
    return lax.cumlogsumexp(x, dim % x.ndim)


@operator("topk.default")
def topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:  # noqa: A002
    """The k largest or smallest, and their places."""
    moved = jnp.moveaxis(x, dim, -1)
    order = jnp.argsort(moved, axis=-1, stable=True, descending=largest)[..., :k]
    values = jnp.take_along_axis(moved, order, -1)
    return jnp.moveaxis(values, -1, dim), jnp.moveaxis(order, -1, dim)


@operator("sort.default")
def sort(x: Any, dim: int = -1, descending: bool = False) -> Any:
    """Sorted, and the places; equal values stay in order."""
    order = jnp.argsort(x, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, dim), order


@operator("sort.stable")
def sort_stable(x: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """Sorted, and the places."""
    return sort(x, dim, descending)


@operator("argsort.default")
def argsort(x: Any, dim: int = -1, descending: bool = False) -> Any:
    """The places in order of the values."""
    return sort(x, dim, descending)[1]


@operator("argsort.stable")
def argsort_stable(x: Any, stable: bool, dim: int = -1, descending: bool = False) -> Any:
    """The places in order of the values."""
    return sort(x, dim, descending)[1]
