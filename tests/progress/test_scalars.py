"""TensorBoard's scalars, read back from the event files."""

import io
import sys
from collections import defaultdict

import jax.numpy as jnp
import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

import funcollect as fc
from funcollect.progress import track
from tests.support.frames.streams import FakeCollector, make_batch, seven_frames_each


def read(folder):
    """All scalars: (frame, value) by name, in the order of the files."""
    found = defaultdict(list)
    for path in sorted(folder.iterdir(), key=lambda path: (path.stat().st_mtime_ns, path.name)):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found[value.tag].append((event.step, value.tensor.float_val[0]))
    return dict(found)


def test_returns_lengths_and_speed_over_frames(tmp_path):
    """The means are those of the episodes that ended in the batch."""
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
    found = read(tmp_path)
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


def test_numbers_of_earlier_frames_are_logged_where_they_belong(tmp_path):
    """Such as those of an evaluation that ends later, or after the loop."""
    batches = track(FakeCollector(seven_frames_each(2)), log_dir=tmp_path, disable=True)
    for _ in batches:
        batches.log({"evaluation": 1.0}, frames=3)
    batches.log({"evaluation": 2.0}, frames=7)
    assert read(tmp_path)["evaluation"] == [(3, 1), (3, 1), (7, 2)]
    with pytest.raises(ValueError, match="frames is -1, expected at least 0"):
        batches.log({"evaluation": 2.0}, frames=-1)


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
    """The event files that are open."""
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


def test_a_loop_broken_off_closes_the_file_and_the_next_goes_on(tmp_path, writers):
    with fc.SyncDataCollector("CartPole-v1", frames_per_batch=100, total_frames=300, seed=0) as collector:
        batches = track(collector, log_dir=tmp_path, disable=True)
        for _ in batches:
            batches.log({"loss": 1})
            assert read(tmp_path)["loss"] == [(100, 1)]  # it is on disk
            assert len(writers) == 1
            break
        assert not writers
        assert collector.frames == 100
        for _ in batches:
            batches.log({"loss": 2})
        list(track(collector, log_dir=tmp_path, disable=True))
    assert not writers
    found = read(tmp_path)
    assert found["loss"] == [(100, 1), (200, 2), (300, 2)]
    assert [frame for frame, _ in found["speed/frames_per_second"]] == [100, 200, 300]


def test_a_run_taken_up_from_a_checkpoint_hides_what_came_after_it(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

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


def test_an_exception_closes_the_file(tmp_path, writers):
    def loop(batches):
        for _ in batches:
            raise RuntimeError("the learner failed")

    batches = track(FakeCollector(seven_frames_each(2)), log_dir=tmp_path, disable=True)
    with pytest.raises(RuntimeError, match="the learner failed") as caught:
        loop(batches)
    assert caught.tb is not None  # which keeps the loop's frame alive
    assert not writers
    assert len(read(tmp_path)["speed/frames_per_second"]) == 1


def test_a_folder_that_cannot_be_is_refused_where_it_is_given(tmp_path):
    with pytest.raises(TypeError, match="log_dir is 3, expected str or PathLike"):
        track(FakeCollector([]), log_dir=3)
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "runs"):
        with pytest.raises(OSError, match=f"log_dir is '{folder}', which cannot be made .*: name another folder"):
            track(FakeCollector([]), log_dir=folder)
    track(FakeCollector([]), log_dir=tmp_path / "new" / "runs")
    assert (tmp_path / "new" / "runs").is_dir()


class Listed:
    """A logger that keeps what it gets."""

    def __init__(self):
        self.calls = []

    def begin(self, frames):
        self.calls.append(("begin", frames))

    def __call__(self, frames, values):
        self.calls.append((frames, *values))

    def close(self):
        self.calls.append("close")


def test_a_logger_of_ones_own_begins_and_closes_with_each_loop():
    logger = Listed()
    batches = track(iter(seven_frames_each(3)), logger=logger, disable=True)
    for _ in batches:
        batches.log({"loss": 1})
        break
    (_, _) = batches
    speed, episodes = "speed/frames_per_second", ("episode/return", "episode/length")
    first = [("begin", 0), (14, speed, *episodes), (14, "loss"), "close"]
    assert logger.calls == [*first, ("begin", 14), (28, speed, *episodes), (42, speed, *episodes), "close"]


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
        wanted = list(track(collector, log_dir=tmp_path / "collector", disable=True))
    seen, given = [], {"total": 300, "log_dir": tmp_path / "loop", "disable": False, "file": file}
    logger = lambda frames, values: seen.append((frames, values.get("episode/return")))  # noqa: E731
    made = list(track(rollouts(), logger=logger, **given))  # a function is a logger, and both may be given
    for batch, one in zip(made, wanted, strict=True):
        assert torch.equal(batch["observation"], one["observation"])
    assert "300/300" in file.getvalue()
    both = [read(tmp_path / each)["episode/return"] for each in ("collector", "loop")]
    assert both[0] == both[1]
    assert [frame for frame, _ in both[0]] == [frame for frame, value in seen if value is not None]
