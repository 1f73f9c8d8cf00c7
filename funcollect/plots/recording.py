"""`record`: films episodes, by the simulators of a state or by the renderer of a JAX environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from os import PathLike
from typing import Any

import numpy as np
from tensordict import TensorDict

from funcollect.arguments import check_positive
from funcollect.core.api import close, init, reset, run
from funcollect.core.env_params import of_one_lane
from funcollect.core.request import Request
from funcollect.core.simulators import SimulatorHandle
from funcollect.core.state import CollectorState
from funcollect.envs.host.host_env import Camera
from funcollect.errors import EnvError
from funcollect.interop.jax_setup import import_jax
from funcollect.plots.figures import Picture, check_film, film
from funcollect.protocols import Env, Policy, RenderedEnv
from funcollect.specs import ExplorationType
from funcollect.trajectories.stats import EpisodeStats, episode_stats

_FPS = 30  # if neither the user nor the environment names it


def record(
    env: Env,
    policy: Policy,
    path: str | PathLike[str],
    *,
    episodes: int = 1,
    seed: int | None = 0,
    params: Any = None,
    fps: float | None = None,
    max_frames: int = 5_000,
    exploration_type: ExplorationType = ExplorationType.DETERMINISTIC,
) -> EpisodeStats:
    """Film whole episodes of a policy as a GIF or an MP4.

    With the same seed, `evaluate` runs the same episodes. The film shows each episode from its reset on, so an
    episode has one picture more than it has steps. The file is written only if all goes well.

    Args:
        env: the environment; of several, the first is filmed, and all take steps. Gymnasium's have to render arrays:
            ``make_env(id, render_mode="rgb_array")``. Those of gymnax, brax, MuJoCo Playground, jumanji and navix are
            drawn by the renderers of these suites; a JAX environment of your own has a method ``renderer()``, a context
            manager that yields an `envs.Renderer`.
        policy: the policy; of a population, the first member is filmed.
        path: the file; its suffix names the format. Save long films as MP4: a GIF is held in memory until its end.
        episodes: the number of episodes.
        seed: an int; the same seed gives the same film. None draws one.
        params: parameters to act with; None for the policy's own.
        fps: frames per second; None for the value in the environment's metadata, or else 30. A GIF has at most 50.
        max_frames: the number of steps after which the film ends, even within an episode.
        exploration_type: by default deterministic.

    Returns:
        Statistics of the filmed episodes that ended.

    Raises:
        ImportError: if imageio, or a package that the suite draws with, is not installed.
        TypeError: if the environment cannot be filmed.
        ValueError: if the render mode is another, the suffix is unknown, or `fps` is not positive.
        EnvError: if the environment or its renderer raises, for example because MuJoCo cannot render without OpenGL, or
            if its suite has no renderer for it.

    >>> import funcollect as fc, tempfile
    >>> env = fc.make_env("CartPole-v1", render_mode="rgb_array")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     len(record(env, fc.random_policy(env), f"{folder}/cartpole.gif"))
    1
    """
    check_positive("episodes", episodes)
    check_positive("max_frames", max_frames)
    check_film(path, fps)
    request = Request(length=1, params=params, exploration_type=exploration_type, reset_when_done=False)
    state = init(env, policy, seed=seed)
    try:
        parts: list[EpisodeStats] = []
        with _opened_camera(env, state) as (own_fps, shoot), film(path, fps or own_fps or _FPS) as add:
            for after, batch in _steps(env, policy, state, request, episodes):
                add(shoot(after))
                if batch is not None:
                    parts.append(episode_stats(batch[:1], parts[-1] if parts else None))  # [1], or the first of [P, 1]
                if len(parts) >= max_frames:
                    break
        return EpisodeStats.concatenate(parts)
    finally:
        close(state)


def check_filmed(env: Env, policy: Policy) -> None:
    """Take one picture; raises as `record` does if the environment cannot be filmed."""
    state = init(env, policy, seed=0)
    try:
        with _opened_camera(env, state) as (_, shoot):
            shoot(state)
    finally:
        close(state)


def _steps(
    env: Env, policy: Policy, state: CollectorState, request: Request, episodes: int
) -> Iterator[tuple[CollectorState, TensorDict | None]]:
    """Run the episodes of the first lane; yield the state after each reset, and after each step with its batch."""
    for episode in range(episodes):
        state = reset(env, state) if episode else state
        yield state, None
        while not bool((state.terminated | state.truncated)[0]):
            state, batch = run(env, policy, state, request)
            yield state, batch


@contextmanager
def _opened_camera(
    env: Env, state: CollectorState
) -> Iterator[tuple[float | None, Callable[[CollectorState], Picture]]]:
    """Open what films `env`, of several environments the first; `state` is its first state.

    Yields the frames per second that the environment recommends, and a function from a state to its picture, [H, W, 3]
    uint8, which raises EnvError if rendering fails.

    Raises:
        TypeError: if it cannot be filmed.
        ValueError: for another render mode.
        EnvError: if its renderer raises.
    """
    with ExitStack() as stack:
        if isinstance(env, RenderedEnv):
            with _rendering():
                fps, draw = stack.enter_context(env.renderer())
            camera = None
        else:
            camera = _simulators_camera(env, state)
            fps = camera.fps

        def shoot(state: CollectorState) -> Picture:
            with _rendering():
                if camera is None:
                    env_state = import_jax().tree.map(lambda leaf: leaf[0], state.env_state.current)
                    array = np.asarray(draw(env_state, of_one_lane(state.env_params)))
                else:
                    array = np.asarray(camera.shoot())
            if array.dtype != np.uint8 or array.ndim != 3 or array.shape[-1] != 3:
                raise EnvError(
                    f"render() gave {array.dtype} {list(array.shape)}, expected uint8 [H, W, 3]: return RGB pictures"
                )
            return array

        yield fps, shoot


def _simulators_camera(env: Env, state: CollectorState) -> Camera:
    """The camera of simulators that render arrays; TypeError or ValueError for any others."""
    simulators = state.env_state.simulation.simulators if isinstance(state.env_state, SimulatorHandle) else None
    opened: Callable[[int], Camera] | None = getattr(simulators, "camera", None)
    if opened is None:
        known, mend = "a Gymnasium environment that renders", "make_env(id, render_mode='rgb_array') makes one"
        if env.backend == "jax":
            known = "one of gymnax, brax, MuJoCo Playground, jumanji or navix, or one with a method renderer()"
            mend = "add the method (its form is funcollect.envs.Renderer)"
        raise TypeError(f"{env} cannot be filmed, expected {known}: {mend}; plots.video saves pixel observations")
    camera = opened(0)
    if camera.mode != "rgb_array":
        raise ValueError(
            f"{env} has the render mode {camera.mode!r}, expected 'rgb_array': make it with "
            "funcollect.make_env(…, render_mode='rgb_array'); on the command line, give your factory a parameter "
            "render_mode, and pass it on"
        )
    return camera


@contextmanager
def _rendering() -> Iterator[None]:
    """Raise EnvError, with the reason, for what the block raises."""
    try:
        yield
    except (EnvError, ImportError):
        raise
    except Exception as error:
        raise EnvError(
            f"render() raised {error!r}: without a display, MuJoCo needs OpenGL by EGL or OSMesa (install it, and set "
            "MUJOCO_GL=egl or osmesa before Python starts)"
        ) from error
