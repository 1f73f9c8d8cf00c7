"""How a Torch policy runs, lowered to JAX or called at each step, and how `explain` reports it."""

import re
from dataclasses import FrozenInstanceError, fields, replace
from functools import partial

import gymnasium
import jax
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

import funcollect as fc
from funcollect.core import routes
from funcollect.interop.jax_setup import compiled
from funcollect.policies import torch_in_jax
from funcollect.policies.torch_in_jax import LoweredPolicy
from tests.support.cases import mlp, torch_mlp, torch_recurrent
from tests.support.compare import assert_same, collect, compilations
from tests.support.envs.jax_counting import counting
from tests.support.policies import Recording
from tests.support.running import in_soak


def way(env, policy):
    return "xla" if isinstance(routes.route_of(env, policy).policy, LoweredPolicy) else "eager"


class Scaled(nn.Module):
    """Has a buffer, a plain attribute and dropout."""

    def __init__(self):
        super().__init__()
        self.net = mlp(4, 2)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("shift", torch.zeros(2))
        self.factor = 1.0
        self.eval()

    def forward(self, x):
        return self.dropout(self.net(x)) * self.factor + self.shift


def scaled_policy(compiler=None):
    return fc.torch_policy(Scaled(), head=fc.heads.categorical, compile=compiler)


@pytest.mark.parametrize("wanted", ["xla", "eager"])
def test_nested_outputs_stand_in_their_places(cartpole, wanted):
    score = TensorDictModule(mlp(4, 2), ["observation"], [("agent", "logits")])
    choose = TensorDictModule(ArgMax(), [("agent", "logits")], ["action", ("agent", "value")])
    again = TensorDictModule(nn.Identity(), ["action"], [("agent", "choice")])
    sequence = TensorDictSequential(score, choose, again)
    policy = fc.tensordict_policy(sequence, compile=wanted)
    for env in (cartpole, fc.make_env("CartPole-v1", num_envs=3)):
        assert way(env, policy) == wanted
        batch = collect(env, policy, 7)
        said = sequence(batch.select("observation").clone())["agent"]
        for name in ("logits", "value", "choice"):
            torch.testing.assert_close(batch["agent", name], said[name].detach())


def test_nested_outputs_where_a_batch_has_its_own(cartpole):
    module = TensorDictModule(ArgMax(), ["observation"], ["action", ("next", "value")])
    with pytest.raises(fc.LoweringError, match=r"the out_keys \[\('next', 'value'\)\] stand where a batch has its own"):
        fc.init(cartpole, fc.tensordict_policy(module, compile="xla"), seed=0)
    with pytest.raises(fc.PolicyError, match=r"the policy wrote \['next'\], keys that a batch uses itself"):
        collect(cartpole, fc.tensordict_policy(module), 3)


class ArgMax(nn.Module):
    def forward(self, values):
        return values.argmax(-1), values.max(-1, keepdim=True).values


@pytest.mark.parametrize("name", ["gymnax/CartPole-v1", "CartPole-v1", *in_soak(["torch/CartPole-v1"])])
def test_one_program_for_all_updates(name):
    env, policy = fc.make_env(name, num_envs=3), scaled_policy("xla")
    inner = routes.route_of(env, policy).policy
    traces, apply = [], inner.apply
    inner.apply = lambda *inputs: traces.append(1) or apply(*inputs)
    optimizer = torch.optim.Adam(policy.module.parameters(), fused=True)
    with fc.SyncDataCollector(env, policy, frames_per_batch=6, seed=0) as collector:

        def update(params):
            batch = next(collector)
            policy.module.shift += 0.01
            optimizer.zero_grad()
            torch.distributions.Categorical(logits=policy.module(batch["observation"])).entropy().sum().backward()
            optimizer.step()
            collector.update_policy_weights_(params)

        update(None)
        update(TensorDict.from_module(policy.module))
        first = len(traces)
        with compilations() as compiled:
            for number in range(20):
                update(TensorDict.from_module(policy.module) if number % 2 else None)
    assert len(traces) == first
    assert not compiled


