"""The built-in policy mlp."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import funcollect as fc
from funcollect.policies.mlp import Flatten, mlp
from tests.support.envs.light_envs import Sampling


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (3,)),
        spaces.Box(-1, 1, ()),
        spaces.Box(0, 9, (2, 3), np.int64),
        spaces.Discrete(4, start=-1),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[0, 1], [2, -3]]),
        spaces.MultiBinary((2, 2)),
        spaces.Dict({"b": spaces.Discrete(3), "a": spaces.Tuple((spaces.Box(0, 1, (2,)), spaces.MultiBinary(2)))}),
    ],
    ids=str,
)
def test_observations_are_flattened_as_gymnasium_does(space):
    space.seed(0)
    samples = [space.sample() for _ in range(5)]
    batched = gymnasium.vector.utils.batch_space(space, 5)
    stacked = gymnasium.vector.utils.concatenate(space, samples, gymnasium.vector.utils.create_empty_array(space, 5))
    assert stacked in batched
    rows = Flatten(space)(map_arrays(torch.as_tensor, stacked))
    wanted = np.stack([spaces.flatten(space, sample) for sample in samples]).astype(np.float32)
    assert torch.equal(rows, torch.from_numpy(wanted))


def map_arrays(function, nested):
    if isinstance(nested, dict):
        return {name: map_arrays(function, value) for name, value in nested.items()}
    if isinstance(nested, tuple):
        return tuple(map_arrays(function, value) for value in nested)
    return function(nested)


def test_pixels_are_scaled():
    rows = Flatten(spaces.Box(0, 255, (2, 2), np.uint8))(torch.full((3, 2, 2), 255, dtype=torch.uint8))
    assert torch.equal(rows, torch.ones(3, 4))


ACTIONS = [spaces.Discrete(3, start=5), spaces.MultiDiscrete([[2, 3], [4, 2]]), spaces.Box(-2, 3, (2, 3))]


@pytest.mark.parametrize("space", [*ACTIONS, spaces.Box(-np.inf, np.inf, (2,))], ids=str)
def test_the_network_suits_the_action_space(space):
    env = fc.make_env(lambda: Sampling(spaces.Discrete(3), space), num_envs=2)
    policy = mlp(env, seed=0)
    _, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 4)
    assert batch["action"].shape == (2, 4, *space.shape)


@pytest.mark.parametrize("space", [spaces.MultiBinary(3), spaces.Box(-1, 1, ()), spaces.Box(0, 9, (2,), int)], ids=str)
def test_other_action_spaces_are_refused(space):
    with pytest.raises(ValueError, match=r"mlp needs a Discrete.*the policy random"):
        mlp(fc.make_env(lambda: Sampling(spaces.Discrete(3), space), num_envs=2), seed=0)


def test_the_networks_seed_leaves_torchs_alone():
    env = fc.make_env("CartPole-v1", num_envs=2)
    before = torch.get_rng_state()
    one, same, other = mlp(env, seed=0).params, mlp(env, seed=0).params, mlp(env, seed=1).params
    assert torch.equal(torch.get_rng_state(), before)
    assert (one == same).all()
    assert not (one == other).all()
