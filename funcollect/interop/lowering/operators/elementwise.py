"""Arithmetic, functions of one or two arrays, comparisons, logic, choice, bits, complex numbers; activations.

Activations have their own rules, although Torch would decompose them: a choice between branches gives NaN gradients
where the other branch overflows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.operators import Table
from funcollect.interop.lowering.operators.reduction import by_channel, in_dtype

jax = import_jax()
jnp, lax, nn, special = jax.numpy, jax.lax, jax.nn, jax.scipy.special

_NAMED_ALIKE = """abs acos acosh asin asinh atan atanh bitwise_and.Tensor|Scalar|Scalar_Tensor bitwise_not
    bitwise_or.Tensor|Scalar|Scalar_Tensor bitwise_xor.Tensor|Scalar|Scalar_Tensor ceil copysign.Tensor|Scalar
    cos cosh deg2rad exp exp2 expm1 floor fmod.Tensor|Scalar hypot isclose isfinite isinf isnan log log10 log1p
    log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor maximum minimum rad2deg
    remainder.Tensor|Scalar|Scalar_Tensor round.default|decimals sin sinc sinh square tan tanh trunc
    where.self|ScalarOther|ScalarSelf|Scalar"""
_OF_FLOATS = {
    "digamma": lambda x: jnp.where(x == 0, -jnp.copysign(jnp.inf, x), special.digamma(x)),
    "erf": special.erf,
    "erfc": special.erfc,
    "erfinv": special.erfinv,
    "lgamma": special.gammaln,
    "reciprocal": jnp.reciprocal,
    "rsqrt": lax.rsqrt,
    "sigmoid": jax.nn.sigmoid,
    "sqrt": jnp.sqrt,
    "xlogy.Tensor|Scalar_Other|Scalar_Self": lambda x, y: jnp.where(jnp.isnan(y), jnp.nan, special.xlogy(x, y)),
}  # some of JAX's functions refuse integers or return integers; Torch returns floating-point numbers


def _single(x: Any) -> Any:
    """Convert halves to single precision, in which Torch combines them with a number before it rounds once."""
    half = getattr(x, "dtype", None) in (jnp.bfloat16, jnp.float16)
    return x.astype(jnp.float32) if half else x


def _scaled(alpha: Any, y: Any) -> Any:
    """Return ``alpha * y``; Torch rounds the number `alpha` to the dtype of `y`."""
    single = _single(y)
    return alpha * y if single is y else jnp.asarray(alpha, y.dtype).astype(jnp.float32) * single


def _is_whole(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.integer)) or jnp.result_type(x) == jnp.bool_


def _with_floats(function: Any) -> Any:
    """Return `function` extended to integers: they are converted to floating-point numbers."""
    return lambda *arrays: function(*(x * 1.0 if _is_whole(x) else x for x in arrays))


def sign(x: Any) -> Any:
    """0 for NaN and -0.0; for a complex number, the number of absolute value 1 in its direction."""
    if jnp.iscomplexobj(x):
        size = jnp.abs(x)
        return x / jnp.where(size > 0, size, 1)
    return jnp.where(x > 0, 1, jnp.where(x < 0, -1, 0))


def sub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return x - y if alpha == 1 else _single(x) - _scaled(alpha, y)


def div(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "floor":
        whole = jnp.floor_divide(x, y)
        return whole if _is_whole(whole) else jnp.where(y == 0, lax.stop_gradient(jnp.true_divide(x, y)), whole)
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
    """As in Torch, the gradient is 1 on a bound, and a bound may be NaN."""
    if low is not None:
        x = jnp.where((x < low) | jnp.isnan(low), low, x)
    return x if high is None else jnp.where((x > high) | jnp.isnan(high), high, x)


def lerp(start: Any, end: Any, weight: Any) -> Any:
    """Computed from the nearer of the two ends, since they may be infinite."""
    start, end, weight = _single(start), _single(end), _single(weight)
    way = end - start
    return jnp.where(jnp.abs(weight) < 0.5, start + weight * way, end - way * (1 - weight))


_FORWARD = ("backward", "ortho", "forward")  # NumPy's names for no factor, 1/sqrt(n), 1/n on a forward transform
_INVERSE = ("forward", "ortho", "backward")  # and on an inverse one


def complex_(real: Any, imaginary: Any) -> Any:
    return lax.complex(*jnp.broadcast_arrays(real, imaginary))


def fft(x: Any, dims: Sequence[int], normalization: int, forward: bool) -> Any:
    transform, norms = (jnp.fft.fftn, _FORWARD) if forward else (jnp.fft.ifftn, _INVERSE)
    return transform(x, axes=dims, norm=norms[normalization]) if dims else x


def irfft(x: Any, dims: Sequence[int], normalization: int, size: int) -> Any:
    sizes = [*(x.shape[dim] for dim in dims[:-1]), size]
    return jnp.fft.irfftn(x, s=sizes, axes=dims, norm=_INVERSE[normalization])


def hardtanh(x: Any, low: float = -1.0, high: float = 1.0) -> Any:
    """The gradient is 0 on a bound."""
    inside = (x > low) & (x < high)
    return jnp.where(inside, x, jax.lax.stop_gradient(jnp.clip(x, low, high)))


def softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    scaled = x * beta
    return jnp.where(scaled > threshold, x, nn.softplus(scaled) / beta)


def elu(x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    below = jnp.where(x > 0, 0.0, x)
    return jnp.where(x > 0, scale * x, scale * alpha * jnp.expm1(below * input_scale))


def leaky_relu(x: Any, slope: Any = 0.01) -> Any:
    return jnp.where(x > 0, x, slope * x)


def rrelu(x: Any, lower: float = 0.125, upper: float = 1 / 3, training: bool = False) -> Any:
    if training:
        raise ValueError("it draws random slopes in training mode: call module.eval() first")
    return leaky_relu(x, (lower + upper) / 2)


TABLE: Table = {
    "sgn sign": sign,
    "add.Tensor|Scalar": lambda x, y, alpha=1: x + y if alpha == 1 else _single(x) + _scaled(alpha, y),
    "sub.Tensor|Scalar": sub,
    "div.Tensor|Tensor_mode|Scalar|Scalar_mode": div,
    "floor_divide": lambda x, y: div(x, y, "floor"),
    "pow.Tensor_Scalar|Tensor_Tensor|Scalar": power,
    "clamp.default|Tensor clamp_min.default|Tensor": clamp,
    "lerp.Scalar|Tensor": lerp,
    **{names: getattr(jnp, names.partition(".")[0]) for names in _NAMED_ALIKE.split()},
    **{name: getattr(nn, name) for name in ("glu", "log_sigmoid", "relu", "silu")},
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
    "masked_fill.Scalar|Tensor": lambda x, mask, value: jnp.where(mask, jnp.asarray(value, x.dtype), x),
    "atan2": jnp.arctan2,
    "neg _neg_view": jnp.negative,
    "frac": lambda x: x - jnp.trunc(x),
    "rsub.Tensor|Scalar": lambda x, y, alpha=1: sub(y, x, alpha),
    "mul.Tensor|Scalar": lambda x, y: _single(x) * _single(y),
    "addcmul": lambda x, one, two, value=1: _single(x) + value * (_single(one) * _single(two)),
    "addcdiv": lambda x, one, two, value=1: _single(x) + value * (_single(one) / _single(two)),
    "clamp_max.default|Tensor": lambda x, high: clamp(x, None, high),
    "detach": lax.stop_gradient,
    "complex": complex_,
    "angle": lambda x: (
        jnp.angle(x) if jnp.iscomplexobj(x) else jnp.where(jnp.isnan(x), x, jnp.where(x < 0, jnp.pi, 0.0))
    ),
    "_fft_c2c": fft,
    "_fft_r2c": lambda x, dims, norm, half: (jnp.fft.rfftn if half else jnp.fft.fftn)(
        x, axes=dims, norm=_FORWARD[norm]
    ),
    "_fft_c2r": irfft,
    "view_as_complex": lambda x: lax.complex(x[..., 0], x[..., 1]),
    "view_as_real": lambda x: jnp.stack([x.real, x.imag], -1),
    "polar": lambda size, angle: complex_(size * jnp.cos(angle), size * jnp.sin(angle)),
    "_conj _conj_physical": jnp.conj,
    "fft_fftfreq": jnp.fft.fftfreq,
    "fft_rfftfreq": jnp.fft.rfftfreq,
    "hardtanh": hardtanh,
    "softplus": softplus,
    "elu": elu,
    "leaky_relu": leaky_relu,
    "rrelu": rrelu,
    "relu6": lambda x: hardtanh(x, 0.0, 6.0),
    "gelu": lambda x, approximate="none": nn.gelu(x, approximate == "tanh"),
    "mish": lambda x: x * jnp.tanh(nn.softplus(x)),
    "selu": lambda x: elu(x, 1.6732632423543772, 1.0507009873554805),
    "celu": lambda x, alpha=1.0: elu(x, alpha, 1.0, 1.0 / alpha),
    "prelu": lambda x, weight: leaky_relu(x, by_channel(weight, x) if weight.size > 1 else weight),
    "hardsigmoid": lambda x: hardtanh(x + 3.0, 0.0, 6.0) / 6.0,
    "hardswish": lambda x: x * (hardtanh(x + 3.0, 0.0, 6.0) / 6.0),
    "threshold": lambda x, limit, value: jnp.where(x <= limit, value, x),
    "softmax.int": lambda x, dim, dtype=None: nn.softmax(in_dtype(x, dtype), dim),
    "log_softmax.int": lambda x, dim, dtype=None: nn.log_softmax(in_dtype(x, dtype), dim),
}
