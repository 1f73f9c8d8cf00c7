"""TorchRL's policies: exploration, values, distributions, and parts that are called without a TensorDict."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
    set_interaction_type,
)
from torch import nn
from torch.distributions import Normal
from torchrl.data import Categorical
from torchrl.modules import EGreedyModule, OneHotCategorical, ProbabilisticActor, QValueActor, RandomPolicy, TanhNormal

import funcollect as fc
from funcollect.core.routes import route_of
from funcollect.policies.as_policy import as_policy
from funcollect.policies.tensordict_modules import calling
from funcollect.policies.torch_in_jax import LoweredPolicy
from funcollect.testing import POLICY_CHECKS, check_policy
from tests.support.cases import LocScale, mlp
from tests.support.compare import assert_close, assert_same, collect
from tests.support.running import in_soak

Choice = torch.distributions.Categorical


def test_epsilon_is_read_live_and_follows_the_exploration_type():
    spec = Categorical(2)
    values = TensorDictModule(nn.Linear(4, 2), ["observation"], ["action_value"])
    explore = EGreedyModule(spec, eps_init=1.0, eps_end=0.0, annealing_num_steps=100)
    policy = TensorDictSequential(QValueActor(values, spec=spec, action_space="categorical"), explore)
    env = fc.make_env("CartPole-v1", num_envs=3)
    policy = as_policy(policy, env)

    def agreement(**options):
        batch = collect(env, policy, 200, **options)
        assert batch["chosen_action_value"].shape == (3, 200, 1)
        return (batch["action"] == batch["action_value"].argmax(-1)).float().mean()

    assert 0.4 < agreement() < 0.6
    assert agreement(exploration_type=fc.ExplorationType.DETERMINISTIC) == 1
    explore.step(100)
    assert agreement() == 1


COMPILED = [("CartPole-v1", None), ("gymnax/CartPole-v1", "xla"), *in_soak([("gymnax/CartPole-v1", "eager")])]


@pytest.mark.parametrize(("name", "compiler"), COMPILED)
def test_of_equal_values_the_first_is_chosen(name, compiler):
    """TorchRL's value policies answer a tie with several ones."""
    layer = nn.Linear(4, 2)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    actor = QValueActor(layer, in_keys=["observation"], action_space="one_hot")
    assert actor(TensorDict({"observation": torch.zeros(1, 4)}, batch_size=1))["action"].tolist() == [[1, 1]]
    batch = collect(fc.make_env(name, num_envs=3, one_hot=True), fc.tensordict_policy(actor, compile=compiler), 5)
    assert (batch["action"] == torch.tensor([1, 0])).all()
    assert (batch["next", "observation"][..., 1] < batch["observation"][..., 1]).all()  # pushed to the left


@pytest.mark.parametrize("space", ["one_hot", *in_soak(["categorical"])])
def test_value_policies_are_lowered(space):
    """They keep their own methods in a dictionary."""
    env = fc.make_env("gymnax/CartPole-v1", num_envs=3, one_hot=space == "one_hot")
    actor = QValueActor(mlp(4, 2), in_keys=["observation"], action_space=space)
    assert isinstance(route_of(env, fc.tensordict_policy(actor)).policy, LoweredPolicy)
    lowered, eager = (collect(env, fc.tensordict_policy(actor, compile=compiler), 40) for compiler in ("xla", "eager"))
    assert_close(lowered, eager)


def drawing(module, keys, distribution, **kwargs):
    return ProbabilisticActor(module, in_keys=keys, distribution_class=distribution, return_log_prob=True, **kwargs)


def actor_of(distribution):
    if distribution in (Choice, OneHotCategorical):
        return reading(mlp(4, 2), distribution)
    bounds = {"low": -2.0, "high": 2.0} if distribution is TanhNormal else {}
    keys = ["loc", "scale"]
    module = TensorDictModule(nn.Sequential(mlp(3, 2), LocScale()), ["observation"], keys)
    return drawing(module, keys, distribution, distribution_kwargs=bounds)


def reading(net, distribution=Choice, kind=TensorDictModule):
    return drawing(kind(net, ["observation"], ["logits"]), ["logits"], distribution)


