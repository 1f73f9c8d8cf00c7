"""States, functions, collectors and methods used wrongly: what was good before is good afterwards."""

import pickle
import re
import sys

import jax
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from tensordict import TensorDict
from torch import nn

import funcollect as fc
from funcollect.errors import ClosedError, EvaluationError, InUseError, StaleStateError
from tests.misuse.test_bad_arguments import COLLECTOR, OWN, batch
from tests.support.compare import fresh
from tests.support.misuse import Rigged, refused, runs, table


@pytest.fixture(params=["CartPole-v1", "torch/CartPole-v1"])
def env(request):
    return fc.make_env(request.param, num_envs=3)


MANY = {"episodes": 1000, "seed": 0}
MASK = "expected bool (3,) … one flag per lane"


def masked(mask):
    return lambda e, p, s: fc.reset(e, s, mask)


@table(
    ("2**31 steps", lambda e, p, s: fc.rollout(e, p, s, 2**31), ValueError, f"length is {2**31} … several rollouts"),
    ("a short mask", masked(torch.ones(2, dtype=torch.bool)), ValueError, f"torch.bool (2,) … {MASK}"),
    ("a mask of numbers", masked([0, 2, 1]), ValueError, f"torch.int64 (3,) … {MASK}"),
    ("swapped", lambda e, p, s: fc.init(p, e, seed=0), TypeError, "env is … env comes first … make"),
    ("swapped later", lambda e, p, s: fc.rollout(p, e, s, 2), TypeError, "policy is the environment … env comes first"),
    ("a class", lambda e, p, s: fc.init(type(e), p, seed=0), TypeError, "env is the class … an Env … make_env"),
    ("too few", lambda e, p, s: fc.evaluate(e, p, max_frames=3, **MANY), EvaluationError, "of 1000 … max_frames=3 … r"),
)
def test_arguments_that_do_not_do(misuse, env):
    policy = fc.random_policy(env)
    state = fc.init(env, policy, seed=0)
    with refused(misuse.error, misuse.says):
        misuse.do(env, policy, state)
    fc.close(runs(env, policy, state))


def test_a_stale_state():
    env, policy, state = fresh("CartPole-v1", num_envs=3)
    after, _ = fc.rollout(env, policy, state, 4)
    says = (
        "simulators of HostEnv('CartPole-v1', num_envs=3) … a later state has taken its place … "
        "state, batch = funcollect.rollout(env, policy, state, 128) … fork(env, state) … recover(env, state)"
    )
    for use in (
        lambda: fc.rollout(env, policy, state, 4),
        lambda: fc.step(env, policy, state),
        lambda: fc.fork(env, state),
        lambda: fc.reset(env, state, torch.tensor([True, False, False])),
        lambda: fc.reset(env, state),
    ):
        with refused(StaleStateError, says):
            use()
    after, _ = fc.rollout(env, policy, after, 4)  # the live one goes on
    runs(env, policy, fc.recover(env, state))
    with refused(StaleStateError, "a later state has taken its place"):
        fc.rollout(env, policy, after, 4)  # the recovered state has superseded it


PLACES = ("CartPole-v1", "torch/CartPole-v1", "gymnax/CartPole-v1")


@pytest.mark.parametrize(("name", "other"), [("torch/CartPole-v1", "CartPole-v1"), *((each, each) for each in PLACES)])
def test_a_state_of_another_environment(name, other):
    env, wrong = (fc.make_env(each, num_envs=3) for each in (name, other))
    state = fc.init(env, fc.random_policy(env), seed=0)
    for use in (
        lambda: fc.rollout(wrong, fc.random_policy(wrong), state, 4),
        lambda: fc.reset(wrong, state),
        lambda: fc.fork(wrong, state),
    ):
        with refused(ValueError, f"belongs to another environment … {wrong!r} … pass the env that it was made with"):
            use()
    if name.startswith("gymnax"):  # its parameters would act silently, since all shapes fit
        with refused(ValueError, "belongs to another environment"):
            fc.traced.rollout(wrong, fc.random_policy(wrong), None, state, 4)
        state = pickle.loads(pickle.dumps(state))  # whose origin is unknown
    else:
        wrong = fc.make_env("torch/CartPole-v1", num_envs=2)
        with refused(ValueError, "the state has 3 lanes … CartPole(num_envs=2) has 2 … pass its own env"):
            fc.rollout(wrong, fc.random_policy(wrong), state, 4)
    runs(env, state=state)


