"""Frames as packed rows in a memory-mapped file."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path

import torch
from torch import Tensor

from funcollect.arguments import check_flags, check_kind
from funcollect.buffers.storages import rows_file
from funcollect.buffers.storages.packed_rows import RowLayout
from funcollect.buffers.storages.tensor_storage import LazyTensorStorage


class LazyMemmapStorage(LazyTensorStorage):
    """`LazyTensorStorage` in a file, so that frames may outgrow memory and other processes may read them.

    Readers (`ReplayReader`) never see part of a frame: before rows are overwritten their frames are retired, and new
    ones are published when they are whole.

    Args:
        max_size: frames.
        scratch_dir: where the file is made; it stays there. A temporary directory that goes with the storage, or at
            the end of the process, unless given.
        ndim: leading dimensions of a batch, time last.
        device: where samples come out; the host unless given. Rows are in the file in any case.
        compact_obs: as of `LazyTensorStorage`; what lies aside is in memory, so there are no readers.
        existsok: write over the file of a storage that was there before.

    Raises:
        OSError: where the disk has no room for all of `max_size`, at the first batch and not in the midst of a run.
        FileExistsError: where the directory has a storage already.
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
        check_kind(
            "scratch_dir", scratch_dir, (str, os.PathLike, type(None)), "pass a directory, or None for a new one"
        )
        self.scratch_dir = None if scratch_dir is None else Path(scratch_dir)
        self._existsok = existsok
        self._file: rows_file.RowsFile | None = None
        self._base = 0  # of the numbers that readers know frames by, which never start again; of slot 0

    def _allocate(self, layout: RowLayout, existsok: bool = False) -> Tensor:
        directory = self.scratch_dir
        if directory is None:
            directory = Path(tempfile.mkdtemp(prefix="funcollect-"))
            weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)
        path = directory / rows_file.NAME
        if path.exists() and not (existsok or self._existsok):
            raise FileExistsError(f"{path} exists: give another scratch_dir, or existsok=True to write over it")
        path.parent.mkdir(parents=True, exist_ok=True)
        header = {
            "rows": None if layout.structure is not None else layout.to_json(),
            "compact_obs": self.compact_obs,
        }
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

    def announce(self, oldest: int, written: int) -> None:
        """Tell readers that frames ``oldest … written - 1`` are whole, and no others."""
        if self._file is not None:
            self._file.announce(self._base + oldest, self._base + written)

    def empty(self) -> None:
        """Forget every frame; the keys, shapes and dtypes stay."""
        if self._file is not None:
            self._base = -(-self._file.span[1] // self.max_size) * self.max_size
            self.announce(0, 0)
