"""Figures of episode statistics, of single episodes and of profiles, and films: ``pip install 'funcollect[viz]'``.

Matplotlib and imageio are imported on first use. Figures are not registered with pyplot, so you need not close them.
"""

from funcollect.plots.figures import episode, lengths, profile, returns
from funcollect.plots.recording import frames, video

__all__ = ["episode", "frames", "lengths", "profile", "returns", "video"]
