import math

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import funcollect as fc
from funcollect.envs import CartPole, Pendulum
from funcollect.keys import LaneKeys, Purpose, key_from_seed
from tests.support.compare import collect, fresh
from tests.support.envs.own_envs import InParts

LANES = 6
both = pytest.mark.parametrize(("name", "make"), [("CartPole-v1", CartPole), ("Pendulum-v1", Pendulum)])


def keys(lanes, episodes, seed=0):
    return LaneKeys.of(key_from_seed(seed), Purpose.RESET, torch.tensor(lanes), torch.tensor(episodes))


def start(env, lanes=LANES, seed=0, episode=0):
    return env.reset(keys(list(range(lanes)), [episode] * lanes, seed), None)[0]


def step(env, state, action):
    return env.step(keys([0] * len(state), [0] * len(state)), state, action, None)


def peer(name, state):
    """Gymnasium's environment at the same point."""
    env = gymnasium.make(name, disable_env_checker=True)
    env.reset(seed=0)
    env.unwrapped.state = state.numpy().copy()
    return env


def to_gymnasium(action):
    return int(action) if action.dtype == torch.int64 else action.numpy()


def random_actions(env, count):
    generator = torch.Generator().manual_seed(3)
    if isinstance(env, CartPole):
        return torch.randint(2, (count, LANES), generator=generator)
    return torch.randn(count, LANES, 1, generator=generator) * 2  # some beyond the bounds, where it is clipped


@both
def test_every_step_is_gymnasiums_step(name, make):
    """From the same float64 state and action: the same state, observation, reward and termination."""
    env = make(LANES)
    state, fallen = start(env), 0
    for action in random_actions(env, 60):
        peers = [peer(name, row) for row in state]
        answer = step(env, state, action)
        for lane, other in enumerate(peers):
            observation, reward, terminated, _, _ = other.step(to_gymnasium(action[lane]))
            wanted = torch.from_numpy(np.asarray(other.unwrapped.state, np.float64))
            torch.testing.assert_close(answer.env_state[lane], wanted, rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(answer.observation[lane], torch.from_numpy(observation), rtol=2e-7, atol=1e-9)
            assert float(answer.reward[lane]) == pytest.approx(float(reward), rel=2e-7)
            assert bool(answer.terminated[lane]) == terminated
        fallen += int(answer.terminated.sum())
        state = torch.where(answer.terminated[:, None], start(env, episode=fallen), answer.env_state)
    assert fallen > 3 or name == "Pendulum-v1"


@pytest.mark.parametrize("bound", ["position", "angle"])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_a_cart_pole_terminates_beyond_its_bounds_and_not_at_them(bound, sign):
    column, limit = (0, CartPole.max_position) if bound == "position" else (2, CartPole.max_angle)
    state = torch.zeros(2, 4, dtype=torch.float64)
    state[0, column], state[1, column] = sign * limit, sign * math.nextafter(limit, 9)
    assert step(CartPole(2), state, torch.zeros(2).long()).terminated.tolist() == [False, True]


def test_starts_have_gymnasiums_distribution():
    poles, pendulums = start(CartPole(), 4000), start(Pendulum(), 4000)
    for column, bound in [(poles[:, i], 0.05) for i in range(4)] + [(pendulums[:, 0], math.pi), (pendulums[:, 1], 1)]:
        assert column.abs().max() < bound
        assert column.abs().max() > 0.99 * bound
        assert abs(column.mean()) < 4.5 * bound / math.sqrt(3 * 4000)


@both
def test_spaces_are_gymnasiums(name, make):
    other, env = gymnasium.make(name), make()
    assert env.action_space == other.action_space
    assert env.observation_space.shape == other.observation_space.shape
    assert env.observation_space.dtype == other.observation_space.dtype
    assert env.max_episode_steps == gymnasium.spec(name).max_episode_steps
    assert repr(make(3)) == f"{make.__name__}(num_envs=3)"


class Grid(InParts):
    """A walk whose observation is a Dict: the place, and how often each side was chosen."""

    observation_space = spaces.Dict(place=spaces.Box(-99, 99, (1,)), counts=spaces.Dict(left=spaces.Discrete(99)))
    action_space = spaces.Discrete(2)
    max_episode_steps = 5

    def start(self, uniforms):
        return {"place": (uniforms * 10).round(), "left": torch.zeros(len(uniforms), dtype=torch.long)}

    def observe(self, place):
        return {"place": place["place"].float(), "counts": {"left": place["left"]}}

    def move(self, place, action):
        moved = {"place": place["place"] + 2 * action[:, None] - 1, "left": place["left"] + (1 - action)}
        return moved, moved["place"][:, 0].float(), moved["left"] >= 4


@pytest.mark.parametrize("num_envs", [None, 3])
def test_a_subclass_with_a_dict_observation(num_envs):
    env = Grid(num_envs)
    batch = collect(env, fc.random_policy(env), 40)
    left, step = batch["next", "counts", "left"], batch["collector", "step"]
    assert batch["counts", "left"][step == 0].eq(0).all()
    assert torch.equal(left, batch["counts", "left"] + 1 - batch["action"])
    assert torch.equal(batch["next", "place"], batch["place"] + 2.0 * batch["action"][..., None] - 1)
    assert torch.equal(batch["next", "reward"], batch["next", "place"])
    assert torch.equal(batch["next", "terminated"][..., 0], left >= 4)
    assert torch.equal(batch["next", "truncated"][..., 0], step == 4)


@pytest.mark.parametrize(("later", "says"), [
    ({}, r"are \[\], expected \['x'\] as in the steps before"),
    ({"x": torch.ones(2), "y": torch.ones(2)}, r"are \['x', 'y'\], expected \['x'\]"),
    ({"x": torch.ones(2, dtype=torch.int64)}, r"info 'x' .* is torch.int64 \(2,\), expected torch.float32 \(2,\)"),
    ({"x": 1.0}, r"info 'x' .* is float, expected torch.float32 \(2,\)"),
])  # fmt: skip
def test_later_infos_are_like_the_first_ones(later, says):
    class Informed(CartPole):
        def __init__(self, lanes):
            super().__init__(lanes)
            self.infos = [later, {"x": torch.ones(2)}]

        def step(self, *args):
            return super().step(*args)._replace(info=self.infos.pop())

    env, policy, state = fresh(Informed(2))
    with pytest.raises(fc.EnvError, match=says):
        fc.rollout(env, policy, state, 2)
