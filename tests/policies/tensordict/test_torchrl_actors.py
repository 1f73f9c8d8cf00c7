"""TorchRL's policies: hidden states as keys, exploration, distributions, and parts called without a TensorDict."""

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
from torchrl.data import Categorical
from torchrl.envs import Compose, GymEnv, InitTracker, SerialEnv, TransformedEnv
from torchrl.modules import (
    EGreedyModule,
    GRUModule,
    LSTMModule,
    OneHotCategorical,
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
)

import funcollect as fc
from funcollect.core.routes import route_of
from funcollect.policies.as_policy import as_policy
from funcollect.policies.tensordict_modules import calling
from funcollect.policies.torch_in_jax import LoweredPolicy
from funcollect.testing import POLICY_CHECKS, check_policy
from tests.support.cases import LocScale, mlp
from tests.support.compare import assert_close, assert_same, collect
from tests.support.running import scaled


def lstm():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LSTMModule(input_size=4, hidden_size=5, in_key="observation", out_key="embedding")


def gru():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        keys = ["observation", "hidden"]
        return GRUModule(input_size=4, hidden_size=5, in_keys=keys, out_keys=["embedding", ("next", "hidden")])


def recurrent_actor(memory, return_log_prob=True):
    return ProbabilisticActor(
        TensorDictSequential(memory, TensorDictModule(mlp(5, 2), ["embedding"], ["logits"])),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=return_log_prob,
    )


def greedy(memory):
    return TensorDictSequential(
        memory,
        TensorDictModule(mlp(5, 2), ["embedding"], ["logits"]),
        TensorDictModule(lambda logits: logits.argmax(-1), ["logits"], ["action"]),
    )


@pytest.mark.parametrize("num_envs", [None, 3])
@pytest.mark.parametrize(("memory", "keys"), [(lstm, ["recurrent_state_h", "recurrent_state_c"]), (gru, ["hidden"])])
def test_hidden_states_are_those_of_a_loop_by_hand(memory, keys, num_envs):
    env = fc.make_env("CartPole-v1", num_envs=num_envs)
    batch = collect(env, as_policy(greedy(memory()), env), scaled(40), seed=2)
    if num_envs is None:
        batch = batch[None]
    assert batch["next", "done"].any()
    first = batch["collector", "step"] == 0
    assert torch.equal(batch["is_init"][..., 0], first)
    assert not batch["next", "is_init"].any()
    module = memory()
    carried = {key: torch.zeros_like(batch[key][:, 0]) for key in keys}
    for t in range(batch.shape[-1]):
        for key in keys:
            carried[key][first[:, t]] = 0
            torch.testing.assert_close(batch[key][:, t], carried[key])
        step = batch[:, t].select("observation", "is_init").update(carried)
        with torch.no_grad():
            step = module(step)
        torch.testing.assert_close(batch["embedding"][:, t], step["embedding"])
        carried = {key: step["next", key].clone() for key in keys}
        for key in keys:
            torch.testing.assert_close(batch["next", key][:, t], carried[key])


def cartpole():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def test_a_primer_around_the_environment_says_how_hidden_states_begin():
    memory = lstm()
    primer = memory.make_tensordict_primer()
    env = fc.make_env(lambda: TransformedEnv(SerialEnv(2, cartpole), Compose(InitTracker(), primer)))
    assert set(env.observation_space) == {"observation", "is_init"}
    batch = collect(env, as_policy(recurrent_actor(memory), env), 40)
    assert torch.equal(batch["is_init"][..., 0], batch["collector", "step"] == 0)
    assert (batch["recurrent_state_h"][batch["is_init"][..., 0]] == 0).all()
    goes_on = ~batch["next", "done"][:, :-1, 0]
    after = batch["next", "recurrent_state_h"][:, :-1]
    assert torch.equal(batch["recurrent_state_h"][:, 1:][goes_on], after[goes_on])


