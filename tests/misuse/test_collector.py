"""Collectors given wrong arguments, or used wrongly; no simulator stays behind where construction fails."""

import sys

import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from torch import nn

import funcollect as fc
from funcollect.errors import ClosedError
from tests.support.misuse import Misuse, Rigged, refused, table


def network():
    return fc.torch_policy(nn.Linear(4, 2), head=fc.heads.categorical)


BOTH = {"max_frames_per_traj": 5, "reset_when_done": False}


def given(what, error, *says, **how):
    return Misuse(what, lambda: how, error, says)


@table(
    given("total 0", ValueError, "total_frames is 0", "expected at least 1", "-1 for an endless run", total_frames=0),
    given("limit 0", ValueError, "max_frames_per_traj is 0", "or None", max_frames_per_traj=0),
    given("no function", TypeError, "postproc is 3", "expected a function from batch to batch", "pass", postproc=3),
    given("two limits", ValueError, "max_frames_per_traj cuts", "reset_when_done=False keeps it", **BOTH),
    *[
        given(name, ValueError, f"{name} is 'cuda:77'", "that Torch has here", "such as 'cpu'", **{name: "cuda:77"})
        for name in ("device", "storing_device", "env_device", "policy_device")
    ],
    given("env_device meta", ValueError, "env_device is meta", "runs on cpu", "build the env", env_device="meta"),
    given("two policies", ValueError, "are both given", "expected one", policy=network(), policy_factory=network),
    given("no factory", TypeError, "is Linear", "a function that returns a policy", policy_factory=nn.Linear(4, 2)),
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
    with fc.SyncDataCollector(
        "CartPole-v1", frames_per_batch=4, postproc=lambda batch: batch["action"] if wrong else batch
    ) as collector:
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
LIVE = {"create_env_fn": CartPoleEnv()}
RAY = {
    "class": ({"collector_class": dict}, TypeError, r"collector_class is .*expected SyncDataCollector"),
    "workers without a class": ({"num_workers_per_collector": 2}, ValueError, "SyncDataCollector has no workers"),
    "lists that differ": (TWO | {"collector_kwargs": [{}]}, ValueError, r"'create_env_fn': 2, 'collector_kwargs': 1"),
    "a number that differs": (TWO | {"num_collectors": 3}, ValueError, "differ"),
    "none": ({"create_env_fn": []}, ValueError, "or are 0"),
    "a keyword of the run": ({"collector_kwargs": {"frames_per_batch": 3}}, ValueError, "give it to RayCollector"),
    "a keyword of nobody": ({"collector_kwargs": {"policy_device": "cup"}}, ValueError, "policy_device is 'cup'"),
    "a misspelling": (
        {"collector_kwargs": {"reset_when_don": 1}},
        TypeError,
        r"\['reset_when_don'\], which Sync.* lacks",
    ),
    "a keyword of another class": ({"collector_kwargs": {"cat_results": 0}}, TypeError, "pass another collector_class"),
    "a live environment": (LIVE | {"num_collectors": 2}, ValueError, "same live environment"),
    "nested workers": (
        LIVE | {"collector_class": fc.MultiSyncDataCollector, "num_workers_per_collector": 2},
        ValueError,
        "same live environment",
    ),
    "devices": (TWO | {"policy_device": ["cpu"] * 3}, ValueError, "'policy_device': 3"),
    "name": ({"remote_configs": {"name": "actor"}}, ValueError, "would find its name taken"),
    "lifetime": ({"remote_configs": {"lifetime": "detached"}}, ValueError, "an actor ends with its collector"),
    "frames": ({"frames_per_batch": [10, 10], "sync": True}, TypeError, "expected a positive int"),
    "interval": ({"max_weight_update_interval": 1.5}, TypeError, "expected an int: pass -1 for no limit"),
    "sync": ({"sync": 1}, TypeError, "sync is 1, expected a bool"),
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
