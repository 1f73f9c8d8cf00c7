"""States, functions and collectors used wrongly: the state that was good before is good afterwards."""

import pickle
import sys

import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from torch import nn

import funcollect as fc
from funcollect.errors import ClosedError, EvaluationError, InUseError, ReplayError, StaleStateError
from tests.support.misuse import Misuse, Rigged, refused, runs, swaps, table


@pytest.fixture(params=["CartPole-v1", "torch/CartPole-v1"])
def env(request):
    return fc.make_env(request.param, num_envs=3)


MANY = {"episodes": 1000, "seed": 0}
MASK = "expected bool (3,) … one flag per lane"


def masked(mask):
    return lambda e, p, s: fc.reset(e, s, mask)


@table(
    ("seed 2**64", lambda e, p, s: fc.init(e, p, seed=2**64), ValueError, f"seed is {2**64} … < 2**64 … take it modul"),
    ("2**31 steps", lambda e, p, s: fc.rollout(e, p, s, 2**31), ValueError, f"length is {2**31} … several rollouts"),
    ("a short mask", masked(torch.ones(2, dtype=torch.bool)), ValueError, f"torch.bool (2,) … {MASK}"),
    ("a mask of numbers", masked([0, 2, 1]), ValueError, f"torch.int64 (3,) … {MASK}"),
    ("a ragged mask", masked([[True], [True, False]]), ValueError, f"mask is … {MASK}"),
    ("swapped", lambda e, p, s: fc.init(p, e, seed=0), TypeError, "env is … env comes first … make"),
    ("swapped later", lambda e, p, s: fc.rollout(p, e, s, 2), TypeError, "policy is the environment … env comes first"),
    ("a class", lambda e, p, s: fc.init(type(e), p, seed=0), TypeError, "env is the class … an Env … make_env"),
    ("none", lambda e, p, s: fc.init(e, None, seed=0), TypeError, "policy is None … a Policy … torch_policy"),
    ("a list", lambda e, p, s: fc.fork(e, [s]), TypeError, "state is [CollectorState( … expected … pass the state"),
    ("too few", lambda e, p, s: fc.evaluate(e, p, max_frames=3, **MANY), EvaluationError, "of 1000 … max_frames=3 … r"),
)
def test_arguments_that_do_not_do(misuse, env):
    policy = fc.random_policy(env)
    state = fc.init(env, policy, seed=0)
    with refused(misuse.error, misuse.says):
        misuse.do(env, policy, state)
    fc.close(runs(env, policy, state))


def test_a_stale_state():
    env = fc.make_env("CartPole-v1", num_envs=3)
    policy = fc.random_policy(env)
    state = fc.init(env, policy, seed=0)
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


def test_a_state_whose_call_did_not_end_says_so():
    env = fc.make_env(Rigged(lambda answer: None))
    policy = fc.random_policy(env)
    state = fc.init(env, policy, seed=0)
    with pytest.raises(fc.EnvError):
        fc.rollout(env, policy, state, 8)
    with refused(StaleStateError, "the call that used it did not end (an exception, or Ctrl-C) … funcollect.recover"):
        fc.rollout(env, policy, state, 8)
    runs(env, policy, fc.recover(env, state))


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("CartPole-v1", "CartPole-v1"),
        ("torch/CartPole-v1", "CartPole-v1"),
        ("torch/CartPole-v1", "torch/CartPole-v1"),
        ("gymnax/CartPole-v1", "gymnax/CartPole-v1"),
    ],
)
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
    runs(env, state=state)


def test_a_state_of_another_number_of_lanes(env):
    state = fc.init(env, fc.random_policy(env), seed=0)
    wrong = fc.make_env("torch/CartPole-v1", num_envs=2)
    with refused(ValueError, ("the state has 3 lanes", "CartPole(num_envs=2) has 2", "pass its own env")):
        fc.rollout(wrong, fc.random_policy(wrong), state, 4)
    runs(env, state=state)