class Count(nn.Module):
    """Carries a count under a nested key."""

    in_keys = ("observation", ("memory", "count"))
    out_keys = ("action", ("next", "memory", "count"))

    def forward(self, tensordict):
        count = tensordict["memory", "count"]
        tensordict["action"] = (tensordict["observation"][..., 2] > 0).long()
        tensordict["next", "memory", "count"] = count + 1
        count.zero_()  # what it was given is its own
        return tensordict


def test_an_initial_state_under_a_nested_key():
    policy = fc.tensordict_policy(Count(), initial_state={"memory": {"count": torch.tensor([7.0])}})
    batch = collect(fc.make_env("CartPole-v1", num_envs=3), policy, 30, 30)
    wanted = 7.0 + batch["collector", "step"]
    assert torch.equal(batch["memory", "count"][..., 0], wanted)
    assert torch.equal(batch["next", "memory", "count"][..., 0], wanted + 1)
    assert "is_init" not in list(batch.keys())


def test_epsilon_is_read_live_and_follows_the_exploration_type():
    spec = Categorical(2)
    values = TensorDictModule(nn.Linear(4, 2), ["observation"], ["action_value"])
    explore = EGreedyModule(spec, eps_init=1.0, eps_end=0.0, annealing_num_steps=100)
    policy = TensorDictSequential(QValueActor(values, spec=spec, action_space="categorical"), explore)
    frames = {"frames_per_batch": 600, "create_env_kwargs": {"num_envs": 3}, "seed": 0}
    with fc.SyncDataCollector("CartPole-v1", policy, **frames) as collector:
        batch = next(collector)
        agrees = (batch["action"] == batch["action_value"].argmax(-1)).float().mean()
        assert 0.4 < agrees < 0.6
        assert batch["chosen_action_value"].shape == (3, 200, 1)
        explore.step(100)
        batch = next(collector)
        assert torch.equal(batch["action"], batch["action_value"].argmax(-1))
    explore.eps.fill_(1.0)
    mode = fc.ExplorationType.DETERMINISTIC
    with fc.SyncDataCollector("CartPole-v1", policy, exploration_type=mode, **frames) as collector:
        batch = next(collector)
        assert torch.equal(batch["action"], batch["action_value"].argmax(-1))


@pytest.mark.parametrize(
    ("name", "compiler"), [("CartPole-v1", None), *(("gymnax/CartPole-v1", compiler) for compiler in ("xla", "eager"))]
)
def test_of_equal_values_the_first_is_chosen(name, compiler):
    """TorchRL's value policies answer a tie with several ones."""
    layer = nn.Linear(4, 2)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    actor = QValueActor(layer, in_keys=["observation"], action_space="one_hot")
    assert actor(TensorDict({"observation": torch.zeros(1, 4)}, batch_size=1))["action"].tolist() == [[1, 1]]
    env = fc.make_env(name, num_envs=3, one_hot=True)
    policy = fc.tensordict_policy(actor, compile=compiler)
    _, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 5)
    assert (batch["action"] == torch.tensor([1, 0])).all()
    assert (batch["next", "observation"][..., 1] < batch["observation"][..., 1]).all()  # pushed to the left


@pytest.mark.parametrize("space", ["categorical", "one_hot"])
def test_value_policies_are_lowered(space):
    """They keep their own methods in a dictionary."""
    env = fc.make_env("gymnax/CartPole-v1", num_envs=3, one_hot=space == "one_hot")
    actor = QValueActor(mlp(4, 2), in_keys=["observation"], action_space=space)
    assert isinstance(route_of(env, fc.tensordict_policy(actor)).policy, LoweredPolicy)
    lowered, eager = (collect(env, fc.tensordict_policy(actor, compile=compiler), 40) for compiler in ("xla", "eager"))
    assert_close(lowered, eager)


