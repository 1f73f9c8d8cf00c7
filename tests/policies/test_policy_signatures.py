"""Policies that take other arguments than they would be called with raise where that is known, before any step."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

import funcollect as fc
from tests.support.envs.light_envs import Nested

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of torch.compile's imports


class Takes(nn.Module):
    """A module whose forward pass is a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


class Own(fc.PolicyBase):
    backend, params = "torch", None

    def __call__(self, params: Any, observation: Any) -> Any:  # type: ignore[override]
        return observation


def one(observation: Any) -> Any:
    return torch.zeros(len(observation), dtype=torch.int64)


def two(observation: Any, other: Any) -> Any:
    return one(observation)


def many(*arguments: Any) -> Any:
    return one(arguments[0])


def three(pixels: Any, mode: Any, other: Any) -> Any:
    return torch.zeros(len(mode), 2)


def network(function: Callable[..., Any], *keys: str) -> TensorDictModule:
    return TensorDictModule(Takes(function), [*keys], ["action"])


def collect(policy: Any = None, env: Any = "CartPole-v1", **kwargs: Any) -> Any:
    """Build a collector; one of the classes with workers here, in this process."""
    kind = kwargs.pop("kind", fc.SyncDataCollector)
    return kind(env, policy, frames_per_batch=8, total_frames=8, **kwargs)


WORKERS = functools.partial(fc.MultiSyncDataCollector, in_process=True)
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a function": (lambda: collect(two), r"policy takes \(observation.*, other.*, expected one argument, the obs"),
    "a module": (lambda: collect(Takes(two)), r"policy takes .*other"),
    "in workers": (lambda: collect(Takes(two), ["CartPole-v1"], kind=WORKERS), r"policy takes .*other"),
    "of keys": (lambda: collect(three, Nested), r"for each of some of its keys \['mode', 'pixels'\]"),
    "torch_policy": (lambda: fc.torch_policy(Takes(two)), r"module takes .*other"),
    "a recurrent one": (lambda: fc.torch_policy(Takes(one), initial_state=torch.zeros(3)), "observation and the state"),
    "jax_policy": (lambda: fc.jax_policy(one, None), r"apply takes .*, expected a function \(params, observation\)"),
    "on a TensorDict": (lambda: fc.tensordict_policy(two), r"module takes .*expected a TensorDictModule or"),
    "a network of a TensorDict": (
        lambda: collect(TensorDictSequential(network(two, "observation"))),
        r"Takes takes .*other.*expected an argument for each of the in_keys \['observation'\] of its TensorDictModule",
    ),
    "a compiled module": (lambda: collect(torch.compile(Takes(two))), r"policy takes .*other"),
    "too few": (lambda: fc.tensordict_policy(network(one, "observation", "done")), "in_keys"),
    "of a class of one's own": (
        lambda: fc.init(fc.make_env("CartPole-v1"), Own(), seed=0),
        r"Own.__call__ takes \(params.*observation.*, expected what funcollect.Policy has",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_number_of_arguments_is_found_before_any_step(kind: str) -> None:
    make, message = WRONG[kind]
    with pytest.raises((TypeError, fc.WorkerError), match=message) as raised:
        make()
    assert "change its parameters" in str(raised.value)


class Called(nn.Module):
    """A module with a `__call__` of its own."""

    def __call__(self, observation: Any) -> Any:
        return one(observation)

    def forward(self, observation: Any, other: Any, third: Any) -> Any: ...


@functools.wraps(two)
def supplied(*arguments: Any) -> Any:
    return two(*arguments, None)


PASSES = [one, many, supplied, functools.partial(two, other=0), Takes(many), Called(), network(many, "observation")]
COMPILED = TensorDictModule(torch.compile(Takes(one), backend="eager"), ["observation"], ["action"])


@pytest.mark.parametrize("policy", [*PASSES, COMPILED])
def test_any_number_of_arguments_passes(policy: Any) -> None:
    with collect(policy, env=lambda: fc.make_env("CartPole-v1", num_envs=2)) as collector:
        assert next(collector)["action"].eq(0).all()
