"""Linear algebra."""

from __future__ import annotations

from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.registry import operator

jnp = import_jax().numpy


@operator("linear.default", weights=(1,))
def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """A layer [..., in] -> [..., out]."""
    product = jnp.matmul(x, weight.T)
    return product if bias is None else product + bias


@operator("mm.default", "bmm.default", "matmul.default", "mv.default", "dot.default", "vdot.default")
def matmul(x: Any, y: Any) -> Any:
    """A product of matrices or vectors."""
    return jnp.matmul(x, y)


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