def actor_of(distribution, outputs=2):
    discrete = distribution in (torch.distributions.Categorical, OneHotCategorical)
    keys = ["logits"] if discrete else ["loc", "scale"]
    net = mlp(4 if discrete else 3, outputs) if discrete else nn.Sequential(mlp(3, outputs), LocScale())
    kwargs = {"low": -2.0, "high": 2.0} if distribution is TanhNormal else {}
    return ProbabilisticActor(
        TensorDictModule(net, ["observation"], keys),
        in_keys=keys,
        distribution_class=distribution,
        distribution_kwargs=kwargs,
        return_log_prob=True,
    )


DISTRIBUTIONS = {
    torch.distributions.Categorical: ("CartPole-v1", {}),
    OneHotCategorical: ("CartPole-v1", {"one_hot": True}),
    TanhNormal: ("Pendulum-v1", {}),
    torch.distributions.Normal: ("Pendulum-v1", {}),
}


@pytest.mark.parametrize("mode", [InteractionType.RANDOM, InteractionType.DETERMINISTIC])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_without_a_tensordict_the_answers_are_the_same(distribution, mode, monkeypatch):
    name, kwargs = DISTRIBUTIONS[distribution]
    env = fc.make_env(name, num_envs=3, **kwargs)
    policy = as_policy(actor_of(distribution), env)
    fast = collect(env, policy, 50, exploration_type=mode)
    monkeypatch.setattr(calling, "plain_parts", lambda module: None)
    assert_same(collect(env, policy, 50, exploration_type=mode), fast)
    dist = policy.module.get_dist(fast)
    torch.testing.assert_close(dist.log_prob(fast["action"]), fast["action_log_prob"])
    if mode is InteractionType.DETERMINISTIC:
        with set_interaction_type(mode), torch.no_grad():
            wanted = policy.module(fast.clone())["action"]
        torch.testing.assert_close(fast["action"], wanted)


@pytest.mark.parametrize("distribution", [torch.distributions.Categorical, torch.distributions.Normal])
def test_plain_actors_are_called_without_a_tensordict(distribution, monkeypatch):
    name, kwargs = DISTRIBUTIONS[distribution]
    env = fc.make_env(name, num_envs=3, **kwargs)
    calls, run = [], calling.run_module
    monkeypatch.setattr(calling, "run_module", lambda *args, **options: calls.append(1) or run(*args, **options))
    collect(env, as_policy(actor_of(distribution), env), 30)
    assert len(calls) == 1  # to compare; not at the other steps


class Loud(TensorDictModule):
    """Says more than its module does."""

    def forward(self, tensordict):
        tensordict = super().forward(tensordict)
        return tensordict.set("twice", tensordict["logits"] * 2)


def hooked():
    actor = actor_of(torch.distributions.Categorical)
    actor.register_forward_hook(lambda module, args, out: out.set("action", 1 - out["action"]))
    return actor


def by_keyword():
    """in_keys by the names of arguments, in another order than they stand in."""

    class Net(nn.Module):
        def forward(self, scale, observation):
            return observation[:, :2] * scale[:, :2]

    double = TensorDictModule(nn.Identity(), ["observation"], ["scale"])
    net = TensorDictModule(Net(), in_keys={"observation": "observation", "scale": "scale"}, out_keys=["logits"])
    return TensorDictSequential(double, net)


def sequence(module):
    return ProbabilisticActor(
        module, in_keys=["logits"], distribution_class=torch.distributions.Categorical, return_log_prob=True
    )


class First(nn.Module):
    """Answers with a view of what it reads."""

    def forward(self, observation):
        return observation[..., :2]


