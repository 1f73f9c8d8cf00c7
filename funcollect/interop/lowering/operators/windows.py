"""Convolutions and pooling of one to three dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.operators import Rule, Table
from funcollect.interop.lowering.operators.normalisation import by_channel, scaled

jax = import_jax()
jnp, lax = jax.numpy, jax.lax

Operation = Callable[..., Any]


def convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    rank = x.ndim - 2
    stride, padding, dilation = _each(stride, rank), _each(padding, rank), _each(dilation, rank)
    if transposed:
        result = _transposed(x, weight, stride, padding, dilation, _each(output_padding, rank), groups)
    else:
        result = _channels_last(x, weight, stride, [(p, p) for p in padding], None, dilation, groups)
    return scaled(result, None, by_channel(bias, x))


def _transposed(x: Any, weight: Any, stride: Any, padding: Any, dilation: Any, output_padding: Any, groups: int) -> Any:
    """A convolution over the input, spread out by the stride, with the kernel [in, out/groups, *k] flipped."""
    kernel = weight.shape[2:]
    split = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    turned = jnp.flip(jnp.swapaxes(split, 1, 2), range(3, split.ndim)).reshape(-1, split.shape[1], *kernel)
    reach = [d * (k - 1) - p for d, k, p in zip(dilation, kernel, padding, strict=True)]
    pads = [(r, r + extra) for r, extra in zip(reach, output_padding, strict=True)]
    return _channels_last(x, turned, [1] * len(kernel), pads, stride, dilation, groups)


def _channels_last(x: Any, weight: Any, stride: Any, pads: Any, spread: Any, dilation: Any, groups: int) -> Any:
    """A convolution that is computed with channels last, for which XLA on the CPU has fast kernels."""
    space = "DHW"[5 - x.ndim :]
    last, kernel = (0, *range(2, x.ndim), 1), (*range(2, x.ndim), 1, 0)
    result = lax.conv_general_dilated(
        jnp.transpose(x, last),
        jnp.transpose(weight, kernel),
        stride,
        pads,
        lhs_dilation=spread,
        rhs_dilation=dilation,
        dimension_numbers=(f"N{space}C", f"{space}IO", f"N{space}C"),
        feature_group_count=groups,
    )
    return jnp.moveaxis(result, -1, 1)


def _each(given: Any, rank: int) -> list[int]:
    """One number for each dimension, from one for all, one each, or none at all."""
    values = list(given) if isinstance(given, Sequence) else [given]
    return values * rank if len(values) == 1 else values


def _pads(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> tuple[int, int]:
    """The padding before and behind, such that as many windows fit as Torch has."""
    reach = dilation * (kernel - 1) + 1
    room = size + 2 * padding - reach
    windows = (-(-room // stride) if ceil else room // stride) + 1
    if ceil and (windows - 1) * stride >= size + padding:
        windows -= 1  # a window begins inside the input or the padding before it
    return padding, max(0, (windows - 1) * stride + reach - size - padding)  # JAX has no gradient of a cut


def _windows(x: Any, start: Any, function: Any, kernel: Any, stride: Any, pads: Any) -> Any:
    """Reduce each window over the last axes [..., *space] by a function of two numbers, from `start` on."""
    lead = x.ndim - len(kernel)
    ones = [1] * lead
    return lax.reduce_window(x, start, function, [*ones, *kernel], [*ones, *stride], [(0, 0)] * lead + pads)


def _max_pool(
    rank: int, x: Any, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Any:
    kernel, padding, dilation = _each(kernel, rank), _each(padding, rank), _each(dilation, rank)
    stride = _each(stride, rank) or kernel
    sizes = zip(x.shape[-rank:], kernel, stride, padding, dilation, strict=True)
    pads = [_pads(*size, ceil_mode) for size in sizes]
    low = np.array(-jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min, x.dtype)
    if max(dilation) > 1:  # JAX has no gradient of dilated windows
        return _dilated_max(x, low, kernel, stride, pads, dilation)
    return _windows(x, low, lax.max, kernel, stride, pads)


def _dilated_max(x: Any, low: Any, kernel: Any, stride: Any, pads: Any, dilation: Any) -> Any:
    """The largest element of each dilated window; all the gradient goes to the first of equal ones."""
    lead = x.ndim - len(kernel)
    padded = jnp.pad(x, [(0, 0)] * lead + pads, constant_values=low)
    ends = [size - d * (k - 1) for size, k, d in zip(padded.shape[lead:], kernel, dilation, strict=True)]
    places = []
    for offset in np.ndindex(*kernel):
        ranges = zip(offset, dilation, ends, stride, strict=True)
        places.append(padded[(..., *(slice(at * d, at * d + end, step) for at, d, end, step in ranges))])
    stacked = jnp.stack(places)
    return jnp.take_along_axis(stacked, stacked.argmax(0, keepdims=True), 0)[0]


def _avg_pool(
    rank: int,
    x: Any,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    kernel, padding = _each(kernel, rank), _each(padding, rank)
    stride = _each(stride, rank) or kernel
    pads = [_pads(*size, 1, ceil_mode) for size in zip(x.shape[-rank:], kernel, stride, padding, strict=True)]

    def total(y: Any, pads: Any) -> Any:
        return _windows(y, np.zeros((), y.dtype), lax.add, kernel, stride, pads)

    summed = total(x, pads)
    if divisor_override or (count_include_pad and not any(padding) and not ceil_mode):
        return summed / (divisor_override or math.prod(kernel))
    counted = jnp.ones(x.shape[-rank:], x.dtype)  # padding counts if asked for; what lies beyond it never does
    if count_include_pad:
        counted = jnp.pad(counted, [(p, p) for p in padding], constant_values=1)
        pads = [(0, max(0, behind - p)) for (_, behind), p in zip(pads, padding, strict=True)]
    return summed / total(counted, pads)


def _adaptive_pool(function: Operation, rank: int, x: Any, output_size: Any) -> Any:
    """`x` [..., *space] reduced by `function` (mean or max) over `output_size` windows of nearly equal size."""
    for axis, wanted in zip(range(x.ndim - rank, x.ndim), _each(output_size, rank), strict=True):
        size = x.shape[axis]
        if wanted is None or wanted == size:
            continue
        if size % wanted == 0:
            x = function(x.reshape(*x.shape[:axis], wanted, size // wanted, *x.shape[axis + 1 :]), axis + 1)
        else:
            ranges = [(i * size // wanted, -(-(i + 1) * size // wanted)) for i in range(wanted)]
            parts = [function(lax.slice_in_dim(x, start, end, axis=axis), axis) for start, end in ranges]
            x = jnp.stack(parts, axis)
    return x


def _with_indices(pool: Operation) -> Operation:
    """Return a rule for an operator that also returns the places of the values: they are not computed."""
    return lambda *arguments: (pool(*arguments), None)


TABLE: Table = {"convolution": Rule(convolution, weights=(1,))}
for _rank in (1, 2, 3):
    _largest = partial(_max_pool, _rank)
    TABLE |= {
        f"max_pool{_rank}d": _largest,
        f"avg_pool{_rank}d": partial(_avg_pool, _rank),
        f"adaptive_avg_pool{_rank}d": partial(_adaptive_pool, jnp.mean, _rank),
        f"adaptive_max_pool{_rank}d": _with_indices(partial(_adaptive_pool, jnp.max, _rank)),
    }
    if _rank > 1:
        TABLE[f"max_pool{_rank}d_with_indices"] = _with_indices(_largest)
