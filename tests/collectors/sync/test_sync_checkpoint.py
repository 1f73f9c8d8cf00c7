"""`SyncDataCollector.state_dict` through a file, and what loading does to weights."""

import io

import jax.numpy as jnp
import pytest
import torch

import funcollect as fc


def torch_linear():
    return fc.torch_policy(torch.nn.Linear(4, 2), head=fc.heads.categorical)


def jax_linear():
    return fc.jax_policy(lambda params, x: x @ params["w"], {"w": jnp.ones((4, 2))}, head=fc.heads.categorical)


def jax_recurrent():
    def apply(params, x, state):
        return x @ params["w"] + state, state + 1

    return fc.jax_policy(apply, {"w": jnp.ones((4, 2))}, head=fc.heads.categorical, initial_state=jnp.zeros(2))


def through_a_file(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("policy", [torch_linear, jax_linear, jax_recurrent, lambda: None])
def test_a_file_brings_back_the_same_run(policy):
    with fc.SyncDataCollector("CartPole-v1", policy(), frames_per_batch=40, seed=3) as first:
        next(first)
        saved = through_a_file(first.state_dict())
        runs = []
        for _ in range(2):
            with fc.SyncDataCollector("CartPole-v1", policy(), frames_per_batch=40, seed=9) as other:
                other.load_state_dict(saved)
                assert (other.seed, other.frames) == (3, 40)
                runs.append(next(other))
        assert (runs[0] == runs[1]).all()
        assert runs[0]["collector", "traj_ids"][0] == first.state.episode[0] + 1


@pytest.mark.parametrize("policy", [torch_linear, jax_linear])
def test_own_weights_go_back_into_the_policy_and_stay_live(policy):
    with fc.SyncDataCollector("CartPole-v1", policy(), frames_per_batch=4, seed=0) as collector:
        saved = collector.state_dict()
        changed = {name: weight + 1 for name, weight in saved["policy_state_dict"].items()}
        collector.load_state_dict(saved | {"policy_state_dict": changed})
        assert collector.params is None
        after = collector.policy.state_dict()
        assert all(torch.equal(after[name], weight) for name, weight in changed.items())


def test_given_params_stay_given():
    policy = torch_linear()
    with fc.SyncDataCollector("CartPole-v1", policy, frames_per_batch=4, seed=0) as collector:
        own = policy.state_dict()
        collector.update_policy_weights_({name: weight + 1 for name, weight in own.items()})
        collector.load_state_dict(collector.state_dict())
        assert collector.params is not None
        assert all(torch.equal(weight, own[name]) for name, weight in policy.state_dict().items())
