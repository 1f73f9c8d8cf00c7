"""The collector's keywords over an environment that counts: every batch is written down by hand.

And what concerns JAX: where its environments run, and memory that it lacks.
"""

import math
import re
from types import SimpleNamespace

import jax
import pytest
import torch

import funcollect as fc
from funcollect.interop.memory import memory_error
from tests.support.compare import assert_same, joined, leaves
from tests.support.envs.counting import always, check, make_counting
from tests.support.envs.jax_counting import counting, counting_policy

THREE = ({"lengths": (3, 2)}, {"lengths": (2,), "truncated": (1,)}, {"lengths": (4, 1)})
SINGLE = ("host", "torch")
MANY = ("host", "vector", "torch")


def collect(backend, *lanes, policy=None, batched=True, frames_per_batch, **kwargs):
    env = make_counting(backend, *lanes, batched=batched)
    policy = always(0) if policy is None else policy
    return fc.SyncDataCollector(env, policy, frames_per_batch=frames_per_batch, **kwargs)


def over_jax(policy=None, env=None, **options):
    options = {"frames_per_batch": 7, "seed": 4} | options
    return fc.SyncDataCollector(env or counting(3), policy or counting_policy(), **options)


@pytest.mark.parametrize("backend", [*MANY, "jax"])
def test_batches_are_the_functions_own_and_the_callers(backend):
    if backend == "jax":
        env, policy, collector = counting(3), counting_policy(), over_jax()
    else:
        env, policy = make_counting(backend, *THREE), always(0)
        collector = collect(backend, *THREE, frames_per_batch=7, seed=4)  # rounded up to whole steps
    state = fc.init(env, policy, seed=4)
    for _ in range(3):
        batch = next(collector)
        state, wanted = fc.rollout(env, policy, state, 3)
        assert_same(batch, wanted)
        batch["mine"] = torch.zeros(3, 3)
        del batch["next", "reward"]
        batch.zero_()


@pytest.mark.parametrize("backend", MANY)
@pytest.mark.parametrize("limit", [None, -1, 2])
def test_max_frames_per_traj(backend, limit):
    collector = collect(backend, *THREE, frames_per_batch=12, max_frames_per_traj=limit, seed=0)
    cut = ("0.0 0.1c 1.0 1.1b", "0.0 0.1b 1.0 1.1c", "0.0 0.1c 1.0t 2.0")
    check(next(collector), *(cut if limit == 2 else ("0.0 0.1 0.2t 1.0", "0.0 0.1t 1.0 1.1c", "0.0 0.1 0.2 0.3t")))


@pytest.mark.parametrize("backend", MANY)
def test_a_finished_lane_stays_finished_until_reset(backend):
    lanes = {"lengths": (3, 2)}, {"lengths": (2,), "truncated": (0,)}, {"lengths": (9,)}
    collector = collect(backend, *lanes, frames_per_batch=12, reset_when_done=False, seed=0)
    check(next(collector), "0.0 0.1 0.2t 0.3=t", "0.0 0.1c 0.2=c 0.2=c", "0.0 0.1 0.2 0.3")
    check(next(collector), "0.3=t 0.3=t 0.3=t 0.3=t", "0.2=c 0.2=c 0.2=c 0.2=c", "0.4 0.5 0.6 0.7")
    if backend == "vector":  # what a frozen lane does is hidden, but this one counts it
        return
    collector.reset(torch.tensor([True, False, False]))
    check(next(collector), "1.0 1.1t 1.2=t 1.2=t", "0.2=c 0.2=c 0.2=c 0.2=c", "0.8t 0.9=t 0.9=t 0.9=t")
    collector.reset()
    check(next(collector), "2.0 2.1 2.2t 2.3=t", "1.0 1.1t 1.2=t 1.2=t", "1.0 1.1 1.2 1.3")
    single = collect(backend, THREE[0], batched=False, frames_per_batch=2, reset_when_done=False, seed=0)
    for words in ("0.0 0.1", "0.2t 0.3=t", "0.3=t 0.3=t"):
        check(next(single), words, batched=False)


@pytest.mark.parametrize("backend", MANY)
def test_every_batch_begins_anew(backend):
    collector = collect(backend, *THREE, frames_per_batch=9, reset_at_each_iter=True, seed=0)
    check(next(collector), "0.0 0.1 0.2t", "0.0 0.1t 1.0", "0.0 0.1 0.2")
    check(next(collector), "2.0 2.1 2.2t", "2.0 2.1t 3.0", "1.0t 2.0 2.1")


