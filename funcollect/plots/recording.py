"""Pictures and films of pixel observations in a batch, and `record`, which films a policy in an environment."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from os import PathLike
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase
from torch import Tensor

from funcollect.arguments import check_kind, check_number, check_positive
from funcollect.core.api import close, init, reset, run
from funcollect.core.env_params import of_one_lane
from funcollect.core.request import Request
from funcollect.core.simulators import SimulatorHandle
from funcollect.core.state import CollectorState
from funcollect.envs.host.host_env import Camera
from funcollect.errors import EnvError
from funcollect.interop.jax_setup import import_jax
from funcollect.plots.figures import File, Trajectory, new_figure, pick, saved
from funcollect.protocols import Env, Policy, RenderedEnv, Renderer
from funcollect.specs import ExplorationType, GroupedSpec, TurnSpec
from funcollect.trajectories.stats import EpisodeStats, episode_stats
from funcollect.tree import Path, as_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Key = str | Path | None
Picture = npt.NDArray[np.uint8]
Add = Callable[[Picture], None]  # adds a picture [H, W, 3] to a film

_LOSSLESS: dict[str, Any] = {"codec": "libx264rgb", "pixelformat": "rgb24", "output_params": ["-crf", "0"]}
_NO_FORK = "IMAGEIO_FFMPEG_NO_PREVENT_SIGINT"


def frames(
    batch: TensorDictBase, traj_id: int | None = None, *, count: int = 8, key: Key = None, path: File = None
) -> Figure:
    """Show evenly spaced frames of an episode side by side, at most `count`, from its first observation to its last.

    A frame is ``[H, W]``, ``[H, W, C]`` with 1, 3 or 4 colors, or ``[3, H, W]``. Of a stack of frames,
    ``[stack, H, W]`` or ``[stack, H, W, C]``, the last one is shown. The dtype is uint8, or floating with values in
    [0, 1]. `key` names the observation; None if only one consists of pictures. The other arguments and the errors are
    those of `episode`; TypeError also for pictures of another dtype, ValueError for a wrong key or observation.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> pixels = {"observation": torch.zeros(5, 8, 8, 3, dtype=torch.uint8)}
    >>> batch = TensorDict({**pixels, "next": pixels, "collector": {"traj_ids": torch.zeros(5).long()}}, [5])
    >>> [axes.get_title() for axes in frames(batch, count=3).axes]
    ['step 0', '2', '5']
    """
    check_positive("count", count, 8)
    trajectory = pick(batch, traj_id)
    leaf = _pictorial(trajectory, key)
    indices = np.unique(np.linspace(0, len(leaf) - 1, min(count, len(leaf))).round().astype(int))
    pictures = _rgb(leaf[torch.from_numpy(indices)])
    inches, (height, width) = min(2.0, 12 / len(indices)), pictures.shape[1:3]
    figure = new_figure(inches * len(indices), inches * height / width + 0.3)
    panels = figure.subplots(1, len(indices), squeeze=False)[0]
    for axes, picture, index in zip(panels, pictures, indices, strict=True):
        axes.imshow(picture, interpolation="nearest")
        axes.set_title(f"{'' if index else 'step '}{trajectory.first_step + index}", fontsize="small")
        axes.set_axis_off()
    return saved(figure, path)


def _pictorial(trajectory: Trajectory, key: Key) -> Tensor:
    """The observation leaf that consists of pictures, [T + 1, ...]."""
    leaves = trajectory.observations
    shapes = {".".join(path): list(leaf.shape[1:]) for path, leaf in leaves.items()}
    if key is not None:
        if (wanted := as_path(key)) not in leaves:
            raise ValueError(f"there is no observation {'.'.join(wanted)}, expected one of {shapes}")
        return leaves[wanted]
    found = [leaf for leaf in leaves.values() if leaf.ndim >= 3]
    if len(found) != 1:
        mend = f"name it with key=; there are {shapes} (plots.episode draws the others)"
        raise ValueError(f"{len(found)} of the observations are pictures, expected one: {mend}")
    return found[0]


def _rgb(leaf: Tensor) -> npt.NDArray[np.uint8]:
    """Pictures of any layout as [T, H, W, 3] uint8; floats must be in [0, 1], and are scaled to 255."""
    match leaf.shape[1:]:
        case (_, _):
            pictures = leaf[..., None]
        case (_, _, 1 | 3 | 4):
            pictures = leaf
        case (3, _, _):
            pictures = leaf.movedim(1, -1)
        case (_, _, _):
            pictures = leaf[:, -1, :, :, None]
        case (_, _, _, 1 | 3 | 4):
            pictures = leaf[:, -1]
        case shape:
            known = "[H, W], [H, W, C] with 1, 3 or 4 colours, [3, H, W], [stack, H, W] or [stack, H, W, C]"
            raise ValueError(f"a frame has shape {list(shape)}, expected {known}: choose another key")
    if pictures.is_floating_point():
        low, high = (float(bound) for bound in pictures.aminmax())
        if not (low >= 0 and high <= 1):
            found = f"from {low:.4g} to {high:.4g}"
            raise ValueError(f"the pictures hold values {found}, expected [0, 1], or uint8: scale them")
        pictures = (pictures * 255).round().to(torch.uint8)
    if pictures.dtype != torch.uint8:
        raise TypeError(f"the pictures are {pictures.dtype}, expected uint8, or floats within [0, 1]: convert them")
    return pictures.expand(*pictures.shape[:-1], 3).numpy() if pictures.shape[-1] == 1 else pictures[..., :3].numpy()


def video(
    batch: TensorDictBase, path: str | PathLike[str], traj_id: int | None = None, *, fps: float = 30, key: Key = None
) -> int:
    """Save an episode's pixel observations as a film, and return the number of frames: one more than it has steps.

    `path` names a GIF or an MP4 by its suffix; the file is written only if all goes well. `fps` are frames per second.
    The other arguments and the errors are those of `frames`, with imageio for Matplotlib; ValueError also for an
    unknown suffix, or unless `fps` is positive.

    >>> import tempfile, torch
    >>> from tensordict import TensorDict
    >>> pixels = {"observation": torch.zeros(5, 32, 32, 3, dtype=torch.uint8)}
    >>> batch = TensorDict({**pixels, "next": pixels, "collector": {"traj_ids": torch.zeros(5).long()}}, [5])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     video(batch, f"{folder}/episode.gif")
    6
    """
    leaf = _pictorial(pick(batch, traj_id), key)
    with film(path, fps) as add:
        for picture in leaf[:, None]:
            add(_rgb(picture)[0])
    return len(leaf)


@contextmanager
def film(path: str | PathLike[str], fps: float, *, lossless: bool = False) -> Iterator[Add]:
    """Open a film, and yield the function that adds a picture. An error in the block leaves no file.

    A `lossless` MP4 keeps every pixel, and an odd height or width too.
    """
    target = check_film(path, fps)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.stem}.{os.getpid()}.{threading.get_native_id()}{target.suffix}")
    try:
        with _opened(partial, fps, lossless) as add:
            yield add
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def check_film(path: str | PathLike[str], fps: float | None) -> FilePath:
    """The path of a film; ImportError without imageio, ValueError for an unknown suffix or `fps` out of range."""
    check_kind("path", path, (str, PathLike), "pass for example 'episode.gif'")
    target = FilePath(path)
    if target.suffix.lower() not in (".gif", ".mp4"):
        raise ValueError(f"path is {str(target)!r}, expected a name that ends in .gif or .mp4: change it")
    if fps is not None:
        check_number("fps", fps, positive=True, example=30)
    if find_spec("imageio") is None:
        raise ImportError("films need imageio, which is not installed: pip install 'funcollect[viz]'")
    return target


@contextmanager
def unforked() -> Iterator[None]:
    """Keep imageio from forking this process to start ffmpeg, since JAX's threads may make a fork hang."""
    before = os.environ.get(_NO_FORK)
    os.environ[_NO_FORK] = "1"
    try:
        yield
    finally:
        os.environ.pop(_NO_FORK) if before is None else os.environ.update({_NO_FORK: before})


