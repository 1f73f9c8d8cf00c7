"""Figures of statistics, profiles and episodes, and pixel observations as strips and films."""

import sys

import imageio_ffmpeg
import numpy as np
import pytest
import torch
from PIL import Image
from tensordict import TensorDict

import funcollect as fc
from funcollect import plots
from funcollect.plots.figures import pick
from funcollect.profiling import Limit, Profile, Timeline
from funcollect.trajectories.stats import EpisodeStats, OpenReturn
from tests.support.envs.counting import always, make_counting


def make_stats(returns, lengths, lanes, open_lanes=()):
    count = len(lengths)
    return EpisodeStats(
        returns=torch.tensor(returns, dtype=torch.float64),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        traj_ids=torch.arange(count),
        lanes=torch.tensor(lanes, dtype=torch.int64),
        terminated=torch.ones(count, dtype=torch.bool),
        open_returns={1000 + lane: OpenReturn(lane, 1, torch.tensor(0.0)) for lane in open_lanes},
    )


ONE = make_stats([1.0], [4], [0])


def points_of(figure):
    return figure.axes[0].lines[0].get_xydata().tolist()


def test_an_episode_stands_where_it_ended():
    stats = make_stats([1.0, 2.0, 3.0, 4.0], [4, 5, 3, 4], [0, 1, 0, 1])
    assert points_of(plots.returns(stats)) == [[8, 1], [10, 2], [14, 3], [18, 4]]
    assert points_of(plots.returns([ONE, make_stats([2.0], [5], [0])])) == [[4, 1], [9, 2]]  # of two batches
    stats = make_stats([1.0, 2.0], [4, 5], [0, 0], open_lanes=(0, 1, 2))  # lanes without an episode count, too
    assert points_of(plots.returns(stats)) == [[12, 1], [27, 2]]


def test_lengths_are_drawn_like_returns(tmp_path):
    figure = plots.lengths(make_stats([1.0, 2.0], [4, 6], [0, 0]), window=2, path=tmp_path / "lengths.svg")
    assert points_of(figure) == [[4, 4], [10, 6]]
    assert figure.axes[0].lines[1].get_ydata().tolist() == [4, 5]
    assert figure.axes[0].get_ylabel() == "episode length in frames"
    assert "<svg" in (tmp_path / "lengths.svg").read_text()


def test_the_rolling_mean_covers_the_last_episodes():
    for returns, wanted in (([1, 3, 5, 9], [1, 2, 4, 7]), ([1, torch.inf, 5, 9], [1, torch.inf, torch.inf, 7])):
        _, mean = plots.returns(make_stats(returns, [1] * 4, [0] * 4), window=2).axes[0].lines
        assert mean.get_ydata().tolist() == wanted
    together = make_stats([1.0, 3.0, 8.0, 0.0], [5, 5, 6, 6], [0, 1, 0, 1])  # one point where episodes end together
    points, mean = plots.returns(together, window=2).axes[0].lines
    assert len(points.get_xdata()) == 4
    assert mean.get_xydata().tolist() == [[10, 2], [22, 4]]


def test_several_players_have_a_curve_each():
    axes = plots.returns(make_stats([[1.0, -1.0], [2.0, -2.0]], [4, 5], [0, 0])).axes[0]
    assert [line.get_ydata().tolist() for line in axes.lines] == [[1, 2], [1, 1.5], [-1, -2], [-1, -1.5]]
    assert len(axes.get_legend().get_texts()) == 2


def test_no_episode_is_no_error_and_pyplot_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    plots.returns(make_stats([], [], []), path=tmp_path / "returns.png")
    assert (tmp_path / "returns.png").read_bytes().startswith(b"\x89PNG")
    assert "matplotlib.pyplot" not in sys.modules
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'funcollect\[viz\]'"):
        plots.returns(ONE)


