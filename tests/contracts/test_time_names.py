"""The time dimension of every batch is named ``"time"``, as TorchRL names it: its modules find it by that name.

Collectors and all adapters are checked by `expect_layout`, in `check_collector` and the tests of `check_env`.
"""

import jax
import optree
import pytest
import torch
from torchrl.envs import RewardSum
from torchrl.objectives.value import GAE

import funcollect as fc
from funcollect.tree import NAMESPACE


def whole(**keywords):
    keywords = {"create_env_fn": "CartPole-v1", "frames_per_batch": 100, "total_frames": 100, "seed": 0} | keywords
    with fc.SyncDataCollector(**keywords) as collector:
        return next(iter(collector))


def traced():
    env = fc.make_env("gymnax/CartPole-v1", num_envs=2)
    policy = fc.random_policy(env)
    state = fc.traced.init(env, policy, None, key=jax.random.PRNGKey(0))
    return fc.deliver(fc.traced.rollout(env, policy, None, state, 5)[1], env)


LIMITED = {"trajs_per_batch": 2, "max_frames_per_traj": 20}


def sequences():
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(8), batch_size=2)
    buffer.extend(whole(**LIMITED, traj_format="padded"))
    return buffer.sample()


NAMED = {
    "single": whole,
    "traced": traced,
    "mapped": lambda: optree.tree_map(torch.clone, whole(), namespace=NAMESPACE),
    "split": lambda: fc.split_trajectories(whole()),
    "trajectories": lambda: whole(**LIMITED),
    "padded": lambda: whole(**LIMITED, traj_format="padded"),
    "sequences of a buffer": sequences,
    "compact": lambda: fc.next_observations(whole(compact_obs=True)),
}


@pytest.mark.parametrize("name", NAMED)
def test_the_last_dimension_is_time(name):
    batch = NAMED[name]()
    wanted = [*[None] * (batch.batch_dims - 1), "time"]
    assert batch.names == batch["next"].names == batch["collector"].names == wanted


@pytest.mark.parametrize("name", ["CartPole-v1", "torch/CartPole-v1", "gymnax/CartPole-v1"])
def test_a_step_has_no_time(name):
    env = fc.make_env(name, num_envs=2)
    policy = fc.random_policy(env)
    state, batch = fc.step(env, policy, fc.init(env, policy, seed=0))
    fc.close(state)
    assert (batch.batch_size, batch.names, batch.is_locked) == (torch.Size([2]), [None], True)


def test_modules_of_torchrl_find_it_by_its_name():
    batch = whole(create_env_kwargs={"num_envs": 2}).clone()
    batch["state_value"], batch["next", "state_value"] = torch.rand(2, 2, 50, 1)
    advantages = GAE(gamma=0.9, lmbda=0.8, value_network=None)
    turned = advantages(batch.transpose(0, 1).contiguous())["advantage"].transpose(0, 1)
    torch.testing.assert_close(turned, advantages(batch)["advantage"])
    summed = RewardSum(in_keys=[("next", "reward")], out_keys=["sum"])(batch)["sum"]
    assert summed.max() > 1
