"""Draw states of jumanji's environments with their viewers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from funcollect.envs.extras import import_extra
from funcollect.envs.jax_envs.renderers.matplotlib_pixels import pixels_of
from funcollect.errors import EnvError
from funcollect.interop.jax_setup import import_jax
from funcollect.protocols import Renderer

_FPS = 5  # as jumanji's own animations have
_DPI = 60  # its figures are 10 inches wide and high


@contextmanager
def jumanji_renderer(raw: Any) -> Iterator[Renderer]:
    """Draw states of `raw` by copies of it and of its viewer, which show no window."""
    pyplot = import_extra("matplotlib.pyplot", "Matplotlib", "viz")
    kind = import_extra("jumanji.viewer", "jumanji", "jax-envs").MatplotlibViewer
    tree = import_jax().tree
    env = copy.copy(raw.unwrapped)
    found = [name for name, member in vars(env).items() if isinstance(member, kind)]
    if len(found) != 1:
        raise EnvError(
            f"jumanji has no renderer for {type(env).__name__}, expected an environment with a viewer that draws with "
            "Matplotlib: pass one as the environment's viewer="
        )
    viewer: Any = copy.copy(getattr(env, found[0]))
    setattr(env, found[0], viewer)
    pictures: list[Any] = []
    viewer._name += " "  # figures are found by name: not one that the user has open
    viewer._get_fig_ax = partial(viewer._get_fig_ax, show=False)
    viewer._display = lambda figure: pictures.append(pixels_of(figure, _DPI))  # some `render` drop what this returns

    def render(env_state: Any) -> Any:
        try:
            with pyplot.ioff():
                env.render(env_state)
        finally:
            pyplot.close(viewer._name)  # some viewers draw over what the figure shows
        return pictures.pop()

    def draw(env_state: Any, _: Any) -> Any:
        try:
            return render(tree.map(np.asarray, env_state))  # many viewers read cell by cell, which is slow in JAX
        except AttributeError:
            return render(env_state)  # some viewers use `.at`, which NumPy's arrays lack

    yield Renderer(_FPS, draw)
