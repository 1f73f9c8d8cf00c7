"""Flax nnx and linen, Equinox and Haiku: what a rollout records is what the library's own call says."""

import jax
import numpy as np
import pytest
import torch
from gymnasium.envs.phys2d.cartpole import CartPoleFunctional

import funcollect as fc
from tests.support.compare import collect
from tests.support.policies.jax_networks import LIBRARIES

ENVS = {
    "host": lambda: fc.make_env("CartPole-v1", num_envs=3),
    "fused": lambda: fc.envs.from_functional(CartPoleFunctional(), num_envs=3, max_episode_steps=500),
}


def assert_records_what(apply, params, batch):
    said = apply(params, batch["observation"].flatten(0, 1).numpy())
    log_probs, value = (
        torch.from_numpy(np.array(x)) for x in (jax.nn.log_softmax(said["logits"]), said["state_value"])
    )
    chosen = log_probs.gather(1, batch["action"].reshape(-1, 1))[:, 0]
    torch.testing.assert_close(batch["state_value"].flatten(0, 1), value)
    torch.testing.assert_close(batch["action_log_prob"].flatten(), chosen)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_network_acts_and_changes_between_rollouts(library):
    apply, params = LIBRARIES[library](0)
    _, others = LIBRARIES[library](1)
    traced = []

    def counted(params, x):
        traced.append(1)
        return apply(params, x)

    policy = fc.jax_policy(counted, params, head=fc.heads.categorical)
    for loop, make in ENVS.items():
        env = make()
        policy.params = params
        assert fc.explain(env, policy).loop == loop
        assert_records_what(apply, params, collect(env, policy, 40))
        traces = len(traced)
        policy.params = others
        assert_records_what(apply, others, collect(env, policy, 40))
        assert_records_what(apply, params, collect(env, policy, 40, params=params))
        assert len(traced) == traces
