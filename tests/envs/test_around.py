"""What `make_env` puts around environments of any kind: clipped actions and rewards, and the last step as an input."""

from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control import PendulumEnv
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from torch import nn

import funcollect as fc
from tests.envs.test_own_environments import JaxWalk, TorchWalk
from tests.envs.test_torch_vector_env import LikeManiSkill
from tests.support.compare import assert_same, collect, fresh
from tests.support.envs.light_envs import Sampling
from tests.support.running import SCALE, in_soak

INPUTS = ("prev_action", "prev_reward", "is_first")


class Hosted(fc.envs.HostEnvBase):
    """Counts to five in each lane; observations are dicts."""

    observation_space = spaces.Dict(count=spaces.Box(0, 99, (1,)))
    action_space = spaces.Box(-1.0, 1.0, (2,))
    truncates = True

    def open(self):
        return HostedLanes(self)


class HostedLanes(fc.envs.SimulatorsBase):
    def __init__(self, env):
        super().__init__(env)
        self.count = np.zeros((env.num_envs or 1, 1), np.float32)

    def reset(self, lanes, seeds):
        self.count[lanes] = self.observation["count",][lanes] = 0

    def step(self, lanes, actions):
        assert (np.abs(np.asarray(actions)) <= 1).all()
        self.count[lanes] += 1
        self.observation["count",][lanes] = self.count[lanes]
        over = (self.count[lanes, 0] >= 5).tolist()
        return (np.asarray(actions).sum(-1) * 3.0).tolist(), over, [False] * len(over), ()


ENVS = {
    "Gymnasium": ("Pendulum-v1", {"max_episode_steps": 9}),
    "workers": ("Pendulum-v1", {"max_episode_steps": 9, "num_workers": 2}),
    "discrete, in workers": ("CartPole-v1", {"num_workers": 2}),
    "one-hot": ("CartPole-v1", {"one_hot": True}),
    "Torch": ("torch/Pendulum-v1", {"max_episode_steps": 9}),
    "JAX": ("gymnax/Pendulum-v1", {"max_episode_steps": 9}),
    "host class": (Hosted, {}),
    "Torch class": (TorchWalk, {}),
    "JAX class": (JaxWalk, {}),
    "device": (None, {}),
    "lanes that reset late": (partial(CartPoleVectorEnv, 4, max_episode_steps=9), {"num_envs": None}),
    "asynchronous pool": ("envpool/CartPole-v1", {"batch_size": 2, "max_episode_steps": 9}),
}


def made(name, **around):
    env, kwargs = ENVS[name]
    if env is None:
        return fc.make_env(fc.envs.from_torch_vector_env(LikeManiSkill), **around)
    return fc.make_env(env, **{"num_envs": 4, **kwargs}, **around)


def wide(env):
    """A policy whose actions go beyond the bounds of a Box; random for other spaces."""
    if not isinstance(env.action_space, spaces.Box):
        return fc.random_policy(env)
    size = int(np.prod(env.action_space.shape))
    return fc.torch_policy(Wide(size), head=fc.heads.normal)


class Wide(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, observation):
        first = observation["is_first"] if isinstance(observation, dict) else observation
        zeros = torch.zeros(len(first), self.size)
        return torch.cat([zeros, zeros + 2.0], -1)