def test_several_runs_share_axes_and_titles_count_the_episodes_of_one():
    axes = plots.returns(make_stats([1.0, 2.0], [4, 5], [0, 0]), label="one").axes[0]
    figure = plots.returns(make_stats([3.0], [2_000], [0]), label="other", window=1_000, ax=axes)
    assert figure.axes == [axes]
    entries = [text.get_text() for text in axes.get_legend().get_texts()]
    assert entries == ["one, mean of the last 100", "other, mean of the last 1,000"]
    colors = [line.get_color() for line in axes.lines]
    assert colors[0] == colors[1] != colors[2] == colors[3]
    assert axes.get_title() == ""
    assert axes.xaxis.get_major_formatter()(2_000) == "2,000"
    assert axes.yaxis.get_major_formatter()(0.1 + 0.2) == "0.3"
    (axes,) = plots.lengths(make_stats([1.0] * 1_234, [4] * 1_234, [0] * 1_234), title="Pong").axes
    assert axes.get_title() == "Pong: 1,234 episodes"
    plots.lengths(ONE, title="Pong, two runs", ax=axes)
    assert axes.get_title() == "Pong, two runs"
    (axes,) = plots.returns(ONE, title="Pong", label="seed 0").axes
    plots.returns(ONE, label="seed 1", ax=axes)
    assert axes.get_title() == "Pong"
    assert plots.returns(ONE, title="CartPole-v1").axes[0].get_title() == "CartPole-v1: 1 episode"


BATCH = TensorDict({"observation": torch.zeros(3)}, [3])
NO_STATS = r"expected EpisodeStats .* pass fc.episode_stats\(batch\)"
BAD = [
    (plots.returns, ONE, {"window": 0}, ValueError, "window is 0, expected at least 1"),
    (plots.returns, [], {}, ValueError, "parts is empty"),
    (plots.returns, BATCH, {}, TypeError, f"a TensorDict, {NO_STATS}"),
    (plots.lengths, [BATCH], {}, TypeError, f"a TensorDict, {NO_STATS}"),
    (plots.returns, "returns", {}, TypeError, f"a str, {NO_STATS}"),
    (plots.profile, 3, {}, TypeError, "profile is 3"),
    *((plots.returns, ONE, {name: 3}, TypeError, f"{name} is 3, expected") for name in ("ax", "title", "label")),
]


@pytest.mark.parametrize(("draw", "given", "options", "error", "words"), BAD)
def test_bad_arguments(draw, given, options, error, words):
    with pytest.raises(error, match=words):
        draw(given, **options)


# --- profiles ---------------------------------------------------------------------------------------------------------

PROFILE = Profile(
    subject="a collector",
    loop="host",
    frames=1_000,
    seconds=0.01,
    first_seconds=1.0,
    timelines=(
        Timeline(where="in each of 2 workers", parts={"environment": 3.0, "policy": 5.0, "waiting": 2.0}),
        Timeline(where="in this process", parts={"reader": 8.0, "waiting": 2.0}),
    ),
)