def test_a_closed_state():
    env = fc.make_env("CartPole-v1", num_envs=3)
    policy = fc.random_policy(env)
    state = fc.init(env, policy, seed=0)
    fc.close(state)
    fc.close(state)
    for use in (lambda: fc.rollout(env, policy, state, 4), lambda: fc.reset(env, state), lambda: fc.fork(env, state)):
        with refused(ClosedError, "HostEnv('CartPole-v1', num_envs=3) were closed … a new state with funcollect.init"):
            use()
    runs(env, policy)


class Global(Rigged):
    def step(self, action):
        return swaps(0, np.random.uniform(-1, 1, 2))(super().step(action))


def test_a_fork_of_what_does_not_follow_from_its_seed():
    env = fc.make_env([Rigged, Global])
    policy = fc.random_policy(env)
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), 4)
    says = "lane 1 … gave another observation … expected the same … self.np_random … the state can still be used"
    with refused(ReplayError, says):
        fc.fork(env, state)
    runs(env, policy, state)


def test_a_fork_of_an_instance_that_cannot_be_built_again():
    env = fc.make_env(Rigged())
    state = fc.init(env, fc.random_policy(env), seed=0)
    with refused(InUseError, "cannot be rebuilt … it has no spec … pass an id or a factory, or a list of"):
        fc.fork(env, state)
    runs(env, state=state)


def network():
    return fc.torch_policy(nn.Linear(4, 2), head=fc.heads.categorical)


BOTH = {"max_frames_per_traj": 5, "reset_when_done": False}


def given(what, error, *says, **how):
    return Misuse(what, lambda: how, error, says)


@table(
    given("two limits", ValueError, "max_frames_per_traj cuts", "reset_when_done=False keeps it", **BOTH),
    given("device", ValueError, "device is 'cuda:77'", "that Torch has here", "such as 'cpu'", device="cuda:77"),
    given("env_device meta", ValueError, "env_device is meta", "runs on cpu", "build the env", env_device="meta"),
    given("two policies", ValueError, "are both given", "expected one", policy=network(), policy_factory=network),
    given("nothing", TypeError, "policy_factory returned None", "expected a policy", policy_factory=lambda: None),
    given("num_envs 0", ValueError, "num_envs is 0", "expected a positive int", create_env_kwargs={"num_envs": 0}),
)
def test_keywords_that_do_not_do(misuse):
    with refused(misuse.error, misuse.says):
        fc.SyncDataCollector("CartPole-v1", **({"frames_per_batch": 4} | misuse.do()))
    with fc.SyncDataCollector("CartPole-v1", network(), frames_per_batch=4) as collector:
        next(collector)


def test_bad_keywords_are_refused_before_an_environment_is_made():
    made = []
    for how in ({"frames_per_batch": 0}, {"frames_per_batch": 4, "exploration_type": "mode"}):
        with pytest.raises((TypeError, ValueError)):
            fc.SyncDataCollector(lambda: made.append(Rigged()), **how)
    assert made == []


def test_a_policy_that_does_not_suit_leaves_the_instance_to_the_next_collector():
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


def test_a_state_closed_behind_the_collectors_back():
    collector = fc.SyncDataCollector("CartPole-v1", frames_per_batch=4)
    fc.close(collector.state)
    with refused(ClosedError, ("HostEnv('CartPole-v1') were closed", "make a new state")):
        next(collector)
    collector.shutdown()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, "the state_dict lacks ['policy_state_dict', 'own_weights' … expected … pass the result of state_dict"),
        ({"episode": torch.zeros(3)}, "has 3 lanes … this one 1 … the same number of env"),
        ({"policy_state_dict": {"scale": 1}}, "params differ … bias is absent … scale is int, expected absent … pass"),
    ],
)
def test_a_state_dict_that_does_not_fit(change, says):
    with fc.SyncDataCollector("CartPole-v1", network(), frames_per_batch=4) as collector:
        next(collector)
        with refused(ValueError, says):
            collector.load_state_dict(collector.state_dict() | change if change else {})
        assert next(collector)["collector", "step"].tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("seed", ["7", 2**64])
