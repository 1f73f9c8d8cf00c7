"""Images sampled at the points of a grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.operators import Table

jax = import_jax()
jnp = jax.numpy

Pad = Callable[[Any, int], Any]
Taps = tuple[Any, Any]  # along one axis, the indices of pixels [taps, *out] and their weights [taps, *out]
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2
_NEAREST = 1
_CUBIC = -0.75  # the free parameter of the cubic kernel, as Torch has it


def _clipped(at: Any, size: int) -> Any:
    """Clip to the image; on its border and beyond the gradient is 0, and NaN becomes 0."""
    inside = (at > 0) & (at < size - 1)
    return jnp.where(inside, at, jax.lax.stop_gradient(jnp.where(at > 0, jnp.minimum(at, size - 1.0), 0.0)))


def _reflected(at: Any, size: int, align_corners: bool) -> Any:
    """Reflect at the borders, as often as necessary."""
    low, span = (0.0, size - 1.0) if align_corners else (-0.5, float(size))
    if not span:
        return jnp.zeros_like(at)
    away = jnp.abs(at - low)
    flips = jnp.floor(away / span)
    rest = away - flips * span
    return _clipped(jnp.where(flips % 2 == 0, rest, span - rest) + low, size)


def _nearest(at: Any, size: int, pad: Pad) -> Taps:
    place = jnp.round(pad(at, size))
    return place[None], jnp.ones_like(place)[None]


def _linear(at: Any, size: int, pad: Pad) -> Taps:
    at = pad(at, size)
    floor = jnp.floor(at)
    return jnp.stack([floor, floor + 1]), jnp.stack([floor + 1 - at, at - floor])


def _cubic(at: Any, size: int, pad: Pad) -> Taps:
    """The four taps of cubic interpolation at the points `at` [*out]; padding moves the pixels, but not the points."""
    floor = jnp.floor(at)
    t, a = at - floor, _CUBIC

    def near(x: Any) -> Any:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Any) -> Any:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    places = jnp.stack([pad(floor + offset, size) for offset in (-1, 0, 1, 2)])
    return places, jnp.stack([far(t + 1), near(t), near(1 - t), far(2 - t)])


def _weighed(image: Any, taps: list[Taps]) -> Any:
    """The weighted sum [C, *out] of the pixels of one image [C, *in] over all combinations of its axes' taps."""
    rank, total, inside = len(taps), 1.0, True
    indices = []
    for axis, (places, weights) in enumerate(taps):
        apart = (len(places), *[1] * (rank - 1 - axis), *places.shape[1:])
        here = ((places >= 0) & (places <= image.shape[1 + axis] - 1)).reshape(apart)
        indices.append(jnp.where(here, places.reshape(apart), 0).astype(jnp.int32))
        total, inside = total * weights.reshape(apart), inside & here
    pixels = image[(slice(None), *indices)]  # [C, *taps, *out]
    return jnp.where(inside, pixels * total, 0).sum(range(1, rank + 1))


def grid_sampler(x: Any, grid: Any, interpolation: int, padding: int, align_corners: bool) -> Any:
    taps = (_linear, _nearest, _cubic)[interpolation]

    def pad(at: Any, size: int) -> Any:
        if padding == _BORDER:
            return _clipped(at, size)
        return _reflected(at, size, align_corners) if padding == _REFLECTION else at

    def one(image: Any, grid: Any) -> Any:
        axes = list(enumerate(image.shape[1:], start=1))
        places = []  # in pixels: -1 and 1 are the centres of the outermost ones, or their outer edges
        for axis, size in axes:
            at = grid[..., -axis] + 1
            places.append((at / 2 * (size - 1) if align_corners else (at * size - 1) / 2, size))
        sampled = _weighed(image, [taps(at, size, pad) for at, size in places])
        known = jnp.isfinite(grid).all(-1) | (padding != _ZEROS) | (interpolation == _NEAREST)
        return jnp.where(known, sampled, jnp.nan)

    return jax.vmap(one)(x, grid)


TABLE: Table = {
    "grid_sampler_2d grid_sampler_3d": grid_sampler,
}