PLAIN = (Choice, Normal)
DISTRIBUTIONS = (Choice, OneHotCategorical, TanhNormal, Normal)


@pytest.mark.parametrize("mode", [InteractionType.RANDOM, InteractionType.DETERMINISTIC])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_without_a_tensordict_the_answers_are_the_same(distribution, mode, monkeypatch):
    discrete, one_hot = distribution in (Choice, OneHotCategorical), distribution is OneHotCategorical
    env = fc.make_env("CartPole-v1" if discrete else "Pendulum-v1", num_envs=3, one_hot=one_hot)
    policy, calls, run = as_policy(actor_of(distribution), env), [], calling.run_module
    monkeypatch.setattr(calling, "run_module", lambda *args, **options: calls.append(1) or run(*args, **options))
    fast = collect(env, policy, 50, exploration_type=mode)
    if mode is InteractionType.RANDOM and distribution in PLAIN:
        assert len(calls) == 1  # to compare; not at the other steps
    monkeypatch.setattr(calling, "plain_parts", lambda module: None)
    assert_same(collect(env, policy, 50, exploration_type=mode), fast)
    dist = policy.module.get_dist(fast)
    torch.testing.assert_close(dist.log_prob(fast["action"]), fast["action_log_prob"])
    again = fc.evaluate_actions(policy, None, fast)
    torch.testing.assert_close(again["action_log_prob"], fast["action_log_prob"], rtol=1e-3, atol=1e-3)
    assert again["action_log_prob"].requires_grad
    assert ("entropy" in again) is (distribution is not TanhNormal)
    if mode is InteractionType.DETERMINISTIC:
        with set_interaction_type(mode), torch.no_grad():
            wanted = policy.module(fast.clone())["action"]
        torch.testing.assert_close(fast["action"], wanted)


class Loud(TensorDictModule):
    def forward(self, tensordict):
        tensordict = super().forward(tensordict)
        return tensordict.set("twice", tensordict["logits"] * 2)


def hooked():
    actor = actor_of(Choice)
    actor.register_forward_hook(lambda module, args, out: out.set("action", 1 - out["action"]))
    return actor


class Scaled(nn.Module):
    def forward(self, scale, observation):
        return observation[:, :2] * scale[:, :2]


def by_keyword():
    """in_keys by the names of arguments, in another order than they stand in."""
    double = TensorDictModule(nn.Identity(), ["observation"], ["scale"])
    net = TensorDictModule(Scaled(), in_keys={"observation": "observation", "scale": "scale"}, out_keys=["logits"])
    return drawing(TensorDictSequential(double, net), ["logits"], Choice)


class First(nn.Module):
    def forward(self, observation):
        return observation[..., :2]


NOT_PLAIN = {
    "a subclass": lambda: reading(mlp(4, 2), kind=Loud),
    "a hook": hooked,
    "keywords": by_keyword,
    "dropout": lambda: reading(nn.Sequential(nn.Dropout(0.5), mlp(4, 2))),
    "a view": lambda: reading(First()),
}


@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_what_is_not_plain_is_run_as_it_is(kind, monkeypatch):
    env = fc.make_env("CartPole-v1", num_envs=3)
    policy = as_policy(NOT_PLAIN[kind](), env)
    batch = collect(env, policy, 40)
    monkeypatch.setattr(calling, "plain_parts", lambda module: None)
    assert_same(collect(env, policy, 40), batch)
    if kind == "a view":
        assert torch.equal(batch["logits"], batch["observation"][..., :2])


def test_composite_actions_are_refused():
    names = {side: ("action", side) for side in ("left", "right")}
    kinds = {"distribution_map": dict.fromkeys(names, Choice), "name_map": names}
    made = {"distribution_class": CompositeDistribution, "distribution_kwargs": kinds}
    draw = ProbabilisticTensorDictModule(["params"], [*names.values()], **made)
    logits = [("params", side, "logits") for side in names]
    split = TensorDictModule(lambda x: (x[:, :2], x[:, 2:]), ["observation"], logits)
    env = fc.make_env("CartPole-v1", num_envs=3)
    with pytest.raises(fc.PolicyError, match=r"'action\.left'.*expected 'action' among them"):
        collect(env, as_policy(ProbabilisticTensorDictSequential(split, draw), env), 3)


