"""`plots.profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from funcollect import plots
from funcollect.profiling import PARTS, Limit, Profile, Timeline

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


def test_bars_are_the_parts_in_order(tmp_path: Path) -> None:
    figure = plots.profile(PROFILE, title="a run", path=tmp_path / "profile.svg")
    (axes,) = figure.axes
    bars: list[Any] = [bar for container in axes.containers for bar in container]
    assert [(bar.get_x(), bar.get_width()) for bar in bars] == [(0, 3), (3, 5), (8, 2), (0, 8), (8, 2)]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["environment", "policy", "waiting", "reader"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["in each of 2 workers", "in this process"]
    assert [line.get_xdata() for line in axes.lines] == [pytest.approx([place] * 2) for place in (3, 5, 8)]
    assert axes.get_title() == "a run: 100,000 frames/s"
    assert "<svg" in (tmp_path / "profile.svg").read_text()


def test_every_part_has_a_color_of_its_own() -> None:
    whole = Timeline(where="here", parts=dict.fromkeys(PARTS, 1.0))
    one = Profile(**vars(PROFILE) | {"timelines": (whole,)})
    bars: list[Any] = [bar for container in plots.profile(one).axes[0].containers for bar in container]
    colors = [bar.get_facecolor() for bar in bars]
    assert len({*colors}) == len(PARTS) - 1  # one stands for two others


def test_it_draws_into_given_axes() -> None:
    axes = plots.profile(PROFILE).axes[0]
    assert plots.profile(PROFILE, ax=axes) is axes.figure


@pytest.mark.parametrize("kwargs", [{"profile": 3}, {"title": 3}, {"ax": 3}], ids=str)
def test_bad_arguments(kwargs: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(kwargs))} is 3"):
        plots.profile(**{"profile": PROFILE} | kwargs)


def test_the_table() -> None:
    assert str(PROFILE) == (
        "a collector, loop host\n"
        "1,000 frames in 0.01 s: 100,000 frames/s; the first batches, not counted, took 1 s\n"
        "\n"
        "in each of 2 workers  µs/frame  share\n"
        "environment               3.00    30%\n"
        "policy                    5.00    50%\n"
        "waiting                   2.00    20%\n"
        "a frame                  10.00   100%\n"
        "\n"
        "in this process  µs/frame  share\n"
        "reader               8.00    80%\n"
        "waiting              2.00    20%\n"
        "a frame             10.00   100%\n"
        "\n"
        "limit                        reached  frames/s\n"
        "bare environment                 30%   333,333\n"
        "bare policy                      50%   200,000\n"
        "bare environment and policy      80%   125,000"
    )


def test_one_program_has_one_limit() -> None:
    one_program = Timeline(where="here", parts={"environment and policy": 8.0, "delivery": 2.0})
    assert Profile(**vars(PROFILE) | {"timelines": (one_program,)}).limits == (
        Limit("bare environment and policy", 125_000),
    )
