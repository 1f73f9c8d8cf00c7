"""The functions over an environment that counts: every batch is written down by hand."""

import random

import pytest
import torch

import funcollect as fc
from funcollect.core.state import trajectory_ids
from tests.support.compare import leaves
from tests.support.envs.counting import always, check, make_counting
from tests.support.running import scaled

ONE = {"lengths": (3, 2)}
THREE = ({"lengths": (3, 2)}, {"lengths": (2,), "truncated": (1,)}, {"lengths": (4, 1)})
SINGLE = ("host", "torch")
MANY = ("host", "vector", "torch")


def flags(*ones, length=7):
    column = torch.zeros(length, 1, dtype=torch.bool)
    column[list(ones)] = True
    return column


@pytest.mark.parametrize("backend", SINGLE)
def test_every_leaf_without_a_batch_dimension(backend):
    env = make_counting(backend, {"lengths": (3, 2), "truncated": (1,)}, batched=False)
    _, batch = fc.rollout(env, always(2), fc.init(env, always(2), seed=0), 7)
    observation = [[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 1, 1], [0, 2, 0], [0, 2, 1]]
    after = [[0, 0, 1], [0, 0, 2], [0, 0, 3], [0, 1, 1], [0, 1, 2], [0, 2, 1], [0, 2, 2]]
    by_hand = {
        ("action",): torch.full((7,), 2),
        ("collector", "lane"): torch.zeros(7, dtype=torch.int64),
        ("collector", "policy_version"): torch.zeros(7, dtype=torch.int64),
        ("collector", "step"): torch.tensor([0, 1, 2, 0, 1, 0, 1]),
        ("collector", "traj_ids"): torch.tensor([0, 0, 0, 1, 1, 2, 2]),
        ("done",): flags(),
        ("next", "done"): flags(2, 4),
        ("next", "observation"): torch.tensor(after, dtype=torch.float32),
        ("next", "reward"): torch.tensor([[0.5], [1.5], [2.5], [10.5], [11.5], [20.5], [21.5]]),
        ("next", "terminated"): flags(2),
        ("next", "truncated"): flags(4),
        ("observation",): torch.tensor(observation, dtype=torch.float32),
        ("terminated",): flags(),
        ("truncated",): flags(),
    }
    got = leaves(batch)
    assert batch.batch_size == (7,)
    assert list(got) == list(by_hand)
    for path, leaf in by_hand.items():
        assert got[path].dtype == leaf.dtype
        assert torch.equal(got[path], leaf), path


@pytest.mark.parametrize("backend", MANY)
def test_every_leaf_of_three_lanes(backend):
    env = make_counting(backend, *THREE)
    _, batch = fc.rollout(env, always(1), fc.init(env, always(1), seed=0), 4)
    by_hand = {
        ("collector", "lane"): [[0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 2, 2]],
        ("collector", "step"): [[0, 1, 2, 0], [0, 1, 0, 1], [0, 1, 2, 3]],
        ("collector", "traj_ids"): [[0, 0, 0, 3], [1, 1, 4, 4], [2, 2, 2, 2]],
        ("next", "done"): [[0, 0, 1, 0], [0, 1, 0, 1], [0, 0, 0, 1]],
        ("next", "reward"): [[0.25, 1.25, 2.25, 10.25], [0.25, 1.25, 10.25, 11.25], [0.25, 1.25, 2.25, 3.25]],
        ("next", "terminated"): [[0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1]],
        ("next", "truncated"): [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]],
    }
    shapes = {path: tuple(leaf.shape) for path, leaf in leaves(batch).items()}
    for path, leaf in by_hand.items():
        column = torch.tensor(leaf)
        trailing = path[0] == "next"
        assert shapes[path] == ((3, 4, 1) if trailing else (3, 4))
        assert torch.equal(batch[path].reshape(3, 4), column.to(batch[path].dtype)), path
    assert batch["observation"][:, 3].tolist() == [[0, 1, 0], [1, 1, 1], [2, 0, 3]]
    assert batch["next", "observation"][:, 3].tolist() == [[0, 1, 1], [1, 1, 2], [2, 0, 4]]
    check(batch, "0.0 0.1 0.2t 1.0", "0.0 0.1t 1.0 1.1c", "0.0 0.1 0.2 0.3t")


