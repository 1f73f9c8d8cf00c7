"""A folder of results, which is there whole or not at all."""

from __future__ import annotations

import errno
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tensordict import TensorDict

from funcollect.tree import flatten

OUTPUTS = frozenset({"batch", "stats.json", "returns.png"})


@contextmanager
def output_folder(out: Path, overwrite: bool) -> Iterator[Path]:
    """A folder beside `out` that takes its place if all goes well, and is gone otherwise.

    Raises:
        ValueError: where something is in the way.
    """
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
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"{out} is a file, --out wants a folder: choose another name")
    if out.is_mount() or Path.cwd().is_relative_to(out):
        raise ValueError(f"{out} is in use and cannot be replaced as a whole: name a folder inside it")
    present = {path.name for path in out.iterdir()}
    if present and not overwrite:
        raise ValueError(f"{out} is not empty: choose another, or replace what an earlier run left with --overwrite")
    if foreign := sorted(present - OUTPUTS):
        raise ValueError(f"{out} holds {foreign}, which no run of funcollect left there: choose another folder")


def save(batches: Iterable[TensorDict], path: Path, frames: int) -> None:
    """Write batches [P, T] of equal shape, `frames` or a little more together, as one memory-mapped TensorDict."""
    store, filled = None, 0
    for batch in batches:
        if store is None:
            store = _reserve(path, batch, steps=math.ceil(frames / batch.numel()) * batch.shape[-1])
        store[..., filled : filled + batch.shape[-1]].update_(batch)
        filled += batch.shape[-1]


def _reserve(path: Path, batch: TensorDict, *, steps: int) -> TensorDict:
    """A memory-mapped TensorDict laid out as `batch` is, but `steps` long.

    The files get their blocks at once: writing into a sparse one on a full disk would kill the process by a signal.

    Raises:
        OSError: where the disk has no room.
    """
    whole = batch[..., :1].expand(*batch.shape[:-1], steps)
    wanted = sum(leaf.numel() * leaf.element_size() for leaf in flatten(whole).values())
    try:
        if wanted > shutil.disk_usage(path.parent).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        store = whole.memmap_like(path)
        for file in path.rglob("*.memmap"):
            _allocate(file)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"no room for {wanted / 1e6:,.1f} MB in {path.parents[2]}: {reason}") from error
    return store


def _allocate(file: Path) -> None:
    size = file.stat().st_size
    if sys.platform == "linux" and size:
        with file.open("r+b") as opened:
            os.posix_fallocate(opened.fileno(), 0, size)
