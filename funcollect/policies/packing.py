"""All outputs of a jitted call in one array, so that one read-back brings them to the host."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from funcollect.errors import PolicyError
from funcollect.interop.jax_setup import import_jax

Words = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Field:
    """Where one output lies among the words of a row."""

    name: str
    shape: tuple[int, ...]  # of one lane
    dtype: Any  # as the policy gave it
    start: int
    stop: int

    def unpack(self, words: Words) -> npt.NDArray[Any]:
        """The output [..., *shape] from words [..., width], in memory of its own."""
        part = np.ascontiguousarray(words[..., self.start : self.stop])
        wide = np.dtype(_carrier(self.dtype))
        values: npt.NDArray[Any] = part.view(wide).reshape(*words.shape[:-1], *self.shape)
        return values.astype(_host_dtype(self.dtype))


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


def layout(outputs: Mapping[str, Any], num_envs: int) -> tuple[Field, ...]:
    """The fields of a row for outputs whose arrays (or their shapes) begin with P; the action comes first.

    Raises:
        PolicyError: for an output without a row per environment.
    """
    fields: list[Field] = []
    start = 0
    for name in sorted(outputs, key=lambda name: (name != "action", name)):
        shape = tuple(outputs[name].shape)
        if shape[:1] != (num_envs,):
            raise PolicyError(f"the policy's {name!r} has shape {shape}, expected [{num_envs}, ...]")
        words = math.prod(shape[1:]) * np.dtype(_carrier(outputs[name].dtype)).itemsize // 4
        fields.append(Field(name, shape[1:], outputs[name].dtype, start, start + words))
        start += words
    return tuple(fields)


def pack(outputs: Mapping[str, Any], fields: tuple[Field, ...]) -> Any:
    """The outputs as int32 words [P, width]; traced."""
    jax = import_jax()
    parts = []
    for field in fields:
        value = outputs[field.name].astype(_carrier(field.dtype))
        words = value if value.dtype == np.int32 else jax.lax.bitcast_convert_type(value, np.int32)
        parts.append(words.reshape(value.shape[0], -1))
    return jax.numpy.concatenate(parts, -1)
