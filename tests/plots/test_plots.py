from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from funcollect import plots
from funcollect.trajectories.stats import EpisodeStats, OpenReturn


def make_stats(
    returns: list[float], lengths: list[int], lanes: list[int], open_lanes: tuple[int, ...] = ()
) -> EpisodeStats:
    count = len(returns)
    return EpisodeStats(
        returns=torch.tensor(returns, dtype=torch.float64),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        traj_ids=torch.arange(count),
        lanes=torch.tensor(lanes, dtype=torch.int64),
        terminated=torch.ones(count, dtype=torch.bool),
        open_returns={1000 + lane: OpenReturn(lane, 1, torch.tensor(0.0)) for lane in open_lanes},
    )


def test_an_episode_stands_where_it_ended() -> None:
    stats = make_stats([1.0, 2.0, 3.0, 4.0], [4, 5, 3, 4], [0, 1, 0, 1])
    points, _ = plots.returns(stats).axes[0].lines
    assert points.get_xydata().tolist() == [[8, 1], [10, 2], [14, 3], [18, 4]]


def test_lengths_are_drawn_like_returns(tmp_path: Path) -> None:
    figure = plots.lengths(make_stats([1.0, 2.0], [4, 6], [0, 0]), window=2, path=tmp_path / "lengths.svg")
    points, mean = figure.axes[0].lines
    assert points.get_xydata().tolist() == [[4, 4], [10, 6]]
    assert mean.get_ydata().tolist() == [4, 5]
    assert figure.axes[0].get_ylabel() == "episode length in frames"
    assert "<svg" in (tmp_path / "lengths.svg").read_text()


def test_a_lane_without_an_episode_counts_too() -> None:
    stats = make_stats([1.0, 2.0], [4, 5], [0, 0], open_lanes=(0, 1, 2))
    points, _ = plots.returns(stats).axes[0].lines
    assert points.get_xdata().tolist() == [12, 27]


def test_the_rolling_mean_covers_the_last_episodes() -> None:
    stats = make_stats([1.0, 3.0, 5.0, 9.0], [1] * 4, [0] * 4)
    _, mean = plots.returns(stats, window=2).axes[0].lines
    assert mean.get_ydata().tolist() == [1, 2, 4, 7]
    stats = make_stats([1.0, float("inf"), 5.0, 9.0], [1] * 4, [0] * 4)
    _, mean = plots.returns(stats, window=2).axes[0].lines
    assert mean.get_ydata().tolist() == [1, float("inf"), float("inf"), 7]


def test_the_mean_has_one_point_where_episodes_end_together() -> None:
    stats = make_stats([1.0, 3.0, 8.0, 0.0], [5, 5, 6, 6], [0, 1, 0, 1])
    points, mean = plots.returns(stats, window=2).axes[0].lines
    assert len(points.get_xdata()) == 4
    assert mean.get_xydata().tolist() == [[10, 2], [22, 4]]


def test_the_batches_of_a_run_one_after_another() -> None:
    parts = [make_stats([1.0], [4], [0]), make_stats([2.0], [5], [0])]
    points, _ = plots.returns(parts).axes[0].lines
    assert points.get_xydata().tolist() == [[4, 1], [9, 2]]


def test_several_players_have_a_curve_each() -> None:
    one = make_stats([1.0, 2.0], [4, 5], [0, 0])
    stats = EpisodeStats(
        returns=torch.stack([one.returns, -one.returns], -1),
        lengths=one.lengths,
        traj_ids=one.traj_ids,
        lanes=one.lanes,
        terminated=one.terminated,
    )
    axes = plots.returns(stats).axes[0]
    assert [line.get_ydata().tolist() for line in axes.lines] == [[1, 2], [1, 1.5], [-1, -2], [-1, -1.5]]
    assert len(axes.get_legend().get_texts()) == 2


@pytest.mark.parametrize("count", [0, 1])
def test_few_episodes_are_no_error(count: int, tmp_path: Path) -> None:
    path = tmp_path / "returns.png"
    plots.returns(make_stats([1.0] * count, [4] * count, [0] * count), path=path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_several_runs_share_axes() -> None:
    axes = plots.returns(make_stats([1.0, 2.0], [4, 5], [0, 0]), label="one").axes[0]
    figure = plots.returns(make_stats([3.0], [2_000], [0]), label="other", window=1_000, ax=axes)
    assert figure.axes == [axes]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "one, mean of the last 100",
        "other, mean of the last 1,000",
    ]
    colors = [line.get_color() for line in axes.lines]
    assert colors[0] == colors[1] != colors[2] == colors[3]
    assert axes.get_title() == ""
    assert axes.xaxis.get_major_formatter()(2_000) == "2,000"
    assert axes.yaxis.get_major_formatter()(0.1 + 0.2) == "0.3"


def test_the_title_names_the_environment_and_counts_the_episodes() -> None:
    (axes,) = plots.returns(make_stats([1.0], [4], [0]), title="CartPole-v1").axes
    assert axes.get_title() == "CartPole-v1: 1 episode"
    (axes,) = plots.lengths(make_stats([1.0] * 1_234, [4] * 1_234, [0] * 1_234), title="Pong").axes
    assert axes.get_title() == "Pong: 1,234 episodes"
    plots.lengths(make_stats([1.0], [4], [0]), title="Pong, two runs", ax=axes)
    assert axes.get_title() == "Pong, two runs"
    (axes,) = plots.returns(make_stats([1.0], [4], [0]), title="Pong", label="seed 0").axes
    plots.returns(make_stats([1.0], [4], [0]), label="seed 1", ax=axes)
    assert axes.get_title() == "Pong"


def test_it_leaves_pyplot_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    plots.returns(make_stats([1.0], [4], [0]), path=tmp_path / "returns.png")
    assert "matplotlib.pyplot" not in sys.modules


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="window is 0, expected at least 1"):
        plots.returns(make_stats([1.0], [4], [0]), window=0)
    with pytest.raises(ValueError, match="parts is empty"):
        plots.returns([])
    for name in ("ax", "title", "label"):
        with pytest.raises(TypeError, match=f"{name} is 3, expected"):
            plots.returns(make_stats([1.0], [4], [0]), **{name: 3})  # type: ignore[arg-type]


BATCH = TensorDict({"observation": torch.zeros(3)}, [3])


@pytest.mark.parametrize(
    ("draw", "given", "kind"),
    [(plots.returns, BATCH, "TensorDict"), (plots.lengths, [BATCH], "TensorDict"), (plots.returns, "returns", "str")],
)
def test_what_is_no_stats(draw: Any, given: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=rf"a {kind}, expected EpisodeStats .* pass fc.episode_stats\(batch\)"):
        draw(given)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'funcollect\[viz\]'"):
        plots.returns(make_stats([1.0], [4], [0]))
