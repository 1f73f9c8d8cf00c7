"""Tensors of a GPU that traced code reads: copied into memory that both frameworks know, so that nothing crosses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcollect.interop.bridge import jax_view
from funcollect.interop.jax_setup import import_jax, with_jax

Arrays = dict[str, Any]  # by name


class JoinedPart(NamedTuple):
    """One of the tensors: where its elements lie among those of its dtype, and its shape."""

    name: str
    dtype: str
    first: int
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Joined:
    """The tensors as arguments of a compiled call, a pytree of one array [n] for each dtype; see `opened`."""

    arrays: Arrays  # by dtype
    parts: tuple[JoinedPart, ...]  # the tensors in these arrays
    finish: Callable[[Arrays], Arrays]  # what traced code makes of the tensors by name

    def opened(self) -> Arrays:
        """Trace the tensors by name."""
        tensors = {}
        for name, dtype, first, shape in self.parts:
            flat = import_jax().lax.slice_in_dim(self.arrays[dtype], first, first + math.prod(shape))
            tensors[name] = flat.reshape(shape)
        return self.finish(tensors)


class JoinedMemory:
    """Memory for tensors like these, which JAX has as arrays.

    To cross costs the host a tenth of a millisecond for each array, whatever its size; to copy all of them costs a
    quarter of that.

    Args:
        tensors: by name, all on one device, of dtypes that JAX has.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        device = next(iter(tensors.values())).device
        sizes: dict[torch.dtype, int] = {}
        parts = []
        for name, tensor in tensors.items():
            first = sizes.get(tensor.dtype, 0)
            parts.append(JoinedPart(name, str(tensor.dtype), first, tuple(tensor.shape)))
            sizes[tensor.dtype] = first + tensor.numel()
        with torch.inference_mode(mode=False):  # else nothing outside of that mode could write it
            memory = {dtype: torch.empty(size, dtype=dtype, device=device) for dtype, size in sizes.items()}
        self.parts = tuple(parts)
        self._own = [
            memory[tensor.dtype][part.first : part.first + tensor.numel()].view(part.shape)
            for part, tensor in zip(parts, tensors.values(), strict=True)
        ]
        self.arrays = {str(dtype): jax_view(each) for dtype, each in memory.items()}

    def write(self, tensors: Mapping[str, Tensor]) -> Arrays:
        """Copy tensors of the same names, dtypes and shapes; return the arrays, which the next call overwrites.

        Programs that read them have to wait for Torch: see `torch_followed`.
        """
        with torch.no_grad():
            torch._foreach_copy_(self._own, list(tensors.values()))
        return self.arrays


def opened(tree: Any) -> Any:
    """Trace the pytree with the tensors of each `Joined` by name. Do it outside of loops."""

    def open_leaf(leaf: Any) -> Any:
        return leaf.opened() if isinstance(leaf, Joined) else leaf

    return import_jax().tree.map(open_leaf, tree, is_leaf=lambda leaf: isinstance(leaf, Joined))


with_jax(
    lambda jax: jax.tree_util.register_pytree_node(
        Joined,
        lambda joined: ((joined.arrays,), (joined.parts, joined.finish)),  # the latter are what programs depend on
        lambda fixed, arrays: Joined(*arrays, *fixed),
    )
)
