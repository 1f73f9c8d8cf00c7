"""The advice of `fc.profile` follows from the numbers, which these tests set where they depend on the machine."""

from dataclasses import replace

import pytest
import torch

import funcollect as fc
from funcollect.envs.host.lane_workers import advice as lane_advice
from funcollect.envs.host.lane_workers.advice import estimated_costs
from funcollect.envs.host.lane_workers.options import LaneWorkers
from funcollect.profiling import local_run, workers
from funcollect.profiling.advice import FEW_STEPS, Finding, advise
from tests.profiling.cases import Slow, slow_env, slow_reader
from tests.support.workers import multi


def test_the_finding_that_saves_most_is_the_advice():
    findings = [Finding(3.0, "three"), Finding(5.0, "five"), Finding(-1.0, "a loss")]
    assert advise(findings, 20.0, "nothing") == "five"
    assert advise(findings, 200.0, "nothing") == "nothing"
    assert advise([], 1.0, "nothing") == "nothing"


def test_estimated_costs_are_those_that_explain_describes():
    quick = estimated_costs(4, LaneWorkers(num_workers=4), 6e-6, 1.0)
    slow = estimated_costs(4, LaneWorkers(num_workers=2), 1e-3, 0.0)
    assert "leave the workers out" in str(quick)
    assert not quick.pays
    assert slow.pays


@pytest.mark.parametrize(
    ("number", "cores", "busy", "period"),
    [
        (2, 4, 1.0, 1.0),  # workers have lanes of both halves, and step all the time
        (2, 2, 1.0, 1.1),  # each rests while the policy acts for its lanes, on its processor
        (4, 2, 0.0, 1.1),
        (4, 2, 1.0, 2.2),  # and the policy competes with the workers of the other half
        (2, 1, 1.0, 2.2),
    ],
)
def test_what_overlap_saves(monkeypatch, number, cores, busy, period):
    monkeypatch.setattr(lane_advice, "cores_here", lambda: cores)
    monkeypatch.setattr(lane_advice, "_EXCHANGE", 0.0)
    costs = estimated_costs(8, LaneWorkers(num_workers=number, overlap=2), number / 8, busy)
    costs = replace(costs, once=0.15, half=0.1)
    assert costs.saved == pytest.approx(0.15 + costs.apart - period)


def advice_on_lanes(monkeypatch, *, step, calls, cores, **options):
    """The advice for CartPole in two workers, if these were the seconds of a lane's step and of a policy's call."""
    monkeypatch.setattr(lane_advice, "_time_of_a_step", lambda *_: (step, 1.0))
    for module in (lane_advice, local_run):
        monkeypatch.setattr(module, "cores_here", lambda: cores)
    monkeypatch.setattr(local_run, "policy_seconds", lambda env, route, lanes, seen: calls(lanes))
    env = fc.make_env("CartPole-v1", num_envs=8, num_workers=2, **options)
    return fc.profile(env, frames=1_024).advice


def test_workers_that_do_not_pay(monkeypatch):
    text = advice_on_lanes(monkeypatch, step=1e-9, calls=lambda lanes: 0.0, cores=4)
    assert "leave the workers out" in text


def test_lanes_that_could_step_meanwhile(monkeypatch):
    text = advice_on_lanes(monkeypatch, step=1.0, calls=lambda lanes: lanes * 1.0, cores=4)
    assert "overlap=2" in text
    assert "would save" in text


def test_lanes_that_should_not_step_meanwhile(monkeypatch):
    text = advice_on_lanes(monkeypatch, step=1.0, calls=lambda lanes: 10.0, cores=2, overlap=2)
    assert "leave overlap out" in text


def test_processors_that_collect_nothing(monkeypatch):
    monkeypatch.setattr(local_run, "cores_here", lambda: 4)
    profile = fc.profile(fc.make_env(slow_env, num_envs=2), frames=16, length=8)
    assert "MultiSyncDataCollector(…, num_workers=4)" in profile.advice


def test_nothing_that_a_setting_avoids(monkeypatch):
    monkeypatch.setattr(local_run, "cores_here", lambda: 1)
    with fc.SyncDataCollector("CartPole-v1", None, frames_per_batch=FEW_STEPS, compact_obs=True) as collector:
        assert "no setting avoids it" in fc.profile(collector, frames=FEW_STEPS).advice
        reader_advice = fc.profile(collector, frames=FEW_STEPS, reader=slow_reader).advice
    assert "only a faster one helps" in reader_advice


def test_slow_lanes_are_better_spread(monkeypatch):
    monkeypatch.setattr(local_run, "cores_here", lambda: 2)
    profile = fc.profile(fc.make_env(slow_env, num_envs=2), frames=16, length=8)
    assert "make_env(…, num_workers=2) steps the lanes in as many processes" in profile.advice


def test_threads_that_do_not_help(monkeypatch):
    before = torch.get_num_threads()
    threads = []
    monkeypatch.setattr(local_run, "cores_here", lambda: 1)
    monkeypatch.setattr(local_run, "policy_seconds", lambda *_: threads.append(torch.get_num_threads()) or 1e-9)
    torch.set_num_threads(2)
    try:
        policy = fc.torch_policy(Slow(), head=fc.heads.categorical)
        profile = fc.profile(fc.make_env("CartPole-v1", num_envs=2), policy, frames=32, length=16)
        assert "torch.set_num_threads(1)" in profile.advice
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert threads == [2, 1, 2]


def test_a_policy_that_is_called_at_each_step_of_a_jax_environment():
    policy = fc.torch_policy(Slow(), head=fc.heads.categorical, compile="eager")
    profile = fc.profile(fc.make_env("gymnax/CartPole-v1", num_envs=2), policy, frames=16, length=8)
    assert "compile='eager'" in profile.advice


def test_a_reader_that_waits_for_few_workers(monkeypatch):
    monkeypatch.setattr(workers, "cores_here", lambda: 4)
    pair = {"create_env_fn": slow_env, "num_workers": 2, "policy": None}
    with multi(frames_per_batch=20, prefetch=True, **pair) as collector:
        assert fc.profile(collector, frames=40).advice.endswith("num_workers=4")
