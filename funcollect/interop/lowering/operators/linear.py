"""Linear algebra."""

from __future__ import annotations

from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.operators.normalisation import vector_norm
from funcollect.interop.lowering.registry import operator

jnp = import_jax().numpy


@operator("linear.default", weights=(1,))
def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """A layer [..., in] -> [..., out]."""
    product = jnp.matmul(x, weight.T)
    return product if bias is None else product + bias


@operator("mm.default", "bmm.default", "matmul.default", "mv.default", "dot.default")
def matmul(x: Any, y: Any) -> Any:
    """A product of matrices or vectors."""
    return jnp.matmul(x, y)


@operator("mm.dtype", "bmm.dtype")
def matmul_to(x: Any, y: Any, dtype: Any) -> Any:
    """A product of halves that is added up, and returned, in single precision."""
    return jnp.matmul(x, y, preferred_element_type=dtype)


@operator("vdot.default")
def vdot(x: Any, y: Any) -> Any:
    """A product of vectors, the first one conjugated."""
    return jnp.vdot(x, y)


@operator("addmm.dtype")
def addmm_to(bias: Any, x: Any, y: Any, dtype: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """A product of halves in single precision, plus."""
    return alpha * matmul_to(x, y, dtype) + beta * bias.astype(dtype)


@operator("addbmm.default")
def addbmm(bias: Any, x: Any, y: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    """The sum of the products of matrices, plus."""
    return beta * bias + alpha * jnp.matmul(x, y).sum(0)


@operator("addmm.default", "addmv.default", "baddbmm.default")
def addmm(bias: Any, x: Any, y: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    """A product of matrices, plus."""
    product = jnp.matmul(x, y)
    product = product if alpha == 1 else alpha * product
    return product + (bias if beta == 1 else beta * bias)


@operator("bilinear.default")
def bilinear(x: Any, y: Any, weight: Any, bias: Any = None) -> Any:
    """A layer of two inputs."""
    product = jnp.einsum("...i,oij,...j->...o", x, weight, y)
    return product if bias is None else product + bias


@operator("einsum.default")
def einsum(equation: str, operands: Any, path: Any = None) -> Any:
    """A sum of products by index."""
    return jnp.einsum(equation, *operands)


@operator("outer.default")
def outer(x: Any, y: Any) -> Any:
    """Every product."""
    return jnp.outer(x, y)


@operator("_cdist_forward.default")
def cdist(x: Any, y: Any, p: float, mode: Any = None) -> Any:
    """Euclidean or other distances between rows."""
    apart = x[..., :, None, :] - y[..., None, :, :]
    if p != 2:
        return (jnp.abs(apart) ** p).sum(-1) ** (1 / p)
    squared = (apart**2).sum(-1)
    return jnp.where(squared > 0, jnp.sqrt(jnp.where(squared > 0, squared, 1)), 0)


@operator("dist.default")
def dist(x: Any, y: Any, p: float = 2) -> Any:
    """The norm of a difference."""
    return vector_norm(x - y, p)
