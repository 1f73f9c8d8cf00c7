import io
import math
import re
from types import SimpleNamespace

import ipykernel.kernelapp
import pytest

import funcollect as fc
from funcollect import progress
from funcollect.progress import EpisodeWindow, track
from funcollect.trajectories.split import split_trajectories
from tests.support.frames.streams import LENGTH, FakeCollector, make_batch, seven_frames_each


def drawn(text):
    """What the bar shows in the end."""
    return text.rstrip("\n").split("\r")[-1]


def shown(batches, total_frames=-1, **options):
    """The text of a bar over these batches, which are delivered as they are."""
    file = io.StringIO()
    tracked = list(track(FakeCollector(batches, total_frames), disable=False, file=file, **options))
    assert all(one is other for one, other in zip(tracked, batches, strict=True))
    return file.getvalue()


def test_the_bar_shows_frames_rate_and_episodes():
    text = shown(seven_frames_each(5), total_frames=70)
    line = drawn(text)
    assert line.startswith("100%")
    assert "70.0/70.0" in line
    assert re.search(r"[\d.]+k? frames/s", line)
    assert "episodes=14, return=10, length=5" in line  # 35 steps of 2 lanes, returns 0 + 1 + 2 + 3 + 4
    assert text.endswith("\n")
    line = drawn(shown(seven_frames_each(2), total_frames=20))  # a whole last batch may be more
    assert line.startswith("100%")
    assert "28.0/28.0" in line
    line = drawn(shown(seven_frames_each(2)))  # endless
    assert "28.0 frames" in line
    assert "%" not in line
    assert drawn(shown(seven_frames_each(2), total=56)).startswith(" 50%")


def test_the_bar_is_drawn_in_a_notebook_and_not_where_nobody_looks(monkeypatch):
    """Nor where a process that runs notebooks, and is none itself, has imported what they are made of."""
    assert ipykernel.kernelapp.IPKernelApp
    file = io.StringIO()
    assert len(list(track(FakeCollector(seven_frames_each(2)), file=file))) == 2
    assert file.getvalue() == ""
    monkeypatch.setattr(ipykernel.kernelapp.IPKernelApp, "_instance", object())
    list(track(FakeCollector(seven_frames_each(2)), file=file))
    assert "28.0 frames" in drawn(file.getvalue())


def test_breaking_off_and_an_exception_close_the_bar_and_the_iteration():
    file = io.StringIO()
    collector = FakeCollector(seven_frames_each(5), total_frames=70)
    for _ in track(collector, disable=False, file=file):
        break
    assert collector.closed == 1
    assert file.getvalue().endswith("\n")
    assert "14.0/70.0" in drawn(file.getvalue())

    class Failing(FakeCollector):
        def __iter__(self):
            yield make_batch(0, 7)
            raise RuntimeError("worker 3 died")

    file = io.StringIO()
    with pytest.raises(RuntimeError, match="worker 3"):
        list(track(Failing([]), disable=False, file=file))
    assert file.getvalue().endswith("\n")


def test_a_run_taken_up_again_is_shown_from_where_it_was():
    env = fc.make_env("CartPole-v1", num_envs=2)
    with fc.SyncDataCollector(env, None, frames_per_batch=20, total_frames=80, seed=0) as collector:
        for _ in track(collector, disable=True):
            break
        file = io.StringIO()
        frames = [batch.numel() for batch in track(collector, disable=False, file=file)]
    assert frames == [20, 20, 20]
    assert "| 20.0/80.0" in file.getvalue().split("\r")[1]
    assert drawn(file.getvalue()).startswith("100%")


def test_frames_of_whole_trajectories_are_those_of_the_run():
    logged, file = [], io.StringIO()
    given = {"frames_per_batch": 500, "trajs_per_batch": 2, "total_frames": 1000, "seed": 0}
    with fc.SyncDataCollector("CartPole-v1", **given) as collector:
        tracked = track(collector, logger=lambda frames, values: logged.append(frames), disable=False, file=file)
        for _ in tracked:
            break
        for _ in tracked:
            assert logged[-1] == collector.frames
    assert logged[0] == 500
    assert "1.00k/1.00k" in drawn(file.getvalue())


def test_returns_are_whole_across_batch_borders_and_the_window_forgets_older_ones():
    window = EpisodeWindow()
    for start in range(0, 30, 3):  # no episode lies within one batch
        window.add(make_batch(start, 3))
    assert (window.episodes, window.frames) == (12, 60)
    assert (window.mean_returns, window.mean_length) == ([10.0], LENGTH)
    window, early = EpisodeWindow(2), make_batch(0, 5)
    early["next", "reward"] *= 100
    window.add(early)
    assert window.mean_returns == [1000.0]
    window.add(make_batch(5, 5))
    assert (window.mean_returns, window.episodes) == ([10.0], 4)


def test_before_the_first_episode_and_with_several_players():
    window = EpisodeWindow()
    window.add(make_batch(0, 3))
    assert window.mean_returns == []
    assert math.isnan(window.mean_length)
    assert window.summary() == {}
    window = EpisodeWindow()
    window.add(make_batch(0, 5, players=2))
    assert window.mean_returns == [10.0, -10.0]
    assert window.summary()["return"] == "10/-10"


def test_padding_counts_for_nothing_in_split_batches():
    split, window = split_trajectories(make_batch(0, 7)), EpisodeWindow()
    assert split.numel() == 20
    assert window.add(split) == 14
    assert (window.episodes, window.mean_returns) == (2, [10.0])


@pytest.mark.parametrize("lost", ["collector", ("next", "reward"), "next"])
def test_of_batches_without_episodes_frames_are_shown(lost):
    window = EpisodeWindow()
    line = drawn(shown([batch.exclude(lost) for batch in seven_frames_each(5)], total_frames=70, window=window))
    assert "70.0/70.0" in line
    assert "episodes" not in line
    assert window.last is None


def test_a_window_can_be_read_meanwhile():
    window, seen = EpisodeWindow(), []
    for _ in track(FakeCollector(seven_frames_each(3)), window=window, disable=True):
        assert window.last is not None
        seen.append((window.frames, len(window.last)))
    assert seen == [(14, 2), (28, 2), (42, 4)]


def test_bad_arguments():
    with pytest.raises(TypeError, match=r"batch is .*, expected TensorDictBase: track batches of a collector"):
        list(track([{"next": 1}], disable=True))
    for size in (0, -1):
        with pytest.raises(ValueError, match=rf"window is {size}, expected at least 1"):
            track(FakeCollector([]), window=size)
    for batches in (3, "CartPole-v1", make_batch(0, 3)):
        with pytest.raises(TypeError, match=r"batches is .*, expected a collector, or an iterable over batches"):
            track(batches)  # type: ignore[arg-type]


def test_who_waits_is_shown_as_a_share_of_the_time(monkeypatch):
    """Of 10 s since the beginning, the reader waited 4 and each of two workers 1; shares below 0.5 % are omitted."""
    stats = {"reader_waited": 3.0, "workers_waited": 5.0, "policy_lag": 1, "restarts": 0, "copies": 0}
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=iter([0.0, 100.0, 110.0, 510.0]).__next__))
    assert progress.shown_workers(SimpleNamespace(num_workers=2))() == {}  # a data loader
    entries = progress.shown_workers(SimpleNamespace(num_workers=2, stats=stats.copy))
    stats |= {"reader_waited": 7.0, "workers_waited": 7.0}
    assert entries() == {"reader_waits": "40%", "workers_wait": "10%", "lag": "1"}
    stats["workers_waited"] = 5.1
    assert entries() == {"reader_waits": "1%", "lag": "1"}
