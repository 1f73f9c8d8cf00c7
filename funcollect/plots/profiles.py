"""A bar for the time of a frame, divided into its parts."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

from funcollect.arguments import check_kind
from funcollect.plots.figures import axes_of, saved
from funcollect.profiling import PARTS, Limit, Profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = dict(zip(PARTS, ("C0", "C1", "C0", "C2", "C4", "C5", "C3", "C8", "0.85"), strict=True))
_WIDE = 0.06  # the share of the bar from which on a part is labelled inside


def profile(
    profile: Profile, *, title: str = "", ax: Axes | None = None, path: str | PathLike[str] | None = None
) -> Figure:
    """Draw the parts of a frame's time as a bar, one for each timeline, and the limits as dashed lines.

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
    axes = axes_of(ax, 9, 2.2 + 0.8 * bars)
    for row, timeline in enumerate(profile.timelines):
        _draw_bar(axes, row, timeline.parts, profile.microseconds)
    for row, limit in enumerate(profile.limits):
        _draw_limit(axes, row, limit, profile.microseconds)
    axes.set_yticks(range(bars), [timeline.where.replace(", ", ",\n") for timeline in profile.timelines])
    axes.set_ylim(bars - 0.4, -0.9)
    axes.set_xlim(0, 1.02 * profile.microseconds)
    axes.set_xlabel("microseconds per frame")
    speed = f"{profile.frames_per_second:,.0f} frames/s"
    axes.set_title(f"{title}: {speed}" if title else speed)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small", frameon=False)
    return saved(axes, path)


def _draw_bar(axes: Axes, row: int, parts: Mapping[str, float], whole: float) -> None:
    """Draw the parts of one timeline side by side."""
    left = 0.0
    for part, value in parts.items():
        known = {handle.get_label() for handle in axes.containers}
        style: dict[str, Any] = {"height": 0.6, "color": _COLORS[part], "edgecolor": "white", "linewidth": 0.5}
        bar = axes.barh(row, value, left=left, label="" if part in known else part, **style)
        if value > _WIDE * whole:
            axes.bar_label(bar, [f"{value / whole:.0%}"], label_type="center", fontsize="small")
        left += value


def _draw_limit(axes: Axes, row: int, limit: Limit, whole: float) -> None:
    """Draw a limit as a line behind the bars, named above them."""
    place = 1e6 / limit.frames_per_second
    axes.axvline(place, color="black", linestyle="--", linewidth=1, zorder=0)
    left = place > whole / 2
    axes.annotate(
        f"{limit.what}: {limit.frames_per_second:,.0f} frames/s",
        (place, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(-4 if left else 4, -4 - 11 * row),
        textcoords="offset points",
        ha="right" if left else "left",
        va="top",
        fontsize="small",
    )
