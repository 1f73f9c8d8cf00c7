"""TensorDict callables and policies of the protocol that answer wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

import funcollect as fc
from funcollect.errors import PolicyError
from funcollect.policies.as_policy import as_policy
from tests.support.misuse import Misuse, fails_then_runs, refused, table


def cartpole() -> Any:
    return fc.make_env("CartPole-v1", num_envs=3)


class Writing(nn.Module):
    """Writes what `change` makes of a good answer, once, at call number `at`."""

    def __init__(self, change: Any, at: int) -> None:
        super().__init__()
        self.change, self.at, self.calls = change, at, 0

    def forward(self, tensordict: TensorDict) -> Any:
        action = torch.zeros(len(tensordict), dtype=torch.int64)
        self.calls += 1
        if self.calls == self.at + 1:
            return self.change(tensordict, action)
        return tensordict.set("action", action)


def writes(**entries: Any) -> Any:
    """A change that sets entries made from the good action."""

    def change(tensordict: TensorDict, action: Any) -> Any:
        for name, make in entries.items():
            tensordict.set(name, make(action))
        return tensordict

    return change


def written(what: str, change: Any, *says: str, at: int = 0) -> Misuse:
    return Misuse(what, lambda env: as_policy(Writing(change, at), env), PolicyError, says)


def same(action: Any) -> Any:
    return action


@table(
    written("no action", writes(value=same), "wrote ['value']", "expected 'action'", "out_keys"),
    written("nothing", lambda tensordict, action: None, "returned NoneType", "expected the TensorDict", "return it"),
    written("the action alone", lambda tensordict, action: action, "returned Tensor", "expected the", "return it"),
    written("a wide one", writes(action=lambda a: a[:, None]), "(3, 1)", "wants (3,)", "return one action", at=2),
    written("a float", writes(action=lambda a: a.float()), "float32", "wants torch.int64", "cast it"),
    written("a reward", writes(action=same, reward=same), "wrote ['reward']", "a batch uses", "rename these out_keys"),
    written("a key later", writes(v=same), "step 2", "wrote ['v']", "after ['action']", "write the same keys", at=2),
)
def test_a_callable_on_tensordicts_that_goes_wrong(misuse: Misuse) -> None:
    fails_then_runs(cartpole, misuse.do, misuse.error, misuse.says)


def test_in_keys_that_the_environment_lacks() -> None:
    env = cartpole()
    wrong = TensorDictModule(lambda x: x[:, 0].long() * 0, ["pixels"], ["action"])
    says = ("reads the in_keys ['pixels']", "the environment gives ['observation']", "name these")
    with fc.SyncDataCollector(env, wrong, frames_per_batch=6) as collector, refused(PolicyError, says):
        next(collector)
    right = TensorDictModule(lambda x: x[:, 0].long() * 0, ["observation"], ["action"])
    with fc.SyncDataCollector(env, right, frames_per_batch=6) as collector:
        next(collector)


class Plain(fc.PolicyBase):
    """The protocol and nothing else; `answers` one after the other, the last one from then on."""

    backend = "torch"
    params = None

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def noise(self, spec: Any) -> None:
        return None

    def init(self, key: Any, num_envs: int) -> None:
        return None

    def prepare(self, params: Any) -> None:
        return None

    def __call__(self, params: Any, state: Any, observation: Any, noise: Any, spec: Any, exploration: Any) -> Any:
        return None, self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


ACTIONS = torch.zeros(3, dtype=torch.int64)
GOOD = {"action": ACTIONS}


def plain(what: str, answers: Any, *says: str) -> Misuse:
    return Misuse(what, lambda env: Plain(*answers, GOOD), PolicyError, says)


@table(
    plain("no action", ({"value": ACTIONS},), "['value']", "expected ['action']", "return the action"),
    plain("a wide one", (GOOD, {"action": ACTIONS[:, None]}), "(3, 1)", "wants (3,)", "return one action"),
    plain("a list", ({"action": [0, 0, 0]},), "is list", "expected an array", "return a tensor or array"),
    plain("another key", (GOOD | {"v": ACTIONS},), "step 1", "extra keys []", "after ['v']", "keep them the same"),
)
def test_a_policy_of_the_protocol_that_goes_wrong(misuse: Misuse) -> None:
    fails_then_runs(cartpole, misuse.do, misuse.error, misuse.says)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fc.jax_policy(lambda x: x, None), r"apply takes \(x\), expected a function \(params, observation\)"),
        (lambda: fc.jax_policy(lambda p, x, h: x, None), r"takes \(p, x, h\), .*recurrent one: initial_state="),
        (lambda: fc.jax_policy(lambda p, x, *, key, to: x, None), r"function \(params, observation, key\) -> answer"),
        (lambda: fc.jax_policy(lambda p, x: x, None, initial_state=0.0), r"\(params, observation, state\)"),
        (
            lambda: fc.torch_policy(lambda x, h: x),
            r"takes \(x, h\), .*the observation \(a recurrent one: initial_state=",
        ),
        (lambda: fc.torch_policy(nn.Tanh(), initial_state=torch.zeros(2)), "a function of the observation and the sta"),
        (lambda: fc.tensordict_policy(lambda: None), r"takes \(\), expected a TensorDictModule or a function of a Ten"),
        (lambda: collector(postproc=lambda: None), r"postproc takes \(\), expected a function from batch to batch"),
        (lambda: collector(policy_factory=lambda env: None), r"policy_factory takes \(env\), .*without arguments"),
        (lambda: collector(exploration={"epsilon": lambda: 0.1}), r"exploration\['epsilon'\] takes \(\), expected"),
    ],
)
def test_functions_take_what_they_are_called_with(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


def collector(**kwargs: Any) -> Any:
    if "policy_factory" not in kwargs:
        kwargs["policy"] = fc.torch_policy(nn.Linear(4, 2), head=fc.heads.epsilon_greedy(0.5))
    return fc.SyncDataCollector("CartPole-v1", frames_per_batch=10, total_frames=10, **kwargs)
