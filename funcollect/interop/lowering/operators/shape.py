"""Shapes, joining, padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.registry import operator

jax = import_jax()
jnp, lax = jax.numpy, jax.lax


@operator("sym_size.int")
def size(x: Any, dim: int) -> int:
    """A size, which is a number as a function is traced."""
    return int(x.shape[dim])


@operator("view.default", "_unsafe_view.default")
def reshape(x: Any, shape: Sequence[int]) -> Any:
    """Another shape, the same order."""
    return jnp.reshape(x, shape)


@operator("view.dtype")
def view_as(x: Any, dtype: Any) -> Any:
    """The same bits as another dtype."""
    return x.view(dtype)


@operator("permute.default")
def permute(x: Any, dims: Sequence[int]) -> Any:
    """Axes in another order."""
    return jnp.transpose(x, dims)


@operator("transpose.int")
def transpose(x: Any, one: int, two: int) -> Any:
    """Two axes swapped."""
    return jnp.swapaxes(x, one, two) if x.ndim else x


@operator("t.default")
def t(x: Any) -> Any:
    """A matrix transposed."""
    return jnp.transpose(x)


@operator("squeeze.default")
def squeeze_all(x: Any) -> Any:
    """Without axes of size 1."""
    return jnp.squeeze(x)


@operator("squeeze.dim", "squeeze.dims")
def squeeze(x: Any, dims: Any) -> Any:
    """Without these axes, where they have size 1."""
    wanted = dims if isinstance(dims, Sequence) else [dims]
    return jnp.squeeze(x, tuple(dim for dim in wanted if x.ndim and x.shape[dim] == 1))


@operator("unsqueeze.default")
def unsqueeze(x: Any, dim: int) -> Any:
    """With an axis of size 1."""
    return jnp.expand_dims(x, dim)


@operator("expand.default")
def expand(x: Any, shape: Sequence[int], implicit: bool = False) -> Any:
    """Repeated along axes of size 1; -1 leaves an axis as it is."""
    lead = len(shape) - x.ndim
    sizes = [x.shape[i - lead] if wanted == -1 else wanted for i, wanted in enumerate(shape)]
    return jnp.broadcast_to(x, sizes)


@operator("repeat.default")
def repeat(x: Any, repeats: Sequence[int]) -> Any:
    """Tiled."""
    return jnp.tile(x, repeats)


@operator("repeat_interleave.self_int")
def repeat_interleave(x: Any, repeats: int, dim: int | None = None, output_size: Any = None) -> Any:
    """Each element so many times."""
    return jnp.repeat(x, repeats, dim)


@operator("repeat_interleave.Tensor")
def interleaved(repeats: Any, output_size: int) -> Any:
    """The index of each element as often as it is repeated, so many in all."""
    return jnp.repeat(jnp.arange(repeats.shape[0]), repeats, total_repeat_length=output_size)


@operator("unfold.default")
def unfold(x: Any, dim: int, size: int, step: int) -> Any:
    """Windows along an axis, each along a new last axis."""
    starts = jnp.arange(0, (x.shape[dim] if x.ndim else 1) - size + 1, step)
    windows = jnp.atleast_1d(x).take(starts[:, None] + jnp.arange(size), dim)
    return jnp.moveaxis(windows, dim % max(x.ndim, 1) + 1, -1) if x.ndim else windows[0]


@operator("cat.default")
def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    """Joined along an axis; empty vectors count for nothing, as in Torch."""
    return jnp.concatenate([x for x in tensors if x.shape != (0,)] or tensors, dim)


@operator("stack.default")
def stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    """Joined along a new axis."""
    return jnp.stack(tensors, dim)


@operator("split.Tensor")
def split(x: Any, size: int, dim: int = 0) -> Any:
    """Parts of one size, the last of the rest."""
    length = x.shape[dim]
    starts = range(0, max(length, 1), size)
    return [lax.slice_in_dim(x, start, min(start + size, length), axis=dim) for start in starts]


@operator("split_with_sizes.default")
def split_with_sizes(x: Any, sizes: Sequence[int], dim: int = 0) -> Any:
    """Parts of these sizes."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [lax.slice_in_dim(x, start, start + n, axis=dim) for start, n in zip(starts, sizes, strict=True)]


@operator("unbind.int")
def unbind(x: Any, dim: int = 0) -> Any:
    """The slices along an axis."""
    return list(jnp.moveaxis(x, dim, 0))


@operator("select.int")
def select(x: Any, dim: int, index: int) -> Any:
    """One slice along an axis."""
    return lax.index_in_dim(x, index, dim, keepdims=False)


@operator("slice.Tensor")
def slice_(x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    """A range of slices along an axis."""
    ranges = [slice(None)] * x.ndim
    ranges[dim] = slice(start, end, step)
    return x[tuple(ranges)]


@operator("flip.default")
def flip(x: Any, dims: Sequence[int]) -> Any:
    """Backwards along axes."""
    return jnp.flip(x, dims)


@operator("roll.default")
def roll(x: Any, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    """Turned round along axes, or as a whole."""
    return jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x, shifts[0])


@operator("clone.default")
def same(x: Any) -> Any:
    """The array itself."""
    return x


@operator("tril.default")
def tril(x: Any, diagonal: int = 0) -> Any:
    """Zeros above a diagonal."""
    return jnp.tril(x, diagonal)


@operator("triu.default")
def triu(x: Any, diagonal: int = 0) -> Any:
    """Zeros below a diagonal."""
    return jnp.triu(x, diagonal)


@operator("diagonal.default")
def diagonal(x: Any, offset: int = 0, one: int = 0, two: int = 1) -> Any:
    """A diagonal of two axes."""
    return jnp.diagonal(x, offset, one, two)


def _widths(x: Any, pad: Sequence[int]) -> list[tuple[int, int]]:
    """Torch's padding, from the last axis back, as one pair for each axis."""
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    return [(0, 0)] * (x.ndim - len(pairs)) + pairs[::-1]


@operator("constant_pad_nd.default")
def constant_pad(x: Any, pad: Sequence[int], value: Any = 0) -> Any:
    """Surrounded by a number; a negative width cuts."""
    return lax.pad(x, jnp.asarray(value, x.dtype), [(*width, 0) for width in _widths(x, pad)])


def _pad(mode: str) -> Any:
    return lambda x, pad: jnp.pad(x, _widths(x, pad), mode=mode)


for _rank in (1, 2, 3):
    operator(f"reflection_pad{_rank}d.default")(_pad("reflect"))
    operator(f"replication_pad{_rank}d.default")(_pad("edge"))
