"""The same lanes draw the same starts, noise and random actions, however they are divided among collectors.

Processes and actors deliver what workers in this process do: `tests/collectors/workers/test_workers.py`, and `ray`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import funcollect as fc
from funcollect.core.api import init_lanes
from tests.support.compare import assert_same, leaves
from tests.support.running import SCALE, in_soak

LANES = 8
STEPS = 40
JAX_ENV = "gymnax/CartPole-v1"
ENVS = ["CartPole-v1", "torch/CartPole-v1", JAX_ENV]


class Elementwise(nn.Module):
    """Logits whose bits do not depend on the number of lanes: without a product of matrices."""

    def forward(self, observation):
        return torch.stack([observation[..., 2] * 3, observation[..., 3]], -1)


def logits(params, observation):
    return jnp.stack([observation[..., 2] * params, observation[..., 3]], -1)


def drawn(params, observation, keys):
    return jax.vmap(lambda key: jax.random.randint(key, (), 0, 2))(keys)


def network(env):
    torch.manual_seed(0)
    return fc.torch_policy(nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 2)), head=fc.heads.tanh_normal)


POLICIES = {
    "random": fc.random_policy,
    "torch": lambda env: fc.torch_policy(Elementwise(), head=fc.heads.categorical),
    "jax": lambda env: fc.jax_policy(logits, jnp.float32(3), head=fc.heads.categorical),
    "keys": lambda env: fc.jax_policy(drawn, jnp.zeros(())),
    "network": network,
}
EVERY = [(name, kind) for name in ENVS for kind in POLICIES if kind != "network"]
FEW = [*(("CartPole-v1", kind) for kind in ("random", "torch", "keys")), ("torch/CartPole-v1", "torch")]
RUN = {"total_frames": -1, "seed": 5}
RUN |= {"frames_per_batch": LANES * STEPS, "init_random_frames": LANES * 4}


def by_lane(batches):
    """The rows [LANES, STEPS] of batches [..., P, STEPS], in the order of their lanes."""
    rows = torch.cat([batch.flatten(0, -2).clone() for batch in batches])
    return rows[rows["collector", "lane"][:, 0].argsort()]


def over_workers(name, kind, workers):
    lanes = LANES // workers
    policy = POLICIES[kind](fc.make_env(name, num_envs=lanes))
    made = {"create_env_fn": [name] * workers, "create_env_kwargs": {"num_envs": lanes}, "policy": policy}
    with fc.MultiSyncDataCollector(**made, **RUN, cat_results=0, in_process=True) as collector:
        return by_lane([next(collector)])


def in_shards(build, name, kind, lanes, **kwargs):
    env = fc.make_env(name, num_envs=lanes)
    part = RUN | {key: RUN[key] // 2 for key in ("frames_per_batch", "init_random_frames")} | kwargs
    batches = []
    for index in range(2):
        with build(policy=POLICIES[kind](env), shard=fc.Shard(index, 2), **part) as collector:
            batches.append(next(collector))
    return by_lane(batches)


@pytest.mark.parametrize(("name", "kind"), FEW if SCALE == 1 else EVERY)
def test_lanes_draw_the_same_in_one_worker_and_in_eight(name, kind):
    whole = over_workers(name, kind, 1)
    for workers in (2, 8) if SCALE == 1 else (2, 4, 8):
        assert_same(whole, over_workers(name, kind, workers))
    sync = {"create_env_fn": name, "create_env_kwargs": {"num_envs": LANES // 2}}
    assert_same(whole, in_shards(fc.SyncDataCollector, name, kind, LANES // 2, **sync))


def test_collectors_with_workers_are_joined_like_others():
    workers = {"create_env_fn": ["CartPole-v1"] * 2, "create_env_kwargs": {"num_envs": 2}}
    workers |= {"cat_results": 0, "in_process": True}
    joined = in_shards(fc.MultiSyncDataCollector, "CartPole-v1", "torch", 2, **workers)
    assert_same(over_workers("CartPole-v1", "torch", 4), joined)


@pytest.mark.parametrize("name", ["Pendulum-v1", "torch/Pendulum-v1", *in_soak(["gymnax/Pendulum-v1"])])
def test_networks_agree_to_rounding(name):
    whole = leaves(over_workers(name, "network", 1))
    for workers in (2, 8):
        for path, leaf in leaves(over_workers(name, "network", workers)).items():
            torch.testing.assert_close(leaf, whole[path], rtol=1e-3, atol=1e-3, msg=f"{path}, {workers} workers")


class Told(fc.envs.JaxEnvBase):
    """Shows the parameters with which the episode began; episodes have 5 to 24 steps."""

    observation_space, action_space = spaces.Box(-np.inf, np.inf, (1,)), spaces.Discrete(2)

    def __init__(self, num_envs):
        super().__init__(num_envs=num_envs)
        self.params = np.float32(0)

    def reset(self, key, params, /):
        return (5 + jax.random.randint(key, (), 0, 20), params), params.reshape(1)

    def step(self, key, env_state, action, params, /):
        left, begun = env_state
        return fc.envs.Transition((left - 1, begun), begun.reshape(1), 0.0, left <= 1, False)


def test_other_parameters_of_an_environment_hold_from_each_lanes_next_episode_on():
    """Whether starts made ahead with the old ones are left depends on the lanes beside it."""
    pairs = {lanes: (env := Told(lanes), fc.random_policy(env)) for lanes in (1, 4)}

    def shown(first, lanes):
        env, policy = pairs[lanes]
        state = init_lanes(env, policy, seed=3, first_lane=first, total_lanes=4)
        state, _ = fc.rollout(env, policy, state, 30)
        state = state.replace(env_params=np.float32(9))
        masked = fc.reset(env, state, torch.arange(lanes) == 0)
        assert float(masked.observation["observation",][0, 0]) == 9
        _, batch = fc.rollout(env, policy, state, 30)
        later = batch["collector", "traj_ids"] != batch["collector", "traj_ids"][:, :1]
        assert torch.equal(batch["observation"][..., 0] == 9, later)
        assert later[:, -1].all()
        return batch["observation"][..., 0]

    assert torch.equal(shown(0, 4), torch.cat([shown(lane, 1) for lane in range(4)]))
