"""Writes TensorBoard's event files."""

from __future__ import annotations

import time
from collections.abc import Mapping
from os import PathLike, fspath, makedirs
from typing import Any

from torch import Tensor

from funcollect.messages import shown
from funcollect.trajectories.stats import EpisodeStats


class Scalars:
    """An open event file of a run that has `frames` frames so far."""

    def __init__(self, log_dir: str | PathLike[str], frames: int) -> None:
        # If a run is resumed, TensorBoard hides what it had written after this frame.
        self._writer = _summary_writer()(fspath(log_dir), purge_step=frames + 1 if frames else None)
        self._frames = frames
        self._then = time.perf_counter()
        self.close = self._writer.close

    def add_batch(self, frames: int, episodes: EpisodeStats | None) -> None:
        """Write the speed of a batch of `frames` frames, and the means of the episodes that ended in it."""
        self._frames += frames
        now = time.perf_counter()
        self.add({"speed/frames_per_second": frames / (now - self._then)})
        self._then = now
        if episodes is not None and len(episodes):
            returns = episodes.returns.mean(0)
            players = {"": returns} if returns.ndim == 0 else {f"/{player}": one for player, one in enumerate(returns)}
            self.add({f"episode/return{player}": value for player, value in players.items()})
            self.add({"episode/length": episodes.mean_length})
        self._writer.flush()

    def add(self, values: Mapping[str, Any]) -> None:
        """Write scalars at the current frame."""
        for name, value in values.items():
            try:
                number = float(value.detach() if isinstance(value, Tensor) else value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise ValueError(f"{name} is {shown(value)}, expected one number: give its mean, say") from error
            self._writer.add_scalar(name, number, self._frames)


def open_folder(log_dir: str | PathLike[str]) -> None:
    """Create the folder for event files before the run begins; `track` documents the errors."""
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
    """TensorBoard's `SummaryWriter`; ImportError with advice if it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("log_dir needs TensorBoard, which is not installed: pip install funcollect[viz]") from error
    return SummaryWriter