def test_a_closed_state():
    env, policy, state = fresh("CartPole-v1", num_envs=3)
    for _ in range(2):
        fc.close(state)
    for use in (lambda: fc.rollout(env, policy, state, 4), lambda: fc.reset(env, state), lambda: fc.fork(env, state)):
        with refused(ClosedError, "HostEnv('CartPole-v1', num_envs=3) were closed … a new state with funcollect.init"):
            use()
    runs(env, policy)
    collector = fc.SyncDataCollector("CartPole-v1", frames_per_batch=4)
    fc.close(collector.state)  # behind its back
    with refused(ClosedError, "HostEnv('CartPole-v1') were closed … make a new state"):
        next(collector)
    collector.shutdown()


def test_an_instance_without_a_spec_cannot_be_built_again_for_a_fork():
    env, policy, state = fresh(Rigged())
    state, _ = fc.rollout(env, policy, state, 4)
    with refused(InUseError, "cannot be rebuilt … it has no spec … pass an id or a factory, or a list of"):
        fc.fork(env, state)
    runs(env, policy, state)


def network():
    return fc.torch_policy(nn.Linear(4, 2), head=fc.heads.categorical)


def test_bad_keywords_open_nothing_and_a_policy_that_does_not_suit_leaves_the_instance_to_the_next_collector():
    made = []
    for how in ({"frames_per_batch": 0}, {"frames_per_batch": 4, "exploration_type": "mode"}):
        with pytest.raises((TypeError, ValueError)):
            fc.SyncDataCollector(lambda: made.append(Rigged()), **how)
    assert made == []
    instance = Rigged()
    with pytest.raises(ValueError, match="the head normal needs"):
        fc.SyncDataCollector(instance, fc.torch_policy(nn.Linear(2, 2), head=fc.heads.normal), frames_per_batch=4)
    assert instance.closed == 0
    with fc.SyncDataCollector(instance, frames_per_batch=4) as collector:
        next(collector)
    assert instance.closed == 1


def test_a_postproc_that_returns_no_batch():
    wrong = [True]
    process = lambda batch: batch["action"] if wrong else batch  # noqa: E731
    with fc.SyncDataCollector("CartPole-v1", frames_per_batch=4, postproc=process) as collector:
        with refused(TypeError, ("postproc returned Tensor", "expected a TensorDict", "return the batch")):
            next(collector)
        wrong.clear()
        assert next(collector)["collector", "step"].tolist() == [4, 5, 6, 7]


def test_a_collector_that_was_shut_down():
    collector = fc.SyncDataCollector("CartPole-v1", network(), frames_per_batch=4, total_frames=8)
    saved = collector.state_dict()
    next(collector)
    collector.shutdown()
    collector.shutdown()
    for use in (
        lambda: next(collector),
        collector.rollout,
        collector.reset,
        collector.update_policy_weights_,
        lambda: collector.set_seed(1),
        lambda: collector.load_state_dict(saved),
    ):
        with refused(ClosedError, ("SyncDataCollector(HostEnv('CartPole-v1')", "shut down", "build another")):
            use()
    assert collector.stats()["frames"] == 4


@pytest.mark.parametrize(("change", "says"), [
    ({}, "the state_dict lacks ['policy_state_dict', 'own_weights' … expected … pass the result of state_dict"),
    ({"episode": torch.zeros(3)}, "has 3 lanes … this one 1 … the same number of env"),
    ({"policy_state_dict": {"scale": 1}}, "params differ … bias is absent … scale is int, expected absent … pass"),
])  # fmt: skip
def test_a_state_dict_or_a_seed_that_does_not_do_leaves_the_run_as_it_is(change, says):
    with fc.SyncDataCollector("CartPole-v1", network(), frames_per_batch=4, seed=3) as collector:
        next(collector)
        with refused(ValueError, says):
            collector.load_state_dict(collector.state_dict() | change if change else {})
        with pytest.raises(ValueError, match="seed is"):
            collector.set_seed(2**64)
        assert collector.seed == 3
        assert next(collector)["collector", "step"].tolist() == [4, 5, 6, 7]


