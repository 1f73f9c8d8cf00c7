"""Plots of what was collected. Matplotlib is imported on first use: ``pip install funcollect[viz]``."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from funcollect.trajectories.stats import EpisodeStats

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["returns"]

Floats = npt.NDArray[np.float64]


def returns(
    stats: EpisodeStats | Sequence[EpisodeStats], *, window: int = 100, path: str | PathLike[str] | None = None
) -> Figure:
    """Episode returns over the frames of a run, with a rolling mean.

    An episode stands where it ended: at the frames that its lane had done by then, times the number of lanes.

    Args:
        stats: a run's episodes, or those of its batches one after another; several players have a curve each.
        window: how many of the last episodes the rolling mean covers.
        path: where to save the picture, in the format that its suffix names.

    Returns:
        The figure, which no pyplot state knows of.

    Raises:
        ImportError: without Matplotlib.
        ValueError: for a window below 1, or no stats at all.

    >>> import torch
    >>> from funcollect import EpisodeStats
    >>> ended = dict(traj_ids=torch.arange(3), lanes=torch.zeros(3).long(), terminated=torch.ones(3).bool())
    >>> stats = EpisodeStats(returns=torch.tensor([1.0, 3.0, 8.0]), lengths=torch.tensor([10, 10, 30]), **ended)
    >>> returns(stats, window=2).axes[0].lines[-1].get_xydata().tolist()
    [[10.0, 1.0], [20.0, 2.0], [50.0, 5.5]]
    """
    if window < 1:
        raise ValueError(f"the window is {window}, expected a positive number of episodes")
    whole = stats if isinstance(stats, EpisodeStats) else EpisodeStats.concatenate(stats)
    frames = _frames(whole)
    values = whole.returns.double().numpy().reshape(len(whole), -1) if len(whole) else np.empty((0, 1))
    figure = _figure()
    axes = figure.add_subplot(xlabel="frames", ylabel="episode return", title=f"{len(whole)} episodes")
    for player, value in enumerate(values.T):
        who = f"player {player}, " if values.shape[1] > 1 else ""
        color = f"C{player}"
        axes.plot(frames, value, ".", markersize=4, alpha=0.4, color=color, markeredgewidth=0)
        axes.plot(frames, _rolling_mean(value, window), color=color, label=f"{who}mean of the last {window}")
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    if path is not None:
        figure.savefig(path)
    return figure


def _figure() -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need Matplotlib, which is not installed: pip install funcollect[viz]") from error
    return Figure(figsize=(8, 4.5), dpi=120, layout="constrained")


def _frames(stats: EpisodeStats) -> npt.NDArray[Any]:
    """The frames of the whole run at the end of each episode: [E]."""
    lanes, lengths = stats.lanes.numpy(), stats.lengths.numpy()
    count = len({*lanes.tolist(), *(one.lane for one in stats.open_returns.values())})
    by_lane = np.argsort(lanes, kind="stable")
    total = np.cumsum(lengths[by_lane])
    first = np.flatnonzero(np.diff(lanes[by_lane], prepend=-1))  # where each lane's episodes begin
    before = np.concatenate(([0], total))[first]
    frames = np.empty_like(total)
    frames[by_lane] = total - np.repeat(before, np.diff(first, append=len(lanes)))
    return frames * count


def _rolling_mean(values: Floats, window: int) -> Floats:
    total = np.concatenate(([0.0], np.cumsum(values)))
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - window, 0)
    mean: Floats = (total[end] - total[start]) / (end - start)
    return mean
