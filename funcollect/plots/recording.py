"""Episodes of a rendered environment, as a film."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from typing import Any

import numpy as np
from tensordict import TensorDict

from funcollect.arguments import check_positive
from funcollect.core.api import close, init, reset, run
from funcollect.core.request import Request
from funcollect.core.simulators.simulation import SimulatorHandle
from funcollect.core.state import CollectorState
from funcollect.envs.host.host_env import Camera
from funcollect.errors import EnvError
from funcollect.plots.films import Picture, check_film, film
from funcollect.protocols import Env, Policy
from funcollect.specs import ExplorationType
from funcollect.trajectories.stats import EpisodeStats, episode_stats

_FPS = 30  # of an environment that names none


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
    """Film whole episodes of a policy: GIF or MP4, as the suffix of `path` says.

    The episodes are those that `evaluate` would see with the same seed. An episode has one picture more than steps, its
    first one being that of the reset. The file is there whole or not at all, also after Ctrl-C.

    Args:
        env: a single Gymnasium environment that renders arrays: ``make_env(id, render_mode="rgb_array")``.
        policy: the policy.
        path: where. A GIF holds all pictures in memory until it is written: long films are better MP4.
        episodes: how many, one after another.
        seed: an int; the same seed gives the same film. None draws one.
        params: parameters to act with; None for the policy's own.
        fps: frames per second; None for what the environment's metadata say, or else 30. A GIF has at most 50.
        max_frames: steps after which the film ends, even in the middle of an episode.
        exploration_type: deterministic unless given.

    Returns:
        Statistics of the episodes that came to their end.

    Raises:
        ImportError: without imageio.
        TypeError: for an environment that is not Gymnasium's, or is in a process of its own (`parallel`).
        ValueError: for several environments in one, another render mode, another suffix, an `fps` that is not positive.
        EnvError: where rendering fails, as MuJoCo's does without OpenGL, or the environment itself.

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
            for batch in _moments(env, policy, state, request, episodes):
                add(_picture(camera))
                if batch is not None:
                    parts.append(episode_stats(batch, parts[-1] if parts else None))
                if len(parts) >= max_frames:
                    break
        return EpisodeStats.concatenate(parts)
    finally:
        close(state)


def _moments(
    env: Env, policy: Policy, state: CollectorState, request: Request, episodes: int
) -> Iterator[TensorDict | None]:
    """Run the episodes, stopping after each reset (None) and each step (its batch [1], or [1, 1])."""
    for episode in range(episodes):
        state = reset(env, state) if episode else state
        yield None
        while not bool(state.terminated | state.truncated):
            state, batch = run(env, policy, state, request)
            yield batch


def _camera(env: Env, state: CollectorState) -> Camera:
    """What films the environment."""
    if (env.num_envs or 1) > 1:
        raise ValueError(f"{env} has {env.num_envs} environments, expected a single one: leave num_envs out")
    simulators = state.env_state.simulation.simulators if isinstance(state.env_state, SimulatorHandle) else None
    camera = getattr(simulators, "camera", None)
    if camera is None:
        raise TypeError(
            f"{env} cannot be filmed, expected a Gymnasium environment that renders, in this process: make one with "
            "funcollect.make_env(id, render_mode='rgb_array') and without parallel=True, or save pixel observations "
            "with plots.video"
        )
    shown: Camera = camera(0)
    if shown.mode != "rgb_array":
        raise ValueError(
            f"{env} has the render mode {shown.mode!r}, expected 'rgb_array': make it with "
            "funcollect.make_env(id, render_mode='rgb_array')"
        )
    return shown


def _picture(camera: Camera) -> Picture:
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
