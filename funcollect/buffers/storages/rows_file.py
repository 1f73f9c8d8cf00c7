"""The file of a memory-mapped storage: a header, then its rows.

The header says in JSON what the rows are, and in two words which of them hold whole frames. So a process that finds
the file needs nothing else to read it, also after the one that wrote it was killed. The file appears under its name
when it is complete, by renaming.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]

NAME = "rows.bin"

_MAGIC = int.from_bytes(b"funcoll1", "little")
_WORD, _PAGE = 8, 4096  # bytes
_OLDEST, _WRITTEN = 8, 9  # words of the header that move
_JSON = 16  # the word at which the JSON begins


class RowsFile:
    """The words of such a file, mapped.

    Attributes:
        header: the JSON at the beginning of the file.
        rows: ``[capacity, words]`` int64.
    """

    def __init__(self, words: Ints) -> None:
        self.header: dict[str, Any] = json.loads(words[_JSON:].view(np.uint8)[: words[2]].tobytes())
        self.rows = words[words[1] :].reshape(self.header["max_size"], -1)
        self._words = words

    @property
    def oldest(self) -> int:
        """The number of the oldest frame that is whole."""
        return int(self._words[_OLDEST])

    @property
    def span(self) -> tuple[int, int]:
        """The number of the oldest frame that is whole, and one after that of the newest."""
        while True:
            written, oldest = int(self._words[_WRITTEN]), self.oldest
            if written == self._words[_WRITTEN]:  # otherwise every frame of the span may have been retired meanwhile
                return oldest, written

    def announce(self, oldest: int, written: int) -> None:
        """Frames ``oldest … written - 1`` are whole, and no others."""
        self._words[_OLDEST] = oldest  # first: a frame may be overwritten only where it no longer counts
        self._words[_WRITTEN] = written


def create(path: Path, header: Mapping[str, Any], rows: int, words: int) -> tuple[RowsFile, Tensor]:
    """Make the file of so many rows, whose space is there; also its rows, ``[rows, words]``, as a tensor.

    Raises:
        OSError: where the disk has no room.
    """
    text = json.dumps({**header, "max_size": rows}).encode()
    offset = -(-(_JSON * _WORD + len(text)) // _PAGE) * _PAGE // _WORD  # words before the first row
    size = offset + rows * words
    # A new file in the place of an old one: whoever has mapped the old one must not see it shrink, which kills.
    fresh = path.with_suffix(".new")
    try:
        with open(fresh, "w+b") as file:
            os.posix_fallocate(file.fileno(), 0, size * _WORD)
            file.write(np.array([_MAGIC, offset, len(text)], np.int64).tobytes())
            file.seek(_JSON * _WORD)
            file.write(text)
    except OSError:
        fresh.unlink()
        raise
    mapped = torch.from_file(str(fresh), shared=True, size=size, dtype=torch.int64)
    fresh.replace(path)
    return RowsFile(mapped.numpy()), mapped[offset:].view(rows, words)


def attach(path: Path) -> RowsFile:
    """The file that another process writes, to be read.

    Raises:
        FileNotFoundError: where there is none.
        ValueError: for a file of another kind.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path.parent} has no frames of a LazyMemmapStorage: give its scratch_dir, after the first extend"
        )
    words = np.memmap(path, np.int64, "r")
    if words[0] != _MAGIC:
        raise ValueError(f"{path} was not written by a LazyMemmapStorage: give the scratch_dir of one")
    return RowsFile(words.view(np.ndarray))
