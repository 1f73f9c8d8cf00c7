"""Read the pixels of a Matplotlib figure, whatever backend is set."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from funcollect.envs.extras import import_extra


def pixels_of(figure: Any, dpi: float) -> npt.NDArray[np.uint8]:
    """Draw a figure at `dpi` dots per inch: [H, W, 3] uint8."""
    agg = import_extra("matplotlib.backends.backend_agg", "Matplotlib", "viz")
    figure.set_dpi(dpi)
    before, canvas = figure.canvas, agg.FigureCanvasAgg(figure)
    canvas.draw()
    figure.set_canvas(before)  # by which pyplot finds the figure to close it
    picture: npt.NDArray[np.uint8] = np.array(np.asarray(canvas.buffer_rgba())[..., :3], order="C")
    return picture
