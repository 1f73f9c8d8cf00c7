"""Episode returns and lengths over the frames of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from funcollect.arguments import check_kind, check_positive
from funcollect.plots.figures import axes_of, saved
from funcollect.trajectories.stats import EpisodeStats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]


def returns(
    stats: EpisodeStats | Sequence[EpisodeStats],
    *,
    window: int = 100,
    title: str = "",
    label: str = "",
    ax: Axes | None = None,
    path: str | PathLike[str] | None = None,
) -> Figure:
    """Plot episode returns over the frames of a run, with a rolling mean.

    An episode is drawn where it ended: at the number of frames of its lane at that time, times the number of lanes.

    Args:
        stats: a run's episodes, or a list of those of its batches in order; with several players each has a curve.
        window: the number of last episodes that the rolling mean covers.
        title: the title, such as the environment's id; the number of episodes follows it, unless the run has a `label`
            or `ax` has other runs.
        label: the run's name in the legend, to tell several runs apart.
        ax: Matplotlib's axes to draw in, for several runs in one figure; None for a new figure.
        path: the file to save the figure in; its suffix names the format.

    Returns:
        The figure.

    Raises:
        ImportError: if Matplotlib is not installed.
        TypeError: if `stats` is something else, such as a batch, or another argument has another type.
        ValueError: if `window` is below 1, or `stats` is an empty list.

    >>> import torch
    >>> from funcollect import EpisodeStats
    >>> ended = dict(traj_ids=torch.arange(3), lanes=torch.zeros(3).long(), terminated=torch.ones(3).bool())
    >>> stats = EpisodeStats(returns=torch.tensor([1.0, 3.0, 8.0]), lengths=torch.tensor([10, 10, 30]), **ended)
    >>> figure = returns(stats, window=2, label="seed 0")
    >>> figure.axes[0].lines[-1].get_xydata().tolist()
    [[10.0, 1.0], [20.0, 2.0], [50.0, 5.5]]
    >>> figure is returns(stats, window=2, label="seed 1", ax=figure.axes[0])
    True
    """
    whole = _joined(stats, window)
    values = whole.returns.double().numpy().reshape(len(whole), -1) if len(whole) else np.empty((0, 1))
    return saved(_curves(whole, values, "episode return", window, title, label, ax), path)


def lengths(
    stats: EpisodeStats | Sequence[EpisodeStats],
    *,
    window: int = 100,
    title: str = "",
    label: str = "",
    ax: Axes | None = None,
    path: str | PathLike[str] | None = None,
) -> Figure:
    """Plot episode lengths over the frames of a run, with a rolling mean. See `returns` for the arguments and errors.

    >>> import torch
    >>> from funcollect import EpisodeStats
    >>> ended = dict(traj_ids=torch.arange(2), lanes=torch.zeros(2).long(), terminated=torch.ones(2).bool())
    >>> stats = EpisodeStats(returns=torch.tensor([1.0, 3.0]), lengths=torch.tensor([10, 30]), **ended)
    >>> lengths(stats).axes[0].lines[-1].get_xydata().tolist()
    [[10.0, 10.0], [40.0, 20.0]]
    """
    whole = _joined(stats, window)
    values = whole.lengths.double().numpy()[:, None]
    return saved(_curves(whole, values, "episode length in frames", window, title, label, ax), path)


def _joined(stats: EpisodeStats | Sequence[EpisodeStats], window: int) -> EpisodeStats:
    """The episodes of a whole run, from one object or those of its batches; checks both arguments."""
    check_positive("window", window, 100)
    parts = stats if isinstance(stats, Sequence) else [stats]
    for part in parts:
        if not isinstance(part, EpisodeStats):
            raise TypeError(
                f"stats is or holds a {type(part).__name__}, expected EpisodeStats or a sequence of them: pass "
                "fc.episode_stats(batch)"
            )
    return EpisodeStats.concatenate(parts)


def _curves(
    stats: EpisodeStats, values: Floats, quantity: str, window: int, title: str, label: str, ax: Axes | None
) -> Axes:
    """Draw the values [E, players] as points over frames, and their rolling mean as a line."""
    for name, text in (("title", title), ("label", label)):
        check_kind(name, text, str, "pass for example 'CartPole-v1'")
    axes = axes_of(ax, 8, 4.5)
    if not (label or axes.lines):  # the number of one run's episodes would mislead beside others
        title = f"{title}{': ' if title else ''}{len(stats):,} episode{'' if len(stats) == 1 else 's'}"
    if title:
        axes.set_title(title)
    axes.set(xlabel="frames", ylabel=quantity)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    frames = _frames(stats)
    last = np.append(frames[1:] != frames[:-1], True)[: len(frames)]  # of the episodes that ended together
    for player, value in enumerate(values.T):
        who = [*([label] if label else []), *([f"player {player}"] if values.shape[1] > 1 else [])]
        entry = ", ".join([*who, f"mean of the last {window:,}"])
        (points,) = axes.plot(frames, value, ".", markersize=5, alpha=0.5, markeredgewidth=0)
        axes.plot(frames[last], _rolling_mean(value, window)[last], color=points.get_color(), label=entry)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="best")
    return axes


def _frames(stats: EpisodeStats) -> npt.NDArray[Any]:
    """The number of frames of the whole run at the end of each episode: [E]."""
    of_lane: Counter[int] = Counter()
    frames = []
    for lane, length in zip(stats.lanes.tolist(), stats.lengths.tolist(), strict=True):
        of_lane[lane] += length
        frames.append(of_lane[lane])
    lanes = {*of_lane, *(one.lane for one in stats.open_returns.values())}
    return np.array(frames) * len(lanes)


def _rolling_mean(values: Floats, window: int) -> Floats:
    """The mean of each value and up to ``window - 1`` before it: [E]."""
    if not len(values):
        return values
    window = min(window, len(values))
    padded = np.concatenate([np.zeros(window - 1), values])
    sums = np.lib.stride_tricks.sliding_window_view(padded, window).sum(-1)  # a running sum would stay infinite, or NaN
    mean: Floats = sums / np.minimum(np.arange(1, len(values) + 1), window)
    return mean
