"""Policies and heads given wrongly: said before a state is used, which is as good as before."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import funcollect as fc
from funcollect.errors import PolicyError
from tests.support.misuse import WEIGHTS, Acting, Misuse, Rigged, apply, good, good_jax, linear, refused, runs, table

HEADS = fc.heads


def collector(policy: Any = None, **how: Any) -> Any:
    made = fc.SyncDataCollector("CartPole-v1", policy, frames_per_batch=4, **how)
    next(made)
    return made.policy


@table(
    Misuse("a number", lambda: fc.torch_policy(3), TypeError, ("module is 3", "expected a torch.nn.Module"), good),
    Misuse(
        "a module's class",
        lambda: fc.torch_policy(nn.Linear),
        TypeError,
        ("module is <class", "Linear", "expected a torch.nn.Module", "pass an instance"),
        good,
    ),
    Misuse(
        "a class for a collector",
        lambda: collector(nn.Linear),
        TypeError,
        ("policy is the class Linear", "expected an instance", "build it"),
        lambda: collector(good()),
    ),
    Misuse(
        "a policy's class for a collector",
        lambda: collector(type(good())),
        TypeError,
        ("policy is the class TorchPolicy", "expected an instance", "build it"),
        lambda: collector(good()),
    ),
    Misuse(
        "a number for a collector",
        lambda: collector(3),
        TypeError,
        ("policy is 3", "expected a Policy, a torch.nn.Module", "pass one of these"),
        lambda: collector(None),
    ),
    Misuse(
        "a bare module for init",
        lambda: fc.init(fc.make_env("CartPole-v1"), linear(), seed=0),  # type: ignore[arg-type]
        TypeError,
        ("policy is Linear", "expected a Policy", "wrap a module with funcollect.torch_policy"),
        good,
    ),
    Misuse(
        "a Torch module for JAX",
        lambda: fc.jax_policy(linear(), {}),
        TypeError,
        ("apply is Linear", "expected a function (params, observation)", "funcollect.torch_policy"),
        good_jax,
    ),
    Misuse(
        "a name for JAX",
        lambda: fc.jax_policy("mlp", {}),  # type: ignore[arg-type]
        TypeError,
        ("apply is 'mlp'", "expected a function (params, observation)", "pass one"),
        good_jax,
    ),
    *[
        Misuse(
            f"the head {name} for {kind.__name__}",
            lambda head=head, kind=kind: kind(head),
            TypeError,
            ("head is", name, "expected one of funcollect.heads", "epsilon_greedy(0.1)"),
            good,
        )
        for kind in (
            lambda head: fc.torch_policy(linear(), head=head),
            lambda head: fc.jax_policy(apply, WEIGHTS, head=head),
        )
        for name, head in (
            ("'categorical'", "categorical"),
            ("epsilon_greedy", HEADS.epsilon_greedy),
            ("Linear", linear()),
        )
    ],
    Misuse(
        "epsilon 2",
        lambda: HEADS.epsilon_greedy(2.0),
        ValueError,
        ("epsilon is 2.0", "expected a number in [0, 1]"),
        good,
    ),
    *[
        Misuse(
            f"a policy on {device}",
            lambda device=device: fc.torch_policy(linear(), device=device),
            ValueError,
            (f"device is {device!r}", "expected a device that Torch has here", "choose another, such as 'cpu'"),
            lambda: fc.torch_policy(linear(), head=HEADS.categorical, device="cpu"),
        )
        for device in ("cuda:77", "nonsense")
    ],
)
def test_a_policy_given_wrongly(misuse: Misuse) -> None:
    with refused(misuse.error, misuse.says):
        misuse.do()
    assert misuse.mend is not None
    runs(fc.make_env("CartPole-v1"), misuse.mend())


BOX = spaces.Box(-1, 1, (2,))
UNBOUNDED = spaces.Box(-np.inf, np.inf, (2,))


@pytest.mark.parametrize("wrap", ["torch", "jax"])
@pytest.mark.parametrize(
    ("head", "space", "says", "other"),
    [
        (HEADS.categorical, BOX, ("the head categorical needs a Discrete", "got Box", "use normal"), HEADS.normal),
        (HEADS.greedy, BOX, ("the head greedy needs a Discrete", "got Box", "use normal"), HEADS.tanh_normal),
        (HEADS.epsilon_greedy(0.1), BOX, ("the head epsilon_greedy needs", "got Box", "use normal"), HEADS.normal),
        (HEADS.categorical, spaces.MultiBinary(2), ("the head categorical needs", "MultiBinary", "no head"), None),
        (
            HEADS.normal,
            spaces.Discrete(4),
            ("the head normal needs a floating Box", "Discrete", "use cat"),
            "logits",
        ),
        (HEADS.tanh_normal, spaces.Discrete(4), ("the head tanh_normal needs", "Discrete(4)", "use cat"), "logits"),
        (
            HEADS.normal,
            spaces.Box(0, 9, (2,), np.uint8),
            ("the head normal needs a float", "uint8", "use cat"),
            None,
        ),
        (HEADS.tanh_normal, UNBOUNDED, ("needs bounds on every action", "inf", "use normal"), HEADS.normal),
    ],
)
def test_a_head_that_does_not_suit(wrap: str, head: Any, space: Any, says: tuple[str, ...], other: Any) -> None:
    def policy(head: Any) -> Any:
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


@pytest.mark.parametrize("kinds", [("random", "torch"), ("torch", "random"), ("jax", "torch"), ("torch", "jax")])
@pytest.mark.parametrize("name", ["CartPole-v1", "torch/CartPole-v1", "gymnax/CartPole-v1"])
def test_a_state_of_another_policy(name: str, kinds: tuple[str, str]) -> None:
    env = fc.make_env(name)
    made = {"random": fc.random_policy(env), "torch": good(), "jax": good_jax()}
    first, second = (made[kind] for kind in kinds)
    state = fc.init(env, first, seed=0)
    with refused(ValueError, ("the state holds the policy state", "this policy wants", "state.replace(policy_state=")):
        fc.rollout(env, second, state, 4)
    runs(env, first, state)


class Recurrent(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(4, size), nn.Linear(size, 2)

    def forward(self, observation: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        memory = self.cell(observation, memory)
        return self.out(memory), memory


@pytest.mark.parametrize("kinds", [(0, 8), (8, 0), (16, 8)])
@pytest.mark.parametrize("name", ["CartPole-v1", "torch/CartPole-v1", "gymnax/CartPole-v1"])
def test_a_state_of_another_recurrent_policy(name: str, kinds: tuple[int, int]) -> None:
    def make(size: int) -> Any:
        if not size:
            return fc.torch_policy(nn.Linear(4, 2), head=fc.heads.categorical)
        return fc.torch_policy(Recurrent(size), head=fc.heads.categorical, initial_state=torch.zeros(size))

    env = fc.make_env(name, num_envs=2)
    first, second = map(make, kinds)
    state = fc.init(env, first, seed=0)
    with refused(ValueError, ("policy state of another policy", "this policy wants", "state.replace(policy_state=")):
        fc.rollout(env, second, state, 4)
    mended = state.replace(policy_state=second.init(state.key, state.num_lanes))
    fc.rollout(env, second, mended, 4)


@pytest.mark.parametrize("bad", [None, 3, nn.Linear, Rigged])
def test_a_rollout_without_a_policy(bad: Any) -> None:
    env = fc.make_env("CartPole-v1")
    state = fc.init(env, good(), seed=0)
    with refused(TypeError, ("policy is", "expected a Policy", "funcollect.torch_policy")):
        fc.rollout(env, bad, state, 4)
    runs(env, good(), state)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda x: x[:, :3], ("an array of shape (3, 3)", "the head categorical wants [P, 2]", "one number for each")),
        (lambda x: {"value": x}, ("the keys ['value']", "expected ['logits']", "the head categorical reads")),
        (lambda x: x[0, 0], ("an array of shape ()", "wants [P, 2]", "one number for each")),
        (lambda x: [x, x], ("a list of", "wants [P, 2]", "one number for each")),
    ],
)
def test_a_jax_function_whose_answer_does_not_suit_is_found_before_the_first_step(answer: Any, says: Any) -> None:
    env = fc.make_env("CartPole-v1", num_envs=3)
    policy = fc.jax_policy(lambda params, x: answer(x), {}, head=HEADS.categorical)
    state = fc.init(env, policy, seed=0)
    with refused(PolicyError, ("the policy returned", *says)):
        fc.rollout(env, policy, state, 4)
    runs(env, good_jax(), state)


@pytest.mark.parametrize("name", ["CartPole-v1", "gymnax/CartPole-v1"])
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_call_that_returns_the_outputs_alone(backend: str, name: str) -> None:
    class Alone(fc.PolicyBase):
        params = None

        def __call__(self, params: Any, state: Any, observation: Any, *rest: Any) -> Any:
            return {"action": (observation[:, 2] > 0) * 1}

    Alone.backend = backend  # type: ignore[assignment,misc]
    env = fc.make_env(name, num_envs=2)
    with pytest.raises(PolicyError, match=r"returned a dict with the keys \['action'\], expected the pair .* both"):
        fc.rollout(env, Alone(), fc.init(env, Alone(), seed=0), 2)


def test_the_policy_before_the_environment() -> None:
    env, policy = fc.make_env("CartPole-v1"), good()
    state = fc.init(env, policy, seed=0)
    with pytest.raises(TypeError, match="policy is the environment SimulatedEnv, expected a Policy: env comes first"):
        fc.rollout(policy, env, state, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("head", [HEADS.categorical, HEADS.greedy])
def test_a_network_that_returns_numpy(head: Any) -> None:
    env = fc.make_env("CartPole-v1", num_envs=2)
    policy = fc.torch_policy(lambda observation: np.zeros((2, 2), np.float32), head=head)
    with pytest.raises(PolicyError, match=r"is ndarray, expected a tensor of shape \[2, \.\.\.\]"):
        fc.rollout(env, policy, fc.init(env, policy, seed=0), 2)


@pytest.mark.parametrize("name", ["CartPole-v1", "gymnax/CartPole-v1"])
def test_a_recurrent_answer_in_the_wrong_order(name: str) -> None:
    env = fc.make_env(name, num_envs=2)
    policy = fc.jax_policy(
        lambda params, x, state: (state, {"logits": x[:, :2]}),
        None,
        head=HEADS.categorical,
        initial_state=np.zeros(2, np.float32),
    )
    with pytest.raises(
        PolicyError, match=r"next state is dict, expected \w+ as initial_state: return \(answer, next_state\)"
    ):
        fc.rollout(env, policy, fc.init(env, policy, seed=0), 2)
