"""Resets of chosen lanes to given environment states, and with the options of simulators."""

import gymnasium
import jax
import numpy as np
import pytest
import torch
from gymnasium import spaces

import funcollect as fc
from tests.support.compare import assert_same, fresh

MASK = torch.tensor([True, False, True])
JAX, TORCH = "gymnax/CartPole-v1", "torch/CartPole-v1"


def two_states(name, num_envs=3):
    """An environment and a policy, a state, and one of the same run some steps later."""
    env, policy, state = fresh(name, num_envs=num_envs)
    return env, policy, state, fc.rollout(env, policy, state, 5)[0]


def given(state, *, pair):
    """What a reset `to` a state's takes."""
    env_state = getattr(state.env_state, "current", state.env_state)
    return (env_state, state.observation) if pair else env_state


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("name", [JAX, TORCH])
def test_masked_lanes_continue_from_given_states_under_new_ids(name, pair):
    env, policy, early, late = two_states(name)
    plain = fc.reset(env, late, MASK)
    there = fc.reset(env, late, MASK, to=given(early, pair=pair))
    assert np.asarray(there.step).tolist() == [0, late.step[1], 0]
    assert there.traj_ids.tolist() == plain.traj_ids.tolist()
    for path, row in there.observation.items():
        wanted = np.where(MASK[:, None], np.asarray(early.observation[path]), np.asarray(late.observation[path]))
        assert np.array_equal(np.asarray(row), wanted)
    one, two = (fc.rollout(env, policy, state, 4)[1] for state in (there, plain))
    assert torch.equal(one["observation"][1], two["observation"][1])  # the other lane goes on
    assert not torch.equal(one["observation"][0], two["observation"][0])


def test_traced_resets_take_states_too():
    env, _, early, late = two_states(JAX)
    mask = MASK.numpy()
    traced = jax.jit(lambda state, to: fc.traced.reset(env, state, mask, to=to))(late, early.env_state)
    eager = fc.reset(env, late, MASK, to=early.env_state)
    assert jax.tree.all(jax.tree.map(np.array_equal, traced, eager))


def test_states_that_do_not_show_their_observation_come_with_it():
    env, _, early, late = two_states("gymnax/MemoryChain-bsuite")  # whose `get_obs` returns something else
    with pytest.raises(TypeError, match="computes no observation, expected a pair"):
        fc.reset(env, late, MASK, to=early.env_state)
    there = fc.reset(env, late, MASK, to=(early.env_state, early.observation["observation",]))
    assert np.array_equal(there.observation["observation",][0], early.observation["observation",][0])


@pytest.mark.parametrize(
    "name", ["gymnax/Pendulum-v1", "torch/Pendulum-v1", "brax/inverted_pendulum", "pgx/tic_tac_toe"]
)
def test_states_show_the_observations_of_their_steps(name):
    env, _, _, late = two_states(name, num_envs=2)
    again = fc.reset(env, late, to=late.env_state)
    for path, row in late.observation.items():
        assert np.allclose(np.asarray(row), np.asarray(again.observation[path]), atol=1e-6)


@pytest.mark.parametrize("name", [JAX, TORCH])
def test_other_states_are_refused(name):
    env, _, early, late = two_states(name)
    for wrong in ({"x": np.zeros(3)}, (given(early, pair=False), early.observation["observation",][:, :2])):
        with pytest.raises(ValueError, match=r"to has other (environment states|observations) than .*, expected "):
            fc.reset(env, late, MASK, to=wrong)


class BeginsAt(gymnasium.Env):
    """It begins at the place in the options, else at a random one."""

    observation_space, action_space = spaces.Box(-99.0, 99.0, (1,)), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.random() if options is None else options["place"]
        options and options.clear()
        return np.array([self.place], np.float32), {}

    def step(self, action):
        self.place += action
        return np.array([self.place], np.float32), 1.0, False, False, {}


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}])
def test_options_act_in_one_reset_of_the_chosen_lanes_and_in_copies_of_it(workers, tmp_path):
    env, policy, state = fresh(BeginsAt, num_envs=3, max_episode_steps=6, **workers, steps=2)
    state = fc.reset(env, state, MASK, options={"place": 50.0})
    assert (state.observation["observation",][:, 0] == 50).tolist() == MASK.tolist()
    state, _ = fc.rollout(env, policy, state, 3)
    with pytest.raises(fc.ReplayError, match="reset with options, which are not saved"):
        fc.save(tmp_path / "run", state)
    (_, one), (state, two) = (fc.rollout(env, policy, each, 12) for each in (fc.fork(env, state), state))
    assert_same(one, two)
    assert (two["observation"][:, -1] < 10).all()  # later episodes begin without options
    fc.save(tmp_path / "run", state)


VECTOR = gymnasium.vector.SyncVectorEnv([BeginsAt] * 2, autoreset_mode=gymnasium.vector.AutoresetMode.DISABLED)
REFUSALS = [
    ("CartPole-v1", {"to": np.zeros((2, 4))}, "\\['to'\\] is not for HostEnv.*, expected options"),
    (JAX, {"options": {}}, "\\['options'\\] is not for JaxEnv.*, expected to"),
    (VECTOR, {"options": {}}, "resets of .* take none"),
    ("CartPole-v1", {"options": 3}, "options is 3"),
]


@pytest.mark.parametrize(("name", "given", "message"), REFUSALS)
def test_what_an_environment_does_not_take_is_refused(name, given, message):
    env, _, state = fresh(name, num_envs=None if name is VECTOR else 2)
    with pytest.raises(TypeError, match=message):
        fc.reset(env, state, **given)
    fc.reset(env, state)
