"""Films of a policy in an environment that renders."""

import imageio_ffmpeg
import jax  # noqa: F401  (which warns of every fork)
import numpy as np
import pytest
import torch
from PIL import Image

import funcollect as fc
from tests.support.envs.counting import Counting, always


class Screen(Counting):
    """Shows its count and its episode as the picture's colour."""

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
    """The colour of each frame of a GIF."""
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


@pytest.mark.parametrize(
    ("fps", "given", "duration"), [(10, None, 100), (10, 25, 40), (None, None, 30), (60, None, 20)]
)
def test_frames_per_second(fps, given, duration, tmp_path):
    fc.record(fc.make_env(Screen, fps=fps), always(0), tmp_path / "film.gif", fps=given)
    with Image.open(tmp_path / "film.gif") as film:
        assert film.info["duration"] == duration


def test_a_film_ends_with_max_frames(tmp_path):
    stats = fc.record(fc.make_env(Screen), always(0), tmp_path / "film.gif", episodes=9, max_frames=4)
    assert len(colours(tmp_path / "film.gif")) == 4 + 2
    assert stats.lengths.tolist() == [3]


@pytest.mark.parametrize("seed", [0, 5])
def test_the_episodes_are_those_of_an_evaluation(seed, tmp_path):
    env = fc.make_env("CartPole-v1", render_mode="rgb_array")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = fc.torch_policy(torch.nn.Linear(4, 2), head=fc.heads.categorical)
    stats = fc.record(env, policy, tmp_path / "film.mp4", episodes=2, seed=seed)
    expected = fc.evaluate(env, policy, episodes=2, seed=seed)
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
    if error is fc.EnvError:
        assert "no display" in str(caught.value)
        assert "MUJOCO_GL" in str(caught.value)


BAD = [
    ({"env": fc.make_env(Screen, mode=None)}, ValueError, "has the render mode None, expected 'rgb_array': make it"),
    ({"env": fc.make_env("torch/CartPole-v1")}, TypeError, "cannot be filmed, expected a Gymnasium environment"),
    ({"env": fc.make_env("CartPole-v1", parallel=True)}, ValueError, "has the render mode None"),
    ({"env": fc.make_env(Screen, shape=(6, 4))}, fc.EnvError, r"uint8 \[6, 4\], expected uint8 \[H, W, 3\]"),
    ({"fps": -1}, ValueError, "fps is -1, expected a positive"),
    ({"episodes": 0}, ValueError, "episodes"),
    ({"max_frames": 0}, ValueError, "max_frames"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD)
def test_bad_arguments(arguments, error, message, tmp_path):
    given = {"env": fc.make_env(Screen), "policy": always(0), "path": tmp_path / "film.gif"} | arguments
    with pytest.raises(error, match=message):
        fc.record(**given)
    assert not list(tmp_path.iterdir())
