"""Episodes of one life each: the next one goes on with the game, as under Stable-Baselines3's wrapper."""

import ale_py
import envpool
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import VectorEnv
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, TimeLimit
from stable_baselines3.common.atari_wrappers import AtariWrapper, EpisodicLifeEnv, FireResetEnv
from torchrl.envs import GymWrapper

import funcollect as fc
from funcollect.envs.base import has_game_of_lives
from funcollect.envs.gymnasium_envs import atari_lanes
from funcollect.keys import Purpose, fold, key_from_seed
from tests.envs.conftest import VECTORS
from tests.support.compare import COPIES, assert_same, collect
from tests.support.plain import plain_loop
from tests.support.running import FORKS_OF_RAY, in_soak, once

gymnasium.register_envs(ale_py)
LIVES = ("next", "info", "lives")


def build(theirs=False):
    """Breakout without skipped frames, whose episodes end with a life by Gymnasium's wrapper or by `theirs`."""
    game = gymnasium.make("ALE/Breakout-v5", frameskip=1, disable_env_checker=True)
    game = AtariPreprocessing(game, frame_skip=1, terminal_on_life_loss=not theirs)
    return TimeLimit(FrameStackObservation(EpisodicLifeEnv(game) if theirs else game, 4), 5000)


def fire(observation):
    """Starts the ball, and loses it."""
    return torch.ones(len(observation), dtype=torch.int64)


POLICY = fc.torch_policy(fire)
LOSING = {"terminal_on_life_loss": True, "info_keys": ["lives"]}
ENVS = {
    "id": lambda: fc.make_env("ale/Breakout", num_envs=2, frame_skip=1, **LOSING, max_episode_steps=5000),
    "factory": lambda: fc.make_env(build, num_envs=2, info_keys=["lives"]),
    "instances": lambda: fc.make_env([build(), build()], info_keys=["lives"]),
    "workers": lambda: fc.make_env(build, num_envs=2, num_workers=2, info_keys=["lives"]),
}


@pytest.mark.parametrize("source", ["workers", *in_soak(["id", "factory", "instances"])])
def test_the_game_goes_on_after_a_lost_life(source):
    batch = collect(ENVS[source](), POLICY, 700, seed=0)
    for lane, rows in enumerate(batch):
        where = {"lane": lane, "lanes": 2, "info_keys": ["lives"], "reseed": False}
        wanted = plain_loop(build(theirs=True), seed=0, actions=rows["action"].tolist(), **where)
        ended = rows["next", "done"][:, 0]
        assert rows[LIVES][ended].tolist()[:6] == [4, 3, 2, 1, 0, 4]
        for path, column in wanted.items():
            # Gymnasium's wrapper returns the screen before the loss of a life, theirs the one after it
            rest = ~ended if path == ("next", "observation") else slice(None)
            assert torch.equal(rows[path][rest], column[rest]), path


def test_envpool_goes_on_after_a_lost_life():
    env = fc.make_env("envpool/Breakout-v5", num_envs=2, episodic_life=True, info_keys=["lives"])
    for lane, rows in enumerate(collect(env, POLICY, 200, seed=0)):
        seed = fold(key_from_seed(0), Purpose.RESET, lane, 0)[0] % 2**31
        pool = envpool.make_gymnasium("Breakout-v5", num_envs=1, seed=[seed], episodic_life=True)
        observation, _ = pool.reset()
        for row in rows:
            assert np.array_equal(row["observation"].numpy(), observation[0])
            observation, _, terminated, _, info = pool.step(row["action"].numpy()[None])
            assert (row[LIVES].item(), row["next", "terminated"].item()) == (info["lives"][0], terminated[0])
            if terminated[0]:
                observation = pool.step(np.zeros(1, np.int64))[0]
        pool.close()
        assert rows[LIVES][rows["next", "done"][:, 0]].tolist()[:6] == [4, 3, 2, 1, 0, 4]


def test_a_torchrl_environment_says_that_its_game_begins_again():
    wrapped = GymWrapper(build(), categorical_action_encoding=True)
    with pytest.warns(UserWarning, match="GymWrapper restarts its Atari game at each lost life .* pass the gymnasium"):
        fc.make_env(wrapped)


