"""Constants and casts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.registry import operator

jax = import_jax()
jnp, lax = jax.numpy, jax.lax


@operator("full.default")
def full(shape: Sequence[int], value: Any, dtype: Any = None) -> Any:
    """One number everywhere."""
    return jnp.full(shape, value, dtype)


@operator("full_like.default")
def full_like(x: Any, value: Any, dtype: Any = None) -> Any:
    """One number everywhere, in the shape of another array."""
    return jnp.full_like(x, value, dtype or x.dtype)


@operator("new_full.default")
def new_full(x: Any, shape: Sequence[int], value: Any, dtype: Any = None) -> Any:
    """One number everywhere, in the dtype of another array."""
    return jnp.full(shape, value, dtype or x.dtype)


@operator("zeros.default", "empty.memory_format")
def zeros(shape: Sequence[int], dtype: Any = None) -> Any:
    """Zeros; memory that Torch would leave unwritten is zeros, too."""
    return jnp.zeros(shape, dtype)


@operator("ones.default")
def ones(shape: Sequence[int], dtype: Any = None) -> Any:
    """Ones."""
    return jnp.ones(shape, dtype)


@operator("zeros_like.default", "empty_like.default")
def zeros_like(x: Any, dtype: Any = None) -> Any:
    """Zeros in the shape of another array."""
    return jnp.zeros_like(x, dtype)


@operator("ones_like.default")
def ones_like(x: Any, dtype: Any = None) -> Any:
    """Ones in the shape of another array."""
    return jnp.ones_like(x, dtype)


@operator("new_zeros.default", "new_empty.default")
def new_zeros(x: Any, shape: Sequence[int], dtype: Any = None) -> Any:
    """Zeros in the dtype of another array."""
    return jnp.zeros(shape, dtype or x.dtype)


@operator("new_ones.default")
def new_ones(x: Any, shape: Sequence[int], dtype: Any = None) -> Any:
    """Ones in the dtype of another array."""
    return jnp.ones(shape, dtype or x.dtype)


@operator("scalar_tensor.default")
def scalar_tensor(value: Any, dtype: Any = None) -> Any:
    """A number as an array."""
    return jnp.asarray(value, dtype)


@operator("arange.start_step")
def arange(start: Any, end: Any, step: Any = 1, dtype: Any = None) -> Any:
    """Numbers by equal steps."""
    return jnp.arange(start, end, step, dtype)


@operator("linspace.default")
def linspace(start: Any, end: Any, steps: int, dtype: Any = None) -> Any:
    """So many numbers by equal steps, both ends among them."""
    return jnp.linspace(start, end, steps, dtype=dtype)


@operator("linspace.Tensor_Tensor", "linspace.Tensor_Scalar", "linspace.Scalar_Tensor")
def linspace_between(start: Any, end: Any, steps: int, dtype: Any = None) -> Any:
    """The same between arrays, which get no gradient from it in Torch."""
    return lax.stop_gradient(linspace(start, end, steps, dtype))


@operator("eye.default")
def eye(n: int, dtype: Any = None) -> Any:
    """The identity matrix."""
    return jnp.eye(n, dtype=dtype)


@operator("eye.m")
def eye_m(n: int, m: int, dtype: Any = None) -> Any:
    """Ones on the diagonal of a matrix."""
    return jnp.eye(n, m, dtype=dtype)


@operator("_to_copy.default")
def to_copy(x: Any, dtype: Any = None) -> Any:
    """Cast, as Torch does: towards zero to integers, from complex numbers the real part."""
    if dtype is None:
        return x
    if jnp.iscomplexobj(x) and not jnp.issubdtype(dtype, jnp.complexfloating):
        return x != 0 if jnp.issubdtype(dtype, jnp.bool_) else x.real.astype(dtype)  # the imaginary part is left out
    return x.astype(dtype)


@operator("copy.default")
def copy(x: Any, source: Any) -> Any:
    """Another array in the shape and dtype of the first."""
    return jnp.broadcast_to(source, x.shape).astype(x.dtype)


@operator("_assert_tensor_metadata.default")
def checked(*args: Any, **options: Any) -> None:
    """Nothing: dtypes were checked as the module was exported."""
