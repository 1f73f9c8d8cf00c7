"""Figures of episode statistics, of single episodes and of profiles, and films.

Matplotlib, and imageio for films, are imported on first use: ``pip install 'funcollect[viz]'``. Figures are not
registered with pyplot, so you need not close them.
"""

from funcollect.plots.curves import lengths, profile, returns
from funcollect.plots.episodes import episode, frames, video

__all__ = ["episode", "frames", "lengths", "profile", "returns", "video"]
