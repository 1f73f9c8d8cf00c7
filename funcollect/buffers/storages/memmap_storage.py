"""Frames as packed rows in a memory-mapped file: a header, then the rows.

The header describes the rows in JSON, and two of its words give the range of complete frames. A process can read the
file without further information, even after the writer was killed. A reader never gets part of a frame: frames are
withdrawn before their rows are overwritten, and published once they are complete.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from funcollect.arguments import check_flags, check_kind
from funcollect.buffers.arrays import Ints
from funcollect.buffers.storages.frame_stacks import FrameStacks, StoredStacks, plane_layouts
from funcollect.buffers.storages.packed_rows import RowLayout
from funcollect.buffers.storages.plane_file import PLANES, OpenedPlaneFile, PlaneFile
from funcollect.buffers.storages.tensor_storage import LazyTensorStorage
from funcollect.files import allocate

_NAME = "rows.bin"  # of the file
_MAGIC = int.from_bytes(b"funcoll1", "little")
_WORD, _PAGE = 8, 4096  # bytes
_OLDEST, _WRITTEN = 8, 9  # the words of the header that change
_JSON = 16  # the word at which the JSON begins


class LazyMemmapStorage(LazyTensorStorage):
    """A `LazyTensorStorage` in a file: it can be larger than memory, and other processes can read it (`ReplayReader`).

    Args:
        max_size: the capacity in frames.
        scratch_dir: the directory of the file, which is kept. By default a temporary file without a name, which ends
            with the storage or with the process, even if that is killed.
        ndim: see `LazyTensorStorage`.
        device: the device of samples; by default the CPU. The rows are in the file in any case.
        compact_obs: see `LazyTensorStorage`. Separately stored observations are in memory, so readers are not possible.
        frame_stack: see `LazyTensorStorage`. The frames of stacks are in further files, which readers also use.
        existsok: overwrite the file of an earlier storage.

    Raises:
        OSError: if the disk has no room for `max_size` frames; raised at the first batch rather than in mid-run. Later
            only with `frame_stack`, if stacks share so few frames that a file has to grow; no frame is lost then.
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
    def _allocate(
        self, layout: RowLayout, stacks: RowLayout | None, existsok: bool = False
    ) -> tuple[Tensor, FrameStacks | None]:
        if self.scratch_dir is not None:
            return self._allocate_in(self.scratch_dir, layout, stacks, existsok)
        with tempfile.TemporaryDirectory(prefix="funcollect-") as directory:  # open files live on without their names
            return self._allocate_in(Path(directory), layout, stacks, existsok)

    def _allocate_in(
        self, directory: Path, layout: RowLayout, stacks: RowLayout | None, existsok: bool
    ) -> tuple[Tensor, FrameStacks | None]:
        path = directory / _NAME
        if path.exists() and not (existsok or self._existsok):
            raise FileExistsError(f"{path} exists: give another scratch_dir, or existsok=True to write over it")
        directory.mkdir(parents=True, exist_ok=True)
        saved = layout.to_json() if layout.structure is None else None
        header: dict[str, Any] = {"rows": saved, "compact_obs": self.compact_obs}
        planes = [] if stacks is None else plane_layouts(stacks)
        shared, former = None, set(directory.glob(PLANES.format("*")))
        try:
            if stacks is not None:
                files = [PlaneFile(directory / PLANES.format(secrets.token_hex(8)), plane.words) for plane, _ in planes]
                shared = FrameStacks(stacks, files, self.max_size)
                header |= {"stacks": stacks.to_json(), "planes": [file.path.name for file in files]}
            self._file, rows = _create(path, header, self.max_size, layout.words)
        except OSError as error:
            _remove({*directory.glob(PLANES.format("*"))} - former)
            nbytes = layout.nbytes + sum(plane.nbytes for plane, _ in planes)
            raise OSError(
                error.errno,
                f"{directory} has no room for {self.max_size} frames of {nbytes} bytes, {self.max_size * nbytes} in "
                f"all ({os.strerror(error.errno or 0)}): give a smaller max_size, or another scratch_dir",
            ) from error
        _remove(former)
        self._base = 0
        return rows, shared

    @override
    def announce(self, oldest: int, written: int) -> None:
        if self._file is not None:
            self._file.announce(self._base + oldest, self._base + written)

    @override
    def empty(self) -> None:
        if self._file is not None:
            self._base = -(-self._file.span[1] // self.max_size) * self.max_size
            self.announce(0, 0)


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


def _create(path: Path, header: Mapping[str, Any], rows: int, words: int) -> tuple[RowsFile, Tensor]:
    """Create a file with space for all rows; return it and its rows as a tensor ``[rows, words]``."""
    text = json.dumps({**header, "max_size": rows}).encode()
    offset = -(-(_JSON * _WORD + len(text)) // _PAGE) * _PAGE // _WORD  # words before the first row
    size = offset + rows * words
    # The file gets its name once it is complete. An old file is replaced, not truncated: a process that has mapped it
    # would be killed.
    fresh = path.with_suffix(".new")
    try:
        with open(fresh, "w+b") as file:
            allocate(file.fileno(), size * _WORD)
            file.write(np.array([_MAGIC, offset, len(text)], np.int64).tobytes())
            file.seek(_JSON * _WORD)
            file.write(text)
    except OSError:
        fresh.unlink()
        raise
    mapped = torch.from_file(str(fresh), shared=True, size=size, dtype=torch.int64)
    fresh.replace(path)
    return RowsFile(mapped.numpy()), mapped[offset:].view(rows, words)


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink()


def attach(directory: Path) -> RowsFile:
    """Open the file that another process writes in its `scratch_dir`, for reading."""
    path = directory / _NAME
    if not path.exists():
        raise FileNotFoundError(
            f"{directory} has no frames of a LazyMemmapStorage: give its scratch_dir, after the first extend"
        )
    words = np.memmap(path, np.int64, "r")
    if words[0] != _MAGIC:
        raise ValueError(f"{path} was not written by a LazyMemmapStorage: give the scratch_dir of one")
    return RowsFile(words.view(np.ndarray))


def open_stacks(header: Mapping[str, Any], directory: Path) -> StoredStacks | None:
    """The stacks of the file with this header; None if it has none."""
    if "stacks" not in header:
        return None
    layout = RowLayout.from_json(header["stacks"])
    planes = zip(header["planes"], plane_layouts(layout), strict=True)
    return StoredStacks(layout, [OpenedPlaneFile(directory / name, plane.words) for name, (plane, _) in planes])