def values():
    return QValueActor(mlp(4, 2), spec=Categorical(2), in_keys=["observation"], action_space="categorical")


def exploring():
    return TensorDictSequential(values(), EGreedyModule(Categorical(2), eps_init=0.5))


@pytest.mark.parametrize("make", [*in_soak([values, lambda: actor_of(Choice)]), exploring])
def test_every_check_of_a_policy_passes(make):
    report = check_policy(make(), fc.make_env("CartPole-v1", num_envs=3))
    idle = {"recurrent"} if make not in (values, exploring) else {"recurrent", "log_probs"}
    assert {*report.passed} == {check.__name__ for check in POLICY_CHECKS} - idle, str(report)


def test_a_hidden_state_without_a_primer_begins_at_zero():
    class Counting(nn.Module):
        def forward(self, observation, count=None):
            count = torch.ones_like(observation[..., :1]) if count is None else count + 1
            return (count[..., 0] % 2).long(), count

    module = TensorDictModule(Counting(), ["observation", "count"], ["action", ("next", "count")])
    env = fc.make_env("CartPole-v1", num_envs=2)
    batch = collect(env, as_policy(module, env), 40)
    assert torch.equal(batch["count"][..., 0].long(), batch["collector", "step"])


@pytest.mark.parametrize("make", [RandomPolicy, lambda: None])
def test_a_random_policy_without_a_spec_gets_the_environments(make):
    keywords = {"frames_per_batch": 30, "seed": 0}
    made = fc.Collector("CartPole-v1", policy_factory=RandomPolicy, **keywords)
    given = fc.Collector("CartPole-v1", make(), **keywords)
    with made, given:
        assert_same(next(made), next(given))


@pytest.mark.parametrize("name", ["CartPole-v1", "gymnax/CartPole-v1"])
@pytest.mark.parametrize("log_prob", ["action_log_prob", "old_log_prob", None])
def test_a_nested_action_is_the_executed_one(name, log_prob):
    logits = TensorDictModule(nn.Linear(4, 2), ["observation"], [("agents", "logits")])
    keys = {"in_keys": [("agents", "logits")], "out_keys": [("agents", "action")]}
    last = TensorDictModule(lambda x: (x[..., 0] > 1).long(), **keys)
    if log_prob:
        keys |= {"return_log_prob": True, "log_prob_key": ("agents", log_prob)}
        last = ProbabilisticTensorDictModule(distribution_class=Choice, **keys)
    keywords = {"frames_per_batch": 60, "init_random_frames": 60, "create_env_kwargs": {"num_envs": 2}, "seed": 0}
    with fc.Collector(name, TensorDictSequential(logits, last), **keywords) as collector:
        for random in (True, False):
            batch = next(collector)
            assert torch.equal(batch["agents", "action"], batch["action"])
            if log_prob:
                scores = Choice(logits=batch["agents", "logits"]).log_prob(batch["action"])
                scores = torch.full((2, 30), 0.5).log() if random else scores
                torch.testing.assert_close(batch["agents", log_prob], scores)


def test_a_nested_one_hot_action_is_the_executed_one_and_that_of_another_stays():
    def both(observation):
        return torch.ones(*observation.shape[:-1], 2, dtype=torch.int64), torch.zeros(observation.shape[0])

    for key, same in ((("agents", "action"), True), ("action", False)):
        policy = TensorDictModule(both, ["observation"], [key, ("expert", "value" if same else "action")])
        keywords = {"frames_per_batch": 6, "init_random_frames": 0 if same else 6, "seed": 0}
        with fc.Collector("CartPole-v1", policy, create_env_kwargs={"num_envs": 2, "one_hot": True}, **keywords) as run:
            batch = next(run)
        assert (batch[key].sum(-1) == 1).all()
        assert same or (batch["expert", "action"] == 0).all()
        assert torch.equal(batch[key], batch["action"])
