import gymnasium
import pytest
import torch

import funcollect as fc
from tests.support.compare import fresh
from tests.support.envs.counting import Counting, always, make_counting

# An environment that counts its resets begins differently when it is reset again.
pytestmark = pytest.mark.filterwarnings("ignore:.* begun again from its seed:UserWarning")
COIN = fc.torch_policy(lambda x: torch.tensor([0.0, 0.4, -99.0]).expand(len(x), 3), head=fc.heads.categorical)
LANES = [{"lengths": (1,)}, {"lengths": (2,)}, {"lengths": (3,), "truncated": (0,)}]


@pytest.mark.parametrize("backend", ["host", "vector", "torch"])
@pytest.mark.parametrize(("episodes", "quota"), [(1, [1, 0, 0]), (3, [1, 1, 1]), (7, [3, 2, 2]), (90, [30] * 3)])
def test_each_lane_gives_its_first_episodes_however_long_they_are(episodes, quota, backend):
    stats = fc.evaluate(make_counting(backend, *LANES), always(1), episodes=episodes, seed=0)
    counted = [(lane, number) for lane, count in enumerate(quota) for number in range(count)]
    assert stats.lanes.tolist() == [lane for lane, _ in counted]
    assert stats.lengths.tolist() == [lane + 1 for lane, _ in counted]
    assert stats.traj_ids.tolist() == [3 * number + lane for lane, number in counted]
    rewards = [[10 * number + step + 1 / 4 for step in range(lane + 1)] for lane, number in counted]
    assert stats.returns.tolist() == [*map(sum, rewards)]
    assert stats.terminated.tolist() == [each != (2, 0) for each in counted]
    assert stats.open_returns == {}


def test_it_is_deterministic_unless_told_otherwise():
    env = make_counting("host", {"lengths": (40,)}, {"lengths": (40,)})
    modes, drawn = (
        fc.evaluate(env, COIN, episodes=2, seed=0, **kwargs).returns - sum(range(40))
        for kwargs in ({}, {"exploration_type": fc.ExplorationType.RANDOM})
    )
    assert modes.tolist() == [10, 10]
    assert (drawn < 10).all()
    assert (drawn > 1).all()


def test_params_act_in_place_of_the_policys_own():
    env, policy = make_counting("host", *LANES), fc.torch_policy(torch.nn.Linear(3, 3), head=fc.heads.categorical)
    for action in (0, 2):
        params = {"weight": torch.zeros(3, 3), "bias": torch.eye(3)[action]}
        stats = fc.evaluate(env, policy, episodes=3, seed=0, params=params)
        assert stats.returns.tolist() == [action / 4, 1 + action / 2, 3 + 3 * action / 4]


def test_a_run_goes_on_undisturbed_during_an_evaluation():
    """The run uses the instance; the evaluation uses another one, rebuilt from its spec."""
    env, policy, state = fresh(gymnasium.make("CartPole-v1"), steps=20)
    fc.evaluate(env, policy, episodes=2, seed=1)
    observation = fc.rollout(env, policy, state, 20)[1]["observation"]
    other = fc.make_env("CartPole-v1")
    plain = fc.rollout(other, policy, fc.init(other, policy, seed=0), 40)[1]["observation"]
    assert torch.equal(observation, plain[20:])


@pytest.mark.parametrize("count", [1, 3])
def test_simulators_are_closed_whether_or_not_it_succeeds(count):
    closed = []

    class Closing(Counting):
        def close(self):
            closed.append(self.lengths)

    def evaluate(length, **kwargs):
        env = fc.make_env([lambda: Closing(lengths=(length,))] * count)
        return fc.evaluate(env, always(1), episodes=2, seed=0, **kwargs)

    evaluate(5)
    with pytest.raises(fc.EvaluationError, match=r"0 of 2 episodes ended within max_frames=200.*time limit") as caught:
        evaluate(10**9, max_frames=200)
    assert caught.tb is not None  # it keeps the frames of the call alive, and all their variables
    assert closed == [(5,)] * count + [(10**9,)] * count
