from dataclasses import FrozenInstanceError, fields, replace

import gymnasium
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import TensorDictModule

import funcollect as fc
from tests.support.policies import Recording

CARTPOLE, GYMNAX, MODULE = "CartPole-v1", "gymnax/CartPole-v1", torch.nn.Linear(4, 2)
CATEGORICAL, BY_TORCH = fc.heads.categorical, fc.heads.from_distribution(torch.distributions.Categorical, "logits")


def plan(env=CARTPOLE, policy=None, **options):
    env = fc.make_env(env, **options)
    return fc.explain(env, fc.random_policy(env) if policy is None else policy)


class DrawsByKeys(Recording):
    def noise(self, spec):
        return fc.Noise(kind="keys")


CROSSING = {
    "loop": "crossing",
    "why": "the policy runs in Torch",
    "copies": "to where the policy reads it; each action to the environment; no parameters",
    "noise": "the lane and the step, drawn ahead for a whole rollout",
}
SEEDED = {"seeding": "episode: each episode starts from a seed of its own", "forking": "replayed"}
VECTOR = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")], autoreset_mode=AutoresetMode.DISABLED)
CACHED = replace(fc.make_env(GYMNAX, num_envs=2), starts="cached")
PUSH = fc.jax_policy(lambda params, x: (x[:, 2] > 0).astype("int32"), None)


@pytest.mark.parametrize(("env", "num_envs", "policy", "words"), [
    (CARTPOLE, None, None, SEEDED | {"env": "one environment without a batch dimension", "loop": "host"}),
    (CARTPOLE, 8, None, {"env": "a batch of 8", "why": "simulators"}),
    (VECTOR, None, None, {"forking": "replayed"}),
    (CACHED, None, None, {"seeding": "all episodes of a lane begin as its first one"}),
    ("torch/CartPole-v1", None, None, {"loop": "torch", "why": "Torch", "forking": "values"}),
    (GYMNAX, 3, fc.torch_policy(MODULE, head=CATEGORICAL, compile="eager"), CROSSING),
    (GYMNAX, 3, PUSH, {"loop": "fused", "copies": "nothing: ", "noise": "the policy draws none"}),
    (CARTPOLE, None, fc.torch_policy(MODULE, compile="inductor"), {"policy": "compiled by inductor"}),
    (CARTPOLE, None, fc.torch_policy(MODULE), {"policy": "(torch)", "copies": "no parameters"}),
    (CARTPOLE, None, fc.torch_policy(MODULE, device="cpu"), {"copies": "at every rollout"}),
    (CARTPOLE, None, fc.torch_policy(torch.nn.Linear(4, 2, device="meta")), {"copies": "to meta and each action back"}),
    (CARTPOLE, None, fc.jax_policy(lambda p, x: x @ p, 0.0, head=CATEGORICAL), {"why": "synchronous CPU dispatch"}),
])  # fmt: skip
def test_each_field(env, num_envs, policy, words):
    one = plan(env, policy, **({} if num_envs is None else {"num_envs": num_envs}))
    for field, word in words.items():
        assert word in getattr(one, field)
        assert getattr(one, field) in str(one)


def test_it_prints_one_line_per_field_and_is_frozen():
    one = plan()
    said = [field.name for field in fields(one) if getattr(one, field.name)]
    assert [line.split()[0] for line in str(one).splitlines()] == said
    with pytest.raises(FrozenInstanceError):
        one.loop = "jax"


ON_TENSORDICT = TensorDictModule(lambda x: x[..., 0].long(), ["observation"], ["action"])
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
    (fc.tensordict_policy(ON_TENSORDICT), "TensorDictPolicy", "global generator"),
    (Recording(), "Recording", "follow no seed"),
    (DrawsByKeys(), "DrawsByKeys", "one JAX key per lane and step"),
]


@pytest.mark.parametrize(("policy", "name", "noise"), POLICIES, ids=[case[1] for case in POLICIES])
def test_it_names_the_policy_and_where_its_randomness_comes_from(policy, name, noise):
    one = plan(policy=policy)
    assert name in one.policy
    assert noise in one.noise


def test_it_needs_a_policy_that_suits_and_what_was_removed_names_its_successor():
    with pytest.raises(ValueError, match="the head normal"):
        plan(policy=fc.torch_policy(MODULE, head=fc.heads.normal))
    with pytest.raises(AttributeError, match=r"compare funcollect\.profile with and without"):
        _ = plan().workers
