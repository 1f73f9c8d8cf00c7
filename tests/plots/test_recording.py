"""Films of a policy in an environment that renders, by a renderer of one's own, or by that of a JAX suite."""

import contextlib
import dataclasses
import os
import subprocess
import sys
from ctypes.util import find_library

import imageio_ffmpeg
import jax
import jax.numpy as jnp
import matplotlib
import mujoco
import navix
import numpy as np
import pytest
import torch
import xminigrid
from gymnax.visualize import Visualizer
from jumanji.environments.routing.snake.viewer import SnakeViewer
from matplotlib import pyplot
from PIL import Image

import funcollect as fc
from funcollect.envs.jax_envs.instances import mujoco_renderer
from funcollect.envs.jax_envs.suites import pixels_of
from tests.support.envs.counting import Counting, always
from tests.support.envs.jax_counting import counting
from tests.support.running import ROOT, in_soak


class Screen(Counting):
    def __init__(self, lengths=(3, 2), mode="rgb_array", fps=None, fails_at=None, shape=(6, 4, 3)):
        super().__init__(0, lengths)
        self.render_mode = mode
        self.metadata = {"render_modes": [mode]} | ({} if fps is None else {"render_fps": fps})
        self.fails_at = fails_at
        self.shape = shape
        self.closed = False

    def render(self):
        if (self.episode, self.count) == self.fails_at:
            raise KeyboardInterrupt if self.episode else RuntimeError("no display")
        picture = np.zeros(self.shape, np.uint8)
        picture[..., :2] = [self.episode * 50, self.count * 50 % 256]
        return picture

    def close(self):
        self.closed = True


def colours(path):
    with Image.open(path) as film:
        found = []
        for index in range(film.n_frames):
            film.seek(index)
            found.append(film.convert("RGB").getpixel((0, 0))[:2])
        return found


@pytest.mark.parametrize("num_envs", [None, 1, 3])
def test_every_observation_is_seen_the_terminal_ones_too(num_envs, tmp_path):
    env = fc.make_env(Screen, num_envs=num_envs)
    stats = fc.record(env, always(2), tmp_path / "film.gif", episodes=3)
    assert colours(tmp_path / "film.gif") == [
        *[(0, 0), (0, 50), (0, 100), (0, 150)],
        *[(50, 0), (50, 50), (50, 100)],
        *[(100, 0), (100, 50), (100, 100), (100, 150)],
    ]
    assert stats.lengths.tolist() == [3, 2, 3]
    assert stats.returns.tolist() == [3 + 1.5, 21 + 1.0, 63 + 1.5]
    stats = fc.record(env, always(0), tmp_path / "film.gif", episodes=9, max_frames=4)
    assert len(colours(tmp_path / "film.gif")) == 4 + 2
    assert stats.lengths.tolist() == [3]


@pytest.mark.parametrize(("fps", "given", "lasts"), [(10, None, 100), (10, 25, 40), (None, None, 30), (60, None, 20)])
def test_frames_per_second(fps, given, lasts, tmp_path):
    fc.record(fc.make_env(Screen, fps=fps), always(0), tmp_path / "film.gif", fps=given)
    with Image.open(tmp_path / "film.gif") as film:
        assert film.info["duration"] == lasts  # milliseconds


def test_the_episodes_are_those_of_an_evaluation(tmp_path):
    env = fc.make_env("CartPole-v1", render_mode="rgb_array")
    policy = fc.torch_policy(torch.nn.Linear(4, 2), head=fc.heads.categorical)
    stats = fc.record(env, policy, tmp_path / "film.mp4", episodes=2, seed=5)
    expected = fc.evaluate(env, policy, episodes=2, seed=5)
    assert stats.returns.tolist() == expected.returns.tolist()
    frames, seconds = imageio_ffmpeg.count_frames_and_secs(str(tmp_path / "film.mp4"))
    assert frames == int(stats.lengths.sum()) + 2
    assert seconds == pytest.approx(frames / 50, abs=0.01)


