"""Images sampled at places that are given by a grid."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.registry import operator

jax = import_jax()
jnp = jax.numpy

_NEAREST, _BICUBIC = 1, 2
_BORDER, _REFLECTION = 1, 2
_CUBIC = -0.75  # the free parameter of the cubic kernel, as Torch has it


def _in_pixels(at: Any, size: int, align_corners: bool) -> Any:
    """Places in pixels, of which -1 and 1 are the centres of the outermost ones, or their outer edges."""
    return (at + 1) / 2 * (size - 1) if align_corners else ((at + 1) * size - 1) / 2


def _clipped(at: Any, size: int) -> Any:
    """Inside the image; on its border and beyond, the gradient is 0, and NaN is at its beginning."""
    inside = (at > 0) & (at < size - 1)
    return jnp.where(inside, at, jax.lax.stop_gradient(jnp.where(at > 0, jnp.minimum(at, size - 1.0), 0.0)))


def _reflected(at: Any, size: int, align_corners: bool) -> Any:
    """Mirrored at the borders, as often as it takes."""
    low, span = (0.0, size - 1.0) if align_corners else (-0.5, float(size))
    if not span:
        return jnp.zeros_like(at)
    away = jnp.abs(at - low)
    flips = jnp.floor(away / span)
    rest = away - flips * span
    return _clipped(jnp.where(flips % 2 == 0, rest, span - rest) + low, size)


def _padded(at: Any, size: int, padding: int, align_corners: bool) -> Any:
    if padding == _BORDER:
        return _clipped(at, size)
    return _reflected(at, size, align_corners) if padding == _REFLECTION else at


def _read(image: Any, places: Sequence[Any]) -> Any:
    """The pixels [C, *out] of one image [C, *in] at whole places [*out], one array for each axis; 0 outside."""
    sizes = image.shape[1:]
    pairs = list(zip(places, sizes, strict=True))
    inside = jnp.stack([(at >= 0) & (at <= size - 1) for at, size in pairs]).all(0)
    indices = tuple(jnp.where(inside, at, 0).astype(jnp.int32) for at, _ in pairs)
    return jnp.where(inside, image[(slice(None), *indices)], 0)


def _nearest(image: Any, places: Sequence[Any], pad: Callable[..., Any]) -> Any:
    sizes = image.shape[1:]
    return _read(image, [jnp.round(pad(at, size)) for at, size in zip(places, sizes, strict=True)])


def _linear(image: Any, places: Sequence[Any], pad: Callable[..., Any]) -> Any:
    places = [pad(at, size) for at, size in zip(places, image.shape[1:], strict=True)]
    floors = [jnp.floor(at) for at in places]
    total = 0.0
    for corner in itertools.product((0, 1), repeat=len(places)):
        weight = 1.0
        for at, floor, upper in zip(places, floors, corner, strict=True):
            weight = weight * ((at - floor) if upper else (floor + 1 - at))
        total = total + weight * _read(image, [floor + upper for floor, upper in zip(floors, corner, strict=True)])
    return total


def _cubic_weights(t: Any) -> list[Any]:
    """Of the pixels at -1, 0, 1 and 2, for a place between 0 and 1."""
    a = _CUBIC

    def near(x: Any) -> Any:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Any) -> Any:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _bicubic(image: Any, places: Sequence[Any], pad: Callable[..., Any]) -> Any:
    """Only pixels are padded: the places are not."""
    floors = [jnp.floor(at) for at in places]
    weights = [_cubic_weights(at - floor) for at, floor in zip(places, floors, strict=True)]
    total = 0.0
    for corner in itertools.product(range(4), repeat=len(places)):
        pixels = [pad(f + k - 1, size) for f, k, size in zip(floors, corner, image.shape[1:], strict=True)]
        weight = 1.0
        for each, k in zip(weights, corner, strict=True):
            weight = weight * each[k]
        total = total + weight * _read(image, pixels)
    return total


@operator("grid_sampler_2d.default", "grid_sampler_3d.default")
def grid_sampler(x: Any, grid: Any, interpolation: int, padding: int, align_corners: bool) -> Any:
    """Images [N, C, *in] at the places of a grid [N, *out, axes], which counts axes from the last one back."""
    sample = {_NEAREST: _nearest, _BICUBIC: _bicubic}.get(interpolation, _linear)

    def pad(at: Any, size: int) -> Any:
        return _padded(at, size, padding, align_corners)

    def one(image: Any, grid: Any) -> Any:
        axes = enumerate(image.shape[1:], start=1)
        return sample(image, [_in_pixels(grid[..., -axis], size, align_corners) for axis, size in axes], pad)

    return jax.vmap(one)(x, grid)
