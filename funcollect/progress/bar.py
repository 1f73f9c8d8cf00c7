"""`track`: a progress bar for any collector, and optionally scalars for TensorBoard."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from os import PathLike, fspath, makedirs
from typing import Any, Protocol, TextIO

from tensordict import TensorDict
from torch import Tensor
from tqdm import TqdmWarning

from funcollect.arguments import check_kind
from funcollect.messages import shown
from funcollect.progress.window import EpisodeWindow
from funcollect.trajectories.stats import EpisodeStats

with warnings.catch_warnings():  # without ipywidgets a notebook shows a plain bar, and tqdm warns
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm


class TrackableCollector(Protocol):
    """The part of a collector that `track` uses."""

    @property
    def total_frames(self) -> int:
        """The number of frames after which the collector ends; negative if it never does."""

    def __iter__(self) -> Iterator[TensorDict]:
        """Iterate over the batches."""


def track(
    collector: TrackableCollector,
    *,
    window: int | EpisodeWindow = 100,
    total: int | None = None,
    disable: bool | None = None,
    file: TextIO | None = None,
    log_dir: str | PathLike[str] | None = None,
) -> Tracked:
    """Iterate over a collector's batches with a progress bar.

    The bar shows frames, frames per second, episodes, and their mean return and length. The rate includes the time
    between batches. If a `postproc` removes the keys for episodes, only frames are shown.

    For a collector with workers, the bar also shows how much of the time the reader waited for workers and workers for
    the reader, how many versions of the weights a batch is behind, and the numbers of replaced workers and copied
    batches. Zeros are omitted.

    With `log_dir`, TensorBoard gets ``speed/frames_per_second`` of each batch, and ``episode/return``
    (``episode/return/0``, … for several players) and ``episode/length``, the means of the episodes that ended in the
    batch, all by frames. Add your own scalars with `Tracked.log`.

    Args:
        collector: any collector.
        window: the number of last episodes in the means, or an `EpisodeWindow`, which you can read during the loop.
        total: the number of frames of a full bar; by default the collector's `total_frames`.
        disable: True hides the bar, False always shows it, None shows it on a terminal or in a notebook.
        file: where to draw the bar; by default standard error.
        log_dir: the folder for TensorBoard's event files, which is created at once; None for none.

    Raises:
        ImportError: if `log_dir` is given and TensorBoard is not installed.
        TypeError: if an argument has another type.
        OSError: if `log_dir` cannot be created.
        ValueError: if the window is below 1.

    >>> import funcollect as fc
    >>> with fc.SyncDataCollector("CartPole-v1", None, frames_per_batch=100, total_frames=300, seed=0) as collector:
    ...     sum(batch.numel() for batch in track(collector, disable=True))
    300
    """
    if not hasattr(collector, "total_frames"):
        raise TypeError(f"collector is {shown(collector)}, expected a collector: pass one")
    if total is not None and (isinstance(total, bool) or not isinstance(total, int)):
        raise TypeError(f"total is {shown(total)}, expected an int: pass for example total=10_000")
    check_kind("disable", disable, (bool, type(None)), "pass True, False or None")
    if file is not None and not hasattr(file, "write"):
        raise TypeError(f"file is {shown(file)}, expected a text file: pass for example sys.stdout")
    episodes = window if isinstance(window, EpisodeWindow) else EpisodeWindow(window)
    if log_dir is not None:
        open_folder(log_dir)
    frames = collector.total_frames if total is None else total
    if disable is None and _in_notebook():
        disable = False  # tqdm sees no terminal there
    bar = partial(tqdm, total=frames if frames > 0 else None, unit=" frames", disable=disable, file=file)
    return Tracked(collector, episodes, bar, log_dir)


def _in_notebook() -> bool:
    """Whether this process is a notebook's kernel. That IPython is imported is not enough: it may start kernels."""
    kernel = sys.modules.get("ipykernel.kernelapp")
    return kernel is not None and kernel.IPKernelApp.initialized()


@dataclass(eq=False, repr=False)
class Tracked:
    """The result of `track`: iterate over it to get the batches.

    After a `break`, another loop over the same object continues the run. The bar and the event file are closed whenever
    a loop ends, breaks or raises.
    """

    _collector: TrackableCollector
    _episodes: EpisodeWindow
    _bar: partial[Any]
    _log_dir: str | PathLike[str] | None
    _scalars: Scalars | None = field(default=None, init=False)

    def __iter__(self) -> Iterator[TensorDict]:
        frames = getattr(self._collector, "frames", 0)  # not 0 if the run continues after a break
        workers = WorkersSummary(self._collector)
        log = nullcontext() if self._log_dir is None else closing(Scalars(self._log_dir, frames))
        try:
            with log as self._scalars, self._bar(initial=frames, unit_scale=True, dynamic_ncols=True) as bar:
                for batch in self._collector:
                    self._show(bar, workers, self._episodes.add(batch))
                    yield batch
        finally:
            self._scalars = None

    def _show(self, bar: Any, workers: WorkersSummary, frames: int) -> None:
        """Update the bar and the event file after a batch of `frames` frames."""
        bar.set_postfix(self._episodes.summary() | workers.shown(), refresh=False)
        if bar.total is not None:
            bar.total = max(bar.total, bar.n + frames)  # the last batch may exceed total_frames
        bar.update(frames)
        if self._scalars is not None:
            self._scalars.add_batch(frames, self._episodes.last)

    def log(self, values: Mapping[str, Any]) -> None:
        """Write scalars for TensorBoard at the current frame; without `log_dir`, do nothing.

        Args:
            values: numbers by name, such as ``{"loss/value": loss}``: floats, or tensors or arrays of one element.

        Raises:
            RuntimeError: if it is called outside of a loop over the batches.
            ValueError: if a value is not a single number.

        >>> import funcollect as fc, tempfile
        >>> collector = fc.SyncDataCollector("CartPole-v1", frames_per_batch=100, total_frames=300, seed=0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     batches = fc.track(collector, log_dir=folder, disable=True)
        ...     for batch in batches:
        ...         batches.log({"reward/mean": batch["next", "reward"].mean()})
        """
        if self._scalars is not None:
            self._scalars.add(values)
        elif self._log_dir is not None:
            raise RuntimeError("log was called outside of the loop, expected a batch in hand: call it inside the loop")


class WorkersSummary:
    """The entries of the bar for a collector's workers; waiting times count from the construction of this object on."""

    def __init__(self, collector: Any) -> None:
        self._collector = collector
        self._workers = getattr(collector, "num_workers", 0)
        self._before = collector.stats() if self._workers else {}
        self._began = time.monotonic()

    def shown(self) -> dict[str, str]:
        """The entries of the bar, without zeros; none for a collector without workers."""
        if not self._workers:
            return {}
        stats = self._collector.stats()
        seconds = time.monotonic() - self._began
        entries = {}
        waits = (("reader_waited", "reader_waits", 1), ("workers_waited", "workers_wait", self._workers))
        for key, name, waiting in waits:
            share = (stats.get(key, 0.0) - self._before.get(key, 0.0)) / (seconds * waiting)
            if share >= 0.005:
                entries[name] = f"{share:.0%}"
        counts = {"lag": "policy_lag", "restarts": "restarts", "copies": "copies"}
        return entries | {name: str(stats[key]) for name, key in counts.items() if stats.get(key)}


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
