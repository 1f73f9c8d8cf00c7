"""`plots.returns`, `plots.lengths` and `plots.profile`."""

import sys

import pytest
import torch
from tensordict import TensorDict

from funcollect import plots
from funcollect.profiling import Limit, Profile, Timeline
from funcollect.trajectories.stats import EpisodeStats, OpenReturn


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
