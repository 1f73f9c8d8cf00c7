"""All outputs of a jitted call in one array, so that one read-back brings them to the host."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from funcollect.errors import PolicyError
from funcollect.interop.bridge import jax_view
from funcollect.interop.jax_setup import import_jax
from funcollect.interop.memory import aligned
from funcollect.policies.actors.checks import check_rows

Words = npt.NDArray[np.int32]

_LARGEST_VECTOR = 1 << 16  # floats


@dataclass(frozen=True)
class OutputField:
    """Where one output lies among the words of a row."""

    name: str
    shape: tuple[int, ...]  # of one lane
    dtype: Any  # as the policy gave it
    start: int
    stop: int

    def unpack(self, words: Words) -> npt.NDArray[Any]:
        """The output [..., *shape] from words [..., width], in memory of its own."""
        part = words[..., self.start : self.stop].copy()
        values: npt.NDArray[Any] = part.view(_carrier(self.dtype)).reshape(*words.shape[:-1], *self.shape)
        return values.astype(_host_dtype(self.dtype), copy=False)

    def column(self, words: Words) -> torch.Tensor:
        """The output as a tensor of the dtype that the policy gave it; NumPy itself lacks bfloat16."""
        values = torch.from_numpy(self.unpack(words))
        return values.bfloat16() if np.dtype(self.dtype).name == "bfloat16" else values


def _carrier(dtype: Any) -> Any:
    """The 32- or 64-bit dtype in which values of `dtype` travel without loss."""
    dtype = np.dtype(dtype)
    if dtype.itemsize == 8:
        return dtype
    if dtype.kind in "fV":
        return np.float32  # bfloat16 is of kind V
    return np.uint32 if dtype == np.uint32 else np.int32


def _host_dtype(dtype: Any) -> Any:
    return np.float32 if np.dtype(dtype).kind == "V" else np.dtype(dtype)


def layout(outputs: Mapping[str, Any], num_envs: int) -> tuple[OutputField, ...]:
    """The fields of a row for outputs whose arrays (or their shapes) begin with P; the action comes first.

    Raises:
        PolicyError: for an output without a row per environment.
    """
    fields: list[OutputField] = []
    start = 0
    for name in sorted(outputs, key=lambda name: (name != "action", name)):
        check_rows(name, outputs[name], num_envs)
        shape = outputs[name].shape
        if np.dtype(outputs[name].dtype).kind == "c":
            raise PolicyError(f"the policy's output {name!r} is complex, expected real numbers: return two outputs")
        words = math.prod(shape[1:]) * np.dtype(_carrier(outputs[name].dtype)).itemsize // 4
        fields.append(OutputField(name, shape[1:], outputs[name].dtype, start, start + words))
        start += words
    return tuple(fields)


def pack(outputs: Mapping[str, Any], fields: tuple[OutputField, ...]) -> Any:
    """The outputs as int32 words [P, width]; traced."""
    jax = import_jax()
    parts = []
    for field in fields:
        value = outputs[field.name].astype(_carrier(field.dtype))
        words = value if value.dtype == np.int32 else jax.lax.bitcast_convert_type(value, np.int32)
        parts.append(words.reshape(value.shape[0], -1))
    return jax.numpy.concatenate(parts, -1)


class PackedInputs:
    """Arrays of 32-bit words that a jitted call reads, side by side in one buffer: one transfer instead of several.

    Args:
        sources: what is read at each step: always the same memory.
        noise: one step's noise, if any.
    """

    def __init__(self, sources: Sequence[npt.NDArray[Any]], noise: Sequence[npt.NDArray[Any]]) -> None:
        arrays = [*sources, *noise]
        ends = list(itertools.accumulate((array.size for array in arrays), initial=0))
        self.buffer = aligned((ends[-1],), np.dtype(np.int32))
        self._layout = [
            (slice(start, end), array.shape, array.dtype)
            for array, (start, end) in zip(arrays, itertools.pairwise(ends), strict=True)
        ]
        views = [self.buffer[where].view(dtype).reshape(shape) for where, shape, dtype in self._layout]
        self._copies = list(zip(views, sources, strict=False))
        self._noise = views[len(sources) :]

    def fill(self, noise: npt.NDArray[Any] | None) -> None:
        """Bring in what the sources hold now, and this step's noise."""
        for view, source in self._copies:
            view[...] = source
        for view in self._noise:
            view[...] = noise

    def argument(self, params: Any) -> Any:
        """The buffer as a call with `params` takes it, over its own memory, which is filled again after the call.

        As an array of JAX it costs a microsecond or two less than as NumPy's, but stays on its device: the first CPU.
        """
        jax = import_jax()
        home = set(jax.local_devices(backend="cpu")[:1])
        here = jax.default_backend() == "cpu" and all(leaf.devices() == home for leaf in jax.tree.leaves(params))
        return jax_view(torch.from_numpy(self.buffer)) if here else self.buffer

    def unpack(self, buffer: Any) -> list[Any]:
        """The arrays; traced."""
        bitcast = import_jax().lax.bitcast_convert_type
        return [bitcast(buffer[where], dtype).reshape(shape) for where, shape, dtype in self._layout]


class PackedVector:
    """A pytree of small float32 arrays as one vector: one argument of a jitted call instead of many.

    Worth it where the call's own cost counts; a large network's arrays stay as they are.
    """

    def __init__(self, tree: Any) -> None:
        jax = import_jax()
        leaves, self._treedef = jax.tree.flatten(tree)
        self._shapes = [np.shape(leaf) for leaf in leaves]
        sizes = [math.prod(shape) for shape in self._shapes]
        self._ends = np.cumsum(sizes)[:-1].tolist()
        self.worth_it = (
            len(leaves) > 1
            and sum(sizes) <= _LARGEST_VECTOR
            and all(getattr(leaf, "dtype", None) == np.float32 for leaf in leaves)
        )
        self.pack = jax.jit(lambda tree: jax.numpy.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)]))

    def unpack(self, vector: Any) -> Any:
        """The pytree; traced."""
        jax = import_jax()
        parts = jax.numpy.split(vector, self._ends)
        leaves = [part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True)]
        return jax.tree.unflatten(self._treedef, leaves)
