from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import funcollect as fc


class Fixed(gymnasium.Env):
    """Lane `l` has episodes of l + 1 steps; the reward is the action plus ten times the episode's number."""

    observation_space = spaces.Box(0, 9, (1,))
    action_space = spaces.Discrete(2)
    closed: list[int] = []  # noqa: RUF012

    def __init__(self, lane: int, length: int | None = None) -> None:
        self.lane, self.length, self.episode = lane, length or lane + 1, -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t, self.episode = 0, self.episode + 1
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.zeros(1, np.float32), action + 10.0 * self.episode, self.t == self.length, False, {}

    def close(self) -> None:
        Fixed.closed.append(self.lane)


def lanes(count: int) -> Any:
    return fc.make_env([lambda lane=lane: Fixed(lane) for lane in range(count)])


ONE = fc.torch_policy(lambda x: torch.ones(len(x)).long())
COIN = fc.torch_policy(lambda x: torch.tensor([0.0, 0.4]).expand(len(x), 2), head=fc.heads.categorical)


@pytest.mark.parametrize(("episodes", "quota"), [(1, [1, 0, 0]), (3, [1, 1, 1]), (7, [3, 2, 2]), (300, [100] * 3)])
def test_each_lane_gives_its_first_episodes_however_long_they_are(episodes: int, quota: list[int]) -> None:
    stats = fc.evaluate(lanes(3), ONE, episodes=episodes, seed=0)
    assert len(stats) == episodes
    assert stats.lanes.tolist() == [lane for lane, count in enumerate(quota) for _ in range(count)]
    assert stats.lengths.tolist() == [lane + 1 for lane in stats.lanes.tolist()]
    numbers = [number for count in quota for number in range(count)]
    assert stats.returns.tolist() == [
        (lane + 1) * (1 + 10.0 * number) for lane, number in zip(stats.lanes.tolist(), numbers, strict=True)
    ]
    assert stats.terminated.all()
    assert stats.open_returns == {}


def test_it_is_deterministic_unless_told_otherwise() -> None:
    env = fc.make_env([lambda: Fixed(0, 40)] * 2)
    assert fc.evaluate(env, COIN, episodes=2, seed=0).returns.tolist() == [40, 40]
    drawn = fc.evaluate(env, COIN, episodes=2, seed=0, exploration_type=fc.ExplorationType.RANDOM)
    assert (drawn.returns < 40).all()
    assert (drawn.returns > 5).all()


def test_the_same_seed_gives_the_same_statistics_and_generators_stay() -> None:
    env = fc.make_env("CartPole-v1", num_envs=3)
    policy = fc.random_policy(env)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    one, two, other = (fc.evaluate(env, policy, episodes=8, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.returns, two.returns)
    assert not torch.equal(one.returns, other.returns)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()


def test_it_agrees_with_episodes_found_by_hand_in_a_rollout() -> None:
    env = fc.make_env("CartPole-v1", num_envs=2)
    policy = fc.random_policy(env)
    batch = fc.rollout(env, policy, fc.init(env, policy, seed=3), 400)[1]
    ends = [row.nonzero()[:2, 0] for row in batch["next", "done"][..., 0]]
    wanted = [int(end) - int(start) for row in ends for start, end in [(-1, row[0]), (row[0], row[1])]]
    assert fc.evaluate(env, policy, episodes=4, seed=3).lengths.tolist() == wanted


def test_params_act_in_place_of_the_policys_own() -> None:
    module = torch.nn.Linear(1, 2)
    params = {"weight": torch.zeros(2, 1), "bias": torch.tensor([0.0, 1.0])}
    policy = fc.torch_policy(module, head=fc.heads.categorical)
    assert fc.evaluate(lanes(2), policy, episodes=2, seed=0, params=params).returns.tolist() == [1, 2]
    params["bias"] = torch.tensor([1.0, 0.0])
    assert fc.evaluate(lanes(2), policy, episodes=2, seed=0, params=params).returns.tolist() == [0, 0]


def test_a_run_goes_on_undisturbed_during_an_evaluation() -> None:
    """An instance backs the run; the evaluation is on one rebuilt from its spec."""
    env = fc.make_env(gymnasium.make("CartPole-v1"))
    policy = fc.random_policy(env)
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), 20)
    fc.evaluate(env, policy, episodes=2, seed=1)
    observation = fc.rollout(env, policy, state, 20)[1]["observation"]
    other = fc.make_env("CartPole-v1")
    plain = fc.rollout(other, policy, fc.init(other, policy, seed=0), 40)[1]["observation"]
    assert torch.equal(observation, plain[20:])


@pytest.mark.parametrize("count", [1, 3])
def test_simulators_are_closed_whether_or_not_it_succeeds(count: int) -> None:
    Fixed.closed.clear()
    fc.evaluate(lanes(count), ONE, episodes=2, seed=0)
    assert sorted(Fixed.closed) == list(range(count))
    Fixed.closed.clear()
    with pytest.raises(fc.EvaluationError, match=r"0 of 2 episodes ended within max_frames=200.*time limit") as caught:
        fc.evaluate(fc.make_env([lambda: Fixed(5, 10**9)] * count), ONE, episodes=2, seed=0, max_frames=200)
    assert caught.tb is not None  # which keeps the frames of the call, and what stands in them, alive
    assert Fixed.closed == [5] * count
