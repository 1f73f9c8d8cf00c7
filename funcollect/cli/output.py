"""What a command leaves: a folder of results, complete or absent, and tables for a person."""

from __future__ import annotations

import errno
import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from funcollect.files import allocate
from funcollect.messages import table
from funcollect.progress import EpisodeWindow, track
from funcollect.trajectories.stats import EpisodeStats
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
            if size := file.stat().st_size:
                with file.open("r+b") as opened:
                    allocate(opened.fileno(), size)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"no room for {wanted / 1e6:,.1f} MB in {path.parents[2]}: {reason}") from error
    return store


class RunSummary:
    """Counts the episodes, frames and seconds of a run."""

    def __init__(self) -> None:
        self._window, self._seconds = EpisodeWindow(), 0.0
        self._parts: list[EpisodeStats] = []

    def follow(self, collector: Iterable[TensorDict]) -> Iterator[TensorDict]:
        """Iterate over the batches with a progress bar."""
        began = time.perf_counter()
        for batch in track(collector, window=self._window):
            assert self._window.last is not None
            self._parts[-1:] = [replace(part, open_returns={}) for part in self._parts[-1:]]  # of the last one alone
            self._parts.append(self._window.last)
            yield batch
        self._seconds = time.perf_counter() - began

    @property
    def episodes(self) -> EpisodeStats:
        """The episodes that ended, and those that were open at the end."""
        return EpisodeStats.concatenate(self._parts)

    def statistics(self) -> dict[str, Any]:
        """The counts of the run, and the spread of episode returns and lengths, as values for JSON."""
        counts = {"frames": self._window.frames, "seconds": self._seconds}
        return {**counts, "frames_per_second": self._window.frames / self._seconds, **_statistics(self.episodes)}

    def table(self) -> str:
        """The statistics as two tables."""
        return _tables(self.statistics())


def episode_table(episodes: EpisodeStats) -> str:
    """The number of episodes, and the spread of their returns and lengths, as two tables."""
    return _tables(_statistics(episodes))


def _statistics(episodes: EpisodeStats) -> dict[str, Any]:
    """The counts of episodes, and the spread of their returns and lengths, as values for JSON."""
    terminated, returns = int(episodes.terminated.sum()), episodes.returns
    players = {"": returns} if returns.ndim == 1 else {f"_{n}": column for n, column in enumerate(returns.mT)}
    return {
        "episodes": len(episodes),
        "terminated": terminated,
        "truncated": len(episodes) - terminated,
        **{f"return{player}": _spread(column) for player, column in players.items()},
        "length": _spread(episodes.lengths.double()),
    }


def _tables(statistics: dict[str, Any]) -> str:
    """Counts and spreads, each as a table."""
    spreads = [(name, *map(_number, each.values())) for name, each in statistics.items() if isinstance(each, dict)]
    counts = [(name, _number(each)) for name, each in statistics.items() if not isinstance(each, dict)]
    totals = table([(name.replace("_per_", "/"), value) for name, value in counts])
    return f"{totals}\n\n{table([('per episode', 'mean', 'std', 'min', 'max'), *spreads])}"


def _spread(values: Tensor) -> dict[str, float | None]:
    """The mean, standard deviation, minimum and maximum; None for one that does not exist or is not finite."""
    if not len(values):
        return dict.fromkeys(("mean", "std", "min", "max"))
    numbers = {"mean": values.mean(), "std": values.std(correction=0), "min": values.min(), "max": values.max()}
    return {name: float(number) if number.isfinite() else None for name, number in numbers.items()}


def _number(value: float | None) -> str:
    """A number as text: commas in thousands, two decimals if it is a float; "-" for None."""
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def layout(batch: TensorDict) -> str:
    """The keys of a batch with their shapes and dtypes."""
    rows = [(".".join(path), str(list(leaf.shape)), str(leaf.dtype)) for path, leaf in flatten(batch).items()]
    return table([("key", "shape", "dtype"), *sorted(rows)])