@pytest.mark.parametrize("name", [name for name in ENVS if SCALE > 1 or name != "JAX class"])  # "JAX" compiles, too
def test_what_is_observed_is_what_was_executed(name):
    box = isinstance(made(name).action_space, spaces.Box)
    env = made(name, inputs=INPUTS, clip_rewards=True, clip_actions=box)
    policy = wide(env)
    batch = collect(env, policy, 17, 17, seed=0)
    first, reward, executed = batch["is_first"], batch["next", "reward"], batch["action"]
    if box:
        assert (executed.abs() > torch.from_numpy(env.action_space.high)).any()
        executed = executed.clamp(*map(torch.from_numpy, (env.action_space.low, env.action_space.high)))
    if env.action_spec.one_hot:
        executed = executed.argmax(-1)
    assert first[:, 0].all()
    assert torch.equal(first[:, 1:], batch["next", "done"][:, :-1])
    assert 4 < first.sum() < first.numel()
    assert (batch["next", "prev_action"] == executed).all()
    assert torch.equal(batch["next", "prev_reward"], reward)
    begins = first[..., 0] if executed.ndim == 2 else first
    assert (batch["prev_action"][:, 1:] == torch.where(begins[:, 1:], 0, executed[:, :-1])).all()
    assert torch.equal(batch["prev_reward"][:, 1:], torch.where(first[:, 1:], 0.0, reward[:, :-1]))
    assert torch.equal(reward[..., 0], batch["next", "info", "reward"].sign())


@pytest.mark.parametrize("name", ["Gymnasium", "workers", "Torch", "JAX", "host class"])
def test_the_environment_is_the_same_inside(name):
    """Random starts are uniform in the bounds, and observations do not change."""
    plain, env = made(name), made(name, inputs=INPUTS, clip_actions=True)
    assert env.action_space == plain.action_space
    rollouts = [collect(each, fc.random_policy(each), 25, seed=3) for each in (plain, env)]
    for key in rollouts[0].keys(include_nested=True, leaves_only=True):
        assert torch.equal(rollouts[0][key], rollouts[1][key])


def test_clipped_actions_are_in_bounds_that_float32_would_round_outwards():
    class Thirds(PendulumEnv):
        def __init__(self):
            super().__init__()
            self.action_space = spaces.Box(-1 / 3, 1 / 3, (1,), np.float64)

        def step(self, action):
            assert self.action_space.contains(action)
            return super().step(action)

    env = fc.make_env(Thirds, num_envs=2, clip_actions=True)
    fc.rollout(env, wide(env), fc.init(env, wide(env), seed=0), 20)


@pytest.mark.parametrize("env", ["Pendulum-v1", Hosted, *in_soak(["torch/Pendulum-v1", "gymnax/Pendulum-v1"])])
def test_they_pass_the_checks_of_environments(env):
    fc.testing.check_env(fc.make_env(env, num_envs=2, inputs=INPUTS, clip_actions=True, clip_rewards=True))


@pytest.mark.parametrize("workers", [2, *in_soak([0])])
def test_copies_of_games_go_on_with_the_last_step(workers, tmp_path):
    options = {"inputs": INPUTS, "clip_rewards": True, "num_workers": workers, "noop_max": 3}
    env, policy, state = fresh("ale/Pong", steps=12, num_envs=2, **options)
    fc.save(tmp_path / "state", state)
    copies = [fc.fork(env, state), fc.load(tmp_path / "state", env, policy), state]
    first, *others = [fc.rollout(env, policy, each, 12)[1] for each in copies]
    for other in others:
        assert_same(first, other)
    assert not first["is_first"].any()


def test_a_recurrent_policy_reads_its_executed_actions():
    """Also after random first frames, and when a batch is evaluated again."""

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.logits = nn.Linear(2, 2)

        def forward(self, observation, memory):
            memory = memory + observation["prev_reward"] + observation["prev_action"][:, None]
            return self.logits(torch.cat([memory, observation["is_first"].float()], -1)), memory

    env = fc.make_env("CartPole-v1", num_envs=4, inputs=INPUTS)
    policy = fc.torch_policy(Reads(), head=fc.heads.categorical, initial_state=torch.zeros(1), record_state=True)
    options = {"frames_per_batch": 80, "total_frames": 160, "init_random_frames": 40, "seed": 0}
    with fc.SyncDataCollector(env, policy, **options) as collector:
        _, batch = collector
        again = fc.evaluate_actions(policy, None, batch)["action_log_prob"]
        assert torch.allclose(again, batch["action_log_prob"], atol=1e-5)


STARTS = {
    "box": spaces.Box(1, 2, (1,)),  # 0 is not in it
    "above": spaces.Discrete(3, start=5),
    "below": spaces.Discrete(2, start=-4),
    "several": spaces.MultiDiscrete([2, 3, 2], start=[1, -5, 0]),
}


