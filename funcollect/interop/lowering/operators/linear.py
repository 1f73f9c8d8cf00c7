"""Products of matrices and vectors, distances, attention; factorisations, inverses, ranks, linear systems.

JAX does not check its results: where Torch raises an error, as for a singular matrix, they hold infinities or NaN.
Torch's intermediate factors, which no public function returns, are None here.
"""

from __future__ import annotations

import math
from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.operators import Rule, Table
from funcollect.interop.lowering.operators.reduction import root, scaled, vector_norm

jax = import_jax()
jnp, linalg = jax.numpy, jax.lax.linalg


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
    if math.isinf(p) or p == 0:
        return vector_norm(apart, p, -1).astype(apart.dtype)
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
        some = attn_mask.any(-1, keepdims=True)  # as in Torch, a query without keys gets zeros
        weights = jax.nn.softmax(jnp.where(attn_mask | ~some, scores, -jnp.inf), -1)
        return jnp.matmul(jnp.where(some, weights, 0), value)
    return jnp.matmul(jax.nn.softmax(scores if attn_mask is None else scores + attn_mask, -1), value)


def _adjoint(x: Any) -> Any:
    return jnp.conj(x.mT)


_hermitian = jax.custom_jvp(lambda x: x)  # where only one triangle is read, Torch still gives a symmetric gradient
_hermitian.defjvp(lambda primals, tangents: (primals[0], (tangents[0] + _adjoint(tangents[0])) / 2))


def _first(failed: Any) -> Any:
    """LAPACK's error code [...] from `failed` [..., n]: the first index that is True, counted from 1, or 0 for none."""
    if not failed.shape[-1]:
        return jnp.zeros(failed.shape[:-1], jnp.int32)
    return jnp.where(failed.any(-1), failed.argmax(-1) + 1, 0)


def cholesky_ex(x: Any, *, upper: bool = False, check_errors: bool = False) -> Any:
    source = _hermitian(_adjoint(x) if upper else x)
    lower = linalg.cholesky(source, symmetrize_input=False)
    failed = jnp.isnan(lower).any((-1, -2))
    return _adjoint(lower) if upper else lower, failed


def lu_factor_ex(x: Any, *, pivot: bool = True, check_errors: bool = False) -> Any:
    if not pivot:
        raise ValueError("only factorisations with pivoting are covered: leave out pivot=False")
    factors, pivots, _ = linalg.lu(x)
    return factors, pivots + 1, _first(jnp.diagonal(factors, axis1=-2, axis2=-1) == 0)


def lu_unpack(factors: Any, pivots: Any, unpack_data: bool = True, unpack_pivots: bool = True) -> Any:
    rows, columns = factors.shape[-2:]
    least = min(rows, columns)
    lower = jnp.tril(factors[..., :least], -1) + jnp.eye(rows, least, dtype=factors.dtype)
    order = linalg.lu_pivots_to_permutation(pivots - 1, rows)
    return jax.nn.one_hot(order, rows, dtype=factors.dtype).mT, lower, jnp.triu(factors[..., :least, :])


def _reflected(vectors: Any, scales: Any, onto: Any, conjugate: bool = False) -> Any:
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


def ormqr(vectors: Any, scales: Any, other: Any, left: bool = True, transpose: bool = False) -> Any:
    if left:
        return _reflected(vectors, scales, other, transpose)
    return _adjoint(_reflected(vectors, scales, _adjoint(other), not transpose))


def solve_ex(a: Any, b: Any, *, left: bool = True, check_errors: bool = False) -> Any:
    vectors = b.ndim == 1 or b.shape == a.shape[:-1]
    b = b[..., None] if vectors else b
    solved = jnp.linalg.solve(a, b) if left else jnp.linalg.solve(a.mT, b.mT).mT
    return solved[..., 0] if vectors else solved, None, None, lu_factor_ex(a)[2]


def _batched(a: Any, b: Any) -> tuple[Any, Any]:
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return jnp.broadcast_to(a, batch + a.shape[-2:]), jnp.broadcast_to(b, batch + b.shape[-2:])


