"""Convolutions and pooling of one to three dimensions, recurrent cells and layers, and images sampled at points."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.operators import Rule, Table
from funcollect.interop.lowering.operators.linear import linear
from funcollect.interop.lowering.operators.reduction import by_channel, scaled

jax = import_jax()
jnp, lax, nn = jax.numpy, jax.lax, jax.nn


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
    """One number for each dimension, from a number for all, a sequence of one or of `rank` numbers, or an empty one."""
    values = list(given) if isinstance(given, Sequence) else [given]
    return values * rank if len(values) == 1 else values


def _pads(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> tuple[int, int]:
    """The padding before and after, so that as many windows fit as in Torch."""
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
    counted = jnp.ones(x.shape[-rank:], x.dtype)  # padding counts if asked for; positions beyond it never do
    if count_include_pad:
        counted = jnp.pad(counted, [(p, p) for p in padding], constant_values=1)
        pads = [(0, max(0, behind - p)) for (_, behind), p in zip(pads, padding, strict=True)]
    return summed / total(counted, pads)


def _adaptive_pool(function: Callable[..., Any], rank: int, x: Any, output_size: Any) -> Any:
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


def _with_indices(pool: Callable[..., Any]) -> Callable[..., Any]:
    """A rule for an operator that also returns the indices of the values, which are not computed."""
    return lambda *arguments: (pool(*arguments), None)


# A cell returns the next state for the input's gates, the hidden state's gates, and the state.


def _gru(from_input: Any, from_hidden: Any, hidden: Any) -> Any:
    reset_in, update_in, new_in = jnp.split(from_input, 3, -1)
    reset_hid, update_hid, new_hid = jnp.split(from_hidden, 3, -1)
    update = nn.sigmoid(update_in + update_hid)
    new = jnp.tanh(new_in + nn.sigmoid(reset_in + reset_hid) * new_hid)
    return new + update * (hidden - new)


def _lstm(from_input: Any, from_hidden: Any, state: Any) -> Any:
    entry, forget, new, output = jnp.split(from_input + from_hidden, 4, -1)
    cell = nn.sigmoid(forget) * state[1] + nn.sigmoid(entry) * jnp.tanh(new)
    return nn.sigmoid(output) * jnp.tanh(cell), cell


def _elman(activation: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda from_input, from_hidden, hidden: activation(from_input + from_hidden)


def _hidden(state: Any) -> Any:
    return state[0] if isinstance(state, tuple) else state


def _step(
    cell: Callable[..., Any], x: Any, state: Any, w_in: Any, w_hid: Any, b_in: Any = None, b_hid: Any = None
) -> Any:
    """The state after one step of a cell, from an input [B, in] and a state [B, hidden], of an LSTM a pair of these."""
    state = tuple(state) if isinstance(state, list) else state
    return cell(linear(x, w_in, b_in), linear(_hidden(state), w_hid, b_hid), state)


def _run(cell: Callable[..., Any], x: Any, state: Any, weights: list[Any], reverse: bool) -> tuple[Any, Any]:
    """One layer in one direction [T, B, in] -> [T, B, hidden], and the last state."""
    w_in, w_hid, b_in, b_hid = weights[:4]
    from_input = linear(x, w_in, b_in)  # one product for all steps

    def step(state: Any, gates: Any) -> tuple[Any, Any]:
        state = cell(gates, linear(_hidden(state), w_hid, b_hid), state)
        if len(weights) > 4:  # an LSTM with a projection
            state = (linear(state[0], weights[4]), *state[1:])
        return state, _hidden(state)

    if from_input.shape[0] == 1:
        state, output = step(state, from_input[0])
        return output[None], state
    state, outputs = lax.scan(step, state, from_input, reverse=reverse)
    return outputs, state


def _layers(
    cell: Callable[..., Any],
    x: Any,
    states: Any,
    params: list[Any],
    biased: bool,
    layers: int,
    dropout: float,
    train: bool,
    both_ways: bool,
    batch_first: bool,
) -> tuple[Any, ...]:
    """Layers over time. Returns the outputs, and the last states stacked over layers and directions."""
    if train and dropout and layers > 1:
        raise ValueError("it drops activations between its layers in training mode: call module.eval() first")
    swapped = batch_first and x.ndim == 3
    states = tuple(states) if isinstance(states, list) else states  # of an LSTM
    x = jnp.swapaxes(x, 0, 1) if swapped else x
    directions = 1 + both_ways
    size = len(params) // (layers * directions)
    last = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            run = layer * directions + direction
            given = params[run * size : (run + 1) * size]
            weights = given if biased else [*given[:2], None, None, *given[2:]]
            state = jax.tree.map(lambda each, run=run: each[run], states)
            output, state = _run(cell, x, state, weights, reverse=bool(direction))
            outputs.append(output)
            last.append(state)
        x = jnp.concatenate(outputs, -1)
    x = jnp.swapaxes(x, 0, 1) if swapped else x
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *last)
    return (x, *stacked) if isinstance(stacked, tuple) else (x, stacked)


# Taps are, along one axis, the indices of pixels [taps, *out] and their weights [taps, *out].
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2
_NEAREST = 1
_CUBIC = -0.75  # the free parameter of the cubic kernel, as Torch has it


def _clipped(at: Any, size: int) -> Any:
    """Clip a position to the image. The gradient is 0 on the border and beyond, and NaN becomes 0."""
    inside = (at > 0) & (at < size - 1)
    return jnp.where(inside, at, jax.lax.stop_gradient(jnp.where(at > 0, jnp.minimum(at, size - 1.0), 0.0)))


def _reflected(at: Any, size: int, align_corners: bool) -> Any:
    """Reflect a position at the borders until it lies in the image."""
    low, span = (0.0, size - 1.0) if align_corners else (-0.5, float(size))
    if not span:
        return jnp.zeros_like(at)
    away = jnp.abs(at - low)
    flips = jnp.floor(away / span)
    rest = away - flips * span
    return _clipped(jnp.where(flips % 2 == 0, rest, span - rest) + low, size)


def _nearest(at: Any, size: int, pad: Callable[[Any, int], Any]) -> tuple[Any, Any]:
    place = jnp.round(pad(at, size))
    return place[None], jnp.ones_like(place)[None]


def _linear(at: Any, size: int, pad: Callable[[Any, int], Any]) -> tuple[Any, Any]:
    at = pad(at, size)
    floor = jnp.floor(at)
    return jnp.stack([floor, floor + 1]), jnp.stack([floor + 1 - at, at - floor])


def _cubic(at: Any, size: int, pad: Callable[[Any, int], Any]) -> tuple[Any, Any]:
    """The four taps of cubic interpolation at the points `at` [*out]; padding moves the pixels, but not the points."""
    floor = jnp.floor(at)
    t, a = at - floor, _CUBIC

    def near(x: Any) -> Any:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Any) -> Any:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    places = jnp.stack([pad(floor + offset, size) for offset in (-1, 0, 1, 2)])
    return places, jnp.stack([far(t + 1), near(t), near(1 - t), far(2 - t)])


def _weighed(image: Any, taps: list[tuple[Any, Any]]) -> Any:
    """The weighted sum [C, *out] of the pixels of one image [C, *in] over all combinations of its axes' taps."""
    rank, total, inside = len(taps), 1.0, True
    indices = []
    for axis, (places, weights) in enumerate(taps):
        apart = (len(places), *[1] * (rank - 1 - axis), *places.shape[1:])
        here = ((places >= 0) & (places <= image.shape[1 + axis] - 1)).reshape(apart)
        indices.append(jnp.where(here, places.reshape(apart), 0).astype(jnp.int32))
        total, inside = total * weights.reshape(apart), inside & here
    pixels = image[(slice(None), *indices)]  # [C, *taps, *out]
    return jnp.where(inside, pixels * total, 0).sum(range(1, rank + 1))


