"""Atari games against a plain loop over Gymnasium's wrappers, and forks of them that go on to the bit."""

import ale_py
import gymnasium
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, TimeLimit
from PIL import Image

import funcollect as fc
from funcollect.envs.gymnasium_envs import atari_lanes
from tests.support.compare import COPIES, assert_same, collect, fresh
from tests.support.misuse import Misuse, refused, runs, table
from tests.support.plain import check_lanes
from tests.support.running import in_soak, scaled

gymnasium.register_envs(ale_py)
LIMIT = 25


def build():
    """What `from_ale` makes, put together by hand."""
    game = gymnasium.make("ALE/Pong-v5", frameskip=1, disable_env_checker=True)
    return TimeLimit(FrameStackObservation(AtariPreprocessing(game), 4), LIMIT)


def ale(game="Pong", num_envs=2, **kwargs):
    return fc.make_env(f"ale/{game}", num_envs=num_envs, **{"max_episode_steps": LIMIT, **kwargs})


@pytest.mark.parametrize("seed", range(scaled(1)))
@pytest.mark.parametrize("num_envs", [2, *in_soak([None])])
def test_pong_equals_the_plain_loop(num_envs, seed):
    keys = ["lives", "episode_frame_number"]
    env = ale(num_envs=num_envs, info_keys=keys)
    batch = collect(env, fc.random_policy(env), 40, 20, seed=seed)
    assert batch["next", "truncated"].any()
    check_lanes(batch, build, seed, info_keys=keys, reseed=False)


def test_screens_of_another_kind():
    env = ale(num_envs=None, noop_max=0, frame_skip=2, stack=1, grayscale=False, screen_size=42)
    assert collect(env, fc.random_policy(env), 3, seed=0)["observation"].shape == (3, 1, 42, 42, 3)


@pytest.mark.parametrize("grayscale", [True, *in_soak([False])])
def test_a_game_is_filmed_in_colour(grayscale, tmp_path):
    env = ale(num_envs=None, max_episode_steps=4, grayscale=grayscale, render_mode="rgb_array")
    stats = fc.record(env, fc.random_policy(env), tmp_path / "film.gif", seed=4)
    assert stats.lengths.tolist() == [4]
    with Image.open(tmp_path / "film.gif") as film:
        assert (film.n_frames, film.size) == (4 + 1, (160, 210))
        assert any(len(set(colour)) > 1 for _, colour in film.convert("RGB").getcolors())


def walk(env, lengths, copied="fork"):
    """A run with a copy after every part, the parts, and the copies."""
    policy = fc.random_policy(env)
    state = fc.init(env, policy, seed=3)
    parts, forks = [], [COPIES[copied](env, policy, state)]
    for length in lengths:
        state, part = fc.rollout(env, policy, state, length)
        parts.append(part)
        forks.append(COPIES[copied](env, policy, state))
    return policy, state, parts, forks


@pytest.mark.parametrize(
    ("sticky", "copied"), [(0.25, "fork"), *in_soak([(0.0, "file"), (0.25, "file"), (0.75, "fork")])]
)
def test_a_copy_goes_on_as_its_source_does(monkeypatch, sticky, copied):
    """Through the ends of episodes, whether it starts from a copy of the game or from the seed."""
    monkeypatch.setattr(atari_lanes, "_APART", 20)
    env = ale(num_envs=1, max_episode_steps=30, noop_max=5, repeat_action_probability=sticky)
    policy, state, parts, forks = walk(env, [17, 55], copied)
    parts.append(fc.rollout(env, policy, state, 100)[1])
    assert torch.cat(parts, -1)["next", "done"].sum() >= 5
    for first in range(3):
        own, rest = COPIES[copied](env, policy, forks[first]), torch.cat([part.clone() for part in parts[first:]], -1)
        assert_same(fc.rollout(env, policy, own, rest.shape[-1])[1], rest)


@pytest.mark.parametrize("copied", ["file", *in_soak(["fork"])])
def test_a_copy_knows_the_action_that_is_repeated(monkeypatch, copied):
    """Nine frames of ten repeat it, and no copy of a game holds it: a fork from the last copy would go another way."""
    monkeypatch.setattr(atari_lanes, "_APART", 12)
    env = ale(num_envs=1, max_episode_steps=200, noop_max=3, repeat_action_probability=0.9)
    policy, state, parts, forks = walk(env, [25, 12, 12], copied)  # one step after a copy
    parts.append(fc.rollout(env, policy, state, 4)[1])
    for taken, fork in enumerate(forks[1:], 1):
        assert_same(fc.rollout(env, policy, fork, 4)[1], torch.cat(parts[taken:], -1)[:, :4])