TWO = {"create_env_fn": ["CartPole-v1"] * 2}
LIVE, NESTED = {"create_env_fn": CartPoleEnv()}, {"collector_class": fc.MultiSyncDataCollector}
RAY = {
    "workers without a class": ({"num_workers_per_collector": 2}, ValueError, "SyncDataCollector has no workers"),
    "lists that differ": (TWO | {"collector_kwargs": [{}]}, ValueError, r"'create_env_fn': 2, 'collector_kwargs': 1"),
    "none": ({"create_env_fn": []}, ValueError, "or are 0"),
    "a keyword of the run": ({"collector_kwargs": {"frames_per_batch": 3}}, ValueError, "give it to RayCollector"),
    "a keyword of nobody": ({"collector_kwargs": {"policy_device": "cup"}}, ValueError, "policy_device is 'cup'"),
    "a misspelling": ({"collector_kwargs": {"reset_when_don": 1}}, TypeError, r"\['reset_when_don'\], which Sync.* la"),
    "a keyword of another class": ({"collector_kwargs": {"cat_results": 0}}, TypeError, "MultiSyncDataCollector has"),
    "a live environment": (LIVE | {"num_collectors": 2}, ValueError, "same live environment"),
    "nested workers": (LIVE | NESTED | {"num_workers_per_collector": 2}, ValueError, "same live environment"),
    "devices": (TWO | {"policy_device": ["cpu"] * 3}, ValueError, "'policy_device': 3"),
    "name": ({"remote_configs": {"name": "actor"}}, ValueError, "would find its name taken"),
    "lifetime": ({"remote_configs": {"lifetime": "detached"}}, ValueError, "an actor ends with its collector"),
    "frames": ({"frames_per_batch": [10, 10], "sync": True}, TypeError, "expected a positive int"),
    "prefetch": ({"prefetch": True}, ValueError, "prefetch is for sync=True"),
    "storing devices": (TWO | {"sync": True, "storing_device": ["cpu", "meta"]}, ValueError, "one for sync=True"),
}


@pytest.mark.parametrize("name", RAY)
def test_bad_keywords_are_refused_before_ray_starts(name):
    kwargs, error, message = RAY[name]
    with pytest.raises(error, match=message):
        fc.RayCollector(**({"create_env_fn": "CartPole-v1", "frames_per_batch": 10} | kwargs))
    assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()


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


STATES = (
    lambda: fc.torch_policy(lambda x, h: (x, h), initial_state="x"),
    lambda: fc.torch_policy(lambda x, h: (x, h), initial_state={"a": torch.zeros(2), "b": "x"}),
    lambda: fc.jax_policy(lambda p, x, h: (x, h), 0.0, initial_state="x"),
    lambda: fc.tensordict_policy(nn.Linear(4, 2), initial_state={"hidden": "x"}),
)


def test_a_bad_initial_state_is_named():
    for make in STATES:
        with pytest.raises(TypeError, match="initial_state"):
            make()


def test_numbers_of_numpy_are_numbers():
    fc.make_env("CartPole-v1", num_envs=np.int64(2), info_keys=(), one_hot=np.bool_(False))
    numbers = {"max_frames_per_traj": np.int32(4), "init_random_frames": np.int64(4)}
    fc.SyncDataCollector("CartPole-v1", frames_per_batch=np.int64(8), **numbers).shutdown()
    fc.MultiStep(np.float32(0.5), np.int64(2))
    fc.heads.epsilon_greedy(np.float64(0.5))
    assert buffer()[np.int64(3)].batch_size == ()
    buffer().update_priority(torch.tensor([1, 2]), np.array([0.5, 1.0], np.float32))
    env, policy, state = fresh("CartPole-v1")
    for _ in range(2):
        state, _ = fc.rollout(env, policy, state, np.int64(260), max_frames_per_traj=np.uint8(9))
    assert state.frames == 520 * state.num_lanes


def test_a_state_from_before_jax_had_64_bits():
    env, policy, state = fresh("gymnax/CartPole-v1", num_envs=2)
    with (
        jax.enable_x64(True),
        pytest.raises(ValueError, match=r"jax_enable_x64 may have been set.*make another state with init"),
    ):
        fc.rollout(env, policy, state, 3)
