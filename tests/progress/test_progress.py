"""The bar, its window of episodes, and loggers: TensorBoard's scalars are read back from the event files."""

import io
import math
import re
import sys
from collections import defaultdict
from types import SimpleNamespace

import ipykernel.kernelapp
import jax.numpy as jnp
import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

import funcollect as fc
from funcollect import progress
from funcollect.progress import EpisodeWindow, track
from funcollect.trajectories.split import split_trajectories
from tests.support.frames import LENGTH, FakeCollector, make_batch, seven_frames_each


def drawn(text):
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


def window_over(*batches, size=100):
    window = EpisodeWindow(size)
    for batch in batches:
        window.add(batch)
    return window


def test_returns_are_whole_across_batch_borders_and_the_window_forgets_older_ones():
    window = window_over(*(make_batch(start, 3) for start in range(0, 30, 3)))  # no episode lies within one batch
    assert (window.episodes, window.frames) == (12, 60)
    assert (window.mean_returns, window.mean_length) == ([10.0], LENGTH)
    early = make_batch(0, 5)
    early["next", "reward"] *= 100
    window = window_over(early, size=2)
    assert window.mean_returns == [1000.0]
    window.add(make_batch(5, 5))
    assert (window.mean_returns, window.episodes) == ([10.0], 4)


def test_before_the_first_episode_with_several_players_and_over_padding():
    window = window_over(make_batch(0, 3))
    assert (window.mean_returns, window.summary()) == ([], {})
    assert math.isnan(window.mean_length)
    window = window_over(make_batch(0, 5, players=2))
    assert window.mean_returns == [10.0, -10.0]
    assert window.summary()["return"] == "10/-10"
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
    window = EpisodeWindow()
    tracked = track(FakeCollector(seven_frames_each(3)), window=window, disable=True)
    assert [(window.frames, len(window.last)) for _ in tracked] == [(14, 2), (28, 2), (42, 4)]


def test_bad_arguments():
    with pytest.raises(TypeError, match=r"batch is .*, expected TensorDictBase: track batches of a collector"):
        list(track([{"next": 1}], disable=True))
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


def read(folder):
    """All scalars: (frame, value) by name, in the order of the files."""
    found = defaultdict(list)
    for path in sorted(folder.iterdir(), key=lambda path: (path.stat().st_mtime_ns, path.name)):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found[value.tag].append((event.step, value.tensor.float_val[0]))
    return dict(found)


def test_returns_lengths_and_speed_over_frames(tmp_path):
    early = make_batch(0, 5)
    early["next", "reward"] *= 100
    batches = [early, make_batch(5, 5), make_batch(10, 3)]
    assert len(list(track(FakeCollector(batches), log_dir=tmp_path, disable=True))) == 3
    found = read(tmp_path)
    assert sorted(found) == ["episode/length", "episode/return", "speed/frames_per_second"]
    assert found["episode/return"] == [(10, 1000), (20, 10)]
    assert found["episode/length"] == [(10, 5), (20, 5)]
    assert [frame for frame, _ in found["speed/frames_per_second"]] == [10, 20, 26]
    assert all(value > 0 for _, value in found["speed/frames_per_second"])


def test_several_players_batches_without_episodes_and_numbers_of_ones_own(tmp_path):
    weight = torch.ones((), requires_grad=True)
    given = [make_batch(0, 5, players=2), make_batch(5, 5, players=2).exclude("collector")]
    batches = track(FakeCollector(given), log_dir=tmp_path, disable=True)
    for index, _ in enumerate(batches):
        batches.log({"loss/value": weight * index, "loss/policy": jnp.float32(-index), "rate": 0.5})
        batches.log({"evaluation": 1.0}, frames=3)  # such as that of an evaluation that ends later, or after the loop
    batches.log({"evaluation": 2.0}, frames=7)
    with pytest.raises(ValueError, match="frames is -1, expected at least 0"):
        batches.log({"evaluation": 2.0}, frames=-1)
    found = read(tmp_path)
    assert found["evaluation"] == [(3, 1), (3, 1), (7, 2)]
    assert found["episode/return/0"] == [(10, 10)]
    assert found["episode/return/1"] == [(10, -10)]
    assert [frame for frame, _ in found["speed/frames_per_second"]] == [10, 20]
    assert found["loss/value"] == [(10, 0), (20, 1)]
    assert found["loss/policy"] == [(10, 0), (20, -1)]
    assert found["rate"] == [(10, 0.5), (20, 0.5)]


def test_what_cannot_be_logged(tmp_path):
    batches = track(FakeCollector(seven_frames_each(1)), log_dir=tmp_path, disable=True)
    for _ in batches:
        for value in ("high", torch.zeros(2), None):
            with pytest.raises(ValueError, match=r"loss is .*expected one number"):
                batches.log({"loss": value})
        with pytest.raises(TypeError, match=r"values is .*expected .*Mapping.*pass numbers by name"):
            batches.log([1.0])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="outside of the loop"):
            batches.log({"loss": 1})
        list(batches)


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # nor is TensorBoard needed
    batches = track(FakeCollector(seven_frames_each(1)), disable=True)
    for _ in batches:
        batches.log({"loss": 1})
    batches.log({"loss": 1})
    assert not list(tmp_path.iterdir())
    with pytest.raises(ImportError, match=r"pip install 'funcollect\[viz\]'"):
        track(FakeCollector([]), log_dir=tmp_path)


