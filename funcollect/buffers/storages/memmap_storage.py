"""Frames as packed rows in a memory-mapped file."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from funcollect.arguments import check_flags, check_kind
from funcollect.buffers.storages import rows_file
from funcollect.buffers.storages.packed_rows import RowLayout
from funcollect.buffers.storages.tensor_storage import LazyTensorStorage


class LazyMemmapStorage(LazyTensorStorage):
    """A `LazyTensorStorage` in a file: it can be larger than memory, and other processes can read it (`ReplayReader`).

    Args:
        max_size: the capacity in frames.
        scratch_dir: the directory of the file, which is kept. By default a temporary directory, which is deleted with
            the storage or at the end of the process.
        ndim: see `LazyTensorStorage`.
        device: the device of samples; by default the CPU. The rows are in the file in any case.
        compact_obs: see `LazyTensorStorage`. Separately stored observations are in memory, so readers are not possible.
        existsok: overwrite the file of an earlier storage.

    Raises:
        OSError: if the disk has no room for `max_size` frames; raised at the first batch rather than in mid-run.
        FileExistsError: if the directory already has a storage.
    """

    def __init__(
        self,
        max_size: int,
        *,
        scratch_dir: str | os.PathLike[str] | None = None,
        ndim: int = 1,
        device: torch.device | str | None = None,
        compact_obs: bool = False,
        existsok: bool = False,
    ) -> None:
        super().__init__(max_size, ndim=ndim, device=device, compact_obs=compact_obs)
        check_flags(existsok=existsok)
        check_kind("scratch_dir", scratch_dir, (str, os.PathLike, type(None)), "pass a directory, or None")
        self.scratch_dir = None if scratch_dir is None else Path(scratch_dir)
        self._existsok = existsok
        self._file: rows_file.RowsFile | None = None
        self._base = 0  # the number of the first frame after `empty`: for readers, numbers only increase

    def _allocate(self, layout: RowLayout, existsok: bool = False) -> Tensor:
        directory = self.scratch_dir
        if directory is None:
            directory = Path(tempfile.mkdtemp(prefix="funcollect-"))
            weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)
        path = directory / rows_file.NAME
        if path.exists() and not (existsok or self._existsok):
            raise FileExistsError(f"{path} exists: give another scratch_dir, or existsok=True to write over it")
        path.parent.mkdir(parents=True, exist_ok=True)
        described = layout.to_json() if layout.structure is None else None
        header = {"rows": described, "compact_obs": self.compact_obs}
        try:
            self._file, rows = rows_file.create(path, header, self.max_size, layout.words)
        except OSError as error:
            size = self.max_size * layout.nbytes
            raise OSError(
                error.errno,
                f"{path.parent} has no room for {self.max_size} frames of {layout.nbytes} bytes, {size} in all "
                f"({error.strerror}): give a smaller max_size, or another scratch_dir",
            ) from error
        self._base = 0
        return rows

    @override
    def announce(self, oldest: int, written: int) -> None:
        if self._file is not None:
            self._file.announce(self._base + oldest, self._base + written)

    @override
    def empty(self) -> None:
        if self._file is not None:
            self._base = -(-self._file.span[1] // self.max_size) * self.max_size
            self.announce(0, 0)
