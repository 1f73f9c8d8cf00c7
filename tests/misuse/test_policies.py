"""Policies, heads and parameters given wrongly: said before a state is used, which is as good as before."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen
from gymnasium import spaces
from torch import nn

import funcollect as fc
from funcollect.errors import PolicyError
from tests.support.cases import Recurrent
from tests.support.misuse import Acting, good, linear, refused, runs, table
from tests.support.running import in_soak

HEADS = fc.heads
WEIGHTS = {"w": jnp.zeros((4, 2))}


def good_jax():
    return fc.jax_policy(lambda params, observation: observation @ params["w"], WEIGHTS, head=HEADS.categorical)


def collector(policy):
    return fc.SyncDataCollector("CartPole-v1", policy, frames_per_batch=4)


def bare():
    return fc.init(fc.make_env("CartPole-v1"), linear(), seed=0)


APPLY = "expected a function (params, observation)"
UNMADE = HEADS.epsilon_greedy


@table(
    ("a class", lambda: fc.torch_policy(nn.Linear), TypeError, "module is <class … expected a torch … an instance"),
    ("a class to collect with", lambda: collector(nn.Linear), TypeError, "policy is the class Linear … build it"),
    ("a bare module", bare, TypeError, "policy is Linear … expected a Policy … wrap a module with"),
    ("Torch for JAX", lambda: fc.jax_policy(linear(), {}), TypeError, f"apply is Linear … {APPLY} … torch_policy"),
    ("Flax for JAX", lambda: fc.jax_policy(linen.Dense(2), {}), TypeError, f"apply is … {APPLY} … Flax module's apply"),
    (
        "Flax for Torch",
        lambda: fc.torch_policy(linen.Dense(2)),
        TypeError,
        "Flax's Dense … apply to jax_policy",
    ),
    ("no head yet", lambda: fc.torch_policy(linear(), head=UNMADE), TypeError, "head is … expected one … greedy(0.1"),
    ("no device", lambda: fc.torch_policy(linear(), device="cuda:77"), ValueError, "device is 'cuda:77' … 'cpu'"),
)
def test_a_policy_given_wrongly(misuse):
    with refused(misuse.error, misuse.says):
        misuse.do()


BOX = spaces.Box(-1, 1, (2,))
UNBOUNDED = spaces.Box(-np.inf, np.inf, (2,))
BYTES = spaces.Box(0, 9, (2,), np.uint8)


@pytest.mark.parametrize(("wrap", "head", "space", "says", "other"), [
    ("torch", HEADS.categorical, BOX, "categorical needs a Discrete … got Box … use normal", HEADS.normal),
    ("jax", HEADS.greedy, BOX, "greedy needs a Discrete … got Box … use normal", HEADS.tanh_normal),
    ("torch", HEADS.epsilon_greedy(0.1), BOX, "epsilon_greedy needs … got Box … use normal", HEADS.normal),
    ("jax", HEADS.categorical, spaces.MultiBinary(2), "categorical needs … MultiBinary … no head", None),
    ("torch", HEADS.normal, spaces.Discrete(4), "needs a floating Box … Discrete … use cat", "logits"),
    ("jax", HEADS.tanh_normal, spaces.Discrete(4), "needs … Discrete(4) … use cat", "logits"),
    ("torch", HEADS.normal, BYTES, "normal needs a float … uint8 … use cat", None),
    ("jax", HEADS.clipped_normal(0.1), UNBOUNDED, "needs bounds on every action … inf … use normal", HEADS.normal),
    ("torch", HEADS.clipped_normal([0.1] * 3), BOX, "scale has shape [3], expected a number or [2]", HEADS.normal),
    ("jax", HEADS.tanh_normal, UNBOUNDED, "needs bounds on every action … inf … use normal", HEADS.normal),
])  # fmt: skip
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


def recurrent(size):
    return fc.torch_policy(Recurrent(4, 2, size=size), head=fc.heads.categorical, initial_state=torch.zeros(size))


@pytest.mark.parametrize(("name", "first", "second"), [
    ("CartPole-v1", good(), recurrent(8)),
    ("torch/CartPole-v1", recurrent(8), good()),
    *in_soak([("gymnax/CartPole-v1", recurrent(16), recurrent(8))]),
    ("gymnax/CartPole-v1", good_jax(), good()),
])  # fmt: skip
def test_a_state_of_another_policy(name, first, second):
    env = fc.make_env(name, num_envs=2)
    state = fc.init(env, first, seed=0)
    with refused(ValueError, "the state holds … this policy wants … state.replace(policy_state="):
        fc.rollout(env, second, state, 4)
    mended = state.replace(policy_state=second.init(state.key, state.num_lanes))
    fc.rollout(env, second, mended, 4)


PAIR = r"returned a dict with the keys \['action'\], expected the pair .* both"
NAMED = r"keys \['value'\], expected \['action'\] .*: return the action"


@pytest.mark.parametrize(("backend", "name", "answer", "words"), [
    ("torch", "CartPole-v1", lambda action: {"action": action}, PAIR),
    ("jax", "gymnax/CartPole-v1", lambda action: {"action": action}, PAIR),
    ("torch", "CartPole-v1", lambda action: (None, {"value": action}), NAMED),
])  # fmt: skip
def test_a_call_that_returns_something_else(backend, name, answer, words):
    class Own(fc.PolicyBase):
        params = None

        def __call__(self, params, state, observation, *rest):
            return answer((observation[:, 2] > 0) * 1)

    Own.backend = backend
    env = fc.make_env(name, num_envs=2)
    with pytest.raises(PolicyError, match=words):
        fc.rollout(env, Own(), fc.init(env, Own(), seed=0), 2)


OWN = {"weight": torch.zeros(2, 4), "bias": torch.zeros(2)}
ABSENT = "bias is absent, expected (2,) … 0.bias is (2,), expected absent … weight is absent … pass"
OF_JAX = "params differ … ['w'] is … expected (4, 2) … pass"


@pytest.mark.parametrize(("make", "fitting", "given", "error", "says"), [
    (good, OWN, {f"0.{name}": value for name, value in OWN.items()}, ValueError, ABSENT),
    (good, OWN, OWN | {"bias": torch.zeros(3)}, ValueError, "bias is (3,), expected (2,) … pass"),
    (good, OWN, OWN | {"bias": np.zeros(2)}, ValueError, "bias is ndarray, expected (2,) … pass"),
    (good, OWN, [OWN["weight"]], TypeError, "params is list … expected a TensorDict … module.state_dict()"),
    (good_jax, WEIGHTS, {}, ValueError, OF_JAX),
    (good_jax, WEIGHTS, {"w": jnp.zeros((3, 2))}, ValueError, OF_JAX),
])  # fmt: skip
def test_parameters_that_do_not_fit_leave_state_and_collector_as_they_are(make, fitting, given, error, says):
    env, policy = fc.make_env("CartPole-v1", num_envs=3), make()
    state = fc.init(env, policy, seed=0)
    with refused(error, says):
        fc.rollout(env, policy, state, 4, params=given)
    fc.rollout(env, policy, state, 4, params=fitting)
    with fc.SyncDataCollector("CartPole-v1", policy, frames_per_batch=4) as collector:
        with refused(error, says):
            collector.update_policy_weights_(given)
        assert next(collector)["collector", "policy_version"].eq(0).all()
        collector.update_policy_weights_(fitting)
        assert next(collector)["collector", "policy_version"].eq(1).all()


@pytest.mark.parametrize(("make", "says"), [
    (fc.random_policy, "params were given to a random policy … leave them out"),
    (lambda _: fc.torch_policy(lambda x: (x[:, 0] > 0) * 1), "params were given … pass a torch"),
])  # fmt: skip
def test_parameters_for_a_policy_that_takes_none(make, says):
    env = fc.make_env("CartPole-v1")
    policy = make(env)
    state = fc.init(env, policy, seed=0)
    with refused(ValueError, says):
        fc.rollout(env, policy, state, 4, params=OWN)
    runs(env, policy, state)
