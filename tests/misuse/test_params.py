"""Parameters given wrongly: said before a state is used, which is as good as before."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

import funcollect as fc
from tests.support.misuse import WEIGHTS, Misuse, good, good_jax, linear, refused, runs, table

HEADS = fc.heads


class Entangled(nn.Module):
    """A module that reaches its own parameters through a function, so that no others can act."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.act = lambda observation: self.linear(observation)

    def forward(self, observation: Any) -> Any:
        return self.act(observation)


OWN = {"weight": torch.zeros(2, 4), "bias": torch.zeros(2)}


@table(
    Misuse(
        "a missing one",
        {"weight": OWN["weight"]},
        ValueError,
        ("params differ", "bias is absent, expected (2,)", "pass"),
    ),
    Misuse("an unknown one", OWN | {"scale": OWN["bias"]}, ValueError, ("scale is (2,), expected absent", "pass")),
    Misuse(
        "another network's",
        {"0.weight": OWN["weight"], "0.bias": OWN["bias"]},
        ValueError,
        ("bias is absent, expected (2,)", "0.bias is (2,), expected absent", "weight is absent", "pass"),
    ),
    Misuse(
        "a misshapen one",
        OWN | {"bias": torch.zeros(3)},
        ValueError,
        ("bias is (3,), expected (2,)", "pass"),
    ),
    Misuse("an array", OWN | {"bias": np.zeros(2)}, ValueError, ("bias is ndarray, expected (2,)", "pass")),
    Misuse("a list", [OWN["weight"]], TypeError, ("params is list", "expected a TensorDict", "module.state_dict()")),
)
def test_torch_parameters_that_do_not_fit(misuse: Misuse) -> None:
    given: Any = misuse.do
    not_used_up(good(), given, misuse, OWN)


@table(
    Misuse("a missing one", {}, ValueError, ("params differ", "['w'] is absent, expected (4, 2)", "pass")),
    Misuse("an unknown one", WEIGHTS | {"b": jnp.zeros(2)}, ValueError, ("differ", "['b']", "(2,)", "absent", "pass")),
    Misuse("a misshapen one", {"w": jnp.zeros((3, 2))}, ValueError, ("differ", "['w']", "(3, 2)", "(4, 2)", "pass")),
)
def test_jax_parameters_that_do_not_fit(misuse: Misuse) -> None:
    given: Any = misuse.do
    not_used_up(good_jax(), given, misuse, WEIGHTS)


def not_used_up(policy: Any, given: Any, misuse: Misuse, fitting: Any) -> None:
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


def constant(observation: Any) -> Any:
    return torch.zeros(len(observation), dtype=torch.int64)


@table(
    Misuse("a random policy", fc.random_policy, ValueError, ("params were given to a random policy", "leave them out")),
    Misuse("a function", lambda _: fc.torch_policy(constant), ValueError, ("params were given", "pass a torch")),
    Misuse(
        "a module that reaches its own parts",
        lambda _: fc.torch_policy(Entangled(), head=HEADS.categorical),
        ValueError,
        ("params= cannot act", "'act' of Entangled refers to", "pass params=None, or pass policy_factory"),
    ),
)
def test_parameters_for_a_policy_that_takes_none(misuse: Misuse) -> None:
    env = fc.make_env("CartPole-v1")
    policy = misuse.do(env)
    state = fc.init(env, policy, seed=0)
    with refused(misuse.error, misuse.says):
        fc.rollout(env, policy, state, 4, params=OWN if policy.params is None else policy.params)
    runs(env, policy, state)


def test_a_module_that_cannot_be_copied_to_another_device() -> None:
    """The meta device stands in for a GPU: nothing runs there."""
    with refused(ValueError, ("cannot be copied to meta", "move it there before", "policy_factory")):
        fc.SyncDataCollector("CartPole-v1", Entangled(), frames_per_batch=4, policy_device="meta")
    with fc.SyncDataCollector("CartPole-v1", Entangled(), frames_per_batch=4, policy_device="cpu") as collector:
        assert collector.policy.module.linear
