"""Products of matrices and vectors, distances, attention."""

from __future__ import annotations

import math
from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.operators import Table, operator
from funcollect.interop.lowering.operators.normalisation import scaled, vector_norm
from funcollect.interop.lowering.operators.reduction import root

jax = import_jax()
jnp = jax.numpy


@operator("linear", weights=(1,))
def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """A layer [..., in] -> [..., out]."""
    return scaled(jnp.matmul(x, weight.T), None, bias)


@operator("mm.dtype bmm.dtype")
def matmul_to(x: Any, y: Any, dtype: Any) -> Any:
    """A product of halves that is added up, and returned, in single precision."""
    return jnp.matmul(x, y, preferred_element_type=dtype)


@operator("addmm addmv baddbmm")
def addmm(bias: Any, x: Any, y: Any, beta: Any = 1, alpha: Any = 1, dtype: Any = None) -> Any:
    """Return beta * bias + alpha * x @ y, with the product in a dtype if one is given."""
    product = matmul_to(x, y, dtype)
    product = product if alpha == 1 else alpha * product
    return product + (bias if beta == 1 else beta * bias)


@operator("_cdist_forward")
def cdist(x: Any, y: Any, p: float, mode: Any = None) -> Any:
    """Distances in the p-norm between rows [..., N, D] and [..., M, D] -> [..., N, M]."""
    apart = x[..., :, None, :] - y[..., None, :, :]
    if p != 2:
        return (jnp.abs(apart) ** p).sum(-1) ** (1 / p)
    return root((apart**2).sum(-1))


@operator("scaled_dot_product_attention")
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
    """Means of the values [..., S, V], weighted by how well queries [..., L, E] agree with keys [..., S, E]."""
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
    "mm bmm matmul mv dot": jnp.matmul,
    "vdot": jnp.vdot,
    "outer": jnp.outer,
    "einsum": lambda equation, operands, path=None: jnp.einsum(equation, *operands),
    "addmm.dtype": lambda bias, x, y, dtype, *, beta=1, alpha=1: addmm(bias.astype(dtype), x, y, beta, alpha, dtype),
    "addbmm": lambda bias, x, y, beta=1, alpha=1: beta * bias + alpha * jnp.matmul(x, y).sum(0),
    "bilinear": lambda x, y, weight, bias=None: scaled(jnp.einsum("...i,oij,...j->...o", x, weight, y), None, bias),
    "dist": lambda x, y, p=2: vector_norm(x - y, p),
}