@pytest.mark.parametrize("name", STARTS)
def test_the_first_previous_action_lies_in_its_space(name):
    env = fc.make_env(partial(Sampling, action_space=STARTS[name]), num_envs=2, inputs=["prev_action"])
    fc.testing.check_env(env, steps=20)
    seen = env.observation_space["prev_action"]
    assert seen.contains(seen.dtype.type(0) if isinstance(seen, spaces.Discrete) else np.zeros(seen.shape, seen.dtype))
    assert all(seen.contains(STARTS[name].sample().astype(seen.dtype)) for _ in range(9))


@pytest.mark.parametrize("name", ["torch/Pendulum-v1", "gymnax/CartPole-v1"])
def test_episodes_that_go_on_from_given_states_begin_with_the_first_inputs(name):
    env, policy, state = fresh(name, steps=5, num_envs=3, inputs=["is_first", "prev_reward"])
    mask = torch.tensor([True, False, True])
    state = fc.reset(env, state, mask, to=(state.env_state, state.observation))
    _, batch = fc.rollout(env, policy, state, 1)
    assert torch.equal(batch["is_first"][:, 0, 0], mask)
    assert torch.equal(batch["prev_reward"][:, 0, 0] == 0, mask)


WHOLE = partial(Sampling, action_space=spaces.Box(0, 5, (2,), np.int64))


@pytest.mark.parametrize(("env", "given", "message"), [
    ("CartPole-v1", {"clip_actions": True}, "clip_actions=True was given for .*expected a Box of floating numbers"),
    (WHOLE, {"clip_actions": True}, r"int64\), expected a Box of floating numbers: leave it out"),
    ("pettingzoo/mpe/simple_tag_v3", {"inputs": ["is_first"]}, "which has actions and rewards of several agents"),
    ("pettingzoo/classic/tictactoe_v3", {"inputs": ["prev_reward"]}, "which has rewards of several agents, expected"),
    ("CartPole-v1", {"inputs": ["reward"]}, "inputs must be one of .*prev_action.*but is 'reward'"),
    ("CartPole-v1", {"inputs": "is_first"}, "inputs is 'is_first', expected a list"),
    ("CartPole-v1", {"clip_rewards": 1}, "clip_rewards is 1, expected a bool"),
    ("Pendulum-v1", {"clip_rewards": True, "info_keys": ["reward"]}, "info_keys has 'reward'.*leave it out"),
    ("pettingzoo/mpe/simple_spread_v3", {"clip_rewards": True}, "rewards of several agents, expected .*leave it out"),
    ("pettingzoo/classic/tictactoe_v3", {"clip_rewards": True}, "rewards of several agents, expected .*leave it out"),
    (fc.make_env("CartPole-v1", inputs=["is_first"]), {"inputs": ["is_first"]}, "observes .'is_first'. itself"),
    (fc.make_env("Pendulum-v1", clip_actions=True), {"inputs": ["prev_action"]}, "expected one call.*all of them"),
    (fc.make_env("CartPole-v1", inputs=["prev_reward"]), {"clip_rewards": True}, "expected one call.*all of them"),
    (fc.make_env(fc.make_env("torch/Pendulum-v1", clip_rewards=True), clip_actions=True), {"clip_rewards": True},
     "which was made with it: leave it out"),
])  # fmt: skip
def test_errors(env, given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        fc.make_env(env, **given)


def test_an_info_of_the_name_of_recorded_rewards_is_refused():
    class Scored(TorchWalk):
        def step(self, key, place, action, params, /):
            return super().step(key, place, action, params)._replace(info={"reward": place[:, 0]})

    env = fc.make_env(Scored, num_envs=2, clip_rewards=True)
    with pytest.raises(fc.EnvError, match=r"has an info 'reward', under which clip_rewards=True .*rename it"):
        collect(env, fc.random_policy(env), 3, seed=0)
