"""Activations and softmax.

They have rules of their own, although Torch would decompose them: a choice between branches gives NaN gradients where
the other branch overflows.
"""

from __future__ import annotations

from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.registry import operator

jax = import_jax()
jnp, nn = jax.numpy, jax.nn


@operator("relu.default")
def relu(x: Any) -> Any:
    """Not below zero."""
    return nn.relu(x)


@operator("hardtanh.default")
def hardtanh(x: Any, low: float = -1.0, high: float = 1.0) -> Any:
    """Between two numbers; the gradient is 0 on them."""
    inside = (x > low) & (x < high)
    return jnp.where(inside, x, jax.lax.stop_gradient(jnp.clip(x, low, high)))


@operator("relu6.default")
def relu6(x: Any) -> Any:
    """Between 0 and 6."""
    return hardtanh(x, 0.0, 6.0)


@operator("gelu.default")
def gelu(x: Any, approximate: str = "none") -> Any:
    """The Gaussian error linear unit."""
    return nn.gelu(x, approximate == "tanh")


@operator("silu.default")
def silu(x: Any) -> Any:
    """Times its own sigmoid."""
    return nn.silu(x)


@operator("mish.default")
def mish(x: Any) -> Any:
    """Times the hyperbolic tangent of its softplus."""
    return x * jnp.tanh(nn.softplus(x))


@operator("softplus.default")
def softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    """A smooth relu, linear above the threshold."""
    scaled = x * beta
    return jnp.where(scaled > threshold, x, nn.softplus(scaled) / beta)


@operator("log_sigmoid.default")
def log_sigmoid(x: Any) -> Any:
    """The logarithm of the sigmoid."""
    return nn.log_sigmoid(x)


@operator("elu.default")
def elu(x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    """Linear above zero, exponential below."""
    below = jnp.where(x > 0, 0.0, x)
    return jnp.where(x > 0, scale * x, scale * alpha * jnp.expm1(below * input_scale))


@operator("selu.default")
def selu(x: Any) -> Any:
    """The self-normalising elu."""
    return elu(x, 1.6732632423543772, 1.0507009873554805)


@operator("celu.default")
def celu(x: Any, alpha: float = 1.0) -> Any:
    """An elu with a continuous derivative."""
    return elu(x, alpha, 1.0, 1.0 / alpha)


@operator("leaky_relu.default")
def leaky_relu(x: Any, slope: float = 0.01) -> Any:
    """Linear, with another slope below zero."""
    return jnp.where(x > 0, x, slope * x)


@operator("rrelu.default")
def rrelu(x: Any, lower: float = 0.125, upper: float = 1 / 3, training: bool = False) -> Any:
    """A leaky relu with the mean of the slopes that training draws."""
    if training:
        raise ValueError("it draws random slopes in training mode: call module.eval() first")
    return leaky_relu(x, (lower + upper) / 2)


@operator("prelu.default")
def prelu(x: Any, weight: Any) -> Any:
    """A leaky relu whose slopes, one or by channel, are learned."""
    if weight.ndim == 1 and weight.size > 1:
        weight = weight.reshape(-1, *[1] * (x.ndim - 2))
    return jnp.where(x > 0, x, weight * x)


@operator("hardsigmoid.default")
def hardsigmoid(x: Any) -> Any:
    """A sigmoid of straight lines."""
    return hardtanh(x + 3.0, 0.0, 6.0) / 6.0


@operator("hardswish.default")
def hardswish(x: Any) -> Any:
    """Times its own hardsigmoid."""
    return x * hardsigmoid(x)


@operator("threshold.default")
def threshold(x: Any, limit: float, value: float) -> Any:
    """A value in place of what is not above the limit."""
    return jnp.where(x > limit, x, value)


@operator("glu.default")
def glu(x: Any, dim: int = -1) -> Any:
    """One half times the sigmoid of the other."""
    return nn.glu(x, dim)


@operator("softmax.int")
def softmax(x: Any, dim: int, dtype: Any = None) -> Any:
    """Probabilities from logits."""
    return nn.softmax(x if dtype is None else x.astype(dtype), dim)


@operator("log_softmax.int")
def log_softmax(x: Any, dim: int, dtype: Any = None) -> Any:
    """Logarithms of probabilities from logits."""
    return nn.log_softmax(x if dtype is None else x.astype(dtype), dim)
