"""Writes TensorBoard's event files."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike, fspath, makedirs
from typing import Any

from torch import Tensor

from funcollect.messages import shown
from funcollect.trajectories.stats import EpisodeStats

__all__ = ["Scalars", "scalars"]


class Scalars:
    """An open event file.

    Args:
        writer: a `SummaryWriter`.
        frames: the number of frames of the run so far.
    """

    def __init__(self, writer: Any, frames: int) -> None:
        self._writer = writer
        self.frames = frames
        self._then = time.perf_counter()

    def add_batch(self, frames: int, episodes: EpisodeStats | None) -> None:
        """Write the speed of a batch of `frames` frames, and the means of the episodes that ended in it."""
        self.frames += frames
        now = time.perf_counter()
        self.add({"speed/frames_per_second": frames / (now - self._then)})
        self._then = now
        if episodes is not None and len(episodes):
            returns = episodes.returns.mean(0)
            values = {"episode/return": returns} if returns.ndim == 0 else _by_player(returns.tolist())
            self.add({**values, "episode/length": episodes.mean_length})
        self._writer.flush()

    def add(self, values: Mapping[str, Any]) -> None:
        """Write scalars at the current frame."""
        for name, value in values.items():
            self._writer.add_scalar(name, _number(name, value), self.frames)


def _number(name: str, value: Any) -> float:
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} is {shown(value)}, expected one number: give its mean, say") from error


def _by_player(returns: list[float]) -> dict[str, float]:
    return {f"episode/return/{player}": value for player, value in enumerate(returns)}


@contextmanager
def scalars(log_dir: str | PathLike[str], frames: int) -> Iterator[Scalars]:
    """Open an event file for a run that has `frames` frames already; close it at the end."""
    # If a run is resumed, TensorBoard hides what it had written after this frame.
    writer = _summary_writer()(fspath(log_dir), purge_step=frames + 1 if frames else None)
    try:
        yield Scalars(writer, frames)
    finally:
        writer.close()


def open_folder(log_dir: str | PathLike[str]) -> None:
    """Create the folder for event files before the run begins.

    Raises:
        ImportError: if TensorBoard is not installed.
        TypeError: if `log_dir` is not a path.
        OSError: if it cannot be created.
    """
    _summary_writer()
    if not isinstance(log_dir, (str, PathLike)):
        raise TypeError(f"log_dir is {log_dir!r}, expected a path: pass for example log_dir='runs/first'")
    if "://" in fspath(log_dir):  # for example a bucket, which TensorBoard writes to itself
        return
    try:
        makedirs(log_dir, exist_ok=True)
    except OSError as error:
        raise OSError(f"log_dir is {fspath(log_dir)!r}, which cannot be made ({error}): name another folder") from error


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("log_dir needs TensorBoard, which is not installed: pip install funcollect[viz]") from error
    return SummaryWriter
