"""Writes a buffer's dumps atomically: one directory per dump, and a small file that names the complete one.

A dump is written next to the previous one. It becomes current when the small file is renamed, so an interrupted dump
leaves the previous one intact. The files contain no code.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]

_POINTER, _META, _ARRAYS = "current", "meta.json", "arrays.npz"


def write(directory: str | os.PathLike[str], fill: Callable[[Path], None]) -> None:
    """Let `fill` write a dump into an empty directory, then make it the current one."""
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    former = _current(root)
    fresh = root / f"v{int(former.name[1:]) + 1 if former else 0}"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        fill(fresh)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    for file in fresh.iterdir():
        _sync(file)
    _sync(fresh)
    pointer = root / f"{_POINTER}.new"
    pointer.write_text(fresh.name)
    _sync(pointer)
    pointer.replace(root / _POINTER)
    _sync(root)
    for other in root.glob("v*"):
        if other != fresh and other.name[1:].isdigit():  # the previous one, and the remains of interrupted ones
            shutil.rmtree(other, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _current(root: Path) -> Path | None:
    pointer = root / _POINTER
    return root / pointer.read_text() if pointer.exists() else None


def current(directory: str | os.PathLike[str]) -> Path:
    """The directory of the current dump.

    Raises:
        FileNotFoundError: if there is none.
    """
    if (found := _current(Path(directory))) is None:
        raise FileNotFoundError(f"{directory} has no whole dump of a buffer: give the directory that dumps was given")
    return found


def put(directory: Path, meta: Mapping[str, Any], arrays: Arrays) -> None:
    """Write everything but the frames: JSON and plain arrays."""
    (directory / _META).write_text(json.dumps(meta, indent=1))
    np.savez(directory / _ARRAYS, allow_pickle=False, **arrays)


def get(directory: Path) -> tuple[dict[str, Any], Arrays]:
    """The contents written by `put`."""
    with np.load(directory / _ARRAYS, allow_pickle=False) as saved:
        arrays = {name: saved[name] for name in saved.files}
    return json.loads((directory / _META).read_text()), arrays


def under(prefix: str, arrays: Mapping[str, npt.NDArray[Any]]) -> Arrays:
    """The arrays with a prefix added to their names."""
    return {f"{prefix}.{name}": array for name, array in arrays.items()}


def of(prefix: str, arrays: Mapping[str, npt.NDArray[Any]]) -> Arrays:
    """The arrays whose names have this prefix, with it removed."""
    return {name[len(prefix) + 1 :]: array for name, array in arrays.items() if name.startswith(f"{prefix}.")}
