"""The file of a memory-mapped storage: a header, then the rows.

The header describes the rows in JSON, and two of its words give the range of complete frames. A process can read the
file without further information, even after the writer was killed. A reader never gets part of a frame: frames are
withdrawn before their rows are overwritten, and published once they are complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from funcollect.buffers.arrays import Ints

NAME = "rows.bin"

_MAGIC = int.from_bytes(b"funcoll1", "little")
_WORD, _PAGE = 8, 4096  # bytes
_OLDEST, _WRITTEN = 8, 9  # the words of the header that change
_JSON = 16  # the word at which the JSON begins


class RowsFile:
    """A mapped file."""

    def __init__(self, words: Ints) -> None:
        self.header: dict[str, Any] = json.loads(words[_JSON:].view(np.uint8)[: words[2]].tobytes())
        self.rows = words[words[1] :].reshape(self.header["max_size"], -1)  # [capacity, words] int64
        self._words = words

    @property
    def oldest(self) -> int:
        """The number of the oldest complete frame."""
        return int(self._words[_OLDEST])

    @property
    def span(self) -> tuple[int, int]:
        """The number of the oldest complete frame, and one past the number of the newest."""
        while True:
            written, oldest = int(self._words[_WRITTEN]), self.oldest
            if written == self._words[_WRITTEN]:  # else all frames of the range may have been withdrawn since
                return oldest, written

    def announce(self, oldest: int, written: int) -> None:
        """Publish that exactly the frames ``oldest … written - 1`` are complete."""
        self._words[_OLDEST] = oldest  # first, since a frame may be overwritten only once it is withdrawn
        self._words[_WRITTEN] = written


def create(path: Path, header: Mapping[str, Any], rows: int, words: int) -> tuple[RowsFile, Tensor]:
    """Create a file with space for all rows; return it and its rows as a tensor ``[rows, words]``."""
    text = json.dumps({**header, "max_size": rows}).encode()
    offset = -(-(_JSON * _WORD + len(text)) // _PAGE) * _PAGE // _WORD  # words before the first row
    size = offset + rows * words
    # The file gets its name once it is complete. An old file is replaced, not truncated: a process that has mapped it
    # would be killed.
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
    """Open the file of another process for reading."""
    if not path.exists():
        raise FileNotFoundError(
            f"{path.parent} has no frames of a LazyMemmapStorage: give its scratch_dir, after the first extend"
        )
    words = np.memmap(path, np.int64, "r")
    if words[0] != _MAGIC:
        raise ValueError(f"{path} was not written by a LazyMemmapStorage: give the scratch_dir of one")
    return RowsFile(words.view(np.ndarray))
