"""Episodes drawn: which one, its panels, and what their lines say."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import funcollect as fc
from funcollect import plots
from funcollect.plots.episodes import pick
from tests.support.envs.counting import always, make_counting


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


def test_split_batches_and_batches_in_rows_give_the_same():
    batch = counted(12)
    split = fc.split_trajectories(batch)
    rows = torch.cat([batch[:, :6], batch[:, 6:]])  # trajectories go on in another row
    for traj_id in (0, 1, 2, 3, 5):
        expected = pick(batch, traj_id)
        for other in (split, rows):
            assert (pick(other, traj_id).frames.exclude(("collector", "mask")) == expected.frames).all()
    assert pick(split, None).traj_id == pick(batch, None).traj_id


def test_repeated_frames_of_a_finished_lane_are_left_out():
    with fc.SyncDataCollector("CartPole-v1", frames_per_batch=100, reset_when_done=False, seed=0) as collector:
        batch = next(collector)
    assert len(pick(batch, None).frames) == int((~batch["done"]).sum()) < 100


def made(observation, action, players=1):
    """One trajectory of three frames."""
    frames = TensorDict({"next": {"reward": torch.ones(3, players)}, "collector": {"traj_ids": torch.zeros(3)}}, [3])
    frames.update({"action": action, **observation})
    frames["next"].update(observation)
    return frames


def test_each_kind_of_leaf(tmp_path):
    observation = {
        "joints": torch.randn(3, 2),
        "room": torch.tensor([4, 5, 6]),
        "screen": torch.zeros(3, 8, 8),
        "wide": torch.arange(36.0).reshape(3, 12),
    }
    batch = made({**observation, "nested": {"x": torch.ones(3, 1)}}, torch.randn(3, 2), players=2)
    batch["logits"] = torch.randn(3, 2)  # a policy's output is no observation
    figure = plots.episode(batch, path=tmp_path / "episode.png")
    assert (tmp_path / "episode.png").read_bytes().startswith(b"\x89PNG")
    panels = {axes.get_ylabel(): axes for axes in figure.axes}
    assert list(panels) == ["joints", "room", "wide", "nested.x", "action", "reward", ""]
    assert len(lines(panels["joints"])) == len(stairs(panels["action"])) == len(stairs(panels["reward"])) == 2
    assert stairs(panels["room"]) == [[4, 5, 6, 6]]
    (mesh,) = panels["wide"].collections
    assert mesh.get_array().shape == (12, 4)
    assert panels["joints"].get_title() == "trajectory 0: 3 frames, return 3/3, goes on"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda batch: batch.to_dict(), TypeError, "the batch is dict, expected a TensorDict"),
        (lambda batch: batch.exclude("collector"), ValueError, "no tensor collector.traj_ids"),
        (lambda batch: batch.exclude("action"), ValueError, "has no action, expected actions and rewards"),
        (lambda batch: batch.exclude(("next", "reward")), ValueError, "has no .*reward.*, expected actions and"),
        (lambda batch: batch[:, :0], ValueError, r"the batch \[2, 0\] has no frames"),
    ],
)
def test_batches_that_cannot_be_drawn(change, error, message):
    with pytest.raises(error, match=message):
        plots.episode(change(counted()))


def test_an_id_that_is_not_there():
    with pytest.raises(ValueError, match=r"no trajectory 77, expected one of \[0, 1, 2, 3, 4, 5, 6\] \(7 in all\)"):
        plots.episode(counted(), 77)
