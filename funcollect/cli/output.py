"""What a command leaves: a folder of results, complete or absent, and tables for a person."""

from __future__ import annotations

import errno
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from funcollect.collectors.sync import SyncDataCollector
from funcollect.files import allocate
from funcollect.messages import table
from funcollect.progress import EpisodeWindow, track
from funcollect.protocols import Env, Policy
from funcollect.trajectories.stats import EpisodeStats
from funcollect.tree import flatten


@contextmanager
def output_folder(out: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a new folder, which replaces `out` if the block ends without an error; ValueError if `out` must be kept.

    That is unless it is missing, empty, or with `overwrite` the result of an earlier run.
    """
    out = out.resolve()
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file, expected a folder for --out: choose another name")
    if out.exists() and (out.is_mount() or Path.cwd().is_relative_to(out)):
        raise ValueError(f"{out} is in use and cannot be replaced as a whole: name a folder inside it")
    present = {path.name for path in out.iterdir()} if out.exists() else set()
    if present and not overwrite:
        raise ValueError(f"{out} is not empty: choose another folder, or replace an earlier run with --overwrite")
    if foreign := sorted(present - {"batch", "stats.json", "returns.png"}):
        raise ValueError(f"{out} holds {foreign}, which no run of funcollect has written: choose another folder")
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


def saver(path: Path, frames: int) -> Callable[[TensorDict], None]:
    """A function that writes batches [P, T] of equal shape one after another as one memory-mapped TensorDict.

    It has room for `frames` frames or a few more. All disk blocks are allocated at once (OSError if there is no room),
    since writing to a sparse file on a full disk kills the process by a signal.
    """
    store: TensorDict | None = None
    filled = 0

    def save(batch: TensorDict) -> None:
        nonlocal store, filled
        length = batch.shape[-1]
        if store is None:
            whole = batch[..., :1].expand(*batch.shape[:-1], math.ceil(frames / batch.numel()) * length)
            store = _reserved(path, whole)
        store[..., filled : filled + length].update_(batch)
        filled += length

    return save


def _reserved(path: Path, like: TensorDict) -> TensorDict:
    """A memory-mapped TensorDict with the keys, shapes and dtypes of another."""
    wanted = sum(leaf.numel() * leaf.element_size() for leaf in flatten(like).values())
    try:
        if wanted > shutil.disk_usage(path.parent).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        store = like.memmap_like(path)
        for file in path.rglob("*.memmap"):
            if size := file.stat().st_size:
                with file.open("r+b") as opened:
                    allocate(opened.fileno(), size)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"no room for {wanted / 1e6:,.1f} MB in {path.parents[2]}: {reason}") from error
    return store


def collected(
    env: Env, policy: Policy, size: int, frames: int, seed: int, take: Callable[[TensorDict], None]
) -> tuple[EpisodeStats, dict[str, Any]]:
    """Collect batches of `size` frames with a progress bar, and pass each to `take`.

    Returns the episodes, those that were open at the end included, and the statistics of the run, as values for JSON.
    """
    window, began = EpisodeWindow(), time.perf_counter()
    parts: list[EpisodeStats] = []
    with SyncDataCollector(env, policy, frames_per_batch=size, total_frames=frames, seed=seed) as collector:
        for batch in track(collector, window=window):
            assert window.last is not None
            parts[-1:] = [replace(part, open_returns={}) for part in parts[-1:]]  # of the last one alone
            parts.append(window.last)
            take(batch)
    seconds, episodes = time.perf_counter() - began, EpisodeStats.concatenate(parts)
    counts = {"frames": window.frames, "seconds": seconds, "frames_per_second": window.frames / seconds}
    return episodes, counts | statistics_of(episodes)


def statistics_of(episodes: EpisodeStats) -> dict[str, Any]:
    """The counts of episodes, and the spread of their returns and lengths, as values for JSON."""
    terminated, returns = int(episodes.terminated.sum()), episodes.returns
    players = {"": returns} if returns.ndim == 1 else {f"_{n}": column for n, column in enumerate(returns.mT)}
    counts = {"episodes": len(episodes), "terminated": terminated, "truncated": len(episodes) - terminated}
    spreads = {f"return{player}": _spread(column) for player, column in players.items()}
    return {**counts, **spreads, "length": _spread(episodes.lengths.double())}


def tables(statistics: dict[str, Any]) -> str:
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