def test_the_modes_are_the_users(cartpole):
    policy = scaled_policy()
    assert way(cartpole, policy) == "xla"
    state = fc.init(cartpole, policy, seed=0)
    _, again = fc.rollout(cartpole, policy, state, 20)
    policy.module.train()
    assert "dropout" in fc.explain(cartpole, policy).why
    assert way(cartpole, policy) == "eager"
    _, dropped = fc.rollout(cartpole, policy, state, 20)
    with torch.no_grad():
        scores = torch.log_softmax(policy.module.eval()(dropped["observation"]), -1)
    chosen = scores.gather(-1, dropped["action"][..., None])[..., 0]
    assert (chosen - dropped["action_log_prob"]).abs().max() > 1e-3
    assert_same(again, fc.rollout(cartpole, policy, state, 20)[1])
    env, demanding = fc.make_env("CartPole-v1", num_envs=3), scaled_policy("xla")
    state = fc.init(env, demanding, seed=0)
    demanding.module.train()
    for call in (partial(fc.rollout, env, demanding, state, 3), partial(fc.init, env, demanding, seed=0)):
        with pytest.raises(fc.LoweringError, match=r"call module.eval\(\) first"):
            call()


def test_plain_attributes_are_noticed_and_soon_no_longer_lowered(cartpole, monkeypatch):
    monkeypatch.setattr("funcollect.core.lowered._MOST_SETTINGS", 2)
    policy = scaled_policy()
    policy.module.shift.copy_(torch.tensor([0.0, 1.0]))
    state = fc.init(cartpole, policy, seed=0)
    ways = []
    for factor in (1.0, -50.0, 1.0, 4.0):
        policy.module.factor = factor
        state, batch = fc.rollout(cartpole, policy, state, 8)
        with torch.no_grad():
            scores = torch.log_softmax(policy.module(batch["observation"]), -1)
        torch.testing.assert_close(batch["action_log_prob"], scores.gather(-1, batch["action"][..., None])[..., 0])
        ways.append(way(cartpole, policy))
    assert ways == ["xla"] * 3 + ["eager"]
    assert "seen with 2 different values" in fc.explain(cartpole, policy).why


class Holding(nn.Module):
    def __init__(self, **held):
        super().__init__()
        vars(self).update(held)
        self.net = mlp(4, 2)

    def forward(self, x):
        return self.net(x)


class Branching(Holding):
    def forward(self, x):
        return self.net(x) if x.sum() > -100 else self.net(-x)


MEANS = torch.zeros(4)


class Inside(Holding):
    def forward(self, x):
        return (lambda rows: self.net(rows - MEANS))(x)


class Counting(Holding):
    def forward(self, x):
        self.calls += 1
        return {"logits": self.net(x), "calls": torch.full((len(x),), self.calls)}


LOOP = [frozenset([torch.zeros(4)])]
LOOP.insert(0, LOOP)


@pytest.mark.parametrize(("module", "why"), [
    (Branching(), r"its control flow depends on data, at .*test_routes.py:\d+: return self.net\(x\) if x.sum\(\)"),
    (mlp(4, 2).forward, "a plain function is not lowered"),
    (Holding(mean=torch.zeros(4)), "'mean' of Holding holds a tensor or a module beside"),
    (Holding(others=[nn.Linear(4, 2)]), "'others' of Holding holds a tensor or a module beside"),
    (Holding(loop=LOOP), "'loop' of Holding holds a tensor or a module beside"),
    (Inside(), "'forward' of Inside holds a tensor or a module beside"),
    (Counting(calls=0), "Counting changes its own attributes when called"),
])  # fmt: skip
def test_what_is_not_lowered_crosses_and_is_explained(cartpole, module, why):
    policy = fc.torch_policy(module, head=fc.heads.categorical)
    plan = fc.explain(cartpole, policy)
    assert plan.loop == "crossing"
    assert re.search(f"not lowered: .*{why}", plan.why, re.DOTALL)
    with pytest.raises(fc.LoweringError, match=why):
        fc.init(cartpole, fc.torch_policy(module, head=fc.heads.categorical, compile="xla"), seed=0)
    batch = collect(cartpole, policy, 12)
    if isinstance(module, Counting):
        assert batch["calls"].diff().eq(1).all()
        assert batch["calls"].dtype == torch.int64


SCORED = [("gymnax/Pendulum-v1", fc.heads.tanh_normal), ("CartPole-v1", fc.heads.epsilon_greedy(0.4))]
SCORED += in_soak([("gymnax/Pendulum-v1", fc.heads.normal), ("gymnax/CartPole-v1", fc.heads.categorical)])
SCORED += in_soak([("Pendulum-v1", fc.heads.tanh_normal), ("torch/Pendulum-v1", fc.heads.tanh_normal)])


