"""Pixel observations as strips and films, from a batch."""

import sys

import imageio_ffmpeg
import numpy as np
import pytest
import torch
from PIL import Image
from tensordict import TensorDict

from funcollect import plots


def shown(figure):
    return [np.asarray(axes.images[0].get_array()) for axes in figure.axes]


def made(screen, **others):
    """One trajectory [T] of the pictures [T + 1, ...]: the last is the terminal one."""
    length = len(screen) - 1
    step = torch.arange(length)
    next_ = {"screen": screen[1:], "done": (step == length - 1)[:, None], **others}
    collector = {"traj_ids": torch.full((length,), 3), "step": step}
    return TensorDict({"screen": screen[:-1], "next": next_, "collector": collector, **others}, [length])


def rising(count, *shape):
    """The picture at step t is filled with 10 t."""
    return (torch.arange(count, dtype=torch.uint8) * 10).reshape(-1, *[1] * len(shape)).repeat(1, *shape)


def test_a_strip_goes_from_the_first_observation_to_the_terminal_one(tmp_path):
    figure = plots.frames(made(rising(10, 6, 4, 3)), count=4, path=tmp_path / "strip.png")
    assert [picture[0, 0].tolist() for picture in shown(figure)] == [[value] * 3 for value in (0, 30, 60, 90)]
    assert [axes.get_title() for axes in figure.axes] == ["step 0", "3", "6", "9"]
    assert (tmp_path / "strip.png").read_bytes().startswith(b"\x89PNG")
    for count in (1, 3, 100):  # never more frames than there are
        assert len(shown(plots.frames(made(rising(3, 6, 6)), count=count))) == min(count, 3)
    with pytest.raises(ValueError, match="count is 0, expected at least 1"):
        plots.frames(made(rising(3, 6, 4)), count=0)


@pytest.mark.parametrize(
    "shape", [(6, 5), (6, 5, 1), (6, 5, 3), (6, 5, 4), (3, 6, 5), (4, 6, 5), (4, 6, 5, 3), (2, 6, 5, 1)]
)
def test_every_layout(shape):
    (picture,) = shown(plots.frames(made(rising(3, *shape)), count=1))
    assert picture.shape == (6, 5, 3)


def test_colours_and_stacks_are_told_apart_and_floats_are_scaled():
    colours = torch.zeros(2, 3, 6, 5, dtype=torch.uint8)
    colours[:, 2] = 255  # blue
    (picture,) = shown(plots.frames(made(colours), count=1))
    assert picture[0, 0].tolist() == [0, 0, 255]
    stack = torch.zeros(2, 4, 6, 5, dtype=torch.uint8)
    stack[:, 3] = 99  # the newest
    for screen, value in ((stack, 99), (torch.full((2, 6, 4), 0.5), 128)):
        (picture,) = shown(plots.frames(made(screen), count=1))
        assert (picture == value).all()


def test_the_observation_is_named_where_there_are_several():
    batch = made(rising(3, 6, 4), other=rising(2, 6, 4) + 7)
    with pytest.raises(ValueError, match=r"2 of the observations are pictures.*key=.*'screen': \[6, 4\]"):
        plots.frames(batch)
    assert (shown(plots.frames(batch, key="other", count=1))[0] == 7).all()
    with pytest.raises(ValueError, match="no observation elsewhere, expected one of"):
        plots.frames(batch, key="elsewhere")


@pytest.mark.parametrize(
    ("screen", "error", "message"),
    [
        (torch.zeros(3, 6), ValueError, r"0 of the observations are pictures.*\[6\].*plots.episode"),
        (torch.zeros(3, 2, 2, 2, 2, 2), ValueError, r"a frame has shape \[2, 2, 2, 2, 2\], expected"),
        (torch.zeros(3, 6, 4).long(), TypeError, "torch.int64, expected uint8, or floats"),
        (torch.full((3, 6, 4), 200.0), ValueError, r"from 200 to 200, expected \[0, 1\]"),
        (torch.full((3, 6, 4), torch.nan), ValueError, r"from nan to nan, expected \[0, 1\]"),
    ],
)
def test_what_is_no_picture(screen, error, message, tmp_path):
    with pytest.raises(error, match=message):
        plots.frames(made(screen))
    with pytest.raises(error, match=message):
        plots.video(made(screen), tmp_path / "film.gif")
    assert not list(tmp_path.iterdir())


def test_a_gif_holds_every_frame(tmp_path):
    path = tmp_path / "new" / "film.gif"
    assert plots.video(made(rising(10, 6, 4, 3)), path, fps=20) == 10
    with Image.open(path) as film:
        assert (film.n_frames, film.size, film.info["duration"], film.info["loop"]) == (10, (4, 6), 50, 0)
        film.seek(9)
        assert film.convert("RGB").getpixel((0, 0)) == (90, 90, 90)


@pytest.mark.parametrize("screen", [rising(10, 64, 48, 3), rising(10, 63, 47, 3), torch.zeros(10, 64, 48)])
def test_an_mp4_holds_every_frame(screen, tmp_path):
    path = tmp_path / "film.mp4"
    assert plots.video(made(screen), path, fps=20) == 10
    assert imageio_ffmpeg.count_frames_and_secs(str(path)) == (10, 0.5)


def test_equal_pictures_of_a_gif_take_their_time(tmp_path):
    assert plots.video(made(torch.zeros(10, 64, 48)), tmp_path / "film.gif", fps=20) == 10
    with Image.open(tmp_path / "film.gif") as film:  # which keeps them as one
        assert film.info["duration"] * film.n_frames == 500


def test_bad_names_and_rates(tmp_path):
    batch = made(rising(3, 6, 4))
    with pytest.raises(ValueError, match=r"'film.avi', expected a name that ends in .gif or .mp4"):
        plots.video(batch, "film.avi")
    with pytest.raises(ValueError, match="fps is 0, expected a positive"):
        plots.video(batch, tmp_path / "film.gif", fps=0)


@pytest.mark.parametrize("suffix", ["gif", "mp4"])
def test_nothing_is_left_of_a_film_broken_off(suffix, tmp_path):
    screen = torch.rand(10, 64, 48)
    screen[7] = 2.0
    (tmp_path / f"film.{suffix}").write_text("what was there before")
    with pytest.raises(ValueError, match="from 2 to 2"):
        plots.video(made(screen), tmp_path / f"film.{suffix}")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["what was there before"]


def test_without_imageio(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "imageio", None)
    with pytest.raises(ImportError, match=r"pip install 'funcollect\[viz\]'"):
        plots.video(made(rising(3, 6, 4)), tmp_path / "film.gif")
