"""Policies, heads and parameters given wrongly: said before a state is used, which is as good as before."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import funcollect as fc
from funcollect.errors import PolicyError
from tests.support.misuse import WEIGHTS, Acting, Misuse, good, good_jax, linear, refused, runs, table

HEADS = fc.heads


def collector(policy):
    return fc.SyncDataCollector("CartPole-v1", policy, frames_per_batch=4)


def bare():
    return fc.init(fc.make_env("CartPole-v1"), linear(), seed=0)


WRAP = "expected a Policy … wrap a module with funcollect.torch_policy"
APPLY = "expected a function (params, observation)"
UNMADE = HEADS.epsilon_greedy


@table(
    Misuse(
        "a class", lambda: fc.torch_policy(nn.Linear), TypeError, "module is <class … expected a torch … an instance"
    ),
    Misuse("a class to collect with", lambda: collector(nn.Linear), TypeError, "policy is the class Linear … build it"),
    Misuse("a number", lambda: collector(3), TypeError, "policy is 3 … expected a Policy, a torch … pass one of these"),
    Misuse("a bare module", bare, TypeError, f"policy is Linear … {WRAP}"),
    Misuse(
        "Torch for JAX", lambda: fc.jax_policy(linear(), {}), TypeError, f"apply is Linear … {APPLY} … torch_policy"
    ),
    Misuse("a name", lambda: fc.jax_policy("mlp", {}), TypeError, f"apply is 'mlp' … {APPLY} … pass one"),
    Misuse(
        "no head yet",
        lambda: fc.torch_policy(linear(), head=UNMADE),
        TypeError,
        "head is … expected one of … greedy(0.1",
    ),
    Misuse("no device", lambda: fc.torch_policy(linear(), device="cuda:77"), ValueError, "device is 'cuda:77' … 'cpu'"),
)
def test_a_policy_given_wrongly(misuse):
    with refused(misuse.error, misuse.says):
        misuse.do()


BOX = spaces.Box(-1, 1, (2,))
UNBOUNDED = spaces.Box(-np.inf, np.inf, (2,))
BYTES = spaces.Box(0, 9, (2,), np.uint8)


@pytest.mark.parametrize(
    ("wrap", "head", "space", "says", "other"),
    [
        ("torch", HEADS.categorical, BOX, "categorical needs a Discrete … got Box … use normal", HEADS.normal),
        ("jax", HEADS.greedy, BOX, "greedy needs a Discrete … got Box … use normal", HEADS.tanh_normal),
        ("torch", HEADS.epsilon_greedy(0.1), BOX, "epsilon_greedy needs … got Box … use normal", HEADS.normal),
        ("jax", HEADS.categorical, spaces.MultiBinary(2), "categorical needs … MultiBinary … no head", None),
        ("torch", HEADS.normal, spaces.Discrete(4), "needs a floating Box … Discrete … use cat", "logits"),
        ("jax", HEADS.tanh_normal, spaces.Discrete(4), "needs … Discrete(4) … use cat", "logits"),
        ("torch", HEADS.normal, BYTES, "normal needs a float … uint8 … use cat", None),
        ("jax", HEADS.tanh_normal, UNBOUNDED, "needs bounds on every action … inf … use normal", HEADS.normal),
    ],
)
def test_a_head_that_does_not_suit(wrap, head, space, says, other):
    def policy(head):
        if wrap == "torch":
            return fc.torch_policy(nn.Linear(2, 4), head=head)
        return fc.jax_policy(lambda w, x: x @ w, jnp.zeros((2, 4)), head=head)

    env = fc.make_env(Acting(space))
    with refused(ValueError, says):
        fc.init(env, policy(head), seed=0)
    with refused(ValueError, says):
        fc.explain(env, policy(head))
    mend = HEADS.categorical if other == "logits" else other
    runs(env, fc.random_policy(env) if mend is None else policy(mend))


class Recurrent(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.cell, self.out = nn.GRUCell(4, size), nn.Linear(size, 2)

    def forward(self, observation, memory):
        memory = self.cell(observation, memory)
        return self.out(memory), memory


def policy_of(size):
    if not isinstance(size, int):
        return good() if size == "torch" else good_jax()
    if not size:
        return fc.torch_policy(nn.Linear(4, 2), head=fc.heads.categorical)
    return fc.torch_policy(Recurrent(size), head=fc.heads.categorical, initial_state=torch.zeros(size))


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("CartPole-v1", (0, 8)),
        ("torch/CartPole-v1", (8, 0)),
        ("gymnax/CartPole-v1", (16, 8)),
        ("gymnax/CartPole-v1", ("jax", "torch")),
        ("gymnax/CartPole-v1", ("torch", "jax")),
    ],
)
def test_a_state_of_another_policy(name, kinds):
    env = fc.make_env(name, num_envs=2)
    first, second = map(policy_of, kinds)
    state = fc.init(env, first, seed=0)
    with refused(ValueError, "policy state … this policy wants … state.replace(policy_state="):
        fc.rollout(env, second, state, 4)
    mended = state.replace(policy_state=second.init(state.key, state.num_lanes))
    fc.rollout(env, second, mended, 4)


@pytest.mark.parametrize(("backend", "name"), [("torch", "CartPole-v1"), ("jax", "gymnax/CartPole-v1")])
def test_a_call_that_returns_the_outputs_alone(backend, name):
    class Alone(fc.PolicyBase):
        params = None

        def __call__(self, params, state, observation, *rest):
            return {"action": (observation[:, 2] > 0) * 1}

    Alone.backend = backend
    env = fc.make_env(name, num_envs=2)
    with pytest.raises(PolicyError, match=r"returned a dict with the keys \['action'\], expected the pair .* both"):
        fc.rollout(env, Alone(), fc.init(env, Alone(), seed=0), 2)


def test_the_policy_before_the_environment():
    env, policy = fc.make_env("CartPole-v1"), good()
    state = fc.init(env, policy, seed=0)
    with pytest.raises(TypeError, match="policy is the environment SimulatedEnv, expected a Policy: env comes first"):
        fc.rollout(policy, env, state, 2)


def test_a_network_that_returns_numpy():
    env = fc.make_env("CartPole-v1", num_envs=2)
    policy = fc.torch_policy(lambda observation: np.zeros((2, 2), np.float32), head=HEADS.categorical)
    with pytest.raises(PolicyError, match=r"is ndarray, expected a tensor of shape \[2, \.\.\.\]"):
        fc.rollout(env, policy, fc.init(env, policy, seed=0), 2)


@pytest.mark.parametrize("name", ["CartPole-v1", "gymnax/CartPole-v1"])
def test_a_recurrent_answer_in_the_wrong_order(name):
    env = fc.make_env(name, num_envs=2)
    initial = np.zeros(2, np.float32)
    wrong = lambda params, x, state: (state, {"logits": x[:, :2]})  # noqa: E731
    policy = fc.jax_policy(wrong, None, head=HEADS.categorical, initial_state=initial)
    with pytest.raises(PolicyError, match=r"next state is dict, expected \w+ as .*: return \(answer, next_state\)"):
        fc.rollout(env, policy, fc.init(env, policy, seed=0), 2)


class Entangled(nn.Module):
    """A module that reaches its own parameters through a function, so that no others can act."""

    def __init__(self):
        super().__init__()
        self.linear = linear()
        self.act = lambda observation: self.linear(observation)

    def forward(self, observation):
        return self.act(observation)


OWN = {"weight": torch.zeros(2, 4), "bias": torch.zeros(2)}


ABSENT = "bias is absent, expected (2,) … 0.bias is (2,), expected absent … weight is absent … pass"


@table(
    Misuse("another network's", {f"0.{name}": value for name, value in OWN.items()}, ValueError, ABSENT),
    Misuse("a misshapen one", OWN | {"bias": torch.zeros(3)}, ValueError, "bias is (3,), expected (2,) … pass"),
    Misuse("an array", OWN | {"bias": np.zeros(2)}, ValueError, "bias is ndarray, expected (2,) … pass"),
    Misuse("a list", [OWN["weight"]], TypeError, "params is list … expected a TensorDict … module.state_dict()"),
)
def test_torch_parameters_that_do_not_fit(misuse):
    given = misuse.do
    not_used_up(good(), given, misuse, OWN)


@table(
    Misuse("a missing one", {}, ValueError, ("params differ", "['w'] is absent, expected (4, 2)", "pass")),
    Misuse("a misshapen one", {"w": jnp.zeros((3, 2))}, ValueError, ("differ", "['w']", "(3, 2)", "(4, 2)", "pass")),
)
def test_jax_parameters_that_do_not_fit(misuse):
    given = misuse.do
    not_used_up(good_jax(), given, misuse, WEIGHTS)


def not_used_up(policy, given, misuse, fitting):
    """Parameters that do not fit leave state and collector as they are."""
    env = fc.make_env("CartPole-v1", num_envs=3)
    state = fc.init(env, policy, seed=0)
    with refused(misuse.error, misuse.says):
        fc.rollout(env, policy, state, 4, params=given)
    fc.rollout(env, policy, state, 4, params=fitting)
    with fc.SyncDataCollector("CartPole-v1", policy, frames_per_batch=4) as collector:
        with refused(misuse.error, misuse.says):
            collector.update_policy_weights_(given)
        assert next(collector)["collector", "policy_version"].eq(0).all()
        collector.update_policy_weights_(fitting)
        assert next(collector)["collector", "policy_version"].eq(1).all()


def entangled(_):
    return fc.torch_policy(Entangled(), head=HEADS.categorical)


def constant(observation):
    return torch.zeros(len(observation), dtype=torch.int64)


@table(
    Misuse("a random policy", fc.random_policy, ValueError, ("params were given to a random policy", "leave them out")),
    Misuse("a function", lambda _: fc.torch_policy(constant), ValueError, ("params were given", "pass a torch")),
    Misuse(
        "a module that reaches its own parts", entangled, ValueError, "params= cannot act … 'act' of Entangled … pass"
    ),
)
def test_parameters_for_a_policy_that_takes_none(misuse):
    env = fc.make_env("CartPole-v1")
    policy = misuse.do(env)
    state = fc.init(env, policy, seed=0)
    with refused(misuse.error, misuse.says):
        fc.rollout(env, policy, state, 4, params=OWN if policy.params is None else policy.params)
    runs(env, policy, state)


def test_a_module_that_cannot_be_copied_to_another_device():
    """The meta device stands in for a GPU: nothing runs there."""
    with refused(ValueError, ("cannot be copied to meta", "move it there before", "policy_factory")):
        fc.SyncDataCollector("CartPole-v1", Entangled(), frames_per_batch=4, policy_device="meta")
    with fc.SyncDataCollector("CartPole-v1", Entangled(), frames_per_batch=4, policy_device="cpu") as collector:
        assert collector.policy.module.linear
