"""A progress bar around any collector, and the running summary of episodes that it shows."""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol, TextIO

from tensordict import TensorDict
from tqdm import TqdmWarning

from funcollect.trajectories.stats import EpisodeStats, episode_stats

with warnings.catch_warnings():  # in a notebook without ipywidgets, whose lack costs nothing but the looks of the bar
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm

__all__ = ["Collector", "EpisodeWindow", "track"]

MASK = ("collector", "mask")


class Collector(Protocol):
    """What `track` needs of a collector."""

    @property
    def total_frames(self) -> int:
        """The frames after which it ends; negative for an endless one."""
        ...

    def __iter__(self) -> Iterator[TensorDict]:
        """Its batches."""
        ...


class EpisodeWindow:
    """The last episodes of a stream of batches, and what has been counted since its beginning.

    Args:
        size: how many of the last finished episodes the means cover.

    Attributes:
        frames: frames of all batches so far, the padding of split ones excepted.
        episodes: episodes finished so far.
        last: the statistics of the last batch; None where it lacked what they need, as after a `postproc`.

    Raises:
        ValueError: for a `size` below 1.
    """

    def __init__(self, size: int = 100) -> None:
        if size < 1:
            raise ValueError(f"the window is {size}, expected a positive number of episodes")
        self.frames = 0
        self.episodes = 0
        self.last: EpisodeStats | None = None
        self._returns: deque[list[float]] = deque(maxlen=size)  # [players] each
        self._lengths: deque[int] = deque(maxlen=size)

    def add(self, batch: TensorDict) -> int:
        """Count a batch in.

        Returns:
            The number of its frames.
        """
        mask = batch.get(MASK, None)
        frames = batch.numel() if mask is None else int(mask.sum())
        self.frames += frames
        try:
            self.last = episode_stats(batch, self.last)
        except ValueError:  # a postproc may leave any keys and shapes
            self.last = None
        else:
            self.episodes += len(self.last)
            returns = self.last.returns
            self._returns.extend((returns[:, None] if returns.ndim == 1 else returns).tolist())
            self._lengths.extend(self.last.lengths.tolist())
        return frames

    @property
    def mean_returns(self) -> list[float]:
        """The mean return of the episodes in the window, [players]; empty before the first episode."""
        return [sum(one) / len(one) for one in zip(*self._returns, strict=True)]

    @property
    def mean_length(self) -> float:
        """The mean length in frames of the episodes in the window; nan before the first."""
        return sum(self._lengths) / len(self._lengths) if self._lengths else float("nan")

    def summary(self) -> dict[str, str]:
        """What a progress bar shows; nothing of episodes before one has been seen."""
        if not self.episodes:
            return {}
        returns = "/".join(f"{value:.4g}" for value in self.mean_returns)
        return {"episodes": str(self.episodes), "return": returns, "length": f"{self.mean_length:.4g}"}


def track(
    collector: Collector,
    *,
    window: int | EpisodeWindow = 100,
    total: int | None = None,
    disable: bool | None = None,
    file: TextIO | None = None,
) -> Iterator[TensorDict]:
    """A collector's batches, with a progress bar: frames, frames per second, episodes, mean return and length.

    The rate is that of the whole loop, what happens between two batches included. Where a `postproc` has taken the keys
    of episodes away, only frames are shown. Breaking off closes the bar and leaves the collector as it is.

    Args:
        collector: any collector.
        window: how many of the last finished episodes the means cover, or an `EpisodeWindow` to be read meanwhile.
        total: frames at which the bar is full; the collector's `total_frames` unless given.
        disable: True hides the bar, False always shows it, None shows it on a terminal or in a notebook.
        file: where to draw; standard error unless given.

    Raises:
        ValueError: for a window below 1.

    >>> import funcollect as fc
    >>> with fc.SyncDataCollector("CartPole-v1", None, frames_per_batch=100, total_frames=300, seed=0) as collector:
    ...     sum(batch.numel() for batch in track(collector, disable=True))
    300
    """
    episodes = window if isinstance(window, EpisodeWindow) else EpisodeWindow(window)
    frames = collector.total_frames if total is None else total
    if disable is None and "ipykernel" in sys.modules:
        disable = False  # tqdm sees no terminal in a notebook
    bar = partial(tqdm, total=frames if frames > 0 else None, unit=" frames", disable=disable, file=file)
    return _track(collector, episodes, bar)


def _track(collector: Collector, episodes: EpisodeWindow, bar: Callable[..., Any]) -> Iterator[TensorDict]:
    done = getattr(collector, "frames", 0)  # of a run that goes on after a break
    with bar(initial=done, unit_scale=True, dynamic_ncols=True) as shown:
        for batch in collector:
            frames = episodes.add(batch)
            shown.set_postfix(episodes.summary(), refresh=False)
            if shown.total is not None:
                shown.total = max(shown.total, shown.n + frames)  # the last batch is whole
            shown.update(frames)
            yield batch
