"""Reductions, scans and sorting; medians, running extremes and modes; norms and normalisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.operators import Table

jax = import_jax()
jnp, lax = jax.numpy, jax.lax

_NAMED_ALIKE = """all.default|dim|dims any.default|dim|dims argmax argmin mean.default|dim prod.default|dim_int
    sum.default|dim_IntList"""


def axes_of(dim: Any) -> Any:
    """Torch's dimensions as axes of JAX: None stands for all of them, as Torch's empty list does."""
    return (tuple(dim) or None) if isinstance(dim, Sequence) else dim


def in_dtype(x: Any, dtype: Any) -> Any:
    """`x` cast to `dtype`, if it is given."""
    return x if dtype is None else x.astype(dtype)


def root(x: Any, degree: float = 2) -> Any:
    """A root of numbers that are not negative; as in Torch, the gradient of a norm or deviation is 0 at 0."""
    positive = x > 0
    safe = jnp.where(positive, x, 1)
    return jnp.where(positive, jnp.sqrt(safe) if degree == 2 else safe ** (1 / degree), x)


def _reduction(function: Callable[..., Any]) -> Callable[..., Any]:
    """A rule with Torch's arguments that reduces by a function of JAX with `axis` and `keepdims`."""
    return lambda x, dim=None, keepdim=False, dtype=None: function(
        in_dtype(x, dtype), axis=axes_of(dim), keepdims=keepdim
    )


def _picking(places: Callable[..., Any]) -> Callable[..., Any]:
    """A rule for the values at `places` [..., 1, ...] along a dimension, and these; the values get all the gradient."""

    def rule(x: Any, dim: int = -1, keepdim: bool = False) -> Any:
        if not x.ndim:
            return x, jnp.zeros((), int)
        place = places(x, dim)
        values = jnp.take_along_axis(x, place, dim)
        return (values, place) if keepdim else (values.squeeze(dim), place.squeeze(dim))

    return rule