def grid_sampler(x: Any, grid: Any, interpolation: int, padding: int, align_corners: bool) -> Any:
    taps = (_linear, _nearest, _cubic)[interpolation]

    def pad(at: Any, size: int) -> Any:
        if padding == _BORDER:
            return _clipped(at, size)
        return _reflected(at, size, align_corners) if padding == _REFLECTION else at

    def one(image: Any, grid: Any) -> Any:
        axes = list(enumerate(image.shape[1:], start=1))
        places = []  # in pixels: -1 and 1 are the centres of the outermost ones, or their outer edges
        for axis, size in axes:
            at = grid[..., -axis] + 1
            places.append((at / 2 * (size - 1) if align_corners else (at * size - 1) / 2, size))
        sampled = _weighed(image, [taps(at, size, pad) for at, size in places])
        known = jnp.isfinite(grid).all(-1) | (padding != _ZEROS) | (interpolation == _NEAREST)
        return jnp.where(known, sampled, jnp.nan)

    return jax.vmap(one)(x, grid)


_CELLS = {"gru": _gru, "lstm": _lstm, "rnn_tanh": _elman(jnp.tanh), "rnn_relu": _elman(nn.relu)}
TABLE: Table = {
    "convolution": Rule(convolution, weights=(1,)),
    "grid_sampler_2d grid_sampler_3d": grid_sampler,
    **{f"{name}.input": Rule(partial(_layers, cell), weights=(2,)) for name, cell in _CELLS.items()},
    **{f"{name}_cell": Rule(partial(_step, cell), weights=(2, 3)) for name, cell in _CELLS.items()},
}
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
