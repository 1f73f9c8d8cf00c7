"""Takes pictures of a state: by the simulators that it holds, or by the renderer of a JAX environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np

from funcollect.core.env_params import of_one_lane
from funcollect.core.simulators.simulation import SimulatorHandle
from funcollect.core.state import CollectorState
from funcollect.envs.host.host_env import Camera
from funcollect.errors import EnvError
from funcollect.interop.jax_setup import import_jax
from funcollect.plots.figures import Picture
from funcollect.protocols import Env, RenderedEnv, Simulators

_T = TypeVar("_T")


@runtime_checkable
class _Filmable(Simulators, Protocol):
    """Simulators that can be filmed."""

    def camera(self, lane: int) -> Camera: ...


class Filming(NamedTuple):
    """How to film the states of an environment, of several the first."""

    fps: float | None  # the frames per second that the environment recommends
    shoot: Callable[[CollectorState], Picture]  # [H, W, 3] uint8; EnvError if rendering fails


@contextmanager
def opened_camera(env: Env, state: CollectorState) -> Iterator[Filming]:
    """Open what films `env`, of several environments the first; `state` is its first state.

    Raises:
        TypeError: if it cannot be filmed.
        ValueError: for another render mode.
        EnvError: if its renderer raises.
    """
    if not isinstance(env, RenderedEnv):
        camera = _simulators_camera(env, state)
        yield Filming(camera.fps, lambda _: _picture(camera.shoot))
        return
    with ExitStack() as stack:
        fps, draw = _rendered(lambda: stack.enter_context(env.renderer()))

        def shoot(state: CollectorState) -> Picture:
            env_state = import_jax().tree.map(lambda leaf: leaf[0], state.env_state.current)
            return _picture(lambda: draw(env_state, of_one_lane(state.env_params)))

        yield Filming(fps, shoot)


def _simulators_camera(env: Env, state: CollectorState) -> Camera:
    """The camera of simulators that render arrays; TypeError or ValueError for any others."""
    simulators = state.env_state.simulation.simulators if isinstance(state.env_state, SimulatorHandle) else None
    if not isinstance(simulators, _Filmable):
        known, mend = "a Gymnasium environment that renders", "make_env(id, render_mode='rgb_array') makes one"
        if env.backend == "jax":
            known = "one of gymnax, brax, MuJoCo Playground, jumanji or navix, or one with a method renderer()"
            mend = "add the method (its form is funcollect.envs.Renderer)"
        raise TypeError(f"{env} cannot be filmed, expected {known}: {mend}; plots.video saves pixel observations")
    camera = simulators.camera(0)
    if camera.mode != "rgb_array":
        raise ValueError(
            f"{env} has the render mode {camera.mode!r}, expected 'rgb_array': make it with "
            "funcollect.make_env(…, render_mode='rgb_array'); on the command line, give your factory a parameter "
            "render_mode, and pass it on"
        )
    return camera


def _picture(shoot: Callable[[], Any]) -> Picture:
    """Render one state: [H, W, 3] uint8; EnvError if that raises or returns anything else."""
    array = np.asarray(_rendered(shoot))
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[-1] != 3:
        raise EnvError(
            f"render() gave {array.dtype} {list(array.shape)}, expected uint8 [H, W, 3]: return RGB pictures"
        )
    return array


def _rendered(call: Callable[[], _T]) -> _T:
    """Call something that renders; EnvError with its reason if it raises."""
    try:
        return call()
    except (EnvError, ImportError):
        raise
    except Exception as error:
        raise EnvError(
            f"render() raised {error!r}: without a display, MuJoCo needs OpenGL by EGL or OSMesa (install it, and set "
            "MUJOCO_GL=egl or osmesa before Python starts)"
        ) from error
