"""Films of JAX environments: by a renderer of one's own, and by those that the suites ship."""

import contextlib
import dataclasses
import os
import subprocess
import sys
from ctypes.util import find_library

import jax
import jax.numpy as jnp
import matplotlib
import mujoco
import navix
import numpy as np
import pytest
from gymnax.visualize import Visualizer
from jumanji.environments.routing.snake.viewer import SnakeViewer
from matplotlib import pyplot

import funcollect as fc
from funcollect.envs.jax_envs.instances import mujoco_renderer
from funcollect.envs.jax_envs.suites import pixels_of
from tests.support.envs.jax_counting import counting
from tests.support.running import ROOT, in_soak

RANDOM = fc.ExplorationType.RANDOM


@pytest.fixture
def film(monkeypatch):
    """A function that records a film of random actions, and returns its pictures as they were drawn."""

    def record(env, path, **options):
        pictures = []

        @contextlib.contextmanager
        def collected(path, fps):
            yield lambda picture: pictures.append(picture.copy())

        monkeypatch.setattr("funcollect.plots.recording.film", collected)
        fc.record(env, fc.random_policy(env), path, exploration_type=RANDOM, **options)
        return pictures

    return record


def states(env, count):
    """The environment's own states in the run that a film with seed 0 shows, one lane each, and the batch."""
    policy = fc.random_policy(env)
    state, found, batches = fc.init(env, policy, seed=0), [], []
    for _ in range(count):
        found.append(jax.tree.map(lambda leaf: leaf[0], state.env_state.current))
        state, batch = fc.step(env, policy, state)
        batches.append(batch)
    return found, batches


def drawn(opened):
    """A renderer of the counting environment: the low byte of the episode's key, and the count."""

    @contextlib.contextmanager
    def renderer():
        opened.append("open")

        def draw(env_state, params):
            picture = np.zeros((4, 6, 3), np.uint8)
            picture[..., :2] = [int(env_state[0][1]) % 256, 40 * int(env_state[1])]
            return picture

        yield fc.envs.Renderer(10, draw)
        opened.append("closed")

    return renderer


@pytest.mark.parametrize("num_envs", [None, 1])
def test_each_picture_is_of_its_state_the_terminal_ones_too(num_envs, film, tmp_path):
    opened = []
    env = dataclasses.replace(counting(num_envs), renderer=drawn(opened))
    pictures = film(env, tmp_path / "film.gif", episodes=3)
    assert opened == ["open", "closed"]
    state = fc.init(env, fc.random_policy(env), seed=0)
    _, batch = fc.rollout(env, fc.random_policy(env), state, 16)
    roots = batch if num_envs is None else batch[0]
    rows = zip(roots["start"][:, 1].tolist(), roots["next", "count"].tolist(), roots["next", "done"], strict=True)
    wanted, ends = [(int(roots["start"][0, 1]) % 256, 0)], 0
    for (start, count, done), after in zip(rows, [*roots["start"][1:, 1].tolist(), 0], strict=False):
        wanted.append((start % 256, 40 * count))
        ends += bool(done)
        if ends == 3:
            break
        wanted += [(after % 256, 0)] if done else []
    assert [tuple(picture[0, 0, :2].tolist()) for picture in pictures] == wanted


@pytest.mark.needs("gymnax>=1")
def test_gymnax(film, tmp_path):
    env = fc.make_env("gymnax/CartPole-v1")
    pictures = film(env, tmp_path / "film.gif", max_frames=2)
    own, _ = states(env, 3)
    raw, params = env.renderer.args
    by_hand = Visualizer(raw, params, own)
    by_hand.init()
    for step, picture in enumerate(pictures):
        by_hand.update(step)
        assert picture.shape == (500, 600, 3)
        assert np.array_equal(picture, pixels_of(by_hand.fig, 100))
    pyplot.close(by_hand.fig)
    assert (pictures[0] != pictures[2]).any()
    assert not pyplot.get_fignums()


@pytest.mark.needs("gymnax>=1")
def test_gymnax_draws_goals_of_later_episodes(film, tmp_path):
    """The Visualizer draws a maze's goal once; MetaMaze has another one in each episode."""
    env = fc.make_env("gymnax/MetaMaze-misc")
    state, _ = states(env, 1)
    with env.renderer() as renderer:
        moved = state[0].replace(goal=jnp.array([1, 1]))
        one, other, again = (renderer.draw(each, None) for each in (state[0], moved, state[0]))
    assert (one != other).any()
    assert np.array_equal(one, again)