def solve_triangular(a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    a, b = _batched(a, b)
    return linalg.triangular_solve(a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular)


def triangular(b: Any, a: Any, upper: bool = True, transpose: bool = False, unitriangular: bool = False) -> Any:
    a, b = _batched(a, b)
    options = {"lower": not upper, "transpose_a": transpose, "unit_diagonal": unitriangular}
    return linalg.triangular_solve(a, b, left_side=True, **options), a


def lu_solve(factors: Any, pivots: Any, b: Any, *, left: bool = True, adjoint: bool = False) -> Any:
    if not left:
        return _adjoint(lu_solve(factors, pivots, _adjoint(b), adjoint=not adjoint))
    factors, b = _batched(factors, b)
    return jax.scipy.linalg.lu_solve((factors, pivots - 1), b, trans=2 if adjoint else 0)


def cholesky_solve(b: Any, factor: Any, upper: bool = False) -> Any:
    factor, b = _batched(factor, b)
    return jax.scipy.linalg.cho_solve((factor, not upper), b)


def _tolerance(x: Any, largest: Any, atol: Any, rtol: Any) -> Any:
    """The singular value [*B] up to which others count as zero."""
    if rtol is None:
        default = max(x.shape[-2:]) * jnp.finfo(x.dtype).eps
        rtol = default if atol is None else jnp.where(jnp.asarray(atol) > 0, 0.0, default)
    return jnp.maximum(rtol * largest, 0.0 if atol is None else atol)


def pinv(x: Any, rtol: Any = None, hermitian: bool = False, *, atol: Any = None) -> Any:
    if not x.size:
        return x.mT
    if atol is not None:
        largest = jnp.linalg.norm(jax.lax.stop_gradient(x), 2, axis=(-2, -1))
        rtol = _tolerance(x, largest, atol, rtol) / largest
    rtol = _tolerance(x, 1.0, None, rtol)
    return jnp.linalg.pinv(x, rtol=rtol, hermitian=hermitian)


def matrix_rank(x: Any, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Any:
    if not x.size:
        return jnp.zeros(x.shape[:-2], int)
    values = jnp.linalg.svd(x, compute_uv=False)
    return (values > _tolerance(x, values[..., 0], atol, rtol)[..., None]).sum(-1)


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
    "linalg_cholesky_ex": cholesky_ex,
    "linalg_lu_factor_ex": lu_factor_ex,
    "lu_unpack": lu_unpack,
    "_linalg_eigh": lambda x, uplo="L", *_: linalg.eigh(x, lower=uplo.upper() == "L", symmetrize_input=False)[::-1],
    "_linalg_svd": lambda x, full_matrices=False, compute_uv=True, **_: (
        jnp.linalg.svd(x, full_matrices) if compute_uv else (None, jnp.linalg.svd(x, compute_uv=False), None)
    ),
    "linalg_qr": lambda x, mode="reduced": (None, jnp.linalg.qr(x, "r")) if mode == "r" else jnp.linalg.qr(x, mode),
    "linalg_householder_product": lambda vectors, scales: _reflected(
        vectors, scales, jnp.broadcast_to(jnp.eye(*vectors.shape[-2:], dtype=vectors.dtype), vectors.shape)
    ),
    "ormqr": ormqr,
    "linalg_inv_ex": lambda x, *, check_errors=False: (jnp.linalg.inv(x), lu_factor_ex(x)[2]),
    "_linalg_solve_ex": solve_ex,
    "linalg_solve_triangular": solve_triangular,
    "triangular_solve": triangular,
    "linalg_lu_solve": lu_solve,
    "cholesky_solve": cholesky_solve,
    "linalg_pinv.default|rcond_tensor|atol_rtol_tensor|atol_rtol_float": pinv,
    "linalg_matrix_rank.atol_rtol_tensor|atol_rtol_float": matrix_rank,
    "cholesky": lambda x, upper=False: cholesky_ex(x, upper=upper)[0],
    "cholesky_inverse": lambda factor, upper=False: cholesky_solve(
        jnp.eye(factor.shape[-1], dtype=factor.dtype), factor, upper
    ),
    "linalg_lu": lambda x, *, pivot=True: lu_unpack(*lu_factor_ex(x, pivot=pivot)[:2]),
    "_linalg_det": lambda x: (jnp.linalg.det(x), None, None),
    "_linalg_slogdet": lambda x: (*jnp.linalg.slogdet(x), None, None),
    "linalg_matrix_exp": lambda x: jax.scipy.linalg.expm(x) if x.size else x,
    "pinverse": lambda x, rcond=1e-15: pinv(x, rcond),
    "linalg_matrix_rank.default|tol_tensor": lambda x, tol, hermitian=False: matrix_rank(x, atol=tol, rtol=0.0),
}
