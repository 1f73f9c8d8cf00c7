"""Scaled dot-product attention, of which multi-head attention is made."""

from __future__ import annotations

import math
from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.registry import operator

jax = import_jax()
jnp = jax.numpy


@operator("scaled_dot_product_attention.default")
def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Values [..., S, V] weighted by how queries [..., L, E] and keys [..., S, E] agree."""
    if dropout_p:
        raise ValueError("it drops weights in training mode: call module.eval() first")
    if enable_gqa:
        key, value = (jnp.repeat(each, query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = jnp.matmul(query * scale, jnp.swapaxes(key, -1, -2))
    if is_causal:
        attn_mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    if attn_mask is not None and attn_mask.dtype == bool:
        return jnp.matmul(_masked(scores, attn_mask), value)
    return jnp.matmul(jax.nn.softmax(scores if attn_mask is None else scores + attn_mask, -1), value)


def _masked(scores: Any, mask: Any) -> Any:
    """Weights over what the mask lets through; zeros where it lets nothing through, as in Torch."""
    some = mask.any(-1, keepdims=True)
    weights = jax.nn.softmax(jnp.where(mask | ~some, scores, -jnp.inf), -1)
    return jnp.where(some, weights, 0)
