"""Methods, recurrent states and numbers of NumPy: bad arguments are named, good ones are taken."""

import re

import jax
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

import funcollect as fc

OWN = (fc.FuncollectError, TypeError, ValueError)
COLLECTOR = {"create_env_fn": "CartPole-v1", "policy": None, "frames_per_batch": 8}


def batch():
    env = fc.make_env("CartPole-v1", num_envs=2)
    policy = fc.random_policy(env)
    state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 6)
    fc.close(state)
    return batch


def buffer():
    sampler = fc.PrioritizedSampler(max_capacity=16, alpha=0.6, beta=0.4)
    made = fc.ReplayBuffer(storage=fc.LazyTensorStorage(16), sampler=sampler, batch_size=4)
    made.extend(batch().reshape(-1))
    return made


MAKE = {
    "ReplayBuffer": buffer,
    "SyncDataCollector": lambda: fc.SyncDataCollector(**COLLECTOR),
    "MultiStep": lambda: fc.MultiStep(0.9, 3),
}
METHODS = [
    ("ReplayBuffer.add", "data", [0, "x", {}]),
    ("ReplayBuffer.extend", "data", [0, "x", None, {}]),
    ("ReplayBuffer.sample", "batch_size", ["x", 2.5, True, 0, -1]),
    ("ReplayBuffer.update_priority", "index", [None, 2.5, "x", True, [0.5], 99, -2, object()]),
    ("ReplayBuffer.update_priority", "priority", [None, "x", -1.0, float("nan"), float("inf"), [1.0, 2.0], object()]),
    ("ReplayBuffer.update_priority", "written", ["x", 2.5, -1, True]),
    ("ReplayBuffer.dumps", "path", [0, None]),
    ("ReplayBuffer.loads", "path", [0, None]),
    ("SyncDataCollector.set_seed", "seed", ["x", 2.5, True, -1, 2**64]),
    ("SyncDataCollector.reset", "mask", ["x", 0, [True, False]]),
    ("SyncDataCollector.load_state_dict", "state_dict", [None, 0, {}, {"seed": 0}]),
    ("MultiStep.__call__", "batch", [None, 0, {}, TensorDict({}, [0]), batch()[:, :0]]),
]
NAMES = {"data": "data|batch|frames", "priority": "priorit"}


@pytest.mark.parametrize(("method", "argument", "values"), METHODS)
def test_bad_values_of_an_argument_of_a_method(method, argument, values):
    kind, _, name = method.partition(".")
    function, good = getattr(MAKE[kind](), name), {"index": 0, "priority": 1.0} if name == "update_priority" else {}
    for value in values:
        with pytest.raises(OWN) as caught:
            function(**(good | {argument: value}))
        message = str(caught.value)
        assert re.search(NAMES.get(argument, argument), message), f"{value!r}: {type(caught.value).__name__}: {message}"


STATES = {
    "torch": lambda: fc.torch_policy(lambda x, h: (x, h), initial_state="x"),
    "torch, a tree": lambda: fc.torch_policy(lambda x, h: (x, h), initial_state={"a": torch.zeros(2), "b": "x"}),
    "jax": lambda: fc.jax_policy(lambda p, x, h: (x, h), 0.0, initial_state="x"),
    "tensordict": lambda: fc.tensordict_policy(nn.Linear(4, 2), initial_state={"hidden": "x"}),
}


@pytest.mark.parametrize("case", STATES)
def test_a_bad_initial_state_is_named(case):
    with pytest.raises(TypeError, match="initial_state"):
        STATES[case]()


@pytest.mark.parametrize(
    "call",
    [
        lambda: fc.make_env("CartPole-v1", num_envs=np.int64(2), info_keys=(), one_hot=np.bool_(False)),
        lambda: fc.SyncDataCollector("CartPole-v1", frames_per_batch=np.int64(8), max_frames_per_traj=np.int32(4)),
        lambda: fc.SyncDataCollector("CartPole-v1", frames_per_batch=8, init_random_frames=np.int64(4)),
        lambda: fc.MultiStep(np.float32(0.5), np.int64(2)),
        lambda: fc.heads.epsilon_greedy(np.float64(0.5)),
        lambda: buffer().update_priority(torch.tensor([1, 2]), np.array([0.5, 1.0], np.float32)),
        lambda: buffer()[np.int64(3)],
    ],
)
def test_numbers_of_numpy_are_numbers(call):
    call()


def test_a_state_from_before_jax_had_64_bits():
    env = fc.make_env("gymnax/CartPole-v1", num_envs=2)
    policy = fc.random_policy(env)
    state = fc.init(env, policy, seed=0)
    jax.config.update("jax_enable_x64", True)
    try:
        with pytest.raises(ValueError, match=r"jax_enable_x64 may have been set.*make another state with init"):
            fc.rollout(env, policy, state, 3)
    finally:
        jax.config.update("jax_enable_x64", False)
