"""Comparisons, logic, choice and bits."""

from __future__ import annotations

from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.registry import operator, register_as

jnp = import_jax().numpy

_COMPARISONS = {
    "eq": "equal",
    "ne": "not_equal",
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
}
_BITS = {
    "bitwise_and": "bitwise_and",
    "bitwise_or": "bitwise_or",
    "bitwise_xor": "bitwise_xor",
    "__lshift__": "left_shift",
    "__rshift__": "right_shift",
}
_PLAIN = ["logical_and", "logical_or", "logical_xor", "logical_not", "bitwise_not", "isnan", "isinf", "isfinite"]


def _register() -> None:
    for name, function in (_COMPARISONS | _BITS).items():
        for kind in ("Tensor", "Scalar"):
            register_as(f"{name}.{kind}", getattr(jnp, function), __name__)
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
        register_as(f"{name}.Scalar_Tensor", getattr(jnp, name), __name__)
    for name in ("left_shift", "right_shift"):
        for kind in ("Tensor", "Tensor_Scalar", "Scalar_Tensor"):
            register_as(f"bitwise_{name}.{kind}", getattr(jnp, name), __name__)
    for name in _PLAIN:
        register_as(f"{name}.default", getattr(jnp, name), __name__)


_register()


@operator("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def where(condition: Any, chosen: Any, other: Any) -> Any:
    """One or the other."""
    return jnp.where(condition, chosen, other)


@operator("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(x: Any, mask: Any, value: Any) -> Any:
    """With a value where the mask is true."""
    return jnp.where(mask, jnp.asarray(value, x.dtype), x)


@operator("isclose.default")
def isclose(x: Any, y: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
    """Nearly equal."""
    return jnp.isclose(x, y, rtol, atol, equal_nan)
