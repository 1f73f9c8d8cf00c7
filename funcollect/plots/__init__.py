"""Figures of episode statistics and of single episodes, and films.

Matplotlib, and imageio for films, are imported on first use: ``pip install funcollect[viz]``. Figures are not
registered with pyplot, so you need not close them.
"""

from funcollect.plots.curves import lengths, returns
from funcollect.plots.episodes import episode
from funcollect.plots.pictures import frames, video

__all__ = ["episode", "frames", "lengths", "returns", "video"]
