"""Arithmetic, functions of one or two arrays, comparisons, logic, choice and bits."""

from __future__ import annotations

from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.operators import Table

jax = import_jax()
jnp, lax, special = jax.numpy, jax.lax, jax.scipy.special

_NAMED_ALIKE = """abs acos acosh asin asinh atan atanh bitwise_and.Tensor|Scalar|Scalar_Tensor bitwise_not
    bitwise_or.Tensor|Scalar|Scalar_Tensor bitwise_xor.Tensor|Scalar|Scalar_Tensor ceil copysign.Tensor|Scalar cos cosh
    deg2rad exp exp2 expm1 floor floor_divide fmod.Tensor|Scalar hypot isclose isfinite isinf isnan log log10 log1p log2
    logaddexp logaddexp2 logical_and logical_not logical_or logical_xor maximum minimum rad2deg
    remainder.Tensor|Scalar|Scalar_Tensor round.default|decimals sin sinc sinh square tan tanh trunc"""
_OF_FLOATS = {
    "digamma": special.digamma,
    "erf": special.erf,
    "erfc": special.erfc,
    "erfinv": special.erfinv,
    "lgamma": special.gammaln,
    "reciprocal": jnp.reciprocal,
    "rsqrt": lax.rsqrt,
    "sigmoid": jax.nn.sigmoid,
    "sqrt": jnp.sqrt,
    "xlogy.Tensor|Scalar_Other|Scalar_Self": special.xlogy,
}  # some of JAX's functions refuse integers or return integers; Torch returns floating-point numbers


def _single(x: Any) -> Any:
    """Convert halves to single precision: Torch computes with them and a number in it, and rounds once."""
    half = getattr(x, "dtype", None) in (jnp.bfloat16, jnp.float16)
    return x.astype(jnp.float32) if half else x


def _scaled(alpha: Any, y: Any) -> Any:
    """Return a multiple of `y` by a number, which Torch takes in the dtype of `y`."""
    single = _single(y)
    return alpha * y if single is y else jnp.asarray(alpha, y.dtype).astype(jnp.float32) * single


def _is_whole(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.integer)) or jnp.result_type(x) == jnp.bool_


def _with_floats(function: Any) -> Any:
    """Return `function` extended to integers: they are converted to floating-point numbers."""
    return lambda *arrays: function(*(x * 1.0 if _is_whole(x) else x for x in arrays))


def sign(x: Any) -> Any:
    """Of NaN and of -0.0 it is 0; of a complex number the one of absolute value 1 in its direction."""
    if jnp.iscomplexobj(x):
        size = jnp.abs(x)
        return x / jnp.where(size > 0, size, 1)
    return jnp.where(x > 0, 1, jnp.where(x < 0, -1, 0))


def sub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return x - y if alpha == 1 else _single(x) - _scaled(alpha, y)


def div(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "floor":
        return jnp.floor_divide(x, y)
    if rounding_mode is None:
        return jnp.true_divide(x, y)
    if not (_is_whole(x) and _is_whole(y)):
        return jnp.trunc(x / y)
    dtype = jnp.result_type(x, y)
    return lax.div(*jnp.broadcast_arrays(jnp.asarray(x, dtype), jnp.asarray(y, dtype)))


def power(x: Any, y: Any) -> Any:
    if isinstance(y, float) and y.is_integer() and abs(y) < 2**31:
        return lax.integer_pow(x * 1.0, int(y))
    if isinstance(y, float) and y == 0.5:
        return jnp.sqrt(x * 1.0)
    return jnp.power(x, y)


def clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    """As in Torch, the gradient is 1 on a bound."""
    if low is not None:
        x = jnp.where(x < low, low, x)
    return x if high is None else jnp.where(x > high, high, x)


def lerp(start: Any, end: Any, weight: Any) -> Any:
    """Computed from the nearer of two points, as infinite ends require."""
    start, end, weight = _single(start), _single(end), _single(weight)
    way = end - start
    return jnp.where(jnp.abs(weight) < 0.5, start + weight * way, end - way * (1 - weight))


TABLE: Table = {
    "sgn sign": sign,
    "add.Tensor|Scalar": lambda x, y, alpha=1: x + y if alpha == 1 else _single(x) + _scaled(alpha, y),
    "sub.Tensor|Scalar": sub,
    "div.Tensor|Tensor_mode|Scalar|Scalar_mode": div,
    "pow.Tensor_Scalar|Tensor_Tensor|Scalar": power,
    "clamp.default|Tensor clamp_min.default|Tensor": clamp,
    "lerp.Scalar|Tensor": lerp,
    **{names: getattr(jnp, names.partition(".")[0]) for names in _NAMED_ALIKE.split()},
    **{names: _with_floats(function) for names, function in _OF_FLOATS.items()},
    "nan_to_num": lambda x, nan=None, posinf=None, neginf=None: jnp.nan_to_num(x, True, nan or 0.0, posinf, neginf),
    "eq.Tensor|Scalar": jnp.equal,
    "ne.Tensor|Scalar": jnp.not_equal,
    "lt.Tensor|Scalar": jnp.less,
    "le.Tensor|Scalar": jnp.less_equal,
    "gt.Tensor|Scalar": jnp.greater,
    "ge.Tensor|Scalar": jnp.greater_equal,
    "__lshift__.Tensor|Scalar bitwise_left_shift.Tensor|Tensor_Scalar|Scalar_Tensor": jnp.left_shift,
    "__rshift__.Tensor|Scalar bitwise_right_shift.Tensor|Tensor_Scalar|Scalar_Tensor": jnp.right_shift,
    "where.self|ScalarOther|ScalarSelf|Scalar": jnp.where,
    "masked_fill.Scalar|Tensor": lambda x, mask, value: jnp.where(mask, jnp.asarray(value, x.dtype), x),
    "atan2": jnp.arctan2,
    "neg": jnp.negative,
    "frac": lambda x: x - jnp.trunc(x),
    "rsub.Tensor|Scalar": lambda x, y, alpha=1: sub(y, x, alpha),
    "mul.Tensor|Scalar": lambda x, y: _single(x) * _single(y),
    "addcmul": lambda x, one, two, value=1: _single(x) + value * (_single(one) * _single(two)),
    "addcdiv": lambda x, one, two, value=1: _single(x) + value * (_single(one) / _single(two)),
    "clamp_max.default|Tensor": lambda x, high: clamp(x, None, high),
    "detach": lax.stop_gradient,
}
