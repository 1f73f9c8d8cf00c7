"""Arithmetic and functions of one or two arrays."""

from __future__ import annotations

from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.registry import operator, register_as

jax = import_jax()
jnp, lax, special = jax.numpy, jax.lax, jax.scipy.special

_UNARY = """abs acos acosh asin asinh atan atanh ceil cos cosh exp exp2 expm1 floor log log10 log1p log2 reciprocal
    sin sinh sinc sqrt square tan tanh trunc deg2rad rad2deg"""
_NAMED = {
    "atan2": jnp.arctan2,
    "copysign.Tensor": jnp.copysign,
    "copysign.Scalar": jnp.copysign,
    "digamma": special.digamma,
    "erf": special.erf,
    "erfc": special.erfc,
    "erfinv": special.erfinv,
    "frac": lambda x: x - jnp.trunc(x),
    "hypot": jnp.hypot,
    "lgamma": special.gammaln,
    "logaddexp": jnp.logaddexp,
    "logaddexp2": jnp.logaddexp2,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "neg": jnp.negative,
    "rsqrt": lax.rsqrt,
    "sgn": lambda x: _sign(x),
    "sign": lambda x: _sign(x),
    "sigmoid": jax.nn.sigmoid,
    "xlogy.Tensor": special.xlogy,
    "xlogy.Scalar_Other": special.xlogy,
    "xlogy.Scalar_Self": special.xlogy,
}
_FLOATING = {"sqrt", "rsqrt", "reciprocal", "sigmoid", "erf", "erfc", "erfinv", "lgamma", "digamma"}
_FLOATING |= {name for name in _NAMED if name.startswith("xlogy")}


def _sign(x: Any) -> Any:
    """-1, 0 or 1; of NaN and of -0.0 it is 0. Of a complex number the one of absolute value 1 in its direction."""
    if jnp.iscomplexobj(x):
        size = jnp.abs(x)
        return x / jnp.where(size > 0, size, 1)
    return jnp.where(x > 0, 1, jnp.where(x < 0, -1, 0))


def _single(x: Any) -> Any:
    """Halves in single precision, in which Torch computes with them and a number, before it rounds once."""
    half = getattr(x, "dtype", None) in (jnp.bfloat16, jnp.float16)
    return x.astype(jnp.float32) if half else x


def _scaled(alpha: Any, y: Any) -> Any:
    """A multiple, by a number that Torch takes in the dtype of `y`."""
    single = _single(y)
    return alpha * y if single is y else jnp.asarray(alpha, y.dtype).astype(jnp.float32) * single


def _with_floats(function: Any) -> Any:
    """Of integers, too: they are taken as floating."""

    def of_floats(*arrays: Any) -> Any:
        return function(*(x * 1.0 if _is_whole(x) else x for x in arrays))

    return of_floats


def _is_whole(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.integer)) or jnp.result_type(x) == jnp.bool_


def _register() -> None:
    rules = {name: getattr(jnp, name) for name in _UNARY.split()} | _NAMED
    for name, function in rules.items():
        rule = _with_floats(function) if name in _FLOATING else function
        register_as(name if "." in name else f"{name}.default", rule, __name__)


_register()


@operator("add.Tensor", "add.Scalar")
def add(x: Any, y: Any, alpha: Any = 1) -> Any:
    """Plus."""
    return x + y if alpha == 1 else _single(x) + _scaled(alpha, y)


@operator("sub.Tensor", "sub.Scalar")
def sub(x: Any, y: Any, alpha: Any = 1) -> Any:
    """Minus."""
    return x - y if alpha == 1 else _single(x) - _scaled(alpha, y)


@operator("rsub.Tensor", "rsub.Scalar")
def rsub(x: Any, y: Any, alpha: Any = 1) -> Any:
    """Minus, the other way."""
    return sub(y, x, alpha)


@operator("mul.Tensor", "mul.Scalar")
def mul(x: Any, y: Any) -> Any:
    """Times."""
    return _single(x) * _single(y)


@operator("div.Tensor", "div.Tensor_mode", "div.Scalar", "div.Scalar_mode")
def div(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    """Divided by, rounded down or towards zero where that is asked for."""
    if rounding_mode == "floor":
        return jnp.floor_divide(x, y)
    if rounding_mode is None:
        return jnp.true_divide(x, y)
    return lax.div(*jnp.broadcast_arrays(*_promoted(x, y))) if _is_whole(x) and _is_whole(y) else jnp.trunc(x / y)


def _promoted(x: Any, y: Any) -> tuple[Any, Any]:
    dtype = jnp.result_type(x, y)
    return jnp.asarray(x, dtype), jnp.asarray(y, dtype)


@operator("floor_divide.default")
def floor_divide(x: Any, y: Any) -> Any:
    """Divided by, rounded down."""
    return jnp.floor_divide(x, y)


@operator("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")
def remainder(x: Any, y: Any) -> Any:
    """The remainder with the sign of the divisor."""
    return jnp.remainder(x, y)


@operator("fmod.Tensor", "fmod.Scalar")
def fmod(x: Any, y: Any) -> Any:
    """The remainder with the sign of the dividend."""
    return jnp.fmod(x, y)


@operator("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar")
def power(x: Any, y: Any) -> Any:
    """To the power; a whole number as exponent is multiplied out."""
    if isinstance(y, float) and y.is_integer() and abs(y) < 2**31:
        return lax.integer_pow(x * 1.0, int(y))
    if y == 0.5 if isinstance(y, float) else False:
        return jnp.sqrt(x * 1.0)
    return jnp.power(x, y)


@operator("round.default", "round.decimals")
def rounded(x: Any, decimals: int = 0) -> Any:
    """To the nearest, halves to even."""
    return jnp.round(x, decimals)


@operator("clamp.default", "clamp.Tensor")
def clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    """Between two bounds; as in Torch, the gradient is 1 on a bound."""
    if low is not None:
        x = jnp.where(x < low, low, x)
    return x if high is None else jnp.where(x > high, high, x)


@operator("clamp_min.default", "clamp_min.Tensor")
def clamp_min(x: Any, low: Any) -> Any:
    """Not below."""
    return clamp(x, low)


@operator("clamp_max.default", "clamp_max.Tensor")
def clamp_max(x: Any, high: Any) -> Any:
    """Not above."""
    return clamp(x, None, high)


@operator("addcmul.default")
def addcmul(x: Any, one: Any, two: Any, value: Any = 1) -> Any:
    """Plus a scaled product."""
    return _single(x) + value * (_single(one) * _single(two))


@operator("addcdiv.default")
def addcdiv(x: Any, one: Any, two: Any, value: Any = 1) -> Any:
    """Plus a scaled quotient."""
    return _single(x) + value * (_single(one) / _single(two))


@operator("lerp.Scalar", "lerp.Tensor")
def lerp(start: Any, end: Any, weight: Any) -> Any:
    """On the way from one to the other, counted from the nearer one, as infinite ends require."""
    start, end, weight = _single(start), _single(end), _single(weight)
    way = end - start
    return jnp.where(jnp.abs(weight) < 0.5, start + weight * way, end - way * (1 - weight))


@operator("nan_to_num.default")
def nan_to_num(x: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Any:
    """With numbers for what is none."""
    return jnp.nan_to_num(x, nan=nan or 0.0, posinf=posinf, neginf=neginf)


@operator("detach.default")
def detach(x: Any) -> Any:
    """Without a gradient."""
    return lax.stop_gradient(x)
