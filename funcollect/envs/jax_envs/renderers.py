"""How suites of JAX environments draw a state, for `funcollect.record`; what draws is imported on first use."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from funcollect.envs.recognise import import_extra
from funcollect.errors import EnvError
from funcollect.interop.jax_setup import import_jax
from funcollect.protocols import Renderer

_GYMNAX_DPI = 100
_JUMANJI_DPI = 60  # its figures are 10 inches wide and high
_JUMANJI_FPS = 5  # as its own animations have
_NAVIX_FPS = 10  # MiniGrid's
_NAVIX_SIZE = 256  # pixels that the shorter side has at least, up to rounding: navix draws 8 for a cell
_CAMERA = "track"  # follows the body in most of MuJoCo's models; without it, the camera is free
_HEIGHT, _WIDTH = 240, 320  # those of brax's own pictures


@contextmanager
def gymnax_renderer(raw: Any, own: Any) -> Iterator[Renderer]:
    """Draw states of `raw` by gymnax's `Visualizer`, with the parameters `own` where a state has none."""
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
        return pixels_of(visualizer.fig, _GYMNAX_DPI)

    try:
        yield Renderer(1000 / visualizer.interval, draw)
    finally:
        pyplot.close(visualizer.fig)


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
    viewer._display = lambda figure: pictures.append(pixels_of(figure, _JUMANJI_DPI))  # some `render` drop its result

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

    yield Renderer(_JUMANJI_FPS, draw)


@contextmanager
def navix_renderer() -> Iterator[Renderer]:
    """Draw the whole grid of a state by navix's sprites, whatever the environment's own observations are."""
    jitted = import_jax().jit(import_extra("navix.observations", "navix", "jax-envs").rgb)

    def draw(timestep: Any, _: Any) -> Any:
        picture = np.asarray(jitted(timestep.state))
        times = max(1, _NAVIX_SIZE // min(picture.shape[:2]))
        return picture.repeat(times, 0).repeat(times, 1)

    yield Renderer(_NAVIX_FPS, draw)


def brax_renderer(raw: Any) -> AbstractContextManager[Renderer]:
    """Draw states of an environment of brax, of whatever backend."""
    inner = raw.unwrapped
    return mujoco_renderer(inner.sys.mj_model, float(inner.dt), "pipeline_state", {"qpos": "q", "qvel": "qd"})


def playground_renderer(raw: Any) -> AbstractContextManager[Renderer]:
    """Draw states of an environment of MuJoCo Playground."""
    inner = raw.unwrapped
    names = {name: name for name in ("qpos", "qvel", "xfrc_applied")}
    return mujoco_renderer(inner.mj_model, float(inner.dt), "data", names)


@contextmanager
def mujoco_renderer(model: Any, dt: float, physics: str, names: Mapping[str, str]) -> Iterator[Renderer]:
    """Draw states of a `MjModel`, whose steps take `dt` seconds, by MuJoCo's renderer.

    The state's attribute `physics` holds the values of a `MjData`, and `names` maps their names there to its own.
    """
    mujoco = import_extra("mujoco", "MuJoCo", "jax-envs")
    _check_display()
    data = mujoco.MjData(model)
    camera = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, _CAMERA)  # -1, the free one, if there is none
    with closing(mujoco.Renderer(model, height=_HEIGHT, width=_WIDTH)) as renderer:

        def draw(env_state: Any, _: Any) -> Any:
            given = getattr(env_state, physics)
            for name, own in names.items():
                setattr(data, name, np.asarray(getattr(given, own)))
            if data.mocap_pos.size and hasattr(given, "mocap_pos"):  # moved from outside, as targets are
                data.mocap_pos, data.mocap_quat = np.asarray(given.mocap_pos), np.asarray(given.mocap_quat)
            mujoco.mj_forward(model, data)
            renderer.update_scene(data, camera=camera)
            return np.array(renderer.render())

        yield Renderer(1 / dt, draw)


def _check_display() -> None:
    """Raise EnvError where MuJoCo would open a window without a display, by which the process may end."""
    windowed = os.environ.get("MUJOCO_GL", "").lower() not in ("egl", "osmesa")
    if sys.platform == "linux" and windowed and not ({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()):
        raise EnvError(
            "MuJoCo draws in a window unless MUJOCO_GL is set, and there is no display, expected OpenGL by EGL or "
            "OSMesa: install one, and set MUJOCO_GL=egl or osmesa before Python starts"
        )


def pixels_of(figure: Any, dpi: float) -> npt.NDArray[np.uint8]:
    """Draw a figure of Matplotlib's at `dpi` dots per inch, whatever backend is set: [H, W, 3] uint8."""
    agg = import_extra("matplotlib.backends.backend_agg", "Matplotlib", "viz")
    figure.set_dpi(dpi)
    before, canvas = figure.canvas, agg.FigureCanvasAgg(figure)
    canvas.draw()
    figure.set_canvas(before)  # by which pyplot finds the figure to close it
    picture: npt.NDArray[np.uint8] = np.array(np.asarray(canvas.buffer_rgba())[..., :3], order="C")
    return picture
