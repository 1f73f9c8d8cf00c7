"""Factorisations, determinants and matrix functions.

JAX does not check its results: where Torch raises an error, they hold infinities or NaN. Torch's intermediate factors,
which no public function returns, are left out as None.
"""

from __future__ import annotations

from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.registry import operator

jax = import_jax()
jnp, linalg = jax.numpy, jax.lax.linalg


def conjugated(x: Any) -> Any:
    """The conjugate transpose of each matrix."""
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def _hermitian_jvp(primals: Any, tangents: Any) -> Any:
    return primals[0], (tangents[0] + conjugated(tangents[0])) / 2


_hermitian = jax.custom_jvp(lambda x: x)  # a matrix of which one triangle will be read: Torch's gradient is symmetric
_hermitian.defjvp(_hermitian_jvp)


def _first(failed: Any) -> Any:
    """LAPACK's report: the first index, counted from 1, at which a condition holds, or 0 for none [..., n] -> [...]."""
    if not failed.shape[-1]:
        return jnp.zeros(failed.shape[:-1], jnp.int32)
    return jnp.where(failed.any(-1), failed.argmax(-1) + 1, 0)


@operator("linalg_cholesky_ex.default")
def cholesky_ex(x: Any, *, upper: bool = False, check_errors: bool = False) -> Any:
    """The Cholesky factor, and 0, or 1 where the matrix is not positive definite and the factor NaN."""
    source = _hermitian(conjugated(x) if upper else x)
    lower = linalg.cholesky(source, symmetrize_input=False)
    failed = jnp.isnan(lower).any((-1, -2))
    return conjugated(lower) if upper else lower, failed


@operator("cholesky.default")
def cholesky(x: Any, upper: bool = False) -> Any:
    """The Cholesky factor."""
    return cholesky_ex(x, upper=upper)[0]


@operator("linalg_lu_factor_ex.default")
def lu_factor_ex(x: Any, *, pivot: bool = True, check_errors: bool = False) -> Any:
    """Both factors in one matrix, the pivots counted from 1, and the place of the first zero pivot."""
    if not pivot:
        raise ValueError("only factorisations with pivoting are covered: leave out pivot=False")
    factors, pivots, _ = linalg.lu(x)
    return factors, pivots + 1, _first(jnp.diagonal(factors, axis1=-2, axis2=-1) == 0)


@operator("lu_unpack.default")
def lu_unpack(factors: Any, pivots: Any, unpack_data: bool = True, unpack_pivots: bool = True) -> Any:
    """The permutation P, the lower factor L and the upper factor U, whose product P L U is the matrix."""
    rows, columns = factors.shape[-2:]
    least = min(rows, columns)
    lower = jnp.tril(factors[..., :least], -1) + jnp.eye(rows, least, dtype=factors.dtype)
    order = linalg.lu_pivots_to_permutation(pivots - 1, rows)
    permutation = jnp.swapaxes(jax.nn.one_hot(order, rows, dtype=factors.dtype), -1, -2)
    return permutation, lower, jnp.triu(factors[..., :least, :])


@operator("linalg_lu.default")
def lu(x: Any, *, pivot: bool = True) -> Any:
    """The three factors P, L and U."""
    factors, pivots, _ = lu_factor_ex(x, pivot=pivot)
    return lu_unpack(factors, pivots)


@operator("_linalg_det.default")
def det(x: Any) -> Any:
    """The determinant."""
    return jnp.linalg.det(x), None, None


@operator("_linalg_slogdet.default")
def slogdet(x: Any) -> Any:
    """The sign and the logarithm of the determinant."""
    return (*jnp.linalg.slogdet(x), None, None)


@operator("_linalg_eigh.default")
def eigh(x: Any, uplo: str = "L", compute_v: bool = True) -> Any:
    """The eigenvalues in ascending order, and the eigenvectors, of a matrix of which one triangle is read."""
    vectors, values = linalg.eigh(x, lower=uplo.upper() == "L", symmetrize_input=False)
    return values, vectors


@operator("_linalg_svd.default")
def svd(x: Any, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None) -> Any:
    """The singular vectors and values; the values alone where the vectors are not asked for."""
    if compute_uv:
        return jnp.linalg.svd(x, full_matrices=full_matrices)
    return None, jnp.linalg.svd(x, compute_uv=False), None


@operator("linalg_qr.default")
def qr(x: Any, mode: str = "reduced") -> Any:
    """An orthogonal factor and an upper one."""
    if mode == "r":
        return None, jnp.linalg.qr(x, mode="r")
    return jnp.linalg.qr(x, mode=mode)


@operator("linalg_matrix_exp.default")
def matrix_exp(x: Any) -> Any:
    """The exponential of a matrix."""
    return jax.scipy.linalg.expm(x) if x.size else x


def reflected(vectors: Any, scales: Any, onto: Any, conjugate: bool = False) -> Any:
    """A product of Householder reflections [*B, m, k], with scales [*B, k], times matrices [*B, m, n]."""
    rows, count = vectors.shape[-2], scales.shape[-1]
    unit = jnp.tril(vectors[..., :count], -1) + jnp.eye(rows, count, dtype=vectors.dtype)

    def step(result: Any, one: Any) -> Any:
        vector, scale = one
        product = jnp.einsum("...m,...mn->...n", jnp.conj(vector), result)
        return result - scale[..., None, None] * vector[..., None] * product[..., None, :], None

    scales = jnp.conj(scales) if conjugate else scales
    steps = (jnp.moveaxis(unit, -1, 0), jnp.moveaxis(scales, -1, 0))
    return jax.lax.scan(step, onto, steps, reverse=not conjugate)[0]


@operator("linalg_householder_product.default")
def householder_product(vectors: Any, scales: Any) -> Any:
    """The first columns of a product of Householder reflections."""
    return reflected(
        vectors, scales, jnp.broadcast_to(jnp.eye(*vectors.shape[-2:], dtype=vectors.dtype), vectors.shape)
    )


@operator("ormqr.default")
def ormqr(vectors: Any, scales: Any, other: Any, left: bool = True, transpose: bool = False) -> Any:
    """A matrix times a product of Householder reflections, or times its adjoint, from the left or the right."""
    if left:
        return reflected(vectors, scales, other, transpose)
    return conjugated(reflected(vectors, scales, conjugated(other), not transpose))
