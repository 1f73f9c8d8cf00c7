"""Draw states of brax and MuJoCo Playground with MuJoCo's renderer, as these do."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any

import numpy as np

from funcollect.envs.extras import import_extra
from funcollect.errors import EnvError
from funcollect.protocols import Renderer

_CAMERA = "track"  # follows the body in most models; without it, the camera is free
_HEIGHT, _WIDTH = 240, 320  # those of brax's own pictures


def brax_renderer(raw: Any) -> AbstractContextManager[Renderer]:
    """Draw states of an environment of brax, of whatever backend."""
    inner = raw.unwrapped
    return _mujoco_renderer(inner.sys.mj_model, float(inner.dt), _place_brax)


def playground_renderer(raw: Any) -> AbstractContextManager[Renderer]:
    """Draw states of an environment of MuJoCo Playground."""
    inner = raw.unwrapped
    return _mujoco_renderer(inner.mj_model, float(inner.dt), _place_playground)


@contextmanager
def _mujoco_renderer(model: Any, dt: float, place: Callable[[Any, Any], None]) -> Iterator[Renderer]:
    """Draw states of a `MjModel`, whose steps take `dt` seconds; `place` copies a state into a `MjData`."""
    mujoco = import_extra("mujoco", "MuJoCo", "jax-envs")
    _check_display()
    data = mujoco.MjData(model)
    camera = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, _CAMERA)  # -1, the free one, if there is none
    with closing(mujoco.Renderer(model, height=_HEIGHT, width=_WIDTH)) as renderer:

        def draw(env_state: Any, _: Any) -> Any:
            place(env_state, data)
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


def _place_brax(state: Any, data: Any) -> None:
    data.qpos, data.qvel = np.asarray(state.pipeline_state.q), np.asarray(state.pipeline_state.qd)
    _place_mocap(state.pipeline_state, data)


def _place_playground(state: Any, data: Any) -> None:
    data.qpos, data.qvel = np.asarray(state.data.qpos), np.asarray(state.data.qvel)
    data.xfrc_applied = np.asarray(state.data.xfrc_applied)
    _place_mocap(state.data, data)


def _place_mocap(given: Any, data: Any) -> None:
    """Copy the bodies that are moved from outside, such as targets."""
    if data.mocap_pos.size and hasattr(given, "mocap_pos"):
        data.mocap_pos, data.mocap_quat = np.asarray(given.mocap_pos), np.asarray(given.mocap_quat)
