"""Inverses, pseudo-inverses and their ranks, solutions of linear systems.

JAX does not check its results: where Torch raises an error, as for a singular matrix, they hold infinities or NaN.
"""

from __future__ import annotations

from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.operators.factorisation import conjugated, lu_factor_ex
from funcollect.interop.lowering.registry import operator

jax = import_jax()
jnp, linalg = jax.numpy, jax.lax.linalg


@operator("linalg_inv_ex.default")
def inv_ex(x: Any, *, check_errors: bool = False) -> Any:
    """The inverse, and the place of the first zero pivot, or 0 for an invertible matrix."""
    return jnp.linalg.inv(x), lu_factor_ex(x)[2]


@operator("_linalg_solve_ex.default")
def solve_ex(a: Any, b: Any, *, left: bool = True, check_errors: bool = False) -> Any:
    """The solution of a x = b, or of x a = b; two intermediate factors; the place of the first zero pivot."""
    vectors = b.ndim == 1 or b.shape == a.shape[:-1]
    b = b[..., None] if vectors else b
    solved = jnp.linalg.solve(a, b) if left else jnp.swapaxes(jnp.linalg.solve(_swapped(a), _swapped(b)), -1, -2)
    return solved[..., 0] if vectors else solved, None, None, lu_factor_ex(a)[2]


def _swapped(x: Any) -> Any:
    return jnp.swapaxes(x, -1, -2)


def _batched(a: Any, b: Any) -> tuple[Any, Any]:
    """With equal batch dimensions."""
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return jnp.broadcast_to(a, batch + a.shape[-2:]), jnp.broadcast_to(b, batch + b.shape[-2:])


@operator("linalg_solve_triangular.default")
def solve_triangular(a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    """The solution of a triangular system."""
    a, b = _batched(a, b)
    return linalg.triangular_solve(a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular)


@operator("triangular_solve.default")
def triangular(b: Any, a: Any, upper: bool = True, transpose: bool = False, unitriangular: bool = False) -> Any:
    """The solution of a triangular system, and the matrix; the old function."""
    a, b = _batched(a, b)
    options = {"lower": not upper, "transpose_a": transpose, "unit_diagonal": unitriangular}
    return linalg.triangular_solve(a, b, left_side=True, **options), a


@operator("linalg_lu_solve.default")
def lu_solve(factors: Any, pivots: Any, b: Any, *, left: bool = True, adjoint: bool = False) -> Any:
    """The solution of a system whose matrix, or its adjoint, has these factors."""
    if not left:
        return conjugated(lu_solve(factors, pivots, conjugated(b), adjoint=not adjoint))
    factors, b = _batched(factors, b)
    order = linalg.lu_pivots_to_permutation(pivots - 1, factors.shape[-1])
    order = jnp.broadcast_to(order, b.shape[:-1])[..., None]
    if not adjoint:
        b = jnp.take_along_axis(b, order, -2)
        b = solve_triangular(factors, b, upper=False, unitriangular=True)
        return solve_triangular(factors, b, upper=True)
    b = solve_triangular(conjugated(factors), b, upper=False)
    b = solve_triangular(conjugated(factors), b, upper=True, unitriangular=True)
    return jnp.take_along_axis(b, jnp.argsort(order, -2), -2)


@operator("cholesky_solve.default")
def cholesky_solve(b: Any, factor: Any, upper: bool = False) -> Any:
    """The solution of a system whose matrix has this Cholesky factor."""
    first = conjugated(factor) if upper else factor
    halfway = solve_triangular(first, b, upper=False)
    return solve_triangular(conjugated(first), halfway, upper=True)


@operator("cholesky_inverse.default")
def cholesky_inverse(factor: Any, upper: bool = False) -> Any:
    """The inverse of a matrix that has this Cholesky factor."""
    return cholesky_solve(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor, upper)


def _tolerance(x: Any, largest: Any, atol: Any, rtol: Any) -> Any:
    """The singular value [*B] up to which others count as zero."""
    if rtol is None:
        default = max(x.shape[-2:]) * jnp.finfo(x.dtype).eps
        rtol = default if atol is None else jnp.where(jnp.asarray(atol) > 0, 0.0, default)
    return jnp.maximum(rtol * largest, 0.0 if atol is None else atol)


@operator("linalg_pinv.atol_rtol_tensor", "linalg_pinv.atol_rtol_float")
def pinv(x: Any, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Any:
    """The pseudo-inverse, in which small singular values count as zero."""
    if not x.size:
        return jnp.swapaxes(x, -1, -2)
    if atol is not None:
        largest = jnp.linalg.norm(jax.lax.stop_gradient(x), 2, axis=(-2, -1))
        rtol = _tolerance(x, largest, atol, rtol) / largest
    rtol = _tolerance(x, 1.0, None, rtol)
    return jnp.linalg.pinv(x, rtol=rtol, hermitian=hermitian)


@operator("pinverse.default")
def pinverse(x: Any, rcond: float = 1e-15) -> Any:
    """The pseudo-inverse; the old function."""
    return pinv(x, rtol=rcond)


@operator("linalg_pinv.default", "linalg_pinv.rcond_tensor")
def pinv_rcond(x: Any, rcond: Any, hermitian: bool = False) -> Any:
    """The pseudo-inverse, by its old arguments."""
    return pinv(x, rtol=rcond, hermitian=hermitian)


@operator("linalg_matrix_rank.atol_rtol_tensor", "linalg_matrix_rank.atol_rtol_float")
def matrix_rank(x: Any, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Any:
    """The number of singular values that do not count as zero."""
    if not x.size:
        return jnp.zeros(x.shape[:-2], int)
    values = jnp.linalg.svd(x, compute_uv=False)
    return (values > _tolerance(x, values[..., 0], atol, rtol)[..., None]).sum(-1)


@operator("linalg_matrix_rank.default", "linalg_matrix_rank.tol_tensor")
def matrix_rank_tol(x: Any, tol: Any, hermitian: bool = False) -> Any:
    """The number of singular values above a tolerance."""
    return matrix_rank(x, atol=tol, rtol=0.0)
