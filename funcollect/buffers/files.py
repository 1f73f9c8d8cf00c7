"""A buffer's files: a directory for each dump, and a pointer to the one that is whole.

A dump is written beside the former one and becomes current by the renaming of one small file, so a dump that is cut
off, at any moment, leaves the former one as it was. Nothing in the files is code.
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
    """Make a dump, which `fill` writes into an empty directory, the current one."""
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
        if other != fresh and other.name[1:].isdigit():  # the former one, and what was left of those cut off
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
        FileNotFoundError: where there is none.
    """
    if (found := _current(Path(directory))) is None:
        raise FileNotFoundError(f"{directory} has no whole dump of a buffer: give the directory that dumps was given")
    return found


def put(directory: Path, meta: Mapping[str, Any], arrays: Arrays) -> None:
    """Write what is no frame: JSON and plain arrays."""
    (directory / _META).write_text(json.dumps(meta, indent=1))
    np.savez(directory / _ARRAYS, allow_pickle=False, **arrays)


def get(directory: Path) -> tuple[dict[str, Any], Arrays]:
    """What `put` wrote."""
    with np.load(directory / _ARRAYS, allow_pickle=False) as saved:
        arrays = {name: saved[name] for name in saved.files}
    return json.loads((directory / _META).read_text()), arrays


def under(prefix: str, arrays: Mapping[str, npt.NDArray[Any]]) -> Arrays:
    """Arrays by name, with a prefix."""
    return {f"{prefix}.{name}": array for name, array in arrays.items()}


def of(prefix: str, arrays: Mapping[str, npt.NDArray[Any]]) -> Arrays:
    """The arrays that have a prefix, without it."""
    return {name[len(prefix) + 1 :]: array for name, array in arrays.items() if name.startswith(f"{prefix}.")}
