"""Batch, layer, group and RMS normalisation, and norms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.registry import operator

jax = import_jax()
jnp, lax = jax.numpy, jax.lax


def _standard(x: Any, axes: Any, eps: float) -> tuple[Any, Any, Any]:
    """With mean 0 and variance 1 over the axes; the mean; one over the deviation."""
    mean = x.mean(axes, keepdims=True)
    scale = lax.rsqrt(jnp.square(x - mean).mean(axes, keepdims=True) + eps)
    return (x - mean) * scale, mean, scale


def _scaled(x: Any, weight: Any, bias: Any) -> Any:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _by_channel(vector: Any, x: Any) -> Any:
    return None if vector is None else vector.reshape(-1, *[1] * (x.ndim - 2))


@operator("native_layer_norm.default")
def native_layer_norm(x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    """Over the last axes; with the mean, and one over the deviation."""
    normal, mean, scale = _standard(x, tuple(range(-len(shape), 0)), eps)
    return _scaled(normal, weight, bias), mean, scale


@operator("layer_norm.default")
def layer_norm(
    x: Any, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn: bool = True
) -> Any:
    """Over the last axes."""
    return native_layer_norm(x, shape, weight, bias, eps)[0]


@operator("rms_norm.default")
def rms_norm(x: Any, shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Any:
    """Divided by the root of the mean square over the last axes."""
    eps = float(jnp.finfo(x.dtype).eps) if eps is None else eps
    square = jnp.square(x).mean(tuple(range(-len(shape), 0)), keepdims=True)
    return _scaled(x * lax.rsqrt(square + eps), weight, None)


@operator("group_norm.default")
def group_norm(x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn: bool = True) -> Any:
    """Over groups of channels."""
    grouped = x.reshape(x.shape[0], groups, -1)
    normal = _standard(grouped, -1, eps)[0].reshape(x.shape)
    return _scaled(normal, _by_channel(weight, x), _by_channel(bias, x))


@operator("native_group_norm.default")
def native_group_norm(
    x: Any, weight: Any, bias: Any, n: int, channels: int, space: int, groups: int, eps: float
) -> Any:
    """Over groups of channels; with the mean, and one over the deviation."""
    _, mean, scale = _standard(x.reshape(n, groups, -1), -1, eps)
    return group_norm(x, groups, weight, bias, eps), mean[..., 0], scale[..., 0]


@operator("_native_batch_norm_legit_no_training.default")
def batch_norm(x: Any, weight: Any, bias: Any, mean: Any, variance: Any, momentum: float, eps: float) -> Any:
    """By the running statistics of each channel."""
    scale = lax.rsqrt(variance + eps)
    normal = (x - _by_channel(mean, x)) * _by_channel(scale, x)
    empty = jnp.zeros(0, x.dtype)
    return _scaled(normal, _by_channel(weight, x), _by_channel(bias, x)), empty, empty


@operator("_native_batch_norm_legit.no_stats")
def batch_norm_of_batch(x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float) -> Any:
    """By the statistics of the batch itself, for layers that keep none."""
    normal, mean, scale = _standard(x, (0, *range(2, x.ndim)), eps)
    return _scaled(normal, _by_channel(weight, x), _by_channel(bias, x)), mean.ravel(), scale.ravel()


@operator("linalg_vector_norm.default")
def vector_norm(x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:  # noqa: A002
    """The norm along axes, or of all; as in Torch, its gradient is 0 at 0."""
    x = x if dtype is None else x.astype(dtype)
    axes = tuple(range(x.ndim)) if dim is None else tuple(dim) if isinstance(dim, Sequence) else (dim,)
    size = jnp.abs(x)
    if math.isinf(ord):
        return (size.max if ord > 0 else size.min)(axes, keepdims=keepdim)
    if ord == 0:
        return (x != 0).sum(axes, keepdims=keepdim)
    if ord == 1:
        return size.sum(axes, keepdims=keepdim)
    total = (_squared(x) if ord == 2 else size**ord).sum(axes, keepdims=keepdim)
    positive = total > 0
    root = jnp.where(positive, total, 1)
    return jnp.where(positive, jnp.sqrt(root) if ord == 2 else root ** (1 / ord), 0)


def _squared(x: Any) -> Any:
    """Of a complex number the square of its absolute value."""
    return jnp.square(x.real) + jnp.square(x.imag) if jnp.iscomplexobj(x) else jnp.square(x)