@pytest.mark.evening
def test_a_fork_of_a_fork_and_of_lanes_that_were_reset():
    env = ale("Breakout", max_episode_steps=30)
    policy, state, _, _ = walk(env, [12])
    state = fc.reset(env, state, torch.tensor([False, True]))
    child = fc.fork(env, fc.fork(env, state))
    assert_same(fc.rollout(env, policy, child, 50)[1], fc.rollout(env, policy, state, 50)[1])


@pytest.mark.parametrize("copied", ["file", *in_soak(["fork"])])
def test_a_copy_of_lanes_that_stay_finished(copied):
    env = ale(max_episode_steps=10)
    with fc.SyncDataCollector(env, frames_per_batch=30, reset_when_done=False, seed=1) as collector:
        next(collector)
        state = collector.state
        assert state.truncated.all()
        collector.state, other = COPIES[copied](env, collector.policy, state), state
        one = next(collector)
        collector.state = other
        assert_same(next(collector), one)


class Remembering(gymnasium.Wrapper):
    def __init__(self, env, memory):
        super().__init__(env)
        self.memory = memory


def test_a_wrapper_that_cannot_be_copied_is_named_by_copies_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(atari_lanes, "_APART", 10)
    env, policy, state = fresh(lambda: Remembering(build(), (step for step in range(9))), steps=30)
    says = ("Remembering", "cannot pickle 'generator'", "leave out the wrapper", "has not changed")
    with refused(fc.ReplayError, says):
        fc.fork(env, state)
    with refused(fc.ReplayError, says[:2]):
        fc.save(tmp_path / "state", state)
    assert not (tmp_path / "state").exists()
    fc.rollout(env, policy, state, 3)


def test_a_wrapper_that_is_no_plain_data_is_named_by_save_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(atari_lanes, "_APART", 10)
    env, policy, state = fresh(lambda: Remembering(build(), Image.new("L", (2, 2))), steps=30)
    with refused(fc.ReplayError, ("memory", "cannot be saved as data", "episodes='restart'")):
        fc.save(tmp_path / "state", state)
    fc.save(tmp_path / "state", state, episodes="restart")
    loaded = fc.load(tmp_path / "state", env, policy)
    assert (loaded.steps, loaded.traj_ids.tolist()) == (state.steps, [state.traj_ids.item() + 1])
    twin = fc.fork(env, state)
    assert_same(fc.rollout(env, policy, state, 3)[1], fc.rollout(env, policy, twin, 3)[1])


@pytest.mark.parametrize("source", ["id", "factory", "instance", "list"])
def test_a_game_is_known_under_any_wrappers(source):
    transformed = [build, lambda: gymnasium.wrappers.TransformReward(build(), lambda reward: reward)]
    given = {"id": "ALE/Pong-v5", "factory": build, "instance": build(), "list": transformed}
    env = fc.make_env(given[source])
    assert (env.seeding, env.forking) == ("lane", "snapshot")
    plan = fc.explain(env, fc.random_policy(env))
    assert plan.seeding.startswith("lane: each lane is seeded once")
    assert "repeats the steps since" in plan.forking


class NoGame(gymnasium.Env):
    observation_space = spaces.Box(0, 255, (4, 84, 84), dtype="uint8")
    action_space = spaces.Discrete(6)


def given(name, value, why):
    return Misuse(name, lambda: ale(**{name: value}), ValueError, f"{name} cannot be given … {why}")


@table(
    ("an unknown game", lambda: fc.make_env("ale/Pung"), ValueError, "no Atari game 'Pung' … write"),
    ("1.5", lambda: ale(repeat_action_probability=1.5), ValueError, "action_probability is 1.5 … expected"),
    given("frameskip", 2, "its name here is frame_skip"),
    given("obs_type", "ram", "grayscale=False"),
    ("gravity", lambda: ale(gravity=3), TypeError, "cannot make 'ALE/Pong-v5' … 'gravity' … leave out"),
    ("no environment", lambda: fc.envs.from_gymnasium([lambda: 3]), TypeError, "factory returned int … return"),
    ("others", lambda: runs(fc.make_env([build, NoGame])), ValueError, "lane 1 is … lane 0 is … a separate batch"),
)
def test_a_game_given_wrongly(misuse):
    with refused(misuse.error, misuse.says):
        misuse.do()
