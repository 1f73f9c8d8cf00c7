"""Draw states of gymnax's environments with its `Visualizer`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from funcollect.envs.extras import import_extra
from funcollect.envs.jax_envs.renderers.matplotlib_pixels import pixels_of
from funcollect.errors import EnvError
from funcollect.protocols import Renderer

_DPI = 100


@contextmanager
def gymnax_renderer(raw: Any, own: Any) -> Iterator[Renderer]:
    """Draw states of `raw`, with the parameters `own` where a state has none."""
    pyplot = import_extra("matplotlib.pyplot", "Matplotlib", "viz")
    visualizer: Any = import_extra("gymnax.visualize", "gymnax", "jax-envs").Visualizer(raw, own, {})

    def draw(env_state: Any, params: Any) -> Any:
        visualizer.env_params = own if params is None else params
        step = int(getattr(env_state, "time", 0))
        visualizer.state_seq = {0: env_state, step: env_state}
        pyplot.sca(visualizer.ax)
        visualizer.ax.clear()
        visualizer.init()  # at every picture, since goals differ between episodes and are drawn here only
        if not hasattr(visualizer, "im"):
            raise EnvError(
                f"gymnax has no renderer for {raw.name}, expected an environment that gymnax.visualize.Visualizer "
                "draws, such as those of classic control and MinAtar: film one of these, or plot observations with "
                "plots.episode"
            )
        visualizer.update(step)  # also writes the step into the title
        return pixels_of(visualizer.fig, _DPI)

    try:
        yield Renderer(1000 / visualizer.interval, draw)
    finally:
        pyplot.close(visualizer.fig)
