"""Activations and softmax.

They have their own rules, although Torch would decompose them: a choice between branches gives NaN gradients where
the other branch overflows.
"""

from __future__ import annotations

from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.operators import Table
from funcollect.interop.lowering.operators.normalisation import by_channel
from funcollect.interop.lowering.operators.reduction import in_dtype

jax = import_jax()
jnp, nn = jax.numpy, jax.nn


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
    "hardtanh": hardtanh,
    "softplus": softplus,
    "elu": elu,
    "leaky_relu": leaky_relu,
    "rrelu": rrelu,
    "relu": nn.relu,
    "relu6": lambda x: hardtanh(x, 0.0, 6.0),
    "gelu": lambda x, approximate="none": nn.gelu(x, approximate == "tanh"),
    "silu": nn.silu,
    "mish": lambda x: x * jnp.tanh(nn.softplus(x)),
    "log_sigmoid": nn.log_sigmoid,
    "selu": lambda x: elu(x, 1.6732632423543772, 1.0507009873554805),
    "celu": lambda x, alpha=1.0: elu(x, alpha, 1.0, 1.0 / alpha),
    "prelu": lambda x, weight: leaky_relu(x, by_channel(weight, x) if weight.size > 1 else weight),
    "hardsigmoid": lambda x: hardtanh(x + 3.0, 0.0, 6.0) / 6.0,
    "hardswish": lambda x: x * (hardtanh(x + 3.0, 0.0, 6.0) / 6.0),
    "threshold": lambda x, limit, value: jnp.where(x > limit, x, value),
    "glu": nn.glu,
    "softmax.int": lambda x, dim, dtype=None: nn.softmax(in_dtype(x, dtype), dim),
    "log_softmax.int": lambda x, dim, dtype=None: nn.log_softmax(in_dtype(x, dtype), dim),
}
