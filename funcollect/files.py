"""Writes plain data as JSON and arrays, and reads it without executing code; files are complete or absent."""

from __future__ import annotations

# `signal` looks for each handler in an enum, which takes longer than most blocks.
import _signal  # type: ignore[import-not-found]
import contextlib
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib import format as npy
from torch import Tensor

from funcollect.interop.jax_setup import import_jax
from funcollect.messages import shown

Arrays = dict[str, npt.NDArray[Any]]
_Store = Callable[[npt.NDArray[Any]], str]  # stores an array, and returns the name by which it was stored

_FORMAT = 1
_HEADER = "header"  # the name of the array that holds the JSON
_GENERATORS = {kind.__name__: kind for kind in (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64)}
_SEQUENCES: dict[str, Callable[..., Any]] = {kind.__name__: kind for kind in (list, tuple, deque, set, frozenset)}
_RECORDS: dict[str, Any] = {}  # the classes that `allow` permits


def allow(*kinds: type) -> None:
    """Permit dataclasses or named tuples: instances are written by their fields, and rebuilt from them."""
    _RECORDS.update({kind.__name__: kind for kind in kinds})


def to_data(value: Any, known: Sequence[Any] = ()) -> tuple[Any, Arrays]:
    """Turn a value into a structure for JSON, and arrays by name. TypeError names the place of any other object.

    The value may nest numbers, strings, bytes, None, lists, tuples, dicts, sets, deques, generators of NumPy and Torch,
    arrays of all three libraries and instances of allowed classes. Any other named tuple becomes a plain tuple. An
    object held twice is one object again after `from_data`. Objects in `known` are replaced by their positions there.
    """
    written = _Written({}, {id(item): ["known", position] for position, item in enumerate(known)}, [])
    return written.encode(value, "the value"), written.arrays


class _Written(NamedTuple):
    """What is written so far. It is no recursive closure, since that is a cycle, which would keep arrays alive."""

    arrays: Arrays
    places: dict[int, list[Any]]  # by the id of an object: the structure that refers to it
    seen: list[Any]  # the objects, kept alive so that no other object gets their ids

    def store(self, array: npt.NDArray[Any]) -> str:
        self.arrays[name := f"a{len(self.arrays)}"] = array
        return name

    def encode(self, value: Any, where: str) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if id(value) in self.places:
            return self.places[id(value)]
        self.places[id(value)] = ["again", len(self.seen)]
        self.seen.append(value)
        return _nested(value, where, self.encode) or _leaf(value, where, self.store)


