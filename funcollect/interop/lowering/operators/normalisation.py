"""Batch, layer, group and RMS normalisation, and norms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.operators import Table
from funcollect.interop.lowering.operators.reduction import axes_of, in_dtype, root

jax = import_jax()
jnp, lax = jax.numpy, jax.lax


def scaled(x: Any, weight: Any, bias: Any) -> Any:
    """Return x * weight + bias; either may be None."""
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def by_channel(vector: Any, x: Any) -> Any:
    """A vector [C], or None, in a shape that broadcasts with channels [N, C, *space]."""
    return None if vector is None else vector.reshape(-1, *[1] * (x.ndim - 2))


def _standard(x: Any, axes: Any, eps: float) -> tuple[Any, Any, Any]:
    """`x` with mean 0 and variance 1 over the axes, its mean, and one over its deviation."""
    mean = x.mean(axes, keepdims=True)
    scale = lax.rsqrt(jnp.square(x - mean).mean(axes, keepdims=True) + eps)
    return (x - mean) * scale, mean, scale


def native_layer_norm(
    x: Any, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
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