@pytest.fixture
def writers(monkeypatch):
    import torch.utils.tensorboard as tensorboard

    still = []

    class Writer(tensorboard.SummaryWriter):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            still.append(self)

        def close(self):
            super().close()
            still.remove(self)

    monkeypatch.setattr(tensorboard, "SummaryWriter", Writer)
    return still


def test_a_loop_that_fails_closes_the_file_and_the_next_goes_on(tmp_path, writers):
    def fail(batches):
        for _ in batches:
            batches.log({"loss": 1})
            assert read(tmp_path)["loss"] == [(100, 1)]  # it is on disk
            assert len(writers) == 1
            raise ArithmeticError

    with fc.SyncDataCollector("CartPole-v1", frames_per_batch=100, total_frames=300, seed=0) as collector:
        batches = track(collector, log_dir=tmp_path, disable=True)
        with pytest.raises(ArithmeticError) as caught:
            fail(batches)
        assert caught.tb is not None  # which keeps the loop's frame alive
        assert not writers
        assert collector.frames == 100
        for _ in batches:
            batches.log({"loss": 2})
        list(track(collector, log_dir=tmp_path, disable=True))
    assert not writers
    found = read(tmp_path)
    assert found["loss"] == [(100, 1), (200, 2), (300, 2)]
    assert [frame for frame, _ in found["speed/frames_per_second"]] == [100, 200, 300]


def test_a_run_taken_up_from_a_checkpoint_hides_what_came_after_it(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # Files of one second are read by their names, in which this number has to have one digit.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    with fc.SyncDataCollector("CartPole-v1", frames_per_batch=100, total_frames=400, seed=0) as collector:
        for _ in track(collector, log_dir=tmp_path, disable=True):
            if collector.frames == 200:
                saved = collector.state_dict()
            if collector.frames == 300:
                break
        collector.load_state_dict(saved)
        list(track(collector, log_dir=tmp_path, disable=True))
    shown = EventAccumulator(str(tmp_path))
    shown.Reload()
    assert [scalar.step for scalar in shown.Scalars("speed/frames_per_second")] == [100, 200, 300, 400]


def test_a_folder_that_cannot_be_is_refused_where_it_is_given(tmp_path):
    with pytest.raises(TypeError, match="log_dir is 3, expected str or PathLike"):
        track(FakeCollector([]), log_dir=3)
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "runs"):
        with pytest.raises(OSError, match=f"log_dir is '{folder}', which cannot be made .*: name another folder"):
            track(FakeCollector([]), log_dir=folder)
    track(FakeCollector([]), log_dir=tmp_path / "new" / "runs")
    assert (tmp_path / "new" / "runs").is_dir()


class Listed(list):
    def begin(self, frames):
        self.append(("begin", frames))

    def __call__(self, frames, values):
        self.append((frames, *values))

    def close(self):
        self.append("close")


def test_a_logger_of_ones_own_begins_and_closes_with_each_loop():
    logger = Listed()
    batches = track(iter(seven_frames_each(3)), logger=logger, disable=True)
    for _ in batches:
        batches.log({"loss": 1})
        break
    (_, _) = batches
    speed, episodes = "speed/frames_per_second", ("episode/return", "episode/length")
    first = [("begin", 0), (14, speed, *episodes), (14, "loss"), "close"]
    assert logger == [*first, ("begin", 14), (28, speed, *episodes), (42, speed, *episodes), "close"]


def test_a_loop_over_the_functions_has_a_bar_and_a_log(tmp_path):
    env = fc.make_env("CartPole-v1", num_envs=2)
    policy = fc.random_policy(env)

    def rollouts():
        state = fc.init(env, policy, seed=0)
        for _ in range(3):
            state, batch = fc.rollout(env, policy, state, 50)
            yield batch

    file = io.StringIO()
    with fc.SyncDataCollector(env, policy, frames_per_batch=100, total_frames=300, seed=0) as collector:
        list(track(collector, log_dir=tmp_path / "collector", disable=True))
    seen, given = [], {"total": 300, "log_dir": tmp_path / "loop", "disable": False, "file": file}
    logger = lambda frames, values: seen.append((frames, values.get("episode/return")))  # noqa: E731
    list(track(rollouts(), logger=logger, **given))  # a function is a logger, and both may be given
    assert "300/300" in file.getvalue()
    both = [read(tmp_path / each)["episode/return"] for each in ("collector", "loop")]
    assert both[0] == both[1]
    assert [frame for frame, _ in both[0]] == [frame for frame, value in seen if value is not None]
