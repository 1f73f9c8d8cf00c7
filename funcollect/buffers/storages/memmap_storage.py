"""Frames as packed rows in a memory-mapped file: a header, then the rows.

The header describes the rows in JSON, and two of its words give the range of complete frames. A reader never gets part
of a frame: frames are withdrawn before their rows are overwritten, and published once they are complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from funcollect.arguments import check_flags, check_kind
from funcollect.buffers import Ints
from funcollect.buffers.storages.packed_rows import FrameLayout
from funcollect.buffers.storages.shared_leaves import PLANES, RowsInFile, SharedLeaves, room_for
from funcollect.buffers.storages.tensor_storage import LazyTensorStorage

_NAME = "rows.bin"  # of the file
_MAGIC = int.from_bytes(b"funcoll2", "little")
_WORD, _PAGE = 8, 4096  # bytes
_OLDEST, _WRITTEN = 8, 9  # the words of the header that change
_JSON = 16  # the word at which the JSON begins


class LazyMemmapStorage(LazyTensorStorage):
    """A `LazyTensorStorage` in a file: it can be larger than memory, and other processes can read it (`ReplayReader`).

    Args:
        max_size: the capacity in frames.
        scratch_dir: the directory of the file, which is kept. By default a temporary file without a name, which ends
            with the storage or with the process, even if that is killed.
        ndim, compact_obs, frame_stack: see `LazyTensorStorage`. Parts that are stored once are in further files.
        device: the device of samples; by default the CPU. The rows are in the file in any case.
        existsok: overwrite the file of an earlier storage.

    Raises:
        OSError: if the disk has no room for `max_size` frames; raised at the first batch rather than in mid-run. Later
            only with `compact_obs` or `frame_stack`, if frames share so little that a file has to grow; no frame is
            lost then.
        FileExistsError: if the directory already has a storage.

    >>> import funcollect as fc, torch
    >>> buffer = fc.ReplayBuffer(storage=fc.LazyMemmapStorage(100), batch_size=4)
    >>> indices = buffer.extend({"x": torch.arange(10)})
    >>> buffer.sample()["x"].shape
    torch.Size([4])
    """

    def __init__(
        self,
        max_size: int,
        *,
        scratch_dir: str | os.PathLike[str] | None = None,
        ndim: int = 1,
        device: torch.device | str | None = None,
        compact_obs: bool = False,
        frame_stack: int | None = None,
        existsok: bool = False,
    ) -> None:
        super().__init__(max_size, ndim=ndim, device=device, compact_obs=compact_obs, frame_stack=frame_stack)
        check_flags(existsok=existsok)
        check_kind("scratch_dir", scratch_dir, (str, os.PathLike, type(None)), "pass a directory, or None")
        self.scratch_dir = None if scratch_dir is None else Path(scratch_dir)
        self._existsok = existsok
        self._file: RowsFile | None = None
        self._base = 0  # the number of the first frame after `empty`: for readers, numbers only increase

    @override
    def _allocate(self, layout: FrameLayout, existsok: bool = False) -> tuple[Tensor, SharedLeaves]:
        with contextlib.ExitStack() as stack:
            directory = self.scratch_dir
            if directory is None:  # open files live on without their names
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="funcollect-")))
            path, former = directory / _NAME, {*directory.glob(PLANES.format("*"))}
            if path.exists() and not (existsok or self._existsok):
                raise FileExistsError(f"{path} exists: give another scratch_dir, or existsok=True to write over it")
            directory.mkdir(parents=True, exist_ok=True)
            nbytes = layout.rows.nbytes + sum(size * dtype.itemsize for _, size, dtype in layout.kinds())
            wanted = f"{self.max_size} frames of {nbytes} bytes, {self.max_size * nbytes} in all"
            try:
                with room_for(f"{directory} has no room for {wanted}"):
                    rows, shared = self._create(path, layout)
            except BaseException:
                former = {*directory.glob(PLANES.format("*"))} - former
                raise
            finally:
                for each in former:  # files of planes that no header names
                    each.unlink()
        self._base = 0
        return rows, shared

    def _create(self, path: Path, layout: FrameLayout) -> tuple[Tensor, SharedLeaves]:
        """Create the file, and those for planes."""
        saved = layout.to_json() if layout.rows.structure is None else {}
        names = [PLANES.format(secrets.token_hex(8)) for _ in layout.kinds()]
        shared = SharedLeaves(layout, [partial(RowsInFile, path.with_name(name)) for name in names], self.max_size)
        header = np.frombuffer(json.dumps({**saved, "max_size": self.max_size, "files": names}).encode(), np.uint8)
        offset = -(-(_JSON * _WORD + len(header)) // _PAGE) * _PAGE // _WORD  # words before the first row
        # The file gets its name once it is complete. An old file is replaced, not truncated: a process that has mapped
        # it would be killed.
        fresh = path.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        try:
            file = RowsInFile(fresh, 1)
            file.grow(offset + self.max_size * layout.rows.words)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise
        words = file.rows[:, 0]
        words[:3] = _MAGIC, offset, len(header)
        words[_JSON:].view(np.uint8)[: len(header)] = header
        fresh.replace(path)
        self._file = RowsFile(words)
        return torch.from_numpy(self._file.rows), shared

    @override
    def _announce(self, oldest: int, written: int) -> None:
        if self._file is not None:
            self._file.announce(self._base + oldest, self._base + written)

    @override
    def empty(self) -> None:
        if self._file is not None:
            self._base = -(-self._file.span[1] // self.max_size) * self.max_size
            self._announce(0, 0)


class RowsFile:
    """The memory-mapped file of a `LazyMemmapStorage`: its header and its rows."""

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


def attach(directory: Path) -> tuple[RowsFile, FrameLayout, SharedLeaves]:
    """The file that another process writes in its `scratch_dir`, the layout of its frames, and their shared leaves."""
    path = directory / _NAME
    if not path.exists():
        raise FileNotFoundError(
            f"{directory} has no frames of a LazyMemmapStorage: give its scratch_dir, after the first extend"
        )
    words = RowsInFile(path, 1, reading=True).rows[:, 0]
    if words[0] != _MAGIC:
        raise ValueError(f"{path} was not written by a LazyMemmapStorage: give the scratch_dir of one")
    file = RowsFile(words)
    if "batch" not in file.header:
        raise TypeError("the storage holds trees, whose structure is not in its file: store TensorDicts for readers")
    layout = FrameLayout.from_json(file.header)
    planes = [partial(RowsInFile, directory / name, reading=True) for name in file.header["files"]]
    return file, layout, SharedLeaves(layout, planes)