def test_a_seed_that_is_none_leaves_the_run_as_it_is(seed):
    with fc.SyncDataCollector("CartPole-v1", frames_per_batch=4, seed=3) as collector:
        next(collector)
        with pytest.raises((TypeError, ValueError), match="seed is"):
            collector.set_seed(seed)
        assert collector.seed == 3
        assert next(collector)["collector", "step"].tolist() == [4, 5, 6, 7]


def test_what_has_no_length_or_name_says_so():
    with fc.SyncDataCollector("CartPole-v1", frames_per_batch=4) as collector:
        with refused(TypeError, ("an endless collector (total_frames=-1) has no length", "give total_frames")):
            len(collector)
        with refused(AttributeError, ("'SyncDataCollector' object has no attribute 'frames_per_bach'",)):
            _ = collector.frames_per_bach


TWO = {"create_env_fn": ["CartPole-v1"] * 2}
LIVE, NESTED = {"create_env_fn": CartPoleEnv()}, {"collector_class": fc.MultiSyncDataCollector}
RAY = {
    "class": ({"collector_class": dict}, TypeError, r"collector_class is .*expected SyncDataCollector"),
    "workers without a class": ({"num_workers_per_collector": 2}, ValueError, "SyncDataCollector has no workers"),
    "lists that differ": (TWO | {"collector_kwargs": [{}]}, ValueError, r"'create_env_fn': 2, 'collector_kwargs': 1"),
    "a number that differs": (TWO | {"num_collectors": 3}, ValueError, "differ"),
    "none": ({"create_env_fn": []}, ValueError, "or are 0"),
    "a keyword of the run": ({"collector_kwargs": {"frames_per_batch": 3}}, ValueError, "give it to RayCollector"),
    "a keyword of nobody": ({"collector_kwargs": {"policy_device": "cup"}}, ValueError, "policy_device is 'cup'"),
    "a misspelling": ({"collector_kwargs": {"reset_when_don": 1}}, TypeError, r"\['reset_when_don'\], which Sync.* la"),
    "a keyword of another class": ({"collector_kwargs": {"cat_results": 0}}, TypeError, "pass another collector_class"),
    "a live environment": (LIVE | {"num_collectors": 2}, ValueError, "same live environment"),
    "nested workers": (LIVE | NESTED | {"num_workers_per_collector": 2}, ValueError, "same live environment"),
    "devices": (TWO | {"policy_device": ["cpu"] * 3}, ValueError, "'policy_device': 3"),
    "name": ({"remote_configs": {"name": "actor"}}, ValueError, "would find its name taken"),
    "lifetime": ({"remote_configs": {"lifetime": "detached"}}, ValueError, "an actor ends with its collector"),
    "frames": ({"frames_per_batch": [10, 10], "sync": True}, TypeError, "expected a positive int"),
    "prefetch": ({"prefetch": True}, ValueError, "prefetch is for sync=True"),
    "storing devices": (TWO | {"sync": True, "storing_device": ["cpu", "meta"]}, ValueError, "one for sync=True"),
    "one of TorchRL's": ({"trust_policy": True}, TypeError, r"no argument trust_policy \(policies need no trust\)"),
    "in_process": ({"in_process": True}, TypeError, r"no argument in_process \(MultiSyncDataCollector has it\)"),
}


@pytest.mark.parametrize("name", RAY)
def test_bad_keywords_are_refused_before_ray_starts(name):
    kwargs, error, message = RAY[name]
    with pytest.raises(error, match=message):
        fc.RayCollector(**({"create_env_fn": "CartPole-v1", "frames_per_batch": 10} | kwargs))
    assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()
