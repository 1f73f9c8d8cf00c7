"""The one module that imports imageio: films written picture by picture."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from funcollect.arguments import check_kind, check_number

Picture = npt.NDArray[np.uint8]

_SUFFIXES = (".gif", ".mp4")


@contextmanager
def film(path: str | PathLike[str], fps: float) -> Iterator[Callable[[Picture], None]]:
    """A function that adds a picture, [H, W, 3] uint8, to a film; the file is there whole in the end, or not at all.

    Args:
        path: a GIF or MP4, as its suffix says. An MP4 of an odd height or width gets one more row or column.
        fps: frames per second. A GIF counts in hundredths of a second.

    Raises:
        ImportError: without imageio.
        ValueError: for another suffix, and an `fps` that is not positive.
    """
    target = check_film(path, fps)
    imageio = _imageio()
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
    """The path of a film.

    Raises:
        ValueError: for a suffix that is not known, and an `fps` that is not positive.
    """
    check_kind("path", path, (str, PathLike), "pass for example 'episode.gif'")
    target = Path(path)
    if target.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"path is {str(target)!r}, expected a name that ends in {' or '.join(_SUFFIXES)}: change it")
    if fps is not None:
        check_number("fps", fps, positive=True, example=30)
    return target


def _imageio() -> Any:
    try:
        import imageio.v2
        import imageio.v3
    except ImportError as error:
        raise ImportError("films need imageio, which is not installed: pip install funcollect[viz]") from error
    return imageio


@contextmanager
def _gif(imageio: Any, path: Path, fps: float) -> Iterator[Callable[[Picture], None]]:
    duration = max(2, round(100 / fps)) * 10  # milliseconds; viewers slow down what is shorter
    with imageio.v3.imopen(path, "w", plugin="pillow") as file:
        yield lambda picture: file.write(picture, duration=duration, loop=0)


@contextmanager
def _mp4(imageio: Any, path: Path, fps: float) -> Iterator[Callable[[Picture], None]]:
    def even(picture: Picture) -> Picture:  # which the usual pixel format wants
        height, width = picture.shape[:2]
        return np.pad(picture, [(0, height % 2), (0, width % 2), (0, 0)], mode="edge")

    def add(picture: Picture) -> None:
        with _spawned():  # ffmpeg starts with the first picture
            file.append_data(even(picture))

    file = imageio.v2.get_writer(path, format="FFMPEG", mode="I", fps=fps, macro_block_size=1)
    try:
        yield add
    except BaseException:
        with suppress(Exception):  # Ctrl-C ends ffmpeg as well, which is not the news
            file.close()
        raise
    file.close()


@contextmanager
def _spawned() -> Iterator[None]:
    """Have imageio-ffmpeg start its process without `fork`, which may hang once JAX has threads (it warns of that)."""
    name = "IMAGEIO_FFMPEG_NO_PREVENT_SIGINT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