@pytest.mark.parametrize("backend", SINGLE)
def test_a_single_environment_goes_on(backend):
    env = make_counting(backend, ONE, batched=False)
    policy = fc.random_policy(env)
    state = fc.init(env, policy, seed=5)
    for words in ("0.0 0.1", "0.2t", "1.0 1.1t 2.0 2.1 2.2t", "3.0"):
        state, batch = fc.rollout(env, policy, state, len(words.split()))
        check(batch, words, batched=False)
    assert (state.frames, state.steps, state.seed) == (9, 9, 5)
    assert (state.episode.tolist(), state.step.tolist(), state.traj_ids.tolist()) == ([3], [1], [3])
    assert state.returns.tolist() == [30 + int(batch["action"]) / 4]


@pytest.mark.parametrize("backend", MANY)
def test_lanes_go_on_each_for_itself(backend):
    env = make_counting(backend, *THREE)
    policy = fc.random_policy(env)
    state = fc.init(env, policy, seed=0)
    for lanes in [
        ("0.0 0.1 0.2t", "0.0 0.1t 1.0", "0.0 0.1 0.2"),
        ("1.0", "1.1c", "0.3t"),
        ("1.1t 2.0 2.1 2.2t 3.0", "2.0 2.1t 3.0 3.1t 4.0", "1.0t 2.0 2.1 2.2 2.3t"),
    ]:
        state, batch = fc.rollout(env, policy, state, len(lanes[0].split()))
        check(batch, *lanes)
    assert state.episode.tolist() == [3, 4, 3]
    assert state.step.tolist() == [1, 1, 0]
    assert state.traj_ids.tolist() == [9, 13, 11]
    assert (state.frames, state.num_lanes, state.total_lanes) == (27, 3, 3)


@pytest.mark.parametrize("backend", MANY)
def test_trajectories_are_truncated_at_the_limit(backend):
    env = make_counting(backend, *THREE)
    state = fc.init(env, always(0), seed=0)
    state, first = fc.rollout(env, always(0), state, 1, max_frames_per_traj=2)
    state, batch = fc.rollout(env, always(0), state, 5, max_frames_per_traj=2)  # an end at the limit is both
    check(first, "0.0", "0.0", "0.0")
    check(batch, "0.1c 1.0 1.1b 2.0 2.1c", "0.1b 1.0 1.1c 2.0 2.1b", "0.1c 1.0t 2.0 2.1c 3.0t")


@pytest.mark.parametrize("backend", MANY)
def test_a_limit_beyond_64_bits_is_never_reached(backend):
    env = make_counting(backend, *THREE)
    state, batch = fc.rollout(env, always(0), fc.init(env, always(0), seed=0), 5, max_frames_per_traj=2**70)
    check(batch, "0.0 0.1 0.2t 1.0 1.1t", "0.0 0.1t 1.0 1.1c 2.0", "0.0 0.1 0.2 0.3t 1.0t")
    _, batch = fc.rollout(env, always(0), state, 1, max_frames_per_traj=2**70)
    check(batch, "2.0", "2.1t", "2.0")


@pytest.mark.parametrize("backend", MANY)
def test_reset_of_some_lanes_and_of_all(backend):
    env = make_counting(backend, *THREE)
    state, batch = fc.rollout(env, always(0), fc.init(env, always(0), seed=0), 2)
    check(batch, "0.0 0.1", "0.0 0.1t", "0.0 0.1")
    state = fc.reset(env, state, torch.tensor([True, False, True]))
    assert state.returns.tolist() == [0, 0, 0]
    state, batch = fc.rollout(env, always(0), state, 1)
    check(batch, "1.0", "1.0", "1.0t")
    state = fc.reset(env, state)
    assert [state.episode.tolist(), state.step.tolist(), state.returns.tolist()] == [[2, 2, 3], [0, 0, 0], [0, 0, 0]]
    _, batch = fc.rollout(env, always(0), state, 2)
    check(batch, "2.0 2.1", "2.0 2.1t", "3.0t 4.0")


