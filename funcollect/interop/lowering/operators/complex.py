"""Complex numbers and Fourier transforms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.registry import operator

jax = import_jax()
jnp, lax = jax.numpy, jax.lax

_FORWARD = ("backward", "ortho", "forward")  # NumPy's names for no factor, 1/sqrt(n), 1/n on a forward transform
_INVERSE = ("forward", "ortho", "backward")  # and on an inverse one


@operator("view_as_complex.default")
def view_as_complex(x: Any) -> Any:
    """Complex numbers from pairs of real ones [..., 2] -> [...]."""
    return lax.complex(x[..., 0], x[..., 1])


@operator("view_as_real.default")
def view_as_real(x: Any) -> Any:
    """The real and imaginary parts [...] -> [..., 2]."""
    return jnp.stack([x.real, x.imag], -1)


@operator("complex.default")
def complex_(real: Any, imaginary: Any) -> Any:
    """A complex number from its two parts."""
    return lax.complex(*jnp.broadcast_arrays(real, imaginary))


@operator("polar.default")
def polar(size: Any, angle: Any) -> Any:
    """A complex number from its absolute value and its angle."""
    return complex_(size * jnp.cos(angle), size * jnp.sin(angle))


@operator("_conj.default", "_conj_physical.default")
def conj(x: Any) -> Any:
    """The complex conjugate."""
    return jnp.conj(x)


@operator("_neg_view.default")
def neg_view(x: Any) -> Any:
    """Minus, which Torch computes where it is read."""
    return -x


@operator("angle.default")
def angle(x: Any) -> Any:
    """The angle of a complex number; of a real one 0 or pi, or NaN."""
    if jnp.iscomplexobj(x):
        return jnp.angle(x)
    return jnp.where(jnp.isnan(x), x, jnp.where(x < 0, jnp.pi, 0.0))


@operator("_fft_c2c.default")
def fft(x: Any, dims: Sequence[int], normalization: int, forward: bool) -> Any:
    """Complex to complex."""
    if not dims:
        return x
    if forward:
        return jnp.fft.fftn(x, axes=dims, norm=_FORWARD[normalization])
    return jnp.fft.ifftn(x, axes=dims, norm=_INVERSE[normalization])


@operator("_fft_r2c.default")
def rfft(x: Any, dims: Sequence[int], normalization: int, onesided: bool) -> Any:
    """Real to complex; one-sided along the last of the dimensions, or in full."""
    transform = jnp.fft.rfftn if onesided else jnp.fft.fftn
    return transform(x, axes=dims, norm=_FORWARD[normalization])


@operator("_fft_c2r.default")
def irfft(x: Any, dims: Sequence[int], normalization: int, size: int) -> Any:
    """Complex, one-sided along the last of the dimensions, to real of this size there."""
    sizes = [*(x.shape[dim] for dim in dims[:-1]), size]
    return jnp.fft.irfftn(x, s=sizes, axes=dims, norm=_INVERSE[normalization])


@operator("fft_fftfreq.default")
def fftfreq(n: int, d: float = 1.0, dtype: Any = None) -> Any:
    """The frequencies of a transform."""
    return jnp.fft.fftfreq(n, d, dtype=dtype)


@operator("fft_rfftfreq.default")
def rfftfreq(n: int, d: float = 1.0, dtype: Any = None) -> Any:
    """The frequencies of a one-sided transform."""
    return jnp.fft.rfftfreq(n, d, dtype=dtype)