@pytest.mark.parametrize(("name", "head"), SCORED, ids=[f"{name}-{head.name}" for name, head in SCORED])
def test_a_lowered_policy_scores_its_actions_as_torch_does(name, head):
    env = fc.make_env(name, num_envs=4)
    policy = fc.torch_policy(mlp(*env.observation_space.shape, 2), head=head, compile="xla")
    batch = collect(env, policy, 50)
    again = fc.evaluate_actions(fc.torch_policy(policy.module, head=head), None, batch, env=env)["action_log_prob"]
    torch.testing.assert_close(batch["action_log_prob"], again.detach(), rtol=1e-4, atol=1e-4)
    assert len(batch["action"].unique()) > 1


def test_dicts_of_observations_and_extras():
    class Reading(nn.Module):
        def forward(self, observation):
            count = observation["count"]
            hot = nn.functional.one_hot(count, 99)  # which takes only int64
            return {"action": count % 3, "twice": count * 2, "hot": hot}

    env = counting(num_envs=2)
    batches = [collect(env, fc.torch_policy(Reading(), compile=each), 20) for each in ("xla", "eager")]
    assert_same(batches[0], batches[1])
    assert torch.equal(batches[0]["twice"], batches[0]["count"] * 2)


def test_a_lowered_policy_is_a_policy_of_jax(cartpole):
    module = mlp(4, 2)
    policy = fc.lower_policy(fc.torch_policy(module, head=fc.heads.categorical), cartpole)

    def loss(params):
        state = fc.traced.init(cartpole, policy, params, key=jax.random.PRNGKey(0))
        return -fc.traced.rollout(cartpole, policy, params, state, 8)[1]["action_log_prob"].mean()

    before, gradients = jax.value_and_grad(loss)(policy.params)
    policy.load(jax.tree.map(lambda param, gradient: param - 0.1 * gradient, policy.params, gradients))
    assert loss(policy.params) < before
    torch.testing.assert_close(module[0].weight.detach(), torch.from_numpy(np.array(policy.params["0.weight"].T)))
    with pytest.raises(TypeError, match=r"pass funcollect.lower_policy\(policy, env\)"):
        fc.traced.rollout(cartpole, policy.source, policy.params, fc.init(cartpole, policy, seed=0), 3)
    with pytest.raises(TypeError, match="expected one over a Torch module"):
        fc.lower_policy(fc.random_policy(cartpole), cartpole)
    assert compiled(policy, "lay out", None)._cache_size() == 1


def test_a_module_is_lowered_where_it_is(monkeypatch):
    monkeypatch.setattr(torch_in_jax, "_check_answer", lambda *_: None)
    policy = torch_recurrent(fc.make_env("CartPole-v1"))
    policy.replace(policy.module.to("meta"))
    assert LoweredPolicy(policy, torch.zeros(3, 4), fc.ExplorationType.RANDOM).lowered.names


def test_a_lowered_module_is_compared_in_full_precision(cartpole, monkeypatch):
    seen, traced = [], LoweredPolicy.traced

    def noting(*given):
        seen.append(jax.config.jax_default_matmul_precision)
        return traced(*given)

    monkeypatch.setattr(LoweredPolicy, "traced", noting)
    policy = torch_mlp(cartpole)
    assert way(cartpole, policy) == "xla"
    assert seen == ["highest"]
    collect(cartpole, policy, 3)
    assert set(seen[1:]) == {None}


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


ON_TENSORDICT = TensorDictModule(lambda x: x[..., 0].long(), ["observation"], ["action"])
POLICIES = [  # with their names, and where their randomness comes from
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
    *((CARTPOLE, None, policy, {"policy": name, "noise": noise}) for policy, name, noise in POLICIES),
])  # fmt: skip
def test_each_field(env, num_envs, policy, words):
    one = plan(env, policy, **({} if num_envs is None else {"num_envs": num_envs}))
    for field, word in words.items():
        assert word in getattr(one, field)
        assert getattr(one, field) in str(one)


def test_it_prints_one_line_per_field_is_frozen_and_names_the_successor_of_a_removed_one():
    one = plan()
    said = [field.name for field in fields(one) if getattr(one, field.name)]
    assert [line.split()[0] for line in str(one).splitlines()] == said
    with pytest.raises(FrozenInstanceError):
        one.loop = "jax"
    with pytest.raises(AttributeError, match=r"compare funcollect\.profile with and without"):
        _ = one.workers
    with pytest.raises(ValueError, match="the head normal"):
        plan(policy=fc.torch_policy(MODULE, head=fc.heads.normal))
