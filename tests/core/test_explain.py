from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import gymnasium
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import TensorDictModule

import funcollect as fc
from funcollect.policies.as_policy import as_policy
from tests.support.policies.own_policies import Recording

MODULE = torch.nn.Linear(4, 2)
BY_TORCH = fc.heads.from_distribution(torch.distributions.Categorical, "logits")


def plan(env: Any = "CartPole-v1", policy: Any = None, **options: Any) -> fc.Plan:
    env = fc.make_env(env, **options)
    return fc.explain(env, fc.random_policy(env) if policy is None else policy)


class DrawsByKeys(Recording):
    def noise(self, spec: Any) -> fc.Noise:
        return fc.Noise(kind="keys")


@pytest.mark.parametrize(
    ("env", "policy", "options", "words"),
    [
        (
            "CartPole-v1",
            None,
            {},
            {
                "env": "one environment without a batch dimension",
                "loop": "host",
                "why": "simulators",
                "seeding": "episode: each episode starts from a seed of its own",
                "forking": "replayed",
            },
        ),
        ("CartPole-v1", None, {"num_envs": 8}, {"env": "a batch of 8"}),
        ("torch/CartPole-v1", None, {}, {"loop": "torch", "why": "Torch", "forking": "values"}),
        (
            "gymnax/CartPole-v1",
            fc.torch_policy(MODULE, head=fc.heads.categorical, compile="eager"),
            {"num_envs": 3},
            {
                "loop": "crossing",
                "why": "the policy runs in Torch",
                "copies": "to where the policy reads it; each action to the environment; no parameters",
                "noise": "the lane and the step, drawn ahead for a whole rollout",
            },
        ),
        (
            "gymnax/CartPole-v1",
            fc.jax_policy(lambda params, x: (x[:, 2] > 0).astype("int32"), None),
            {"num_envs": 3},
            {"loop": "fused", "copies": "nothing: ", "noise": "the policy draws none"},
        ),
        ("CartPole-v1", fc.torch_policy(MODULE, compile="inductor"), {}, {"policy": "compiled by inductor"}),
        ("CartPole-v1", fc.torch_policy(MODULE), {}, {"policy": "(torch)", "copies": "no parameters"}),
        ("CartPole-v1", fc.torch_policy(MODULE, device="cpu"), {}, {"copies": "at every rollout"}),
        (
            "CartPole-v1",
            fc.torch_policy(torch.nn.Linear(4, 2, device="meta")),
            {},
            {"copies": "to meta and each action back"},
        ),
        (
            "CartPole-v1",
            fc.jax_policy(lambda p, x: x @ p, 0.0, head=fc.heads.categorical),
            {},
            {"why": "synchronous CPU dispatch"},
        ),
    ],
)
def test_each_field(env: str, policy: Any, options: Any, words: dict[str, str]) -> None:
    one = plan(env, policy, **options)
    for field, word in words.items():
        assert word in getattr(one, field)
        assert getattr(one, field) in str(one)


def test_it_prints_one_line_per_field_and_is_frozen() -> None:
    one: Any = plan()
    said = [field.name for field in fields(one) if getattr(one, field.name)]
    assert [line.split()[0] for line in str(one).splitlines()] == said
    with pytest.raises(FrozenInstanceError):
        one.loop = "jax"


def test_vector_environments_and_cached_starts() -> None:
    vector = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")], autoreset_mode=AutoresetMode.DISABLED)
    assert "replayed" in plan(vector).forking
    vector.close()
    env = fc.make_env("gymnax/CartPole-v1", num_envs=2)
    cached = replace(env, starts="cached")
    assert "all episodes of a lane begin as its first one" in fc.explain(cached, fc.random_policy(cached)).seeding


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


def test_it_names_a_tensordict_policys_randomness() -> None:
    env = fc.make_env("CartPole-v1")
    module = TensorDictModule(lambda x: x[..., 0].long(), ["observation"], ["action"])
    assert "global generator" in fc.explain(env, as_policy(module, env)).noise


def test_it_needs_a_policy_that_suits_and_what_was_removed_names_its_successor() -> None:
    with pytest.raises(ValueError, match="the head normal"):
        plan(policy=fc.torch_policy(MODULE, head=fc.heads.normal))
    with pytest.raises(AttributeError, match=r"compare funcollect\.profile with and without"):
        _ = plan().workers