def test_a_lane_that_is_made_to_find_its_game_is_closed():
    class Closing(gymnasium.Wrapper):
        def close(self):
            closed.append(self)
            super().close()

    vector, closed = VectorEnv(), []
    vector.env_fns = [lambda: Closing(build())]
    assert has_game_of_lives(vector)
    assert len(closed) == 1


def theirs_with_fire(game, whole):
    """Stable-Baselines3's wrappers over Gymnasium's preprocessing, or `whole` its own `AtariWrapper`."""
    game = gymnasium.make(f"ALE/{game}-v5", frameskip=1, disable_env_checker=True)
    return AtariWrapper(game, clip_reward=False) if whole else FireResetEnv(EpisodicLifeEnv(AtariPreprocessing(game)))


@pytest.mark.parametrize(("game", "whole"), [("Breakout", True), *in_soak([("Breakout", False), ("Pong", True)])])
def test_the_ball_is_served_as_by_stable_baselines(game, whole):
    keys = ["lives", "episode_frame_number", "frame_number"]
    options = {"terminal_on_life_loss": True, "fire_reset": True, "stack": 1, "info_keys": keys}
    env = fc.make_env(f"ale/{game}", num_envs=2, **options)
    for lane, rows in enumerate(collect(env, fc.random_policy(env), 300 if game == "Breakout" else 1300, seed=0)):
        where = {"lane": lane, "lanes": 2, "info_keys": keys, "reseed": False}
        wanted = plain_loop(theirs_with_fire(game, whole), seed=0, actions=rows["action"].tolist(), **where)
        assert rows["next", "done"].sum() > (5 if game == "Breakout" else 0)
        for path, column in wanted.items():
            if "observation" not in path:
                assert torch.equal(rows[path], column), path
            elif not whole:  # the other one scales colours, and makes them grey in another way
                assert torch.equal(rows[path].squeeze(1), column), path


@pytest.mark.parametrize(("copied", "apart"), once(COPIES, [20, 500]))
def test_a_copy_is_in_the_same_life(monkeypatch, copied, apart):
    monkeypatch.setattr(atari_lanes, "_APART", apart)
    env = fc.make_env("ale/Breakout", num_envs=2, **LOSING, fire_reset=apart == 20)
    with fc.SyncDataCollector(env, POLICY, frames_per_batch=120, reset_when_done=False, seed=1) as collector:
        next(collector)
        state = collector.state
        assert state.terminated.all()
        copy = COPIES[copied](env, POLICY, state)
        one, two = (fc.rollout(env, POLICY, fc.reset(env, each), 40)[1] for each in (state, copy))
        assert_same(one, two)
        assert one[LIVES][:, 0].tolist() == [4, 4]


@pytest.mark.parametrize("name", ["ale/Breakout", "envpool/Breakout-v5"])
def test_a_reset_within_a_life_begins_another_game(name):
    option = {"terminal_on_life_loss": True} if name.startswith("ale") else {"episodic_life": True}
    env = fc.make_env(name, num_envs=2, info_keys=["lives"], **option)
    state, batch = fc.rollout(env, POLICY, fc.init(env, POLICY, seed=0), 36)
    assert batch[LIVES][:, -1].tolist() == [4, 4]
    state = fc.reset(env, state, torch.tensor([True, False]))
    state, batch = fc.rollout(env, POLICY, state, 1)
    assert batch[LIVES][:, 0].tolist() == [5, 4]
    state, batch = fc.rollout(env, POLICY, fc.recover(env, state), 60, max_frames_per_traj=10)
    assert batch[LIVES].unique().tolist() == [5]
    fc.close(state)


@FORKS_OF_RAY  # and those of `AsyncVectorEnv`
@pytest.mark.parametrize("kind", VECTORS.values(), ids=VECTORS)
def test_a_vector_of_such_games_is_refused(kind):
    vector = kind([build], autoreset_mode=gymnasium.vector.AutoresetMode.DISABLED)
    with pytest.raises(ValueError, match=r"restarts them at each lost life, .* pass the list of its functions"):
        fc.make_env(vector)
    vector.close()


def test_an_instance_is_given_back_as_it_was():
    game = build()
    before = str(game)
    env = fc.make_env(game)
    state = fc.init(env, POLICY, seed=0)
    assert str(game) != before
    fc.close(state)
    assert str(game) == before
