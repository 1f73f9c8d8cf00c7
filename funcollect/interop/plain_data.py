"""Turns nested values into JSON and arrays, from which they are rebuilt without executing code."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib import format as npy
from torch import Tensor

from funcollect.interop.jax_setup import import_jax
from funcollect.messages import shown

Arrays = dict[str, npt.NDArray[Any]]

_GENERATORS = {each.__name__: each for each in (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64)}
_SEQUENCES: dict[str, Callable[..., Any]] = {each.__name__: each for each in (list, tuple, deque, set, frozenset)}
_RECORDS: dict[str, Any] = {}


def allow(*kinds: type) -> None:
    """Let instances of dataclasses or named tuples be written by their fields, and made of them again."""
    _RECORDS.update({kind.__name__: kind for kind in kinds})


def to_data(value: Any, known: Sequence[Any] = ()) -> tuple[Any, Arrays]:
    """Turn a value into a structure for JSON, and arrays by name.

    The value may nest numbers, strings, bytes, None, lists, tuples, dicts, sets, deques, generators of NumPy and Torch,
    NumPy arrays, Torch tensors, JAX arrays and instances of allowed classes. Any other named tuple becomes a plain one.
    An object that it holds twice is one object again after `from_data`. The objects `known` are replaced by their
    positions.

    Raises:
        TypeError: for anything else; the message names where it is.
    """
    writer = _Writer(known)
    return writer.encode(value, "the value"), writer.arrays


class _Writer:
    """Encodes each value as itself, or as a list that begins with the name of its kind."""

    def __init__(self, known: Sequence[Any]) -> None:
        self.arrays: Arrays = {}
        self._known = {id(each): position for position, each in enumerate(known)}
        self._seen: dict[int, tuple[int, Any]] = {}  # also refers to the objects, so that their ids stay theirs

    def encode(self, value: Any, where: str) -> Any:
        """The structure for one value; `where` is its path, for messages."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if id(value) in self._known:
            return ["known", self._known[id(value)]]
        if id(value) in self._seen:
            return ["again", self._seen[id(value)][0]]
        self._seen[id(value)] = len(self._seen), value
        return self._nested(value, where) or self._leaf(value, where)

    def _nested(self, value: Any, where: str) -> list[Any]:
        """The structure of a container or a record; empty for anything else."""
        kind: Any = type(value)
        if kind in _RECORDS.values():
            names = kind._fields if isinstance(value, tuple) else [each.name for each in fields(kind)]
            return ["record", kind.__name__, self.encode({name: getattr(value, name) for name in names}, where)]
        kind = tuple if isinstance(value, tuple) else kind
        if kind in _SEQUENCES.values():
            parts = [self.encode(each, f"{where}[{number}]") for number, each in enumerate(value)]
            return [kind.__name__, parts, *([value.maxlen] if kind is deque else [])]
        if isinstance(value, dict):
            items = [[self.encode(key, where), self.encode(each, f"{where}[{key!r}]")] for key, each in value.items()]
            return ["dict", items]
        if kind is np.random.Generator and type(value.bit_generator).__name__ in _GENERATORS:
            return ["generator", self.encode(value.bit_generator.state, where)]
        return []

    def _leaf(self, value: Any, where: str) -> list[Any]:
        """The structure of bytes, an array, a tensor or a generator of Torch."""
        kind = type(value)
        if kind is bytes:
            return ["bytes", self._store(np.frombuffer(value, np.uint8))]
        if (isinstance(value, np.generic) or kind is np.ndarray) and (stored := self._array(np.asarray(value))):
            return ["array" if kind is np.ndarray else "scalar", *stored]
        dense = isinstance(value, Tensor) and value.layout == torch.strided
        if dense and not (value.is_meta or value.is_quantized or value.is_nested):  # its elements are in memory
            return ["tensor", *self._tensor(value.detach().resolve_conj().resolve_neg().cpu())]
        if kind is torch.Generator:
            return ["torch_generator", self._store(value.get_state().numpy()), str(value.device)]
        if kind.__module__.startswith(("jax", "jaxlib")) and isinstance(value, (jax := import_jax()).Array):
            if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
                words = np.asarray(jax.random.key_data(value))
                return ["key", self._store(words), str(jax.random.key_impl(value))]
            return ["jax", *self._bytes(np.asarray(value))]
        raise TypeError(f"{where} is {shown(value)} ({kind.__name__}), which cannot be saved as data")

    def _store(self, array: npt.NDArray[Any]) -> str:
        name = f"a{len(self.arrays)}"
        self.arrays[name] = array
        return name

    def _array(self, value: npt.NDArray[Any]) -> list[Any]:
        """What `_numpy` takes: an array's name, or for dtypes that NumPy's files lack that of its bytes; else empty."""
        if value.dtype.hasobject:
            return []
        if npy.descr_to_dtype(npy.dtype_to_descr(value.dtype)) == value.dtype:
            return [self._store(value)]
        return self._bytes(value) if value.dtype.names is None else []

    def _bytes(self, value: npt.NDArray[Any]) -> list[Any]:
        flat = np.ascontiguousarray(value).reshape(-1)
        return [self._store(flat.view(np.uint8)), value.dtype.name, [*value.shape]]

    def _tensor(self, value: Tensor) -> tuple[str, str, list[int]]:
        """The name of the tensor's bytes, its dtype and its shape: NumPy lacks some of Torch's dtypes."""
        flat = value.contiguous().as_strided((value.numel(),), (1,))  # a single element may have another stride
        return self._store(flat.view(torch.uint8).numpy()), str(value.dtype).removeprefix("torch."), list(value.shape)