def var(x: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Any:
    return jnp.var(x, axis=axes_of(dim), ddof=1 if correction is None else correction, keepdims=keepdim)


def std(x: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Any:
    return root(var(x, dim, correction, keepdim))


def _with_mean(spread: Callable[..., Any]) -> Callable[..., Any]:
    """A rule that returns the variance or standard deviation, as `spread` computes it, and the mean."""
    return lambda x, dim=None, correction=1, keepdim=False: (
        spread(x, dim, correction, keepdim),
        jnp.mean(x, axis=axes_of(dim), keepdims=keepdim),
    )


def _scan(function: Callable[..., Any]) -> Callable[..., Any]:
    """A rule for a scan, which counts in whole numbers of JAX's own size, unless another dtype is given."""

    def rule(x: Any, dim: int, dtype: Any = None) -> Any:
        whole = int if x.dtype == bool or jnp.issubdtype(x.dtype, jnp.integer) else x.dtype
        return function(jnp.atleast_1d(x), dim, dtype=dtype or whole).reshape(x.shape)

    return rule


def topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:  # noqa: A002
    moved = jnp.moveaxis(x, dim, -1)
    order = jnp.argsort(moved, axis=-1, stable=True, descending=largest)[..., :k]
    values = jnp.take_along_axis(moved, order, -1)
    return jnp.moveaxis(values, -1, dim), jnp.moveaxis(order, -1, dim)


def sort(x: Any, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> Any:
    order = jnp.argsort(x, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, dim), order


def _ranked(x: Any, rank: Any, dim: int) -> Any:
    """The place [..., 1, ...] of the element of this rank along a dimension; NaN ranks last."""
    order = jnp.argsort(lax.stop_gradient(x), axis=dim, stable=True)
    sizes = list(x.shape)
    sizes[dim] = 1
    return jnp.take_along_axis(order, jnp.broadcast_to(rank, sizes), dim)


def _nanmedian(x: Any, dim: int) -> Any:
    """The place of the lower median; NaN does not count."""
    count = (~jnp.isnan(x)).sum(dim, keepdims=True)
    return _ranked(x, jnp.maximum(count - 1, 0) // 2, dim)


def _median(x: Any, dim: int) -> Any:
    """The place of the lower median, or of a NaN if there is one."""
    place, missing = _ranked(x, (x.shape[dim] - 1) // 2, dim), jnp.isnan(x)
    return jnp.where(missing.any(dim, keepdims=True), missing.argmax(dim, keepdims=True), place)


def _shared_jvp(primals: Any, tangents: Any) -> Any:
    """The derivative rule of `_shared`: the tangent is the mean of those of the elements that equal the value."""
    value, x = primals
    same = (x == value) | (jnp.isnan(x) & jnp.isnan(value))
    return value, jnp.where(same, tangents[1], 0).sum() / same.sum()


_shared = jax.custom_jvp(lambda value, x: value)  # a value in an array: all elements that equal it share its gradient
_shared.defjvp(_shared_jvp)


def _of_all(places: Callable[..., Any]) -> Callable[..., Any]:
    """A rule for a median of all elements; those that equal it share its gradient."""

    def rule(x: Any) -> Any:
        if not x.size:
            return jnp.asarray(jnp.nan, x.dtype)
        return _shared(lax.stop_gradient(_picking(places)(x.ravel())[0]), x)

    return rule


def _mode(x: Any, dim: int) -> Any:
    """The last place of the most frequent value; among equally frequent values, of the smallest."""
    moved = lax.stop_gradient(jnp.moveaxis(x, dim, -1))
    same = moved[..., :, None] == moved[..., None, :]
    counts = same.sum(-1)
    smaller = (moved[..., None, :] < moved[..., :, None]).sum(-1)
    best = jnp.where(counts == counts.max(-1, keepdims=True), smaller, moved.shape[-1])
    last = moved.shape[-1] - 1 - jnp.flip(best, -1).argmin(-1, keepdims=True)
    return jnp.moveaxis(last, -1, dim)


def _running(further: Callable[..., Any]) -> Callable[..., Any]:
    """Return a scan for the running extreme and its place: the last of equal values, and NaN from the first NaN on."""

    def scan(x: Any, dim: int) -> Any:
        if not x.ndim:
            return x, jnp.zeros((), int)

        def combine(left: Any, right: Any) -> Any:
            (one, at_one), (two, at_two) = left, right
            later = jnp.isnan(two) | (~jnp.isnan(one) & further(two, one))
            return jnp.where(later, two, one), jnp.where(later, at_two, at_one)

        places = lax.broadcasted_iota(jnp.int32, x.shape, dim % x.ndim)
        _, places = lax.associative_scan(combine, (lax.stop_gradient(x), places), axis=dim)
        return jnp.take_along_axis(x, places, dim), places

    return scan


def scaled(x: Any, weight: Any, bias: Any) -> Any:
    """Return x * weight + bias; either may be None."""
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def by_channel(vector: Any, x: Any) -> Any:
    """A vector [C], or None, in a shape that broadcasts with channels [N, C, *space]."""
    return None if vector is None else vector.reshape(-1, *[1] * (x.ndim - 2))


def _standard(x: Any, axes: Any, eps: float) -> tuple[Any, Any, Any]:
    """`x` normalised to mean 0 and variance 1 over the axes, its mean, and the reciprocal of its deviation."""
    mean = x.mean(axes, keepdims=True)
    scale = lax.rsqrt(jnp.square(x - mean).mean(axes, keepdims=True) + eps)
    return (x - mean) * scale, mean, scale


def native_layer_norm(
    x: Any, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-05
) -> tuple[Any, Any, Any]:
    normal, mean, scale = _standard(x, tuple(range(-len(shape), 0)), eps)
    return scaled(normal, weight, bias), mean, scale


def rms_norm(x: Any, shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Any:
    eps = float(jnp.finfo(x.dtype).eps) if eps is None else eps
    square = jnp.square(x).mean(tuple(range(-len(shape), 0)), keepdims=True)
    return scaled(x * lax.rsqrt(square + eps), weight, None)


def native_group_norm(
    x: Any, weight: Any, bias: Any, n: int, channels: int, space: int, groups: int, eps: float
) -> tuple[Any, Any, Any]:
    normal, mean, scale = _standard(x.reshape(n, groups, -1), -1, eps)
    normal = scaled(normal.reshape(x.shape), by_channel(weight, x), by_channel(bias, x))
    return normal, mean[..., 0], scale[..., 0]


def batch_norm(x: Any, weight: Any, bias: Any, mean: Any, variance: Any, momentum: float, eps: float) -> Any:
    scale = lax.rsqrt(variance + eps)
    normal = (x - by_channel(mean, x)) * by_channel(scale, x)
    empty = jnp.zeros(0, x.dtype)
    return scaled(normal, by_channel(weight, x), by_channel(bias, x)), empty, empty


def batch_norm_of_batch(x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float) -> Any:
    normal, mean, scale = _standard(x, (0, *range(2, x.ndim)), eps)
    return scaled(normal, by_channel(weight, x), by_channel(bias, x)), mean.ravel(), scale.ravel()


def vector_norm(x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:  # noqa: A002
    """As in Torch, its gradient is 0 at 0."""
    x = in_dtype(x, dtype)
    axes, size = axes_of(dim), jnp.abs(x)
    if math.isinf(ord):
        return (size.max if ord > 0 else size.min)(axes, keepdims=keepdim)
    if ord == 0:
        return (x != 0).sum(axes, keepdims=keepdim)
    if ord == 1:
        return size.sum(axes, keepdims=keepdim)
    powers = jnp.square(x.real) + jnp.square(x.imag) if ord == 2 else size**ord  # without the root in `jnp.abs`
    return root(powers.sum(axes, keepdims=keepdim), ord)


TABLE: Table = {
    "var.correction": var,
    "std.correction": std,
    "topk": topk,
    "sort.default|stable": sort,
    "nanmedian.dim": _picking(_nanmedian),
    "median.dim": _picking(_median),
    "mode": _picking(_mode),
    **{names: _reduction(getattr(jnp, names.partition(".")[0])) for names in _NAMED_ALIKE.split()},
    "max amax": _reduction(jnp.max),
    "min amin": _reduction(jnp.min),
    "max.dim": _picking(partial(jnp.argmax, keepdims=True)),
    "min.dim": _picking(partial(jnp.argmin, keepdims=True)),
    "var_mean.correction": _with_mean(var),
    "std_mean.correction": _with_mean(std),
    "logsumexp": _reduction(jax.nn.logsumexp),
    "cumsum": _scan(jnp.cumsum),
    "cumprod": _scan(jnp.cumprod),
    "logcumsumexp": lambda x, dim: lax.cumlogsumexp(x, dim % x.ndim),
    "argsort.default|stable": lambda x, *arguments, **options: sort(x, *arguments, **options)[1],
    "median": _of_all(_median),
    "nanmedian": _of_all(_nanmedian),
    "kthvalue": lambda x, k, *arguments, **options: _picking(lambda x, dim: _ranked(x, k - 1, dim))(
        x, *arguments, **options
    ),  # k is counted from 1
    "cummax": _running(jnp.greater_equal),
    "cummin": _running(jnp.less_equal),
    "native_layer_norm": native_layer_norm,
    "rms_norm": rms_norm,
    "native_group_norm": native_group_norm,
    "group_norm": lambda x, groups, weight=None, bias=None, eps=1e-5, cudnn=True: native_group_norm(
        x, weight, bias, len(x), x.shape[1], math.prod(x.shape[2:]), groups, eps
    )[0],
    "_native_batch_norm_legit_no_training": batch_norm,
    "_native_batch_norm_legit.no_stats": batch_norm_of_batch,
    "linalg_vector_norm": vector_norm,
    "layer_norm": lambda x, shape, *arguments: native_layer_norm(x, shape, *arguments[:3])[0],
}
