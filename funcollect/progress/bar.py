"""A progress bar around any collector, with scalars for TensorBoard on request."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from os import PathLike
from typing import Any, Protocol, TextIO

from tensordict import TensorDict
from tqdm import TqdmWarning

from funcollect.arguments import check_kind
from funcollect.messages import shown
from funcollect.progress.scalars import Scalars, open_folder, scalars
from funcollect.progress.window import EpisodeWindow
from funcollect.progress.workers import WorkersSummary

with warnings.catch_warnings():  # in a notebook without ipywidgets, whose lack costs nothing but the looks of the bar
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm

__all__ = ["TrackableCollector", "Tracked", "track"]


class TrackableCollector(Protocol):
    """What `track` needs of a collector."""

    @property
    def total_frames(self) -> int:
        """The frames after which it ends; negative for an endless one."""
        ...

    def __iter__(self) -> Iterator[TensorDict]:
        """Its batches."""
        ...


def track(
    collector: TrackableCollector,
    *,
    window: int | EpisodeWindow = 100,
    total: int | None = None,
    disable: bool | None = None,
    file: TextIO | None = None,
    log_dir: str | PathLike[str] | None = None,
) -> Tracked:
    """A collector's batches, with a progress bar: frames, frames per second, episodes, mean return and length.

    Of a collector with workers it also shows the shares of the time that the reader has waited for workers and workers
    for the reader, how many versions of the weights a batch is behind, and how often workers were replaced and batches
    copied; what is nought is left out.

    The rate is that of the whole loop, what happens between two batches included. Where a `postproc` has taken the keys
    of episodes away, only frames are shown. Breaking off closes the bar and leaves the collector as it is.

    With `log_dir`, TensorBoard gets the same over the run's frames: ``speed/frames_per_second`` of each batch, and
    ``episode/return`` (``episode/return/0``, … for several players) and ``episode/length``, means over the episodes
    that ended in it. Numbers of your own go beside them by `Tracked.log`.

    Args:
        collector: any collector.
        window: how many of the last finished episodes the means cover, or an `EpisodeWindow` to be read meanwhile.
        total: frames at which the bar is full; the collector's `total_frames` unless given.
        disable: True hides the bar, False always shows it, None shows it on a terminal or in a notebook.
        file: where to draw; standard error unless given.
        log_dir: the folder of TensorBoard's event files, which is made at once; None for none.

    Raises:
        ImportError: for a `log_dir` without TensorBoard.
        TypeError: for a `log_dir` that is no path.
        OSError: for a `log_dir` that cannot be made.
        ValueError: for a window below 1.

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
    """Whether this process is a notebook's kernel; one that starts kernels has imported parts of IPython, too."""
    kernel = sys.modules.get("ipykernel.kernelapp")
    return kernel is not None and kernel.IPKernelApp.initialized()


class Tracked:
    """What `track` returns: batches to loop over, and a place for numbers of one's own.

    A loop that was broken off goes on in another one over the same object. The bar and the event file are closed when a
    loop ends, is broken off or raises.
    """

    def __init__(
        self,
        collector: TrackableCollector,
        episodes: EpisodeWindow,
        bar: partial[Any],
        log_dir: str | PathLike[str] | None,
    ) -> None:
        self._collector = collector
        self._episodes = episodes
        self._bar = bar
        self._log_dir = log_dir
        self._scalars: Scalars | None = None

    def __iter__(self) -> Iterator[TensorDict]:
        frames = getattr(self._collector, "frames", 0)  # of a run that goes on after a break
        workers = WorkersSummary(self._collector)
        log = nullcontext() if self._log_dir is None else scalars(self._log_dir, frames)
        try:
            with self._bar(initial=frames, unit_scale=True, dynamic_ncols=True) as bar, log as self._scalars:
                for batch in self._collector:
                    self._show(bar, workers, self._episodes.add(batch))
                    yield batch
        finally:
            self._scalars = None

    def _show(self, bar: Any, workers: WorkersSummary, frames: int) -> None:
        """Count a batch of so many frames in."""
        bar.set_postfix(self._episodes.summary() | workers.shown(), refresh=False)
        if bar.total is not None:
            bar.total = max(bar.total, bar.n + frames)  # the last batch is whole
        bar.update(frames)
        if self._scalars is not None:
            self._scalars.add_batch(frames, self._episodes.last)

    def log(self, values: Mapping[str, Any]) -> None:
        """Write scalars for TensorBoard at the frames of the batch in hand; without `log_dir`, do nothing.

        Args:
            values: numbers by name, such as ``{"loss/value": loss}``: floats, or tensors or arrays of one element.

        Raises:
            RuntimeError: outside of a loop over the batches.
            ValueError: for a value that is not one number.

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
