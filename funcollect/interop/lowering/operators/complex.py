"""Complex numbers and Fourier transforms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.operators import Table

jax = import_jax()
jnp, lax = jax.numpy, jax.lax

_FORWARD = ("backward", "ortho", "forward")  # NumPy's names for no factor, 1/sqrt(n), 1/n on a forward transform
_INVERSE = ("forward", "ortho", "backward")  # and on an inverse one


def complex_(real: Any, imaginary: Any) -> Any:
    return lax.complex(*jnp.broadcast_arrays(real, imaginary))


def angle(x: Any) -> Any:
    if jnp.iscomplexobj(x):
        return jnp.angle(x)
    return jnp.where(jnp.isnan(x), x, jnp.where(x < 0, jnp.pi, 0.0))


def fft(x: Any, dims: Sequence[int], normalization: int, forward: bool) -> Any:
    transform, norms = (jnp.fft.fftn, _FORWARD) if forward else (jnp.fft.ifftn, _INVERSE)
    return transform(x, axes=dims, norm=norms[normalization]) if dims else x


def irfft(x: Any, dims: Sequence[int], normalization: int, size: int) -> Any:
    sizes = [*(x.shape[dim] for dim in dims[:-1]), size]
    return jnp.fft.irfftn(x, s=sizes, axes=dims, norm=_INVERSE[normalization])


TABLE: Table = {
    "complex": complex_,
    "angle": angle,
    "_fft_c2c": fft,
    "_fft_r2c": lambda x, dims, norm, half: (jnp.fft.rfftn if half else jnp.fft.fftn)(
        x, axes=dims, norm=_FORWARD[norm]
    ),
    "_fft_c2r": irfft,
    "view_as_complex": lambda x: lax.complex(x[..., 0], x[..., 1]),
    "view_as_real": lambda x: jnp.stack([x.real, x.imag], -1),
    "polar": lambda size, angle: complex_(size * jnp.cos(angle), size * jnp.sin(angle)),
    "_conj _conj_physical": jnp.conj,
    "_neg_view": jnp.negative,
    "fft_fftfreq": jnp.fft.fftfreq,
    "fft_rfftfreq": jnp.fft.rfftfreq,
}
