"""Activations and softmax.

They have their own rules, although Torch would decompose them: a choice between branches gives NaN gradients where
the other branch overflows.
"""

from __future__ import annotations

from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.operators import Table, operator
from funcollect.interop.lowering.operators.normalisation import by_channel
from funcollect.interop.lowering.operators.reduction import in_dtype

jax = import_jax()
jnp, nn = jax.numpy, jax.nn


@operator("hardtanh")
def hardtanh(x: Any, low: float = -1.0, high: float = 1.0) -> Any:
    """Values between two bounds; the gradient is 0 on a bound."""
    inside = (x > low) & (x < high)
    return jnp.where(inside, x, jax.lax.stop_gradient(jnp.clip(x, low, high)))


@operator("softplus")
def softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    """A smooth ReLU, linear above the threshold."""
    scaled = x * beta
    return jnp.where(scaled > threshold, x, nn.softplus(scaled) / beta)


@operator("elu")
def elu(x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    """Linear above zero, exponential below."""
    below = jnp.where(x > 0, 0.0, x)
    return jnp.where(x > 0, scale * x, scale * alpha * jnp.expm1(below * input_scale))


@operator("leaky_relu")
def leaky_relu(x: Any, slope: Any = 0.01) -> Any:
    """Linear, with another slope below zero."""
    return jnp.where(x > 0, x, slope * x)


@operator("rrelu")
def rrelu(x: Any, lower: float = 0.125, upper: float = 1 / 3, training: bool = False) -> Any:
    """A leaky ReLU whose slope is the mean of those drawn in training."""
    if training:
        raise ValueError("it draws random slopes in training mode: call module.eval() first")
    return leaky_relu(x, (lower + upper) / 2)


def hardsigmoid(x: Any) -> Any:
    """A sigmoid of straight lines."""
    return hardtanh(x + 3.0, 0.0, 6.0) / 6.0


TABLE: Table = {
    "relu": nn.relu,
    "relu6": lambda x: hardtanh(x, 0.0, 6.0),
    "gelu": lambda x, approximate="none": nn.gelu(x, approximate == "tanh"),
    "silu": nn.silu,
    "mish": lambda x: x * jnp.tanh(nn.softplus(x)),
    "log_sigmoid": nn.log_sigmoid,
    "selu": lambda x: elu(x, 1.6732632423543772, 1.0507009873554805),
    "celu": lambda x, alpha=1.0: elu(x, alpha, 1.0, 1.0 / alpha),
    "prelu": lambda x, weight: leaky_relu(x, by_channel(weight, x) if weight.size > 1 else weight),
    "hardsigmoid": hardsigmoid,
    "hardswish": lambda x: x * hardsigmoid(x),
    "threshold": lambda x, limit, value: jnp.where(x > limit, x, value),
    "glu": nn.glu,
    "softmax.int": lambda x, dim, dtype=None: nn.softmax(in_dtype(x, dtype), dim),
    "log_softmax.int": lambda x, dim, dtype=None: nn.log_softmax(in_dtype(x, dtype), dim),
}