def test_jumanji(film, tmp_path):
    env = fc.make_env("jumanji/Snake-v1")
    pictures = film(env, tmp_path / "film.gif", max_frames=2)
    own, _ = states(env, 3)
    for state, picture in zip(own, pictures, strict=True):
        with matplotlib.rc_context({"figure.dpi": 60}):
            by_hand = SnakeViewer("by hand", render_mode="rgb_array").render(state)
        assert np.array_equal(picture, by_hand[..., :3])
        pyplot.close("by hand")
    assert (pictures[0] != pictures[2]).any()
    assert not pyplot.get_fignums()


def test_jumanji_viewers_that_need_arrays_of_jax():
    env = fc.make_env("jumanji/Maze-v0")
    with env.renderer() as renderer:
        picture = renderer.draw(jax.jit(env.reset)(np.zeros(2, np.uint32), None)[0], None)
    red, green = (picture == [255, 0, 0]).all(-1), (picture == [0, 255, 0]).all(-1)
    assert red.sum() > 100  # the agent
    assert green.sum() > 100  # the target


def test_navix_shows_what_its_pixel_observations_hold(film, tmp_path):
    env = fc.make_env("navix/Navix-Empty-5x5-v0", observation_fn=navix.observations.rgb)
    pictures = film(env, tmp_path / "film.gif", max_frames=6)
    _, batches = states(env, 6)
    assert pictures[0].shape == (240, 240, 3)
    for picture, batch in zip(pictures, batches, strict=False):
        assert np.array_equal(picture[::6, ::6], batch["observation"].numpy())
    assert any((picture != pictures[0]).any() for picture in pictures)


@pytest.mark.evening
def test_physics():
    """In a process of its own, since MuJoCo reads once how to make contexts of OpenGL."""
    films = in_soak(["brax/ant", "playground/CartpoleBalance"])
    program = [sys.executable, "-m", "tests.support.programs.physics_films", *films]
    ended = subprocess.run(program, cwd=ROOT, env={**os.environ, "MUJOCO_GL": "egl"}, capture_output=True, text=True)
    if find_library("EGL") is None:  # MuJoCo itself says what it lacks
        assert "EGL" in ended.stderr
    else:
        assert ended.returncode == 0, ended.stderr


def without_opengl(*_, **__):
    raise mujoco.FatalError("an OpenGL platform library has not been loaded into this process")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("egl", r"an OpenGL platform .*set MUJOCO_GL=egl or osmesa before Python starts"),
        (None, "there is no display, expected OpenGL by EGL or OSMesa"),  # MuJoCo would end the process
    ],
)
def test_why_nothing_is_drawn(how, message, monkeypatch, tmp_path):
    for name in ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    if how:
        monkeypatch.setenv("MUJOCO_GL", how)
    monkeypatch.setattr(mujoco, "Renderer", without_opengl)
    model = mujoco.MjModel.from_xml_string("<mujoco/>")
    env = dataclasses.replace(counting(), renderer=lambda: mujoco_renderer(model, 0.1, "data", {}))
    with pytest.raises(fc.EnvError, match=message):
        fc.record(env, fc.random_policy(env), tmp_path / "film.gif")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("env", "error", "message"),
    [
        (lambda: fc.make_env("gymnax/DeepSea-bsuite"), fc.EnvError, "gymnax has no renderer for DeepSea-bsuite"),
        (
            counting,
            TypeError,
            r"cannot be filmed, expected one of gymnax, .* with a method renderer\(\): add the method",
        ),
        (lambda: fc.make_env("pgx/tic_tac_toe"), TypeError, "cannot be filmed"),
    ],
)
def test_environments_that_cannot_be_filmed(env, error, message, tmp_path):
    made = env()
    with pytest.raises(error, match=message):
        fc.record(made, fc.random_policy(made), tmp_path / "film.gif")
    assert not list(tmp_path.iterdir())
    assert not pyplot.get_fignums()


def test_a_viewer_without_pixels_is_refused():
    env = fc.make_env("jumanji/Snake-v1")
    env.renderer.args[0].unwrapped._viewer = object()
    with pytest.raises(fc.EnvError, match="jumanji has no renderer for Snake"), env.renderer():
        pass
