"""`record`: films episodes of an environment that renders."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from typing import Any, Protocol, runtime_checkable

import numpy as np
from tensordict import TensorDict

from funcollect.arguments import check_positive
from funcollect.core.api import close, init, reset, run
from funcollect.core.request import Request
from funcollect.core.simulators.simulation import SimulatorHandle
from funcollect.core.state import CollectorState
from funcollect.envs.host.host_env import Camera
from funcollect.errors import EnvError
from funcollect.plots.figures import Picture, check_film, film
from funcollect.protocols import Env, Policy, Simulators
from funcollect.specs import ExplorationType
from funcollect.trajectories.stats import EpisodeStats, episode_stats

_FPS = 30  # if neither the user nor the environment names it


@runtime_checkable
class _Filmable(Simulators, Protocol):
    """Simulators that can be filmed."""

    def camera(self, lane: int) -> Camera: ...


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

    With the same seed, the episodes are those of `evaluate`. The film shows each episode from its reset on, so an
    episode has one picture more than it has steps. The file is written only if all goes well.

    Args:
        env: a single Gymnasium environment that renders arrays: ``make_env(id, render_mode="rgb_array")``.
        policy: the policy.
        path: the file; its suffix names the format. Save long films as MP4: a GIF is held in memory until its end.
        episodes: the number of episodes.
        seed: an int; the same seed gives the same film. None draws one.
        params: parameters to act with; None for the policy's own.
        fps: frames per second; None for those in the environment's metadata, or else 30. A GIF has at most 50.
        max_frames: the number of steps after which the film ends, even within an episode.
        exploration_type: by default deterministic.

    Returns:
        Statistics of the episodes that ended.

    Raises:
        ImportError: if imageio is not installed.
        TypeError: if the environment is not Gymnasium's.
        ValueError: if there are several environments, the render mode is another, the suffix is unknown, or `fps` is
            not positive.
        EnvError: if the environment raises, for example because MuJoCo cannot render without OpenGL.

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
        camera = _camera(env, state)
        parts: list[EpisodeStats] = []
        with film(path, fps or camera.fps or _FPS) as add:
            for batch in _batches(env, policy, state, request, episodes):
                add(_picture(camera))
                if batch is not None:
                    parts.append(episode_stats(batch, parts[-1] if parts else None))
                if len(parts) >= max_frames:
                    break
        return EpisodeStats.concatenate(parts)
    finally:
        close(state)


def _batches(
    env: Env, policy: Policy, state: CollectorState, request: Request, episodes: int
) -> Iterator[TensorDict | None]:
    """Run the episodes; yield None after each reset, and the batch [1], or [1, 1], after each step."""
    for episode in range(episodes):
        state = reset(env, state) if episode else state
        yield None
        while not bool(state.terminated | state.truncated):
            state, batch = run(env, policy, state, request)
            yield batch


def _camera(env: Env, state: CollectorState) -> Camera:
    """The camera of a single environment that renders arrays; TypeError or ValueError for any other."""
    if (env.num_envs or 1) > 1:
        raise ValueError(f"{env} has {env.num_envs} environments, expected a single one: leave num_envs out")
    simulators = state.env_state.simulation.simulators if isinstance(state.env_state, SimulatorHandle) else None
    if not isinstance(simulators, _Filmable):
        raise TypeError(
            f"{env} cannot be filmed, expected a Gymnasium environment that renders: make one with "
            "funcollect.make_env(id, render_mode='rgb_array'), or save pixel observations with plots.video"
        )
    camera = simulators.camera(0)
    if camera.mode != "rgb_array":
        raise ValueError(
            f"{env} has the render mode {camera.mode!r}, expected 'rgb_array': make it with "
            "funcollect.make_env(id, render_mode='rgb_array')"
        )
    return camera


def _picture(camera: Camera) -> Picture:
    """Render the environment: [H, W, 3] uint8; EnvError if it raises or returns anything else."""
    try:
        picture = camera.shoot()
    except Exception as error:
        raise EnvError(
            f"render() raised {error!r}: without a display, MuJoCo needs OpenGL by EGL or OSMesa (install it, and set "
            "MUJOCO_GL=egl or osmesa before Python starts)"
        ) from error
    array = np.asarray(picture)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[-1] != 3:
        raise EnvError(
            f"render() gave {array.dtype} {list(array.shape)}, expected uint8 [H, W, 3]: return RGB pictures"
        )
    return array