@contextmanager
def _opened(path: FilePath, fps: float, lossless: bool) -> Iterator[Add]:
    """Open a film. Frames of a GIF last a multiple of 10 ms; an MP4 is padded to an even size unless it is lossless."""
    from imageio.v2 import get_writer

    is_gif = path.suffix.lower() == ".gif"
    options: dict[str, Any] = {"format": "FFMPEG", "fps": fps, "macro_block_size": 1, **(_LOSSLESS if lossless else {})}
    if is_gif:
        options = {"duration": max(2, round(100 / fps)) * 10, "loop": 0}  # in ms; viewers show shorter ones more slowly
    multiple = 1 if is_gif or lossless else 2

    def add(picture: Picture) -> None:
        height, width = picture.shape[:2]
        extra = [(0, -height % multiple), (0, -width % multiple), (0, 0)]
        with unforked():  # ffmpeg starts with the first picture
            file.append_data(np.pad(picture, extra, mode="edge"))

    file = get_writer(path, mode="I", **options)
    try:
        yield add
    except BaseException:
        with suppress(Exception):  # Ctrl-C ends ffmpeg too, and its error would hide the interrupt
            file.close()
        raise
    file.close()


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
    """Film whole episodes of a policy as a GIF or an MP4; return statistics of those that ended.

    With the same seed, `evaluate` runs the same episodes; of several lanes, the first one's are filmed. The film shows
    each episode from its reset on, one picture for that and one for each step (a GIF joins equal ones). The file is
    written only if all goes well.

    Args:
        env: the environment; of several, the first is filmed, and all take steps. Gymnasium's have to render arrays:
            ``make_env(id, render_mode="rgb_array")``; the guide to evaluation says what draws those in JAX.
        policy: the policy; of a population, the first member is filmed.
        path: the file; its suffix names the format. Save long films as MP4: a GIF is held in memory until its end.
        episodes: the number of episodes.
        seed: an int; the same seed gives the same film. None draws one.
        params: parameters to act with; None for the policy's own.
        fps: frames per second; None for the value in the environment's metadata, or else 30. A GIF has at most 50.
        max_frames: the number of steps after which the film ends, even within an episode.
        exploration_type: whether the policy samples.

    Raises ImportError if imageio, or a package that the suite draws with, is not installed; TypeError if `env` cannot
    be filmed; ValueError if the render mode is another, the suffix is unknown, or `fps` is not positive; EnvError
    if the environment or its renderer raises, for example because MuJoCo lacks OpenGL, or its suite cannot draw it.

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
    parts: list[EpisodeStats] = []
    with _filmed(env, policy, seed) as (state, own_fps, shoot), film(path, fps or own_fps or 30) as add:
        for episode in range(episodes):
            state = reset(env, state) if episode else state
            add(shoot(state))
            while len(parts) < max_frames and not bool((state.terminated | state.truncated)[0]):
                state, batch = run(env, policy, state, request)
                add(shoot(state))
                parts.append(episode_stats(batch[:1], parts[-1] if parts else None))  # [1], or the first of [P, 1]
            if len(parts) >= max_frames:
                break
    return EpisodeStats.concatenate(parts)


def check_filmed(env: Env, policy: Policy) -> None:
    """Take one picture; raises the errors of `record` if the environment cannot be filmed."""
    with _filmed(env, policy, 0) as (state, _, shoot):
        shoot(state)


@contextmanager
def _filmed(
    env: Env, policy: Policy, seed: int | None
) -> Iterator[tuple[CollectorState, float | None, Callable[[CollectorState], Picture]]]:
    """Open a run; yield its first state, the environment's frames per second, and a function that draws a state."""
    with ExitStack() as stack:
        state = init(env, policy, seed=seed)
        stack.callback(close, state)
        if isinstance(env, RenderedEnv):
            with _rendering():
                fps, draw = stack.enter_context(env.renderer())
        else:
            fps, draw = _camera(env, state)

        def shoot(state: CollectorState) -> Picture:
            env_state: Any = state.env_state
            with _rendering():
                if env.backend == "jax":  # the first lane
                    env_state = import_jax().tree.map(lambda leaf: leaf[0], env_state.current)
                array = np.asarray(draw(env_state, of_one_lane(state.env_params)))
            if array.dtype != np.uint8 or array.ndim != 3 or array.shape[-1] != 3:
                raise EnvError(f"render() gave {array.dtype} {list(array.shape)}, expected uint8 [H, W, 3]: return RGB")
            return array

        yield state, fps, shoot