@pytest.mark.parametrize("backend", MANY)
def test_the_first_frames_are_random(backend):
    """20 frames over 3 lanes, rounded up to whole batches; the policy runs all the same."""
    runs, calls = {}, []

    def prefers_two(observation):
        calls.append(len(observation))
        return torch.tensor([0.0, 0.0, 50.0]).expand(len(observation), 3)

    for steps, random_frames in ((12, None), (12, 20), (1, 20), (4, 20)):
        policy = fc.torch_policy(prefers_two, head=fc.heads.categorical)
        kwargs = {"frames_per_batch": 3 * steps, "init_random_frames": random_frames, "total_frames": 36, "seed": 0}
        runs[steps, random_frames] = joined(list(collect(backend, *THREE, policy=policy, **kwargs)))
    assert calls == [3] * 4 * 12
    plain = runs[12, None]
    assert (plain["action"] == 2).all()
    for steps, random_steps in ((12, 12), (1, 7), (4, 8)):
        batch = runs[steps, 20]
        assert leaves(batch).keys() == leaves(plain).keys()
        assert set(batch["action"][:, :random_steps].flatten().tolist()) == {0, 1, 2}
        assert torch.equal(batch["action"][:, :random_steps], runs[12, 20]["action"][:, :random_steps])
        assert (batch["action"][:, random_steps:] == 2).all()
        assert torch.equal(batch["action_log_prob"][:, :random_steps], torch.full((3, random_steps), -math.log(3)))
        assert (batch["action_log_prob"][:, random_steps:].abs() < 1e-6).all()
        check(batch, *WORDS, ignored=["action_log_prob"])
    check(plain, *WORDS, ignored=["action_log_prob"])


@pytest.mark.parametrize("parts", [(), (1,), (6,)])
@pytest.mark.parametrize("backend", SINGLE)
def test_log_probabilities_of_random_frames_have_the_policys_shape(backend, parts):
    env = fc.make_env("Pendulum-v1" if backend == "host" else "torch/Pendulum-v1", num_envs=2)

    def module(observation):
        return {"action": torch.zeros(len(observation), 1), "action_log_prob": torch.ones(len(observation), *parts)}

    collector = fc.SyncDataCollector(env, module, frames_per_batch=12, init_random_frames=8, seed=0)
    batch, later = next(collector), next(collector)
    log_prob = batch["action_log_prob"]
    assert log_prob.shape == (2, 6, *parts)
    assert torch.allclose(log_prob.reshape(2, 6, -1).sum(-1), torch.tensor(-math.log(4)))
    assert (later["action_log_prob"] == 1).all()
    assert (batch["action"] != 0).all()


WORDS = (
    "0.0 0.1 0.2t 1.0 1.1t 2.0 2.1 2.2t 3.0 3.1t 4.0 4.1",
    "0.0 0.1t 1.0 1.1c 2.0 2.1t 3.0 3.1t 4.0 4.1t 5.0 5.1t",
    "0.0 0.1 0.2 0.3t 1.0t 2.0 2.1 2.2 2.3t 3.0t 4.0 4.1",
)


@pytest.mark.parametrize("name", ["RANDOM", "DETERMINISTIC", "MODE", "MEAN"])
def test_exploration_types_other_than_random_take_the_mode(name):
    kind = fc.ExplorationType[name]
    policy = fc.torch_policy(lambda x: torch.tensor([0.0, 0.0, 0.01]).expand(len(x), 3), head=fc.heads.categorical)
    collector = collect("host", *THREE, policy=policy, frames_per_batch=90, exploration_type=kind, seed=0)
    wanted = {0, 1, 2} if name == "RANDOM" else {2}
    assert set(next(collector)["action"].flatten().tolist()) == wanted


def test_the_device_of_the_environment_is_that_of_jax(monkeypatch):
    monkeypatch.setattr("funcollect.collectors.options.default_device_type", lambda: "meta")  # as if JAX computed there
    assert next(over_jax(env_device="meta")).numel()
    with pytest.raises(ValueError, match=r"env_device is cpu.*runs on meta"):
        over_jax(env_device="cpu")


def test_a_cached_start_follows_the_seed():
    env = counting(3, starts="cached")
    collector, other = over_jax(env=env, seed=3), over_jax(env=env, seed=9)
    other.set_seed(3)
    assert_same(next(other), next(collector))


def test_without_memory_it_says_who_holds_it(monkeypatch):
    lacking = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")
    policy = counting_policy()
    monkeypatch.setattr(policy, "prepare", lambda params: (_ for _ in ()).throw(lacking))
    says = "JAX has no memory for a rollout of 3 steps of 3 environments: use fewer frames"
    with pytest.raises(MemoryError, match=says):
        next(over_jax(policy))
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
