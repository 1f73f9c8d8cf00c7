"""The one module that imports Matplotlib: empty figures, and figures saved."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 150


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches, which no pyplot state knows of.

    Raises:
        ImportError: without Matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need Matplotlib, which is not installed: pip install funcollect[viz]") from error
    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def saved(figure: Figure, path: str | PathLike[str] | None) -> Figure:
    """The figure, saved in the format that the suffix of `path` names, unless that is None."""
    if path is not None:
        figure.savefig(path)
    return figure
