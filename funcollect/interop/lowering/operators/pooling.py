"""Pooling of one to three dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.registry import operator

jax = import_jax()
jnp, lax = jax.numpy, jax.lax


def _each(given: Any, rank: int) -> list[int]:
    values = list(given) if isinstance(given, Sequence) else [given]
    return values * rank if len(values) == 1 else values


def _pads(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> tuple[int, int]:
    """Padding before and behind, such that as many windows fit as Torch has."""
    reach = dilation * (kernel - 1) + 1
    room = size + 2 * padding - reach
    windows = (-(-room // stride) if ceil else room // stride) + 1
    if ceil and (windows - 1) * stride >= size + padding:
        windows -= 1  # a window begins inside the input or the padding before it
    return padding, max(0, (windows - 1) * stride + reach - size - padding)  # JAX has no gradient of a cut


def _windows(x: Any, start: Any, function: Any, kernel: Any, stride: Any, pads: Any) -> Any:
    lead = x.ndim - len(kernel)
    ones = (1,) * lead
    return lax.reduce_window(
        x,
        start,
        function,
        (*ones, *kernel),
        (*ones, *stride),
        [(0, 0)] * lead + pads,
    )


def _max_pool(rank: int) -> Callable[..., Any]:
    def max_pool(
        x: Any, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> Any:
        """The largest of each window."""
        kernel, padding, dilation = _each(kernel, rank), _each(padding, rank), _each(dilation, rank)
        stride = _each(stride, rank) or kernel
        sizes = zip(x.shape[-rank:], kernel, stride, padding, dilation, strict=True)
        pads = [_pads(*size, ceil_mode) for size in sizes]
        low = np.array(-jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min, x.dtype)
        if max(dilation) > 1:  # of which JAX has no gradient
            return _dilated_max(x, low, kernel, stride, pads, dilation)
        return _windows(x, low, lax.max, kernel, stride, pads)

    return max_pool


def _dilated_max(x: Any, low: Any, kernel: Any, stride: Any, pads: Any, dilation: Any) -> Any:
    """The largest of what stands at each place of the windows; all the gradient goes to the first of equals."""
    lead = x.ndim - len(kernel)
    padded = jnp.pad(x, [(0, 0)] * lead + pads, constant_values=low)
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    ends = [size - r for size, r in zip(padded.shape[lead:], reach, strict=True)]
    places = []
    for offset in np.ndindex(*kernel):
        starts = [o * d for o, d in zip(offset, dilation, strict=True)]
        ranges = zip(starts, ends, stride, strict=True)
        places.append(padded[(..., *(slice(start, start + end, step) for start, end, step in ranges))])
    stacked = jnp.stack(places)
    return jnp.take_along_axis(stacked, stacked.argmax(0, keepdims=True), 0)[0]


def _avg_pool(rank: int) -> Callable[..., Any]:
    def avg_pool(
        x: Any,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        """The mean of each window."""
        kernel, padding = _each(kernel, rank), _each(padding, rank)
        stride = _each(stride, rank) or kernel
        pads = [_pads(*size, 1, ceil_mode) for size in zip(x.shape[-rank:], kernel, stride, padding, strict=True)]

        def total(y: Any, pads: Any) -> Any:
            return _windows(y, np.zeros((), y.dtype), lax.add, kernel, stride, pads)

        summed = total(x, pads)
        if divisor_override or (count_include_pad and not any(padding) and not ceil_mode):
            return summed / (divisor_override or math.prod(kernel))
        counted = jnp.ones(x.shape[-rank:], x.dtype)  # padding counts or not, what is beyond it never does
        if count_include_pad:
            counted = jnp.pad(counted, [(p, p) for p in padding], constant_values=1)
            pads = [(0, max(0, behind - p)) for (_, behind), p in zip(pads, padding, strict=True)]
        return summed / total(counted, pads)

    return avg_pool


def _adaptive(function: str, rank: int) -> Callable[..., Any]:
    def adaptive_pool(x: Any, output_size: Any) -> Any:
        """As many windows as are asked for, of nearly equal size."""
        for axis, wanted in zip(range(x.ndim - rank, x.ndim), _each(output_size, rank), strict=True):
            x = _adapted(x, axis, wanted, getattr(jnp, function))
        return x

    return adaptive_pool


def _adapted(x: Any, axis: int, wanted: int | None, function: Any) -> Any:
    size = x.shape[axis]
    if wanted is None or wanted == size:
        return x
    if size % wanted == 0:
        return function(x.reshape(*x.shape[:axis], wanted, size // wanted, *x.shape[axis + 1 :]), axis + 1)
    starts = [i * size // wanted for i in range(wanted)]
    ends = [-(-(i + 1) * size // wanted) for i in range(wanted)]
    parts = [function(lax.slice_in_dim(x, a, b, axis=axis), axis) for a, b in zip(starts, ends, strict=True)]
    return jnp.stack(parts, axis)


def _with_indices(pool: Callable[..., Any]) -> Callable[..., Any]:
    """For an operator that answers with where the values stood, too: these are not worked out."""
    return lambda *args, **options: (pool(*args, **options), None)


def _register() -> None:
    for rank in (1, 2, 3):
        operator(f"max_pool{rank}d.default")(_max_pool(rank))
        operator(f"avg_pool{rank}d.default")(_avg_pool(rank))
        operator(f"adaptive_avg_pool{rank}d.default")(_adaptive("mean", rank))
        operator(f"adaptive_max_pool{rank}d.default")(_with_indices(_adaptive("max", rank)))
    for rank in (2, 3):
        operator(f"max_pool{rank}d_with_indices.default")(_with_indices(_max_pool(rank)))


_register()
