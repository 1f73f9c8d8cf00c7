"""Episode returns and lengths over the frames of a run, and the time of a frame as a bar of its parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from funcollect.arguments import check_kind, check_positive
from funcollect.plots.figures import axes_of, saved
from funcollect.profiling import PARTS, Limit, Profile
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
    return _curves(stats, "returns", "episode return", window, title, label, ax, path)


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
    return _curves(stats, "lengths", "episode length in frames", window, title, label, ax, path)


def _curves(
    stats: EpisodeStats | Sequence[EpisodeStats],
    name: str,
    quantity: str,
    window: int,
    title: str,
    label: str,
    ax: Axes | None,
    path: str | PathLike[str] | None,
) -> Figure:
    """Draw this field of `stats`, [E] or [E, players], as points over frames, and the rolling mean as a line."""
    check_positive("window", window, 100)
    for part in (parts := stats if isinstance(stats, Sequence) else [stats]):
        if not isinstance(part, EpisodeStats):
            raise TypeError(
                f"stats is or holds a {type(part).__name__}, expected EpisodeStats or a sequence of them: pass "
                "fc.episode_stats(batch)"
            )
    check_kind("title", title, str, "pass for example 'CartPole-v1'")
    check_kind("label", label, str, "pass for example 'seed 0'")
    whole, axes = EpisodeStats.concatenate(parts), axes_of(ax, 8, 4.5)
    if not (label or axes.lines):  # the number of one run's episodes would mislead beside others
        title = f"{title}{': ' if title else ''}{len(whole):,} episode{'' if len(whole) == 1 else 's'}"
    if title:
        axes.set_title(title)
    axes.set(xlabel="frames", ylabel=quantity)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    frames = _frames(whole)
    last = np.append(frames[1:] != frames[:-1], True)[: len(frames)]  # of the episodes that ended together
    values = getattr(whole, name).double().numpy().reshape(len(whole), -1 if len(whole) else 1)
    for player, value in enumerate(values.T):
        who = [*([label] if label else []), *([f"player {player}"] if values.shape[1] > 1 else [])]
        entry = ", ".join([*who, f"mean of the last {window:,}"])
        (points,) = axes.plot(frames, value, ".", markersize=5, alpha=0.5, markeredgewidth=0)
        axes.plot(frames[last], _rolling_mean(value, window)[last], color=points.get_color(), label=entry)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="best")
    return saved(axes, path)


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


_COLORS = dict(zip(PARTS, ("C0", "C1", "C0", "C2", "C4", "C5", "C3", "C8", "0.85"), strict=True))
_BAR: dict[str, Any] = {"height": 0.6, "edgecolor": "white", "linewidth": 0.5}
_WIDE = 0.06  # the share of the bar from which on a part is labelled inside


def profile(
    profile: Profile, *, title: str = "", ax: Axes | None = None, path: str | PathLike[str] | None = None
) -> Figure:
    """Draw the parts of a frame's time as a bar, one for each timeline.

    A dashed line shows the time with the bare environment and the bare policy and nothing else.

    Args:
        profile: the result of `funcollect.profile`.
        title: the title, such as the environment's id; the speed follows it.
        ax: Matplotlib's axes to draw in; None for a new figure.
        path: the file to save the figure in; its suffix names the format.

    Returns:
        The figure.

    Raises:
        ImportError: if Matplotlib is not installed.
        TypeError: if `profile` is something else, or another argument has another type.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=8)
    >>> figure = profile(fc.profile(env, frames=1_000))
    >>> figure.axes[0].get_xlabel()
    'microseconds per frame'
    """
    check_kind("profile", profile, Profile, "pass the result of funcollect.profile")
    check_kind("title", title, str, "pass for example 'CartPole-v1'")
    bars = len(profile.timelines)
    axes = axes_of(ax, 9, 1.6 + 0.8 * bars)
    for row, timeline in enumerate(profile.timelines):
        left = 0.0
        for part, value in timeline.parts.items():
            known = {handle.get_label() for handle in axes.containers}
            bar = axes.barh(row, value, left=left, label="" if part in known else part, color=_COLORS[part], **_BAR)
            if value > _WIDE * profile.microseconds:
                share = f"{value / profile.microseconds:.0%}"
                axes.bar_label(bar, [share], label_type="center", fontsize="small")
            left += value
    _draw_limit(axes, profile.limits[-1], profile.microseconds)
    axes.set_yticks(range(bars), [timeline.where.replace(", ", ",\n") for timeline in profile.timelines])
    axes.set_ylim(bars - 0.4, -0.9)
    axes.set_xlim(0, 1.02 * profile.microseconds)
    axes.set_xlabel("microseconds per frame")
    speed = f"{profile.frames_per_second:,.0f} frames/s"
    axes.set_title(f"{title}: {speed}" if title else speed)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small", frameon=False)
    return saved(axes, path)


def _draw_limit(axes: Axes, limit: Limit, whole: float) -> None:
    """Draw a limit as a line behind the bars, named above them."""
    place = 1e6 / limit.frames_per_second
    axes.axvline(place, color="black", linestyle="--", linewidth=1, zorder=0)
    left = place > whole / 2
    axes.annotate(
        f"{limit.what}: {limit.frames_per_second:,.0f} frames/s",
        (place, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(-4 if left else 4, -4),
        textcoords="offset points",
        ha="right" if left else "left",
        va="top",
        fontsize="small",
    )
