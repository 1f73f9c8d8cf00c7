"""Planes of stacked frames in a file, which grows. Its readers see only numbers of planes that are complete."""

from __future__ import annotations

import mmap
import os
import weakref
from pathlib import Path

import numpy as np
from typing_extensions import override

from funcollect.buffers.arrays import Ints
from funcollect.buffers.storages.plane_pool import PlaneMemory
from funcollect.files import allocate

PLANES = "planes-{}.bin"  # the names of the files
_WORD = 8  # bytes


class PlaneFile(PlaneMemory):
    """A new file at `path` for planes of this number of words. A copy is in memory."""

    def __init__(self, path: Path, words: int) -> None:
        super().__init__(words)
        self.path = path
        self._file = _opened(self, path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    @override
    def grow(self, count: int) -> None:
        words = self._rows.shape[1]
        try:
            allocate(self._file, count * words * _WORD)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{self.path} has no room for {count} distinct frames of {words * _WORD} bytes ({error.strerror}): "
                "give a smaller max_size, or another scratch_dir",
            ) from error
        mapped = mmap.mmap(self._file, count * words * _WORD)
        self._rows = np.frombuffer(mapped, np.int64).reshape(count, words)

    def __deepcopy__(self, memo: dict[int, object]) -> PlaneMemory:
        twin = PlaneMemory(self._rows.shape[1])
        twin._rows = self._rows.copy()
        return twin


class OpenedPlaneFile(PlaneMemory):
    """The file of a `PlaneFile` in any process, for reading."""

    def __init__(self, path: Path, words: int) -> None:
        super().__init__(words)
        self._file = _opened(self, path, os.O_RDONLY)  # kept open: the file may grow, also after it was replaced

    @property
    @override
    def rows(self) -> Ints:
        words = self._rows.shape[1]
        count = os.fstat(self._file).st_size // (words * _WORD)
        if count > len(self._rows):
            mapped = mmap.mmap(self._file, count * words * _WORD, access=mmap.ACCESS_READ)
            self._rows = np.frombuffer(mapped, np.int64).reshape(count, words)
        return self._rows


def _opened(owner: object, path: Path, flags: int) -> int:
    """Open a file, which is closed together with its owner."""
    handle = os.open(path, flags | os.O_CLOEXEC, 0o666)
    weakref.finalize(owner, os.close, handle)
    return handle
