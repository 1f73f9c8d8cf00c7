"""A collector that is used before a call of it has returned refuses, and goes on as if nothing had been asked."""

import copy
import pickle
import signal
import threading

import pytest
import torch

import funcollect as fc
from tests.support.compare import assert_same
from tests.support.faulty.faulty_workers import Held
from tests.support.running import in_soak
from tests.support.workers import wait_until


def refused(collector, path):
    for use, *given in (
        (collector.__next__,), (collector.rollout,), (collector.reset,), (collector.set_seed, 1),
        (collector.apply, str), (collector.state_dict,), (collector.save, path / "run"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=r"the collector is in use by a call .*: use it in one thread at a time"):
            use(*given)
    assert not (path / "run").exists()


class Gate(Held):
    """Notes its first step in a file, and waits there for another file."""

    def __init__(self, path):
        super().__init__(path / "open")
        self.path = path

    def step(self, action):
        (self.path / "begun").touch()
        return super().step(action)


@pytest.mark.parametrize("kind", ["sync", "lane workers", "processes", *in_soak(["serial", "asynchronous"])])
def test_another_thread(kind, tmp_path):
    def make():
        keywords = {"frames_per_batch": 24, "seed": 0}
        if kind in ("sync", "lane workers"):
            env = fc.make_env(lambda: Gate(tmp_path), num_envs=2, num_workers=2 if kind == "lane workers" else 0)
            return fc.SyncDataCollector(env, None, **keywords)
        build = fc.MultiaSyncDataCollector if kind == "asynchronous" else fc.MultiSyncDataCollector
        return build([lambda: Gate(tmp_path)] * 2, None, in_process=kind == "serial", **keywords)

    with make() as collector:
        batches = []
        thread = threading.Thread(target=lambda: batches.append(next(collector).clone()))
        thread.start()
        wait_until((tmp_path / "begun").exists)
        refused(collector, tmp_path)
        (tmp_path / "open").touch()
        thread.join()
        batches += [next(collector).clone() for _ in range(2)]
    if kind != "asynchronous":
        with make() as alone:
            for batch in batches:
                assert_same(batch, next(alone))


class Calls(torch.nn.Module):
    """Calls a function in each forward pass."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, observation):
        self.function()
        return self.linear(observation)


@pytest.mark.parametrize("name", ["CartPole-v1", "torch/CartPole-v1", "gymnax/CartPole-v1"])
def test_a_callback_and_a_signal_handler(name, tmp_path):
    def batches(function):
        torch.manual_seed(0)
        policy = fc.torch_policy(Calls(lambda: function()), head=fc.heads.categorical, compile="eager")
        with fc.SyncDataCollector(fc.make_env(name, num_envs=2), policy, frames_per_batch=40, seed=0) as collector:
            current.append(collector)
            return [next(collector) for _ in range(3)]

    def in_callback(*_):
        refused(current[-1], tmp_path)

    current = []
    before = signal.signal(signal.SIGUSR1, in_callback)
    try:
        quiet, *others = map(batches, (lambda: None, in_callback, lambda: signal.raise_signal(signal.SIGUSR1)))
    finally:
        signal.signal(signal.SIGUSR1, before)
    for disturbed in others:
        for one, two in zip(quiet, disturbed, strict=True):
            assert_same(one, two)


@pytest.mark.parametrize("name", ["postproc", "post_collect_hook"])
def test_a_function_of_the_batch_before_it_is_delivered(name, tmp_path):
    def call(batch):
        refused(collector, tmp_path)
        return batch

    with fc.SyncDataCollector("CartPole-v1", frames_per_batch=10, **{name: call}) as collector:
        assert [next(collector).numel() for _ in range(2)] == [10, 10]


def test_the_batch_during_which_a_collector_is_shut_down_is_delivered():
    policy = fc.torch_policy(Calls(lambda: collector.shutdown()), head=fc.heads.categorical, compile="eager")
    env = fc.make_env("torch/CartPole-v1", num_envs=2)
    collector = fc.SyncDataCollector(env, policy, frames_per_batch=20)
    assert next(collector).numel() == 20
    with pytest.raises(fc.ClosedError):
        next(collector)


def test_weights_that_are_given_meanwhile_are_those_of_the_next_batch():
    policy = fc.torch_policy(Calls(lambda: collector.update_policy_weights_()), head=fc.heads.categorical)
    with fc.SyncDataCollector("CartPole-v1", policy, frames_per_batch=5, seed=0) as collector:
        versions = [next(collector)["collector", "policy_version"].unique().tolist() for _ in range(3)]
    assert versions == [[0], [5], [10]]


@pytest.mark.parametrize("kind", [fc.SyncDataCollector, fc.MultiSyncDataCollector])
def test_it_is_not_copied(kind):
    with kind(["CartPole-v1"] * 2, None, frames_per_batch=20) as collector:
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"Collector.* cannot be copied or pickled: save\(path\)"):
                copied(collector)
