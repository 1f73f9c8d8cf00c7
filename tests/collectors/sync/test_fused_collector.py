"""`SyncDataCollector` over JAX environments: every keyword means what it means elsewhere."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import funcollect as fc
from funcollect.interop.memory import memory_error
from tests.support.compare import assert_same, collect, joined
from tests.support.envs.jax_counting import counting, counting_policy

ENV, POLICY = counting(3), counting_policy()


def apply(params, x):
    return params * jnp.stack([x["count"], x["start"][:, 0] % 5, x["count"] % 2], -1)


LINEAR = fc.jax_policy(apply, jnp.float32(0.3), head=fc.heads.categorical)


def make(policy=POLICY, env=ENV, **options):
    return fc.SyncDataCollector(env, policy, **{"frames_per_batch": 3 * 7, "seed": 0} | options)


def test_batches_are_those_of_rollouts_and_the_callers_own():
    batches = list(make(total_frames=60))
    assert_same(joined(batches), collect(ENV, POLICY, 7, 7, 7, seed=0))
    batches[0]["mine"] = torch.zeros(3, 7)


def test_random_frames_come_first_with_their_own_log_probability():
    batches = joined([batch for batch, _ in zip(make(LINEAR, init_random_frames=27), range(3), strict=False)])
    early, late = (part["action_log_prob"] for part in (batches[:, :14], batches[:, 14:]))  # after two batches
    torch.testing.assert_close(early, torch.full((3, 14), -np.log(3.0), dtype=torch.float32))
    assert not torch.isclose(late, torch.tensor(-np.log(3.0)).float()).all()
    assert not torch.equal(batches["action"], collect(ENV, LINEAR, 7, 7, 7, seed=0)["action"])


def test_the_device_of_the_environment_is_that_of_jax(monkeypatch):
    monkeypatch.setattr("funcollect.collectors.options.default_device_type", lambda: "meta")  # as if JAX computed there
    assert next(make(env_device="meta")).numel()
    with pytest.raises(ValueError, match=r"env_device is cpu.*runs on meta"):
        make(env_device="cpu")


def test_a_cached_start_follows_the_seed():
    env = counting(3, starts="cached")
    collector, other = make(env=env, seed=3), make(env=env, seed=9)
    other.set_seed(3)
    assert_same(next(other), next(collector))


def test_without_memory_it_says_who_holds_it(monkeypatch):
    lacking = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")
    monkeypatch.setattr(POLICY, "prepare", lambda params: (_ for _ in ()).throw(lacking))
    says = "JAX has no memory for a rollout of 7 steps of 3 environments: use fewer frames"
    with pytest.raises(MemoryError, match=says):
        next(make())
    monkeypatch.undo()
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    lacking = torch.OutOfMemoryError("CUDA out of memory")
    says = r"Torch has no memory for it.*XLA_PYTHON_CLIENT_PREALLOCATE=false"
    assert re.search(says, str(memory_error(lacking, "it")))
    device = SimpleNamespace(memory_stats=lambda: {"bytes_in_use": 2**31, "pool_bytes": 3 * 2**30})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert "no memory for it (of the GPU, JAX 3.0 GiB are held)" in str(memory_error(lacking, "it"))
    assert memory_error(RuntimeError("other"), "it") is None


@pytest.mark.parametrize("name", ["CartPole-v1", "torch/CartPole-v1", "gymnax/CartPole-v1"])
def test_every_loop_says_who_lacks_memory(name, monkeypatch):
    def without_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    env = fc.make_env(name, num_envs=2)
    policy = fc.torch_policy(torch.nn.Linear(4, 2), head=fc.heads.categorical, compile="eager")
    state = fc.init(env, policy, seed=0)
    monkeypatch.setattr(torch.nn.Linear, "forward", without_memory)
    with pytest.raises(MemoryError, match="Torch has no memory for a rollout of 5 steps of 2 environments"):
        fc.rollout(env, policy, state, 5)
