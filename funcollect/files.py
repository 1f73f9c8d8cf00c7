"""Writes files that are complete or absent, and reads files of plain data without executing code."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from funcollect.interop.plain_data import from_data, to_data

_FORMAT = 1
_HEADER = "header"  # the name of the array that has the JSON


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file beside `path`, which gets that name once the block has ended without an exception.

    Until then, and after a crash, `path` is what it was before. A link stays, and the file to which it leads is
    replaced.
    """
    path = path.resolve()
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, expected a file: pass another name")
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path} is a device or a pipe, expected a file: pass another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        yield fresh
        sync(fresh)
        fresh.replace(path)
        sync(path.parent)
    finally:
        fresh.unlink(missing_ok=True)


def allocate(fd: int, size: int) -> None:
    """Give a file this many bytes, and allocate them where the system can: OSError if there is no room."""
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


def read_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays that `numpy.savez` has written: a zip file, which has a checksum for each.

    Raises FileNotFoundError, or ValueError for a file that is damaged, or another kind of file.
    """
    with _reading(path), open(path, "rb") as file, np.load(file, allow_pickle=False) as saved:  # `open` closes it
        return dict(saved)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise ValueError for any error in the block but a missing file: damaged bytes lead to errors of many kinds."""
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:
        name = type(error).__name__  # its message may advise to unpickle the file
        raise ValueError(f"{path} cannot be read ({name}): it is damaged, or another kind of file") from error


def write_data(path: Path, kind: str, value: Any) -> None:
    """Write plain data (see `to_data`) to a file, which replaces an earlier one. `kind` says what the data describes.

    Raises TypeError for a value that is no plain data, or OSError; an earlier file is unchanged then.
    """
    data, arrays = to_data(value)
    header = json.dumps({"kind": kind, "format": _FORMAT, "data": data}).encode()
    with replacing(path) as fresh, open(fresh, "wb") as file:
        np.savez(file, allow_pickle=False, **{_HEADER: np.frombuffer(header, np.uint8)}, **arrays)


def read_data(path: Path, kind: str) -> Any:
    """Read what `write_data` has written; raises as `read_arrays` does, also for another kind or format."""
    arrays = read_arrays(path)
    with _reading(path):
        header = json.loads(arrays.pop(_HEADER).tobytes())
        found = header["kind"], header["format"]
        value = from_data(header["data"], arrays) if found == (kind, _FORMAT) else None
    if found[0] != kind:
        raise ValueError(f"{path} holds {found[0]}, expected {kind}: pass the file that was saved as such")
    if found[1] != _FORMAT:
        raise ValueError(
            f"{path} has format {found[1]}, this version of funcollect reads format {_FORMAT}: load it with the "
            "version that saved it"
        )
    return value
