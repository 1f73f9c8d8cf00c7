"""Arguments of policies: wrong ones raise where that is known, and keys of a Dict space are passed by name."""

import functools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

import funcollect as fc
from tests.support.envs.light_envs import Nested

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of torch.compile's imports


class Takes(nn.Module):
    """A module whose forward pass is a function."""

    def __init__(self, function):
        super().__init__()
        self.forward = function


class Own(fc.PolicyBase):
    backend, params = "torch", None

    def __call__(self, params, observation):
        return observation


def one(observation):
    return torch.zeros(len(observation), dtype=torch.int64)


def two(observation, other):
    return one(observation)


def many(*arguments):
    return one(arguments[0])


def three(pixels, mode, other):
    return torch.zeros(len(mode), 2)


def network(function, *keys):
    return TensorDictModule(Takes(function), [*keys], ["action"])


def collect(policy=None, env="CartPole-v1", **kwargs):
    """Build a collector; one of the classes with workers here, in this process."""
    kind = kwargs.pop("kind", fc.SyncDataCollector)
    return kind(env, policy, frames_per_batch=8, total_frames=8, **kwargs)


WORKERS = functools.partial(fc.MultiSyncDataCollector, in_process=True)
WRONG = {
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
def test_a_wrong_number_of_arguments_is_found_before_any_step(kind):
    make, message = WRONG[kind]
    with pytest.raises((TypeError, fc.WorkerError), match=message) as raised:
        make()
    assert "change its parameters" in str(raised.value)


class Called(nn.Module):
    """A module with a `__call__` of its own."""

    def __call__(self, observation):
        return one(observation)

    def forward(self, observation, other, third): ...


@functools.wraps(two)
def supplied(*arguments):
    return two(*arguments, None)


PASSES = [one, many, supplied, functools.partial(two, other=0), Takes(many), Called(), network(many, "observation")]
COMPILED = TensorDictModule(torch.compile(Takes(one), backend="eager"), ["observation"], ["action"])


@pytest.mark.parametrize("policy", [*PASSES, COMPILED])
def test_any_number_of_arguments_passes(policy):
    with collect(policy, env=lambda: fc.make_env("CartPole-v1", num_envs=2)) as collector:
        assert next(collector)["action"].eq(0).all()


class TwoKeys(gymnasium.Env):
    """Halves under `b`, zeros under `a`."""

    observation_space = spaces.Dict(a=spaces.Box(-1, 1, (2,)), b=spaces.Box(-1, 1, (2,)))
    action_space = spaces.Box(-1, 1, (2,))

    def reset(self, *, seed=None, options=None):
        return {"a": np.zeros(2, np.float32), "b": np.full(2, 0.5, np.float32)}, {}

    def step(self, action):
        return self.reset()[0], 0.0, False, False, {}


class Optional(nn.Module):
    def forward(self, a, b=None):
        return a if b is None else b


class BothOptional(nn.Module):
    def forward(self, b=None, a=None):
        return a if b is None else b


class Swapped(nn.Module):
    def forward(self, b, a):
        return b + 0 * a


class Further(nn.Module):
    def forward(self, b, a, scale=1.0):
        return scale * b + 0 * a


class KeywordOnly(nn.Module):
    def forward(self, a, *, b):
        return b


class Behind(nn.Module):
    def forward(self, a, scale=1.0, b=None):
        return b


@pytest.mark.parametrize("make", [Optional, BothOptional, Swapped, Further])
@pytest.mark.parametrize("num_envs", [None, 3])
def test_keys_are_passed_by_name(make, num_envs):
    kwargs = {} if num_envs is None else {"num_envs": num_envs}
    with fc.SyncDataCollector(TwoKeys, make(), frames_per_batch=12, create_env_kwargs=kwargs) as collector:
        assert (next(collector)["action"] == 0.5).all()


@pytest.mark.parametrize("make", [KeywordOnly, Behind])
def test_what_cannot_be_passed_by_position_is_refused(make):
    with pytest.raises(TypeError, match=r"\['a', 'b'\] are keys of the observation.*reorder its arguments"):
        fc.SyncDataCollector(TwoKeys, make(), frames_per_batch=12)