def _camera(env: Env, state: CollectorState) -> Renderer:
    """The renderer of simulators that render arrays; TypeError or ValueError for any others."""
    simulators = state.env_state.simulation.simulators if isinstance(state.env_state, SimulatorHandle) else None
    opened: Callable[[int], Camera] | None = getattr(simulators, "camera", None)
    if opened is None:
        known, mend = "a Gymnasium environment that renders", "make_env(id, render_mode='rgb_array') makes one"
        if env.backend == "jax":
            known = "one of a suite that draws (not pgx), or one with a method renderer()"
            mend = "add the method (its form is funcollect.envs.Renderer)"
        raise TypeError(f"{env} cannot be filmed, expected {known}: {mend}; plots.video saves pixel observations")
    camera = opened(0)
    if camera.mode != "rgb_array":
        what, given = f"{env} has the render mode {camera.mode!r}, expected 'rgb_array'", "render_mode='rgb_array'"
        if isinstance(env.action_spec, GroupedSpec | TurnSpec):  # PettingZoo's, which takes it there
            given = "env_kwargs={'render_mode': 'rgb_array'}"
        mend = "on the command line, give your factory a parameter render_mode, and pass it on"
        raise ValueError(f"{what}: make it with {given}; {mend}")
    return Renderer(camera.fps, lambda *_: camera.shoot())


@contextmanager
def _rendering() -> Iterator[None]:
    """Raise EnvError, with the reason and a fix, for an exception of the block."""
    try:
        yield
    except (EnvError, ImportError):
        raise
    except Exception as error:
        what = f"render() raised {error!r}: without a display, MuJoCo needs OpenGL by EGL or OSMesa (install it"
        raise EnvError(f"{what}, and set MUJOCO_GL=egl or osmesa before Python starts)") from error
