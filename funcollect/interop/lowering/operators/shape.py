"""Shapes, joining, padding; constants and casts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from funcollect.interop.jax_setup import import_jax
from funcollect.interop.lowering.operators import Table

jax = import_jax()
jnp, lax = jax.numpy, jax.lax


def squeeze(x: Any, dims: Any) -> Any:
    wanted = dims if isinstance(dims, Sequence) else [dims]
    return jnp.squeeze(x, tuple(dim for dim in wanted if x.ndim and x.shape[dim] == 1))


def expand(x: Any, shape: Sequence[int], implicit: bool = False) -> Any:
    lead = len(shape) - x.ndim
    sizes = [x.shape[i - lead] if wanted == -1 else wanted for i, wanted in enumerate(shape)]
    return jnp.broadcast_to(x, sizes)


def unfold(x: Any, dim: int, size: int, step: int) -> Any:
    starts = jnp.arange(0, (x.shape[dim] if x.ndim else 1) - size + 1, step)
    windows = jnp.atleast_1d(x).take(starts[:, None] + jnp.arange(size), dim)
    return jnp.moveaxis(windows, dim % max(x.ndim, 1) + 1, -1) if x.ndim else windows[0]


def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    """Empty vectors are skipped, as in Torch."""
    return jnp.concatenate([x for x in tensors if x.shape != (0,)] or tensors, dim)


def split(x: Any, size: int, dim: int = 0) -> Any:
    length = x.shape[dim]
    whole, rest = divmod(length, size) if length else (1, 0)
    return split_with_sizes(x, [min(size, length)] * whole + [rest] * bool(rest), dim)


def split_with_sizes(x: Any, sizes: Sequence[int], dim: int = 0) -> Any:
    borders = pairwise(accumulate(sizes, initial=0))
    return [lax.slice_in_dim(x, start, end, axis=dim) for start, end in borders]


def slice_(x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    ranges = [slice(None)] * x.ndim
    ranges[dim] = slice(start, end, step)
    return x[tuple(ranges)]


def to_copy(x: Any, dtype: Any = None) -> Any:
    """A cast as Torch's: towards zero to integers, the real part of complex numbers."""
    if dtype is None:
        return x
    if jnp.iscomplexobj(x) and not jnp.issubdtype(dtype, jnp.complexfloating):
        return x != 0 if jnp.issubdtype(dtype, jnp.bool_) else x.real.astype(dtype)
    return x.astype(dtype)


def _widths(x: Any, pad: Sequence[int]) -> list[tuple[int, int]]:
    """Torch's padding, which begins with the last axis, as one pair for each axis."""
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    return [(0, 0)] * (x.ndim - len(pairs)) + pairs[::-1]


TABLE: Table = {
    "squeeze.dim|dims": squeeze,
    "expand": expand,
    "unfold": unfold,
    "cat": cat,
    "split.Tensor": split,
    "split_with_sizes": split_with_sizes,
    "slice.Tensor": slice_,
    "_to_copy": to_copy,
    "sym_size.int": lambda x, dim: int(x.shape[dim]),  # a number while a function is traced
    "view _unsafe_view": jnp.reshape,
    "view.dtype": lambda x, dtype: x.view(dtype),
    "permute t": jnp.transpose,
    "transpose.int": lambda x, one, two: jnp.swapaxes(x, one, two) if x.ndim else x,
    "squeeze": jnp.squeeze,
    "unsqueeze": jnp.expand_dims,
    "repeat": jnp.tile,
    "repeat_interleave.self_int": lambda x, repeats, dim=None, output_size=None: jnp.repeat(x, repeats, dim),
    "repeat_interleave.Tensor": lambda repeats, *, output_size: jnp.repeat(
        jnp.arange(repeats.shape[0]), repeats, total_repeat_length=output_size
    ),
    "stack": jnp.stack,
    "unbind.int": lambda x, dim=0: list(jnp.moveaxis(x, dim, 0)),
    "select.int": lambda x, dim, index: lax.index_in_dim(x, index, dim, keepdims=False),
    "flip": jnp.flip,
    "roll": lambda x, shifts, dims=(): jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x, shifts[0]),
    "clone": lambda x: x,
    "tril": jnp.tril,
    "triu": jnp.triu,
    "diagonal": jnp.diagonal,
    "constant_pad_nd": lambda x, pad, value=0: lax.pad(  # negative widths, which `jnp.pad` does not take, cut
        x, jnp.asarray(value, x.dtype), [(*width, 0) for width in _widths(x, pad)]
    ),
    "reflection_pad1d reflection_pad2d reflection_pad3d": lambda x, pad: jnp.pad(x, _widths(x, pad), "reflect"),
    "replication_pad1d replication_pad2d replication_pad3d": lambda x, pad: jnp.pad(x, _widths(x, pad), "edge"),
    "full": jnp.full,
    "full_like": jnp.full_like,
    "new_full": lambda x, shape, value, dtype=None: jnp.full(shape, value, dtype or x.dtype),
    "zeros empty.memory_format": jnp.zeros,  # memory that Torch leaves unwritten is zeroed
    "ones": jnp.ones,
    "zeros_like empty_like": jnp.zeros_like,
    "ones_like": jnp.ones_like,
    "new_zeros new_empty": lambda x, shape, dtype=None: jnp.zeros(shape, dtype or x.dtype),
    "new_ones": lambda x, shape, dtype=None: jnp.ones(shape, dtype or x.dtype),
    "scalar_tensor": jnp.asarray,
    "arange.start_step": jnp.arange,
    "linspace": jnp.linspace,
    "linspace.Tensor_Tensor|Tensor_Scalar|Scalar_Tensor": lambda *arguments, **options: lax.stop_gradient(
        jnp.linspace(*arguments, **options)  # Torch gives the ends no gradient
    ),
    "eye.default|m": jnp.eye,
    "copy": lambda x, source: jnp.broadcast_to(source, x.shape).astype(x.dtype),
    "_assert_tensor_metadata": lambda *arguments, **options: None,  # dtypes were checked in the export
}