def test_bars_are_the_parts_in_order(tmp_path):
    figure = plots.profile(PROFILE, title="a run", path=tmp_path / "profile.svg")
    (axes,) = figure.axes
    bars = [bar for container in axes.containers for bar in container]
    assert [(bar.get_x(), bar.get_width()) for bar in bars] == [(0, 3), (3, 5), (8, 2), (0, 8), (8, 2)]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["environment", "policy", "waiting", "reader"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["in each of 2 workers", "in this process"]
    assert axes.lines[0].get_xdata() == [8, 8]
    assert axes.get_title() == "a run: 100,000 frames/s"
    assert "<svg" in (tmp_path / "profile.svg").read_text()
    assert plots.profile(PROFILE, ax=axes) is figure


def test_the_table():
    text = str(PROFILE)
    assert text.startswith(
        "a collector, loop host\n"
        "1,000 frames in 0.01 s: 100,000 frames/s; the first batches, not counted, took 1 s\n"
        "\n"
        "in each of 2 workers  µs/frame  share\n"
        "environment               3.00    30%\n"
    )
    assert text.endswith(
        "a frame             10.00   100%\n"
        "\n"
        "limit                        reached  frames/s\n"
        "bare environment                 30%   333,333\n"
        "bare policy                      50%   200,000\n"
        "bare environment and policy      80%   125,000"
    )
    one_program = Timeline(where="here", parts={"environment and policy": 8.0, "delivery": 2.0})
    limits = Profile(**vars(PROFILE) | {"timelines": (one_program,)}).limits
    assert limits == (Limit("bare environment and policy", 125_000),)


# --- episodes ---------------------------------------------------------------------------------------------------------


def counted(length=9, lanes=({"lengths": (3, 2)}, {"lengths": (4,), "truncated": (0,)})):
    """Lane 0 has episodes of 3 and 2 steps; lane 1 of 4, the first truncated."""
    env = make_counting("torch", *lanes)
    policy = always(2)
    return fc.rollout(env, policy, fc.init(env, policy, seed=0), length)[1]


def lines(axes):
    return [line.get_ydata().tolist() for line in axes.lines]


def stairs(axes):
    return [patch.get_data().values.tolist() for patch in axes.patches]


def test_an_episode_with_its_terminal_observation():
    figure = plots.episode(counted(), 2)  # lane 0, episode 1
    observation, action, reward = figure.axes
    assert lines(observation) == [[0, 0, 0], [1, 1, 1], [0, 1, 2]]
    assert observation.lines[0].get_xdata().tolist() == [0, 1, 2]
    assert stairs(action) == [[2, 2]]
    assert stairs(reward) == [[10.5, 11.5]]
    assert reward.get_xlim() == (0, 2)
    assert observation.get_title() == "trajectory 2: 2 frames, return 22, terminated"
    with pytest.raises(ValueError, match=r"no trajectory 77, expected one of \[0, 1, 2, 3, 4, 5, 6\] \(7 in all\)"):
        plots.episode(counted(), 77)


def test_the_longest_whole_episode_unless_told_otherwise():
    batch = counted()
    assert pick(batch, None).traj_id == 1
    assert plots.episode(batch).axes[0].get_title() == "trajectory 1: 4 frames, return 8, truncated"
    tail = batch[:, 2:6]  # lane 0: one frame, the two of episode 1, one; lane 1: two of episode 0, two of 1
    assert pick(tail, None).traj_id == 2
    part = batch[1:, 1:3]  # no whole one
    figure = plots.episode(part, 1)
    assert pick(part, None).traj_id == 1
    assert figure.axes[0].get_title().endswith("2 frames, return 4, goes on")
    assert figure.axes[-1].get_xlim() == (1, 3)
    wide = batch.clone()
    wide["collector", "traj_ids"] += 1 << 40  # beyond 32 bits
    assert pick(wide, None).traj_id == (1 << 40) + 1
    assert np.isfinite(plots.episode(wide).axes[0].get_ylim()).all()


def test_split_batches_and_batches_in_rows_give_the_same_and_repeated_frames_are_left_out():
    batch = counted(12)
    split = fc.split_trajectories(batch)
    rows = torch.cat([batch[:, :6], batch[:, 6:]])  # trajectories go on in another row
    for traj_id in (0, 1, 2, 3, 5):
        expected = pick(batch, traj_id)
        for other in (split, rows):
            assert (pick(other, traj_id).frames.exclude(("collector", "mask")) == expected.frames).all()
    assert pick(split, None).traj_id == pick(batch, None).traj_id
    with fc.SyncDataCollector("CartPole-v1", frames_per_batch=100, reset_when_done=False, seed=0) as collector:
        batch = next(collector)  # whose lane is finished
    assert len(pick(batch, None).frames) == int((~batch["done"]).sum()) < 100


def test_each_kind_of_leaf(tmp_path):
    observation = {"joints": torch.randn(3, 2), "room": torch.tensor([4, 5, 6]), "screen": torch.zeros(3, 8, 8)}
    observation |= {"wide": torch.arange(36.0).reshape(3, 12), "nested": {"x": torch.ones(3, 1)}}
    batch = {"next": {"reward": torch.ones(3, 2), **observation}, "collector": {"traj_ids": torch.zeros(3)}}
    batch |= {"action": torch.randn(3, 2), "logits": torch.randn(3, 2)}  # a policy's output is no observation
    batch = TensorDict(batch | observation, [3])
    figure = plots.episode(batch, path=tmp_path / "episode.png")
    assert (tmp_path / "episode.png").read_bytes().startswith(b"\x89PNG")
    panels = {axes.get_ylabel(): axes for axes in figure.axes}
    assert list(panels) == ["joints", "room", "wide", "nested.x", "action", "reward", ""]
    assert len(lines(panels["joints"])) == len(stairs(panels["action"])) == len(stairs(panels["reward"])) == 2
    assert stairs(panels["room"]) == [[4, 5, 6, 6]]
    (mesh,) = panels["wide"].collections
    assert mesh.get_array().shape == (12, 4)
    assert panels["joints"].get_title() == "trajectory 0: 3 frames, return 3/3, goes on"


@pytest.mark.parametrize(("change", "error", "message"), [
    (lambda batch: batch.to_dict(), TypeError, "the batch is dict, expected a TensorDict"),
    (lambda batch: batch.exclude("collector"), ValueError, "no tensor collector.traj_ids"),
    (lambda batch: batch.exclude("action"), ValueError, "has no action, expected actions and rewards"),
    (lambda batch: batch.exclude(("next", "reward")), ValueError, "has no .*reward.*, expected actions and"),
    (lambda batch: batch[:, :0], ValueError, r"the batch \[2, 0\] has no frames"),
])  # fmt: skip
def test_batches_that_cannot_be_drawn(change, error, message):
    with pytest.raises(error, match=message):
        plots.episode(change(counted()))


# --- pictures ---------------------------------------------------------------------------------------------------------


def shown(figure):
    return [np.asarray(axes.images[0].get_array()) for axes in figure.axes]


def pictured(screen, **others):
    """One trajectory [T] of the pictures [T + 1, ...]: the last is the terminal one."""
    length = len(screen) - 1
    step = torch.arange(length)
    next_ = {"screen": screen[1:], "done": (step == length - 1)[:, None], **others}
    collector = {"traj_ids": torch.full((length,), 3), "step": step}
    return TensorDict({"screen": screen[:-1], "next": next_, "collector": collector, **others}, [length])


def rising(count, *shape):
    return (torch.arange(count, dtype=torch.uint8) * 10).reshape(-1, *[1] * len(shape)).repeat(1, *shape)


def test_a_strip_goes_from_the_first_observation_to_the_terminal_one(tmp_path):
    figure = plots.frames(pictured(rising(10, 6, 4, 3)), count=4, path=tmp_path / "strip.png")
    assert [picture[0, 0].tolist() for picture in shown(figure)] == [[value] * 3 for value in (0, 30, 60, 90)]
    assert [axes.get_title() for axes in figure.axes] == ["step 0", "3", "6", "9"]
    assert (tmp_path / "strip.png").read_bytes().startswith(b"\x89PNG")
    for count in (1, 3, 100):  # never more frames than there are
        assert len(shown(plots.frames(pictured(rising(3, 6, 6)), count=count))) == min(count, 3)
    with pytest.raises(ValueError, match="count is 0, expected at least 1"):
        plots.frames(pictured(rising(3, 6, 4)), count=0)


@pytest.mark.parametrize(
    "shape", [(6, 5), (6, 5, 1), (6, 5, 3), (6, 5, 4), (3, 6, 5), (4, 6, 5), (4, 6, 5, 3), (2, 6, 5, 1)]
)
def test_every_layout(shape):
    (picture,) = shown(plots.frames(pictured(rising(3, *shape)), count=1))
    assert picture.shape == (6, 5, 3)


def test_colours_and_stacks_are_told_apart_and_floats_are_scaled():
    colours = torch.zeros(2, 3, 6, 5, dtype=torch.uint8)
    colours[:, 2] = 255  # blue
    (picture,) = shown(plots.frames(pictured(colours), count=1))
    assert picture[0, 0].tolist() == [0, 0, 255]
    stack = torch.zeros(2, 4, 6, 5, dtype=torch.uint8)
    stack[:, 3] = 99  # the newest
    for screen, value in ((stack, 99), (torch.full((2, 6, 4), 0.5), 128)):
        (picture,) = shown(plots.frames(pictured(screen), count=1))
        assert (picture == value).all()


def test_the_observation_is_named_where_there_are_several():
    batch = pictured(rising(3, 6, 4), other=rising(2, 6, 4) + 7)
    with pytest.raises(ValueError, match=r"2 of the observations are pictures.*key=.*'screen': \[6, 4\]"):
        plots.frames(batch)
    assert (shown(plots.frames(batch, key="other", count=1))[0] == 7).all()
    with pytest.raises(ValueError, match="no observation elsewhere, expected one of"):
        plots.frames(batch, key="elsewhere")


@pytest.mark.parametrize(("screen", "error", "message"), [
    (torch.zeros(3, 6), ValueError, r"0 of the observations are pictures.*\[6\].*plots.episode"),
    (torch.zeros(3, 2, 2, 2, 2, 2), ValueError, r"a frame has shape \[2, 2, 2, 2, 2\], expected"),
    (torch.zeros(3, 6, 4).long(), TypeError, "torch.int64, expected uint8, or floats"),
    (torch.full((3, 6, 4), 200.0), ValueError, r"from 200 to 200, expected \[0, 1\]"),
    (torch.full((3, 6, 4), torch.nan), ValueError, r"from nan to nan, expected \[0, 1\]"),
])  # fmt: skip
def test_what_is_no_picture(screen, error, message, tmp_path):
    with pytest.raises(error, match=message):
        plots.frames(pictured(screen))
    with pytest.raises(error, match=message):
        plots.video(pictured(screen), tmp_path / "film.gif")
    assert not list(tmp_path.iterdir())


def test_a_gif_holds_every_frame(tmp_path):
    path = tmp_path / "new" / "film.gif"
    assert plots.video(pictured(rising(10, 6, 4, 3)), path, fps=20) == 10
    with Image.open(path) as film:
        assert (film.n_frames, film.size, film.info["duration"], film.info["loop"]) == (10, (4, 6), 50, 0)
        film.seek(9)
        assert film.convert("RGB").getpixel((0, 0)) == (90, 90, 90)
    assert plots.video(pictured(torch.zeros(10, 64, 48)), path, fps=20) == 10  # equal pictures take their time
    with Image.open(path) as film:
        assert film.info["duration"] * film.n_frames == 500


@pytest.mark.parametrize("screen", [rising(10, 64, 48, 3), rising(10, 63, 47, 3), torch.zeros(10, 64, 48)])
def test_an_mp4_holds_every_frame(screen, tmp_path):
    path = tmp_path / "film.mp4"
    assert plots.video(pictured(screen), path, fps=20) == 10
    assert imageio_ffmpeg.count_frames_and_secs(str(path)) == (10, 0.5)


def test_a_film_needs_a_known_suffix_and_imageio(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match=r"'film.avi', expected a name that ends in .gif or .mp4"):
        plots.video(pictured(rising(3, 6, 4)), "film.avi")
    monkeypatch.setitem(sys.modules, "imageio", None)
    with pytest.raises(ImportError, match=r"pip install 'funcollect\[viz\]'"):
        plots.video(pictured(rising(3, 6, 4)), tmp_path / "film.gif")
