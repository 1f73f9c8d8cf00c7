"""Makes figures and films, and writes them to files. No other module of `plots` imports Matplotlib or imageio."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from funcollect.arguments import check_kind, check_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; its width and height are in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need Matplotlib, which is not installed: pip install 'funcollect[viz]'") from error
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def axes_of(ax: Any, width: float, height: float) -> Axes:
    """The axes that a user gives, or those of a new figure for None; TypeError unless they are Matplotlib's."""
    if ax is None:
        return new_figure(width, height).add_subplot()
    from matplotlib.axes import Axes

    check_kind("ax", ax, Axes, "pass for example matplotlib.pyplot.subplots()[1]")
    axes: Axes = ax
    return axes


def saved(drawn: Figure | Axes, path: str | PathLike[str] | None) -> Figure:
    """Save a figure, or that of axes, if `path` is given, in the format that its suffix names, and return it."""
    figure = drawn.get_figure(root=True)
    assert figure is not None
    if path is not None:
        figure.savefig(path)
    return figure


def check_figure(path: Path) -> None:
    """Raise ValueError for a suffix that names no format, OSError unless the folder exists; ImportError as above."""
    formats = sorted(new_figure(1, 1).canvas.get_supported_filetypes())
    if path.suffix.lower()[1:] not in formats:
        raise ValueError(f"{path} has the suffix {path.suffix!r}, expected that of a picture, such as .png: change it")
    if not path.parent.is_dir():
        raise OSError(f"{path.parent} is no folder, expected one for {path.name}: make it")


Picture = npt.NDArray[np.uint8]

_SUFFIXES = (".gif", ".mp4")
_NO_FORK = "IMAGEIO_FFMPEG_NO_PREVENT_SIGINT"


@contextmanager
def film(path: str | PathLike[str], fps: float) -> Iterator[Callable[[Picture], None]]:
    """Open a film, and yield the function that adds a picture, [H, W, 3] uint8. An error in the block leaves no file.

    A GIF's frames last a multiple of 10 ms. An MP4 of an odd height or width gets one more row or column.
    """
    target = check_film(path, fps)
    import imageio.v2
    import imageio.v3

    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
    writer = _gif if target.suffix.lower() == ".gif" else _mp4
    try:
        with writer(imageio, partial, fps) as add:
            yield add
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def check_film(path: str | PathLike[str], fps: float | None) -> Path:
    """Return the path of a film.

    Raises:
        ImportError: if imageio is not installed.
        ValueError: for an unknown suffix, or frames per second that are not positive.
    """
    check_kind("path", path, (str, PathLike), "pass for example 'episode.gif'")
    target = Path(path)
    if target.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"path is {str(target)!r}, expected a name that ends in {' or '.join(_SUFFIXES)}: change it")
    if fps is not None:
        check_number("fps", fps, positive=True, example=30)
    if find_spec("imageio") is None:
        raise ImportError("films need imageio, which is not installed: pip install 'funcollect[viz]'")
    return target


@contextmanager
def _gif(imageio: Any, path: Path, fps: float) -> Iterator[Callable[[Picture], None]]:
    """Open a GIF, and yield the function that adds a picture."""
    duration = max(2, round(100 / fps)) * 10  # in milliseconds; viewers show shorter frames more slowly
    with imageio.v3.imopen(path, "w", plugin="pillow") as file:
        yield lambda picture: file.write(picture, duration=duration, loop=0)


@contextmanager
def _mp4(imageio: Any, path: Path, fps: float) -> Iterator[Callable[[Picture], None]]:
    """Open an MP4, and yield the function that adds a picture."""

    def add(picture: Picture) -> None:
        height, width = picture.shape[:2]
        even = np.pad(picture, [(0, height % 2), (0, width % 2), (0, 0)], mode="edge")  # as the pixel format requires
        with _without_fork():  # ffmpeg starts with the first picture
            file.append_data(even)

    file = imageio.v2.get_writer(path, format="FFMPEG", mode="I", fps=fps, macro_block_size=1)
    try:
        yield add
    except BaseException:
        with suppress(Exception):  # Ctrl-C ends ffmpeg too, and its error would hide the interrupt
            file.close()
        raise
    file.close()


@contextmanager
def _without_fork() -> Iterator[None]:
    """Let imageio-ffmpeg start its process without `fork`, which may hang, and warns, if JAX has threads."""
    before = os.environ.get(_NO_FORK)
    os.environ[_NO_FORK] = "1"
    try:
        yield
    finally:
        os.environ.pop(_NO_FORK) if before is None else os.environ.update({_NO_FORK: before})