def _nested(value: Any, where: str, encode: Callable[[Any, str], Any]) -> list[Any]:
    """The structure of a container or a record: a list that begins with its kind. Empty for anything else."""
    kind: Any = type(value)
    if kind in _RECORDS.values():
        names = kind._fields if isinstance(value, tuple) else [field.name for field in fields(kind)]
        return ["record", kind.__name__, encode({name: getattr(value, name) for name in names}, where)]
    kind = tuple if isinstance(value, tuple) else kind
    if kind in _SEQUENCES.values():
        parts = [encode(item, f"{where}[{number}]") for number, item in enumerate(value)]
        return [kind.__name__, parts, *([value.maxlen] if kind is deque else [])]
    if isinstance(value, dict):
        return ["dict", [[encode(key, where), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]]
    if kind is np.random.Generator and type(value.bit_generator).__name__ in _GENERATORS:
        return ["generator", encode(value.bit_generator.state, where)]
    return []


def _leaf(value: Any, where: str, store: _Store) -> list[Any]:
    """The structure of bytes, an array, a tensor or a generator of Torch."""
    kind = type(value)
    if kind is bytes:
        return ["bytes", store(np.frombuffer(value, np.uint8))]
    if (isinstance(value, np.generic) or kind is np.ndarray) and not value.dtype.hasobject:
        array, name = np.asarray(value), "array" if kind is np.ndarray else "scalar"
        if npy.descr_to_dtype(npy.dtype_to_descr(array.dtype)) == array.dtype:
            return [name, store(array)]
        if array.dtype.names is None:  # a dtype that NumPy's files cannot hold
            return [name, *_bytes(array, store)]
    dense = isinstance(value, Tensor) and value.layout == torch.strided
    if dense and not (value.is_meta or value.is_quantized or value.is_nested):  # its elements are in memory
        tensor = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # a single element may have another stride
        return ["tensor", store(flat.numpy()), str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
    if kind is torch.Generator:
        return ["torch_generator", store(value.get_state().numpy()), str(value.device)]
    if kind.__module__.startswith(("jax", "jaxlib")) and isinstance(value, (jax := import_jax()).Array):
        if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
            return ["key", store(np.asarray(jax.random.key_data(value))), str(jax.random.key_impl(value))]
        return ["jax", *_bytes(np.asarray(value), store)]
    raise TypeError(f"{where} is {shown(value)} ({kind.__name__}), which cannot be saved as data")


def _bytes(value: npt.NDArray[Any], store: _Store) -> list[Any]:
    flat = np.ascontiguousarray(value).reshape(-1)
    return [store(flat.view(np.uint8)), value.dtype.name, [*value.shape]]


def from_data(data: Any, arrays: Mapping[str, npt.NDArray[Any]], known: Sequence[Any] = ()) -> Any:
    """Rebuild a value from the result of `to_data`; `known` are the objects to use at the positions of its own."""
    seen: list[Any] = []

    def decode(data: Any) -> Any:
        if not isinstance(data, list):
            return data
        kind, *rest = data
        if kind in ("known", "again"):
            return (known if kind == "known" else seen)[rest[0]]
        number = len(seen)
        seen.append({} if kind == "dict" else [])  # before its parts, which may refer to it
        seen[number] = build(kind, rest, seen[number])
        return seen[number]

    def build(kind: str, rest: list[Any], empty: Any) -> Any:
        if kind in _SEQUENCES:
            empty.extend(map(decode, rest[0]))
            return empty if kind == "list" else _SEQUENCES[kind](empty, *rest[1:])
        if kind == "dict":
            empty.update({decode(key): decode(value) for key, value in rest[0]})
            return empty
        if kind == "record":
            return _RECORDS[rest[0]](**decode(rest[1]))
        if kind == "generator":
            state = decode(rest[0])
            bits = _GENERATORS[state["bit_generator"]]()
            bits.state = state
            return np.random.Generator(bits)
        if kind not in _ARRAYS:
            raise ValueError(f"the data has a value of the unknown kind {kind!r}")
        return _ARRAYS[kind](arrays[rest[0]], *rest[1:])

    return decode(data)


def _numpy(array: npt.NDArray[Any], name: str | None = None, shape: Sequence[int] = ()) -> npt.NDArray[Any]:
    """A copy of an array, or an array of this dtype and shape from its bytes."""
    if name is None:
        return np.array(array)
    return np.frombuffer(array.tobytes(), import_jax().numpy.dtype(name)).reshape(shape).copy()


def _tensor(array: npt.NDArray[Any], name: str, shape: list[int]) -> Tensor:
    if not isinstance(dtype := getattr(torch, name, None), torch.dtype):
        raise ValueError(f"the data has a tensor of the unknown dtype {name!r}")
    return torch.from_numpy(array.copy()).view(dtype).reshape(shape) if array.size else torch.empty(shape, dtype=dtype)


_ARRAYS: dict[str, Callable[..., Any]] = {
    "array": _numpy,
    "bytes": lambda array: array.tobytes(),
    "scalar": lambda *stored: _numpy(*stored)[()],
    "tensor": _tensor,
    "jax": lambda *stored: import_jax().numpy.array(_numpy(*stored)),
    "key": lambda words, name: import_jax().random.wrap_key_data(import_jax().numpy.asarray(words), impl=name),
    "torch_generator": lambda state, device: torch.Generator(device).set_state(torch.from_numpy(state.copy())),
}


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to; after a block without an error, that file replaces `path`, or the target of a link."""
    path = path.resolve()
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, expected a file: pass another name")
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path} is a device or a pipe, expected a file: pass another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}.new")
    try:
        yield fresh
        sync(fresh)
        fresh.replace(path)
        sync(path.parent)
    finally:
        fresh.unlink(missing_ok=True)


def allocate(fd: int, size: int) -> None:
    """Give a file this size in bytes, allocated where the system can do that; OSError if there is no room."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
    else:
        os.ftruncate(fd, size)


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_arrays(path: Path) -> Arrays:
    """The arrays that `numpy.savez` wrote, whose checksums are checked; ValueError for a damaged or another file.

    Errors of opening it, such as PermissionError, are the system's.
    """
    with open(path, "rb") as file, _reading(path), np.load(file, allow_pickle=False) as saved:  # `open` closes it
        return dict(saved)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn any error in the block, which does not open files, into ValueError: damaged bytes cause many kinds."""
    try:
        yield
    except Exception as error:
        name = type(error).__name__  # without the message, which may advise to unpickle the file
        why = "too large for the memory here" if isinstance(error, MemoryError) else "another kind of file"
        raise ValueError(f"{path} cannot be read ({name}): it is damaged, or {why}") from error


def write_data(path: Path, kind: str, value: Any) -> None:
    """Write plain data (see `to_data`) to a file of this `kind`, which replaces an earlier one if all goes well."""
    data, arrays = to_data(value)
    header = json.dumps({"kind": kind, "format": _FORMAT, "data": data}).encode()
    with replacing(path) as fresh, open(fresh, "wb") as file:
        np.savez(file, allow_pickle=False, **{_HEADER: np.frombuffer(header, np.uint8)}, **arrays)


def read_data(path: Path, kind: str) -> Any:
    """Read what `write_data` wrote; ValueError for a damaged file, and for another kind or format."""
    arrays = read_arrays(path)
    with _reading(path):
        header = json.loads(arrays.pop(_HEADER).tobytes())
        found = header["kind"], header["format"]
        value = from_data(header["data"], arrays) if found == (kind, _FORMAT) else None
    if found[0] != kind:
        raise ValueError(f"{path} holds {found[0]}, expected {kind}: pass the file that was saved as such")
    if found[1] != _FORMAT:
        mend = "load it with the version that saved it"
        raise ValueError(f"{path} has format {found[1]}, this version of funcollect reads format {_FORMAT}: {mend}")
    return value


class Uninterrupted:
    """A block that delays Ctrl-C to its end, in the main thread, the only one it interrupts; blocks may be nested."""

    __slots__ = ("_handler", "_interrupted_at")
    _outermost: ClassVar[Uninterrupted | None] = None  # the block that the main thread is in

    def __enter__(self) -> None:
        self._handler: Any = None
        self._interrupted_at: FrameType | None = None  # the frame in which the signal arrived
        if Uninterrupted._outermost is None and callable(handler := _signal.getsignal(_signal.SIGINT)):
            try:
                _signal.signal(_signal.SIGINT, self._note)
            except ValueError:  # in another thread
                return
            self._handler = handler
            Uninterrupted._outermost = self

    def _note(self, _: int, frame: FrameType | None) -> None:
        self._interrupted_at = frame

    def __exit__(self, *_: object) -> None:
        if self._handler is None:
            return
        Uninterrupted._outermost = None
        _signal.signal(_signal.SIGINT, self._handler)
        if self._interrupted_at is not None:
            self._handler(_signal.SIGINT, self._interrupted_at)
