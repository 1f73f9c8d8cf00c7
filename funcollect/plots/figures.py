"""Makes and saves figures. No other module imports Matplotlib."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; its width and height are in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need Matplotlib, which is not installed: pip install funcollect[viz]") from error
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def saved(figure: Figure, path: str | PathLike[str] | None) -> Figure:
    """Save the figure if `path` is given, in the format that its suffix names, and return it."""
    if path is not None:
        figure.savefig(path)
    return figure
