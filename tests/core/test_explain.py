from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import TensorDictModule

import funcollect as fc
from funcollect.policies.as_policy import as_policy
from tests.support.policies.own_policies import Recording

MODULE = torch.nn.Linear(4, 2)


def plan(env: Any = "CartPole-v1", policy: Any = None, **options: Any) -> fc.Plan:
    env = fc.make_env(env, **options)
    return fc.explain(env, fc.random_policy(env) if policy is None else policy)


def test_it_names_the_environment_and_its_lanes() -> None:
    assert "CartPole-v1" in plan().env
    assert "one environment without a batch dimension" in plan().env
    assert "a batch of 8" in plan(num_envs=8).env


@pytest.mark.parametrize(
    ("name", "loop", "why"), [("CartPole-v1", "host", "simulators"), ("torch/CartPole-v1", "torch", "Torch")]
)
def test_it_says_which_loop_runs_and_why(name: str, loop: str, why: str) -> None:
    one = plan(name)
    assert one.loop == loop
    assert why in one.why
    assert "seed of its own" in one.seeding
    assert one.seeding.startswith("episode")


def test_it_names_lanes_that_begin_each_episode_alike() -> None:
    env = fc.make_env("gymnax/CartPole-v1", num_envs=2)
    cached = replace(env, starts="cached")
    assert "all episodes of a lane begin as its first one" in fc.explain(cached, fc.random_policy(cached)).seeding


def test_it_tells_how_a_state_is_forked() -> None:
    assert "replayed" in plan("CartPole-v1").forking
    assert "values" in plan("torch/CartPole-v1").forking
    import gymnasium

    vector = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")], autoreset_mode=AutoresetMode.DISABLED)
    assert "replayed" in plan(vector).forking
    vector.close()


class DrawsByKeys(Recording):
    def noise(self, spec: Any) -> fc.Noise:
        return fc.Noise(kind="keys")


BY_TORCH = fc.heads.from_distribution(torch.distributions.Categorical, "logits")
POLICIES = [
    (fc.torch_policy(MODULE, head=fc.heads.categorical), "categorical", "gumbel noise"),
    (fc.torch_policy(MODULE, head=fc.heads.epsilon_greedy(0.1)), "epsilon_greedy", "uniform noise"),
    (fc.torch_policy(MODULE, head=fc.heads.greedy), "greedy", "global generator"),
    (fc.torch_policy(lambda x: x[:, 0].long()), "torch", "global generator"),
    (fc.jax_policy(lambda p, x: x @ p, torch.zeros(4, 2).numpy(), head=fc.heads.categorical), "jax", "gumbel noise"),
    (fc.jax_policy(lambda p, x, key: x @ p, 0.0, head=fc.heads.categorical), "jax", "one JAX key per call"),
    (None, "Random", "uniform noise"),
    (fc.torch_policy(MODULE, head=BY_TORCH), "from_distribution", "global generator"),
    (fc.jax_policy(lambda p, x: x @ p, 0.0, head=BY_TORCH), "from_distribution", "one JAX key per lane and step"),
    (Recording(), "Recording", "follow no seed"),
    (DrawsByKeys(), "DrawsByKeys", "one JAX key per lane and step"),
]


@pytest.mark.parametrize(("policy", "name", "noise"), POLICIES, ids=[case[1] for case in POLICIES])
def test_it_names_the_policy_and_where_its_randomness_comes_from(policy: Any, name: str, noise: str) -> None:
    one = plan(policy=policy)
    assert name in one.policy
    assert noise in one.noise


def test_it_names_the_compiler() -> None:
    assert "compiled by inductor" in plan(policy=fc.torch_policy(MODULE, compile="inductor")).policy
    assert "compiled" not in plan(policy=fc.torch_policy(MODULE)).policy


def test_it_names_a_tensordict_policys_randomness() -> None:
    env = fc.make_env("CartPole-v1")
    module = TensorDictModule(lambda x: x[..., 0].long(), ["observation"], ["action"])
    assert "global generator" in fc.explain(env, as_policy(module, env)).noise


def test_it_says_how_jax_dispatches() -> None:
    one = plan(policy=fc.jax_policy(lambda p, x: x @ p, 0.0, head=fc.heads.categorical))
    assert "one jitted call per step" in one.why
    assert "synchronous CPU dispatch" in one.why


def test_it_says_what_is_copied() -> None:
    assert "no parameters" in plan(policy=fc.torch_policy(MODULE)).copies
    assert "at every rollout" in plan(policy=fc.torch_policy(MODULE, device="cpu")).copies
    moved = plan(policy=fc.torch_policy(torch.nn.Linear(4, 2, device="meta")))
    assert "to meta and each action back" in moved.copies


def test_it_needs_an_environment_and_a_policy_that_suit() -> None:
    env = fc.make_env("CartPole-v1")
    with pytest.raises(TypeError, match="make_env"):
        fc.explain("CartPole-v1", fc.random_policy(env))
    with pytest.raises(TypeError, match="torch_policy"):
        fc.explain(env, MODULE)
    with pytest.raises(ValueError, match="the head normal"):
        fc.explain(env, fc.torch_policy(MODULE, head=fc.heads.normal))


def test_what_was_removed_names_its_successor() -> None:
    with pytest.raises(AttributeError, match=r"compare funcollect\.profile with and without"):
        _ = plan().workers
