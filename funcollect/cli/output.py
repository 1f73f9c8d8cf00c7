"""Writes a folder of results, either completely or not at all."""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tensordict import TensorDict

from funcollect.files import allocate
from funcollect.tree import flatten

OUTPUTS = frozenset({"batch", "stats.json", "returns.png"})


@contextmanager
def output_folder(out: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a new folder, which replaces `out` if the block ends without an error; ValueError if `out` must be kept."""
    out = out.resolve()
    _check_output(out, overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        new, old = Path(scratch, "new"), Path(scratch, "old")
        new.mkdir()
        yield new
        try:
            if out.exists():
                out.rename(old)
            new.rename(out)
        except BaseException:
            if old.exists() and not out.exists():
                old.rename(out)
            raise


def _check_output(out: Path, overwrite: bool) -> None:
    """Raise ValueError unless `out` is missing, empty, or with `overwrite` the result of an earlier run."""
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"{out} is a file, expected a folder for --out: choose another name")
    if out.is_mount() or Path.cwd().is_relative_to(out):
        raise ValueError(f"{out} is in use and cannot be replaced as a whole: name a folder inside it")
    present = {path.name for path in out.iterdir()}
    if present and not overwrite:
        raise ValueError(f"{out} is not empty: choose another folder, or replace an earlier run with --overwrite")
    if foreign := sorted(present - OUTPUTS):
        raise ValueError(f"{out} holds {foreign}, which no run of funcollect has written: choose another folder")


def save(batches: Iterable[TensorDict], path: Path, frames: int) -> None:
    """Write batches [P, T] of equal shape, with `frames` frames or a few more, as one memory-mapped TensorDict."""
    store, filled = None, 0
    for batch in batches:
        if store is None:
            store = _reserve(path, batch, steps=math.ceil(frames / batch.numel()) * batch.shape[-1])
        store[..., filled : filled + batch.shape[-1]].update_(batch)
        filled += batch.shape[-1]


def _reserve(path: Path, batch: TensorDict, *, steps: int) -> TensorDict:
    """Make a memory-mapped TensorDict [P, steps] with the keys, shapes and dtypes of `batch`.

    All disk blocks are allocated at once (OSError if there is no room), since writing to a sparse file on a full disk
    kills the process by a signal.
    """
    whole = batch[..., :1].expand(*batch.shape[:-1], steps)
    wanted = sum(leaf.numel() * leaf.element_size() for leaf in flatten(whole).values())
    try:
        if wanted > shutil.disk_usage(path.parent).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        store = whole.memmap_like(path)
        for file in path.rglob("*.memmap"):
            size = file.stat().st_size
            if size:
                with file.open("r+b") as opened:
                    allocate(opened.fileno(), size)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"no room for {wanted / 1e6:,.1f} MB in {path.parents[2]}: {reason}") from error
    return store