@pytest.mark.parametrize("backend", SINGLE)
def test_a_transition_of_a_single_environment(backend):
    env = make_counting(backend, ONE, batched=False)
    _, transition = fc.step(env, always(2), fc.init(env, always(2), seed=0))
    assert transition.batch_size == ()
    assert transition.is_locked
    shapes = {".".join(path): tuple(leaf.shape) for path, leaf in leaves(transition).items()}
    assert (shapes["observation"], shapes["action"], shapes["next.reward"], shapes["collector.step"]) == (
        (3,),
        (),
        (1,),
        (),
    )


@pytest.mark.parametrize("backend", SINGLE)
def test_batches_of_functions_are_locked(backend):
    env = make_counting(backend, *THREE)
    _, batch = fc.rollout(env, always(0), fc.init(env, always(0), seed=0), 3)
    assert batch.is_locked
    assert batch["next"].is_locked
    with pytest.raises(RuntimeError, match="lock"):
        batch["mine"] = torch.zeros(3, 3)
    own = batch.clone(False)
    own["mine"] = torch.zeros(3, 3)
    assert "mine" not in batch


def test_info_keys_are_recorded_for_every_step():
    for backend in ("host", "vector"):
        env = make_counting(backend, *THREE, info_keys=["left"])
        _, batch = fc.rollout(env, always(0), fc.init(env, always(0), seed=0), 4)
        assert batch["next", "info", "left"].tolist() == [[2, 4, 6, 2], [2, 4, 2, 4], [2, 4, 6, 8]]


@pytest.mark.filterwarnings("ignore:.* begun again from its seed:UserWarning")  # it counts its resets
@pytest.mark.parametrize("backend", MANY)
def test_evaluation_takes_the_first_episodes_of_each_lane(backend):
    env = make_counting(backend, {"lengths": (3, 2)}, {"lengths": (40,)}, {"lengths": (1,), "truncated": (0,)})
    stats = fc.evaluate(env, always(0), episodes=5, seed=0)
    assert stats.lanes.tolist() == [0, 0, 1, 1, 2]
    assert stats.lengths.tolist() == [3, 2, 40, 40, 1]
    assert stats.terminated.tolist() == [True, True, True, True, False]
    assert stats.returns.tolist() == [0 + 1 + 2, 10 + 11, 780, 10 * 40 + 780, 0]
    assert stats.traj_ids.tolist() == [0, 3, 1, 4, 2]


def test_ids_stay_unique_when_lanes_join_later():
    lane, episode = torch.tensor([0, 3, 4, 9]), torch.tensor([2, 0, 0, 5])
    assert trajectory_ids(lane, episode, 4).tolist() == [8, 3, 1 << 40, (2 << 40) + 21]


@pytest.mark.parametrize("seed", range(scaled(8)))
@pytest.mark.parametrize("backend", MANY)
def test_any_run_against_a_count(backend, seed):
    """Rollouts of any length with limits and resets between, against lanes counted one by one."""
    choose = random.Random(seed)
    lanes = [{"lengths": [choose.randint(1, 6) for _ in range(3)]} for _ in range(choose.randint(1, 4))]
    env = make_counting(backend, *lanes)
    policy = fc.random_policy(env)
    state = fc.init(env, policy, seed=seed)
    at = [(0, 0) for _ in lanes]
    for _ in range(6):
        if choose.random() < 0.5:
            mask = [choose.random() < 0.5 for _ in lanes]
            state = fc.reset(env, state, torch.tensor(mask))
            at = [
                (episode + 1, 0) if begun else (episode, step) for begun, (episode, step) in zip(mask, at, strict=True)
            ]
        limit, length = choose.choice([None, 2, 4]), choose.randint(1, 9)
        state, batch = fc.rollout(env, policy, state, length, max_frames_per_traj=limit)
        words, at = zip(
            *[count(lane["lengths"], *one, length, limit) for lane, one in zip(lanes, at, strict=True)], strict=True
        )
        check(batch, *words)
        assert list(zip(state.episode.tolist(), state.step.tolist(), strict=True)) == list(at)


def count(lengths, episode, step, length, limit):
    """A lane's words, and where it stands after them."""
    words = []
    for _ in range(length):
        ended, cut = step + 1 >= lengths[episode % len(lengths)], limit is not None and step + 1 >= limit
        words.append(f"{episode}.{step}{'b' if ended and cut else 't' if ended else 'c' if cut else ''}")
        episode, step = (episode + 1, 0) if ended or cut else (episode, step + 1)
    return " ".join(words), (episode, step)
