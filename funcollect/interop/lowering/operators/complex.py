"""Complex numbers and Fourier transforms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.operators import Table, operator

jax = import_jax()
jnp, lax = jax.numpy, jax.lax

_FORWARD = ("backward", "ortho", "forward")  # NumPy's names for no factor, 1/sqrt(n), 1/n on a forward transform
_INVERSE = ("forward", "ortho", "backward")  # and on an inverse one


@operator("complex")
def complex_(real: Any, imaginary: Any) -> Any:
    """A complex number from its two parts."""
    return lax.complex(*jnp.broadcast_arrays(real, imaginary))


@operator("angle")
def angle(x: Any) -> Any:
    """The angle of a complex number; of a real one 0, pi or NaN."""
    if jnp.iscomplexobj(x):
        return jnp.angle(x)
    return jnp.where(jnp.isnan(x), x, jnp.where(x < 0, jnp.pi, 0.0))


@operator("_fft_c2c")
def fft(x: Any, dims: Sequence[int], normalization: int, forward: bool) -> Any:
    """A transform from complex to complex numbers, or its inverse."""
    transform, norms = (jnp.fft.fftn, _FORWARD) if forward else (jnp.fft.ifftn, _INVERSE)
    return transform(x, axes=dims, norm=norms[normalization]) if dims else x


@operator("_fft_r2c")
def rfft(x: Any, dims: Sequence[int], normalization: int, onesided: bool) -> Any:
    """A transform from real to complex numbers; one-sided along the last of the dimensions, or in full."""
    transform = jnp.fft.rfftn if onesided else jnp.fft.fftn
    return transform(x, axes=dims, norm=_FORWARD[normalization])


@operator("_fft_c2r")
def irfft(x: Any, dims: Sequence[int], normalization: int, size: int) -> Any:
    """The inverse of a one-sided transform: real numbers, `size` of them along the last of the dimensions."""
    sizes = [*(x.shape[dim] for dim in dims[:-1]), size]
    return jnp.fft.irfftn(x, s=sizes, axes=dims, norm=_INVERSE[normalization])


TABLE: Table = {
    "view_as_complex": lambda x: lax.complex(x[..., 0], x[..., 1]),
    "view_as_real": lambda x: jnp.stack([x.real, x.imag], -1),
    "polar": lambda size, angle: complex_(size * jnp.cos(angle), size * jnp.sin(angle)),
    "_conj _conj_physical": jnp.conj,
    "_neg_view": jnp.negative,
    "fft_fftfreq": jnp.fft.fftfreq,
    "fft_rfftfreq": jnp.fft.rfftfreq,
}
