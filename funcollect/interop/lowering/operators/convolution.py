"""Convolutions of one to three dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.registry import operator

jax = import_jax()
jnp, lax = jax.numpy, jax.lax

_LETTERS = "DHW"


@operator("convolution.default", weights=(1,))
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
    """A convolution [N, C, *space], or its transpose."""
    rank = x.ndim - 2
    many = [list(each) * (rank if len(each) == 1 else 1) for each in (stride, padding, dilation, output_padding)]
    stride, padding, dilation, output_padding = many
    if transposed:
        result = _transposed(x, weight, stride, padding, dilation, output_padding, groups)
    else:
        result = _channels_last(x, weight, stride, [(p, p) for p in padding], None, dilation, groups)
    return result if bias is None else result + bias.reshape(-1, *[1] * rank)


def _transposed(x: Any, weight: Any, stride: Any, padding: Any, dilation: Any, output_padding: Any, groups: int) -> Any:
    """A convolution over the input spread out by the stride, with the kernel [in, out/groups, *k] turned around."""
    kernel = weight.shape[2:]
    split = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    turned = jnp.flip(jnp.swapaxes(split, 1, 2), range(3, split.ndim)).reshape(-1, split.shape[1], *kernel)
    reach = [d * (k - 1) - p for d, k, p in zip(dilation, kernel, padding, strict=True)]
    pads = [(r, r + extra) for r, extra in zip(reach, output_padding, strict=True)]
    return _channels_last(x, turned, [1] * len(kernel), pads, stride, dilation, groups)


def _channels_last(x: Any, weight: Any, stride: Any, pads: Any, spread: Any, dilation: Any, groups: int) -> Any:
    """The convolution with channels last inside, for which XLA on the CPU has fast kernels."""
    space = _LETTERS[3 - (x.ndim - 2) :]
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