def test_exploration_and_params_reach_the_policy(tmp_path):
    policy = fc.torch_policy(torch.nn.Linear(3, 3), head=fc.heads.categorical)
    params = {"weight": torch.zeros(3, 3), "bias": torch.tensor([0.0, 0.0, 9.0])}
    env = fc.make_env(Screen, lengths=(60,))
    drawn = fc.ExplorationType.RANDOM
    best = fc.record(env, policy, tmp_path / "film.gif", params=params).returns
    assert best.tolist() == [60 * 59 / 2 + 60 * 2 / 4]
    params["bias"] = torch.zeros(3)
    assert fc.record(env, policy, tmp_path / "film.gif", params=params, exploration_type=drawn).returns < best


@pytest.mark.parametrize("suffix", ["gif", "mp4"])
@pytest.mark.parametrize(("fails_at", "error"), [((0, 2), fc.EnvError), ((1, 1), KeyboardInterrupt)])
def test_nothing_is_left_of_a_film_broken_off(suffix, fails_at, error, tmp_path):
    screen, path = Screen(fails_at=fails_at, shape=(64, 48, 3)), tmp_path / f"film.{suffix}"
    path.write_text("what was there before")
    with pytest.raises(error) as caught:
        fc.record(fc.make_env(screen), always(0), path, episodes=2)
    assert [each.read_text() for each in tmp_path.iterdir()] == ["what was there before"]
    assert screen.closed
    assert error is KeyboardInterrupt or all(word in str(caught.value) for word in ("no display", "MUJOCO_GL"))


BAD = [
    ({"env": fc.make_env(Screen, mode=None)}, ValueError, "has the render mode None, expected 'rgb_array': make it"),
    ({"env": fc.make_env("torch/CartPole-v1")}, TypeError, "cannot be filmed, expected a Gymnasium environment"),
    ({"env": fc.make_env(Screen, shape=(6, 4))}, fc.EnvError, r"uint8 \[6, 4\], expected uint8 \[H, W, 3\]"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD)
def test_bad_arguments(arguments, error, message, tmp_path):
    given = {"env": fc.make_env(Screen), "policy": always(0), "path": tmp_path / "film.gif"} | arguments
    with pytest.raises(error, match=message):
        fc.record(**given)
    assert not list(tmp_path.iterdir())


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


@pytest.mark.parametrize("num_envs", [None, *in_soak([1])])
def test_each_picture_is_of_its_state_the_terminal_ones_too(num_envs, monkeypatch, tmp_path):
    opened, pictures = [], []
    env = dataclasses.replace(counting(num_envs), renderer=drawn(opened))
    policy = fc.random_policy(env)

    @contextlib.contextmanager
    def collected(path, fps):
        yield lambda picture: pictures.append(picture.copy())

    monkeypatch.setattr("funcollect.plots.recording.film", collected)
    fc.record(env, policy, tmp_path / "film.gif", episodes=3, exploration_type=fc.ExplorationType.RANDOM)
    assert opened == ["open", "closed"]
    _, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 16)
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


def start_of(env):
    return jax.jit(env.reset)(np.zeros(2, np.uint32), None)[0]


def by_gymnax(env, states):
    by_hand = Visualizer(*env.renderer.args, states)
    by_hand.init()
    for step in range(len(states)):
        by_hand.update(step)
        yield pixels_of(by_hand.fig, 100)
    pyplot.close(by_hand.fig)


def by_jumanji(env, states):
    for state in states:
        with matplotlib.rc_context({"figure.dpi": 60}):
            yield SnakeViewer("by hand", render_mode="rgb_array").render(state)[..., :3]
        pyplot.close("by hand")


def by_navix(env, states):
    return [np.asarray(timestep.observation).repeat(6, 0).repeat(6, 1) for timestep in states]


def by_xland(env, states):
    raw, params = xminigrid.make("MiniGrid-DoorKey-5x5")
    return [raw.render(params, timestep) for timestep in states]