NOT_PLAIN = {
    "a subclass": lambda: sequence(Loud(mlp(4, 2), ["observation"], ["logits"])),
    "a hook": hooked,
    "keywords": lambda: sequence(by_keyword()),
    "dropout": lambda: sequence(
        TensorDictModule(nn.Sequential(nn.Dropout(0.5), mlp(4, 2)), ["observation"], ["logits"])
    ),
    "a view": lambda: sequence(TensorDictModule(First(), ["observation"], ["logits"])),
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
    kinds = dict.fromkeys(names, torch.distributions.Categorical)
    logits = [("params", side, "logits") for side in names]
    draw = ProbabilisticTensorDictModule(
        ["params"],
        [*names.values()],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": kinds, "name_map": names},
    )
    split = TensorDictModule(lambda x: (x[:, :2], x[:, 2:]), ["observation"], logits)
    env = fc.make_env("CartPole-v1", num_envs=3)
    with pytest.raises(fc.PolicyError, match=r"'action\.left'.*expected 'action' among them"):
        collect(env, as_policy(ProbabilisticTensorDictSequential(split, draw), env), 3)


def test_keys_with_an_underscore_are_dropped_by_collectors():
    module = TensorDictModule(lambda x: ((x[..., 2] > 0).long(), x), ["observation"], ["action", "_seen"])
    with fc.SyncDataCollector("CartPole-v1", module, frames_per_batch=5) as collector:
        assert "_seen" not in list(next(collector).keys())


class Carrying(nn.Module):
    in_keys = ("observation", "memory")
    out_keys = ("action", ("next", "memory"))

    def __init__(self, written="memory"):
        super().__init__()
        self.written = written

    def forward(self, tensordict):
        tensordict["action"] = (tensordict["observation"][..., 2] > 0).long()
        if self.written:
            tensordict["next", self.written] = tensordict["memory"].repeat(1, 2)
        return tensordict


def test_misuses_of_hidden_states_are_said():
    env = fc.make_env("CartPole-v1", num_envs=3)
    with pytest.raises(ValueError, match=r"reads 'memory' and writes it under 'next'.*initial_state=\{'memory'"):
        as_policy(Carrying(), env)
    with pytest.raises(ValueError, match=r"initial_state holds \[\('other',\)\], the policy carries \[\('memory',\)\]"):
        fc.tensordict_policy(Carrying(), initial_state={"other": torch.zeros(2)})
    with pytest.raises(TypeError, match="initial_state is Tensor, expected a dict"):
        fc.tensordict_policy(Carrying(), initial_state=torch.zeros(2))
    with pytest.raises(TypeError, match="expected a TensorDictModule or a function"):
        fc.tensordict_policy(Carrying)
    for module, message in ((Carrying(), r"is \(3, 4\), expected \(3, 2\)"), (Carrying(None), "is None, expected")):
        policy = fc.tensordict_policy(module, initial_state={"memory": torch.zeros(2)})
        with pytest.raises(fc.PolicyError, match=f"hidden state 'next.memory' {message}"):
            collect(env, policy, 3)
    inside = fc.make_env(lambda: SerialEnv(2, lambda: TransformedEnv(cartpole(), lstm().make_tensordict_primer())))
    with pytest.raises(ValueError, match=r"'recurrent_state_h'.*take the TensorDictPrimer out"):
        as_policy(recurrent_actor(lstm()), inside)


def exploring():
    values = QValueActor(mlp(4, 2), spec=Categorical(2), in_keys=["observation"], action_space="categorical")
    return TensorDictSequential(values, EGreedyModule(Categorical(2), eps_init=0.5))


FORMS = {
    "lstm": (lambda: fc.tensordict_policy(recurrent_actor(lstm())), set()),
    "gru": (lambda: fc.tensordict_policy(recurrent_actor(gru())), set()),
    "q-values": (
        lambda: QValueActor(mlp(4, 2), spec=Categorical(2), in_keys=["observation"], action_space="categorical"),
        {"log_probs", "recurrent"},
    ),
    "exploring": (exploring, {"log_probs", "recurrent"}),
    "actor": (lambda: actor_of(torch.distributions.Categorical), {"recurrent"}),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_check_of_a_policy_passes(name):
    make, idle = FORMS[name]
    report = check_policy(make(), fc.make_env("CartPole-v1", num_envs=3))
    assert {*report.passed} == {check.__name__ for check in POLICY_CHECKS} - idle, str(report)
