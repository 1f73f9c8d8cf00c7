"""Policies of functions: the modules to which a function refers are the policy's, wherever the function runs."""

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import funcollect as fc
from funcollect.policies.torch_modules.settings import dumps, pack, unpack
from funcollect.policies.torch_modules.skeleton import modules_of
from tests.support.compare import collect
from tests.support.running import SCALE, in_soak, once

ENV = "CartPole-v1"
NETWORK = nn.Linear(4, 2)
HOLDER = SimpleNamespace(network=nn.Linear(4, 2))


def by_global(observation):
    return NETWORK(observation)


def through_another(observation):
    return by_global(observation)


def by_attribute(observation):
    return HOLDER.network(observation)


class Agent:
    def __init__(self, network):
        self.layers = {"only": network}

    def act(self, observation):
        return self.layers["only"](observation)

    __call__ = act


REFERENCES = {  # functions that refer to a network
    "closure": lambda network: lambda observation: network(observation),
    "decorated": lambda network: torch.no_grad()(lambda observation: network(observation)),
    "default": lambda network: lambda observation, network=network: network(observation),
    "partial": lambda network: functools.partial(lambda network, observation: network(observation), network),
    "method": lambda network: network.forward,
    "object": Agent,
    "method of an object": lambda network: Agent(network).act,
}
KINDS = {
    "global": lambda: (by_global, NETWORK),
    "another function": lambda: (through_another, NETWORK),
    "attribute": lambda: (by_attribute, HOLDER.network),
    **{name: functools.partial(lambda refer, network: (refer(network), network), refer, nn.Linear(4, 2))
       for name, refer in REFERENCES.items()},
}  # fmt: skip


def always(network, action):
    with torch.no_grad():
        network.weight.zero_()
        network.bias.copy_(torch.tensor([1.0 - action, action]))


def made(kind, compiled=False):
    function, network = KINDS[kind]()
    always(network, 0)
    policy = fc.torch_policy(function, head=fc.heads.greedy, compile="inductor" if compiled else None)
    if compiled:
        policy.torch_backend = "eager"
    return policy, network


def acts(policy, action, **kwargs):
    return bool((collect(fc.make_env(ENV, num_envs=2), policy, 5, **kwargs)["action"] == action).all())


@pytest.mark.parametrize(("kind", "compiled"), [*((kind, False) for kind in KINDS), ("closure", True)])
def test_weights_are_the_policys(kind, compiled):
    policy, network = made(kind, compiled)
    names = list(policy.state_dict())
    assert [name.rpartition(".")[2] for name in names] == ["weight", "bias"]
    assert acts(policy, 0)
    saved = policy.state_dict()
    always(network, 1)
    assert acts(policy, 1)
    assert acts(policy, 0, params=saved)  # beside the module's own, which they leave as they are
    assert acts(policy, 1)
    policy.load(saved)
    assert acts(policy, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_have_weights_of_their_own(kind):
    policy, network = made(kind)
    module = policy.module
    for other in (copy.deepcopy(module), unpack(pack(module))):
        twin = fc.torch_policy(other, head=fc.heads.greedy)
        twin.load(policy.state_dict())
        assert acts(twin, 0)
        always(network, 1)
        assert acts(policy, 1)
        assert acts(twin, 0)
        always(network, 0)


FOLLOWED = [("global", True), ("global", False), ("closure", False), ("method of an object", True)]


@pytest.mark.parametrize(("kind", "in_process"), FOLLOWED if SCALE == 1 else once(KINDS, (True, False)))
def test_workers_follow(kind, in_process):
    policy, network = made(kind)
    kwargs = {"frames_per_batch": 20, "seed": 0, "in_process": in_process}
    with fc.MultiSyncDataCollector([ENV] * 2, policy, **kwargs) as collector:
        assert (next(collector)["action"] == 0).all()
        always(network, 1)
        collector.update_policy_weights_()
        assert (next(collector)["action"] == 1).all()


@pytest.mark.parametrize("kind", ["global", *in_soak(["closure"])])
def test_an_evaluator_and_a_saved_run_have_the_weights(kind, tmp_path):
    policy, network = made(kind)
    with fc.Evaluator(ENV, policy, episodes=2, seed=0) as evaluator:
        always(network, 1)
        evaluator.submit(step=1)
        (result,) = evaluator.wait()
    wanted = fc.evaluate(fc.make_env(ENV), policy, episodes=2, seed=0)
    assert result.stats.returns.tolist() == wanted.returns.tolist()
    with fc.SyncDataCollector(ENV, policy, frames_per_batch=10, seed=0) as collector:
        next(collector)
        collector.save(tmp_path / "run")
    always(network, 0)
    with fc.SyncDataCollector.load(tmp_path / "run", ENV, policy) as collector:
        assert (next(collector)["action"] == 1).all()


@pytest.mark.parametrize("env_id", ["CartPole-v1", "torch/CartPole-v1", "gymnax/CartPole-v1"])
def test_every_loop_follows_and_gradients_arrive(env_id):
    network = nn.Linear(4, 2)
    policy = fc.torch_policy(lambda observation: network(observation), head=fc.heads.categorical)
    env = fc.make_env(env_id, num_envs=2)
    _, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 6)
    fc.evaluate_actions(policy, None, batch)["action_log_prob"].sum().backward()
    assert network.weight.grad is not None
    always(network, 1)
    mode = fc.ExplorationType.DETERMINISTIC
    _, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 6, exploration_type=mode)
    assert (batch["action"] == 1).all()


def test_a_function_on_a_tensordict():
    def on_tensordict(tensordict):
        return tensordict.set("action", NETWORK(tensordict["observation"]).argmax(-1))

    always(NETWORK, 1)
    policy = fc.tensordict_policy(on_tensordict)
    saved = policy.state_dict()
    always(NETWORK, 0)
    assert acts(policy, 0)
    assert acts(policy, 1, params=saved)


def test_what_refers_to_no_module_stays_a_function():
    scale = 2.0

    def act(observation):
        return (scale * observation.sum(-1) > 0).long()

    policy = fc.torch_policy(act)
    assert policy.module is act
    assert policy.params is None


def test_attributes_are_found_in_their_order_in_every_process():
    holder = SimpleNamespace(**{name: nn.Linear(1, 1) for name in "zyxabc"})

    def act(observation):
        return holder.a, holder.b, holder.c, holder.x, holder.y, holder.z

    assert list(modules_of(act)) == [*"zyxabc"]  # not that of a set of names, which depends on the process


def test_modules_are_found_once_and_named_as_the_function_names_them():
    first, both = nn.Linear(4, 4), [nn.Tanh(), nn.Linear(4, 2)]

    def act(observation):
        return nn.functional.softmax(both[1](both[0](first(observation))), -1)

    assert list(modules_of(act)) == ["first", "both_0", "both_1"]
    assert len(dumps(modules_of(act))) < 10_000


def test_a_trained_tensor_belongs_in_a_module():
    weights = {"w": torch.zeros(4, 2, requires_grad=True)}
    with pytest.raises(TypeError, match=r"refers to the tensor 'weights_w'.*parameter of an nn.Module"):
        fc.torch_policy(lambda observation: observation @ weights["w"], head=fc.heads.greedy)
    constant = torch.zeros(4, 2)
    assert acts(fc.torch_policy(lambda observation: observation @ constant, head=fc.heads.greedy), 0)
