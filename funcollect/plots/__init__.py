"""Pictures of what was collected.

Matplotlib, and imageio for films, are imported on first use: ``pip install funcollect[viz]``. Figures are known to no
pyplot state, so they need no closing.
"""

from funcollect.plots.curves import lengths, returns
from funcollect.plots.episodes import episode
from funcollect.plots.pictures import frames, video

__all__ = ["episode", "frames", "lengths", "returns", "video"]
