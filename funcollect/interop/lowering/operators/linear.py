"""Products of matrices and vectors, distances, attention."""

from __future__ import annotations

import math
from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.operators import Rule, Table
from funcollect.interop.lowering.operators.normalisation import scaled, vector_norm
from funcollect.interop.lowering.operators.reduction import root

jax = import_jax()
jnp = jax.numpy


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    return scaled(jnp.matmul(x, weight.T), None, bias)


def matmul_to(x: Any, y: Any, dtype: Any) -> Any:
    return jnp.matmul(x, y, preferred_element_type=dtype)


def addmm(bias: Any, x: Any, y: Any, beta: Any = 1, alpha: Any = 1, dtype: Any = None) -> Any:
    product = matmul_to(x, y, dtype)
    product = product if alpha == 1 else alpha * product
    return product + (bias if beta == 1 else beta * bias)


def cdist(x: Any, y: Any, p: float, mode: Any = None) -> Any:
    apart = x[..., :, None, :] - y[..., None, :, :]
    if p != 2:
        return (jnp.abs(apart) ** p).sum(-1) ** (1 / p)
    return root((apart**2).sum(-1))


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
    if dropout_p:
        raise ValueError("it drops weights in training mode: call module.eval() first")
    if enable_gqa:
        key, value = (jnp.repeat(each, query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = jnp.matmul(query * scale, jnp.swapaxes(key, -1, -2))
    if is_causal:
        attn_mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    if attn_mask is not None and attn_mask.dtype == bool:
        return jnp.matmul(_masked_weights(scores, attn_mask), value)
    return jnp.matmul(jax.nn.softmax(scores if attn_mask is None else scores + attn_mask, -1), value)


def _masked_weights(scores: Any, mask: Any) -> Any:
    """Weights of the keys that the mask allows; zeros for a query that has none, as in Torch."""
    some = mask.any(-1, keepdims=True)
    weights = jax.nn.softmax(jnp.where(mask | ~some, scores, -jnp.inf), -1)
    return jnp.where(some, weights, 0)


TABLE: Table = {
    "linear": Rule(linear, weights=(1,)),
    "mm.dtype bmm.dtype": matmul_to,
    "addmm addmv baddbmm": addmm,
    "_cdist_forward": cdist,
    "scaled_dot_product_attention": attention,
    "mm bmm matmul mv dot": jnp.matmul,
    "vdot": jnp.vdot,
    "outer": jnp.outer,
    "einsum": lambda equation, operands, path=None: jnp.einsum(equation, *operands),
    "addmm.dtype": lambda bias, x, y, dtype, *, beta=1, alpha=1: addmm(bias.astype(dtype), x, y, beta, alpha, dtype),
    "addbmm": lambda bias, x, y, beta=1, alpha=1: beta * bias + alpha * jnp.matmul(x, y).sum(0),
    "bilinear": lambda x, y, weight, bias=None: scaled(jnp.einsum("...i,oij,...j->...o", x, weight, y), None, bias),
    "dist": lambda x, y, p=2: vector_norm(x - y, p),
}