def by_craftax(env, states):
    from craftax.craftax_classic.renderer import make_craftax_pixel_renderer

    return [np.asarray(make_craftax_pixel_renderer(16)(state)).astype(np.uint8) for state in states]


@pytest.mark.parametrize(("name", "options", "by_hand", "shape"), [
    pytest.param("gymnax/CartPole-v1", {}, by_gymnax, (500, 600, 3), marks=pytest.mark.needs("gymnax>=1")),
    pytest.param("jumanji/Snake-v1", {}, by_jumanji, None, marks=pytest.mark.evening),  # Maze is drawn below
    ("navix/Navix-Empty-5x5-v0", {"observation_fn": navix.observations.rgb}, by_navix, (240, 240, 3)),
    pytest.param("xminigrid/MiniGrid-DoorKey-5x5", {}, by_xland, None, marks=pytest.mark.evening),
    pytest.param("craftax/Craftax-Classic-Symbolic-v1", {}, by_craftax, (144, 144, 3),
                 marks=(pytest.mark.evening, pytest.mark.needs("craftax"))),
])  # fmt: skip
def test_states_are_drawn_as_their_suite_draws_them(name, options, by_hand, shape):
    env = fc.make_env(name, **options)
    first = start_of(env)
    states = [first, jax.jit(env.step)(np.ones(2, np.uint32), first, jnp.int32(1), None)[0]]
    with env.renderer() as renderer:
        pictures = [renderer.draw(state, None) for state in states]
    for picture, wanted in zip(pictures, by_hand(env, states), strict=True):
        assert picture.shape == shape or shape is None
        assert np.array_equal(picture, wanted)
    assert (pictures[0] != pictures[1]).any()
    assert not pyplot.get_fignums()


@pytest.mark.needs("gymnax>=1")
def test_gymnax_draws_goals_of_later_episodes():
    """The Visualizer draws a maze's goal once; MetaMaze has another one in each episode."""
    env = fc.make_env("gymnax/MetaMaze-misc")
    state = start_of(env)
    moved = state.replace(goal=jnp.array([1, 1]))
    with env.renderer() as renderer:
        one, other, again = (renderer.draw(each, None) for each in (state, moved, state))
    assert (one != other).any()
    assert np.array_equal(one, again)


def test_jumanji_viewers_that_need_arrays_of_jax():
    env = fc.make_env("jumanji/Maze-v0")
    with env.renderer() as renderer:
        picture = renderer.draw(start_of(env), None)
    red, green = (picture == [255, 0, 0]).all(-1), (picture == [0, 255, 0]).all(-1)
    assert red.sum() > 100  # the agent
    assert green.sum() > 100  # the target


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


@pytest.mark.parametrize(("how", "message"), [
    ("egl", r"an OpenGL platform .*set MUJOCO_GL=egl or osmesa before Python starts"),
    (None, "there is no display, expected OpenGL by EGL or OSMesa"),  # MuJoCo would end the process
])  # fmt: skip
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


def without_a_viewer():
    env = fc.make_env("jumanji/Snake-v1")
    env.renderer.args[0].unwrapped._viewer = object()
    return env


METHOD = r"cannot be filmed, expected one of a suite .* with a method renderer\(\): add the method"


@pytest.mark.parametrize(("env", "error", "message"), [
    (lambda: fc.make_env("gymnax/DeepSea-bsuite"), fc.EnvError, "gymnax has no renderer for DeepSea-bsuite"),
    (without_a_viewer, fc.EnvError, "jumanji has no renderer for Snake"),
    (counting, TypeError, METHOD),
])  # fmt: skip
def test_environments_that_cannot_be_filmed(env, error, message, tmp_path):
    made = env()
    with pytest.raises(error, match=message):
        fc.record(made, fc.random_policy(made), tmp_path / "film.gif")
    assert not list(tmp_path.iterdir())
    assert not pyplot.get_fignums()