def from_data(data: Any, arrays: Mapping[str, npt.NDArray[Any]], known: Sequence[Any] = ()) -> Any:
    """Rebuild a value from the result of `to_data`, with other `known` objects in place of those."""
    seen: list[Any] = []

    def decode(data: Any) -> Any:
        if not isinstance(data, list):
            return data
        kind, *rest = data
        if kind in ("known", "again"):
            return (known if kind == "known" else seen)[rest[0]]
        number = len(seen)
        seen.append({} if kind == "dict" else [])  # before the parts, as one may refer to a list or a dict
        seen[number] = made(kind, rest, seen[number])
        return seen[number]

    def made(kind: str, rest: list[Any], empty: Any) -> Any:
        if kind in _SEQUENCES:
            empty.extend(map(decode, rest[0]))
            return empty if kind == "list" else _SEQUENCES[kind](empty, *rest[1:])
        if kind == "dict":
            for key, value in rest[0]:
                name = decode(key)
                empty[name] = decode(value)
            return empty
        if kind in _MAKERS:
            return _MAKERS[kind](*map(decode, rest))
        if kind not in _ARRAYS:
            raise ValueError(f"the data has a value of the unknown kind {kind!r}")
        return _ARRAYS[kind](arrays[rest[0]], *rest[1:])

    return decode(data)


def _generator(state: Any) -> np.random.Generator:
    bits = _GENERATORS[state["bit_generator"]]()
    bits.state = state
    return np.random.Generator(bits)


def _numpy(array: npt.NDArray[Any], name: str | None = None, shape: Sequence[int] = ()) -> npt.NDArray[Any]:
    """A copy of an array, or of one with this dtype and shape from its bytes."""
    if name is None:
        return np.array(array)
    return np.frombuffer(array.tobytes(), import_jax().numpy.dtype(name)).reshape(shape).copy()


def _tensor(array: npt.NDArray[Any], name: str, shape: list[int]) -> Tensor:
    if not isinstance(dtype := getattr(torch, name, None), torch.dtype):
        raise ValueError(f"the data has a tensor of the unknown dtype {name!r}")
    return torch.from_numpy(array.copy()).view(dtype).reshape(shape) if array.size else torch.empty(shape, dtype=dtype)


def _jax_key(words: npt.NDArray[Any], name: str) -> Any:
    return import_jax().random.wrap_key_data(import_jax().numpy.asarray(words), impl=name)


_MAKERS: dict[str, Callable[..., Any]] = {
    "record": lambda name, members: _RECORDS[name](**members),
    "generator": _generator,
}
_ARRAYS: dict[str, Callable[..., Any]] = {
    "array": _numpy,
    "bytes": lambda array: array.tobytes(),
    "scalar": lambda *stored: _numpy(*stored)[()],
    "tensor": _tensor,
    "jax": lambda *stored: import_jax().numpy.array(_numpy(*stored)),
    "key": _jax_key,
    "torch_generator": lambda state, device: torch.Generator(device).set_state(torch.from_numpy(state.copy())),
}
