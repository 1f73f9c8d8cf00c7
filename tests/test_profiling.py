"""`fc.profile` of functions, of collectors in this process, and of collectors with workers."""

import functools
import time

import pytest
import torch

import funcollect as fc
from funcollect.core import api
from tests.envs.test_torch_vector_env import LikeManiSkill
from tests.support.compare import assert_same
from tests.support.faulty.faulty_workers import Uneven, stumble
from tests.support.misuse import Rigged
from tests.support.running import FORKS_OF_RAY, in_soak
from tests.support.workers import multi, ray_collector

HOST = {"environment", "policy", "recording", "preparation", "delivery"}
LOOPS = {
    "host": ("CartPole-v1", {}, HOST),
    "torch": ("torch/CartPole-v1", {}, HOST),
    "device": (fc.envs.from_torch_vector_env(LikeManiSkill), None, HOST),
    "crossing": ("gymnax/CartPole-v1", {"compile": "eager"}, HOST - {"recording"}),
    "fused": ("gymnax/CartPole-v1", {}, {"environment", "policy", "delivery"}),
}
SLEPT = 2_500  # microseconds per frame that two workers sleep; on a busy machine waking up may take longer
SYNC, ASYNC = fc.MultiSyncDataCollector, fc.MultiaSyncDataCollector


Sleeping = functools.partial(Uneven, 0.005)  # in each step


def network(inputs=4, seconds=0, **kwargs):
    """A network that sleeps for so long."""
    sleeping = torch.nn.Linear(inputs, 2)
    if seconds:
        sleeping.register_forward_hook(lambda *_: time.sleep(seconds))
    return fc.torch_policy(sleeping, head=fc.heads.categorical, **kwargs)


def slow_reader(batch):
    time.sleep(0.2)


def check(profile):
    """Parts add up to the time of a frame, everywhere, and the rest is there."""
    for timeline in profile.timelines:
        assert abs(sum(timeline.parts.values()) / profile.microseconds - 1) < 1e-6, timeline
        assert min(timeline.parts.values()) >= 0
        for part in timeline.parts:
            assert f"\n{part} " in str(profile)
    assert min(limit.frames_per_second for limit in profile.limits) >= profile.frames_per_second * 0.999
    assert abs(profile.frames_per_second * profile.microseconds / 1e6 - 1) < 1e-9
    return profile


def largest(parts):
    return max(parts, key=parts.get)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("num_envs", [4, *in_soak([None])])
def test_each_loop(loop, num_envs):
    env, kwargs, parts = LOOPS[loop]
    env = fc.make_env(env, num_envs=num_envs) if isinstance(env, str) else env
    policy = None if kwargs is None else network(**kwargs)
    profile = check(fc.profile(env, policy, frames=64, length=16))
    assert profile.loop == fc.explain(env, policy or fc.random_policy(env)).loop == loop
    assert {*profile.parts} == parts
    assert profile.frames == 64


def test_the_slowest_part_is_the_largest():
    env = fc.make_env(Sleeping, num_envs=4, num_workers=2)
    profile = check(fc.profile(env, network(2), frames=64, length=8))
    assert {*profile.parts} == HOST | {"hand-over"}
    assert profile.parts["environment"] >= SLEPT  # two of four lanes, one after the other
    profile = fc.profile(fc.make_env(Sleeping), network(2), frames=16, length=8)
    assert largest(profile.parts) == "environment"
    assert profile.parts["environment"] >= 5_000
    assert profile.limits[0].frames_per_second <= 200
    with pytest.raises(AttributeError, match="compare its parts and limits"):
        _ = profile.advice
    profile = fc.profile(fc.make_env("CartPole-v1", num_envs=2), network(seconds=0.005), frames=32, length=8)
    assert largest(profile.parts) == "policy"
    assert profile.parts["policy"] >= 2_500
    with fc.SyncDataCollector("CartPole-v1", None, frames_per_batch=20, seed=0) as collector:
        profile = check(fc.profile(collector, frames=40, reader=slow_reader))
    assert largest(profile.parts) == "reader"


def test_the_data_are_the_same():
    kwargs = {"init_random_frames": 60, "max_frames_per_traj": 7, "compact_obs": True}

    def build():
        torch.manual_seed(0)
        return fc.SyncDataCollector("CartPole-v1", network(), frames_per_batch=40, seed=0, **kwargs)

    with build() as plain, build() as profiled:
        wanted, got = [next(plain) for _ in range(5)], []
        simulators = profiled.state.env_state.simulation.simulators
        profile = fc.profile(profiled, frames=80, reader=got.append)
        got += [next(profiled) for _ in range(2)]
        assert (profile.frames, profiled.frames) == (80, 200)
        assert profiled.loops is api.LOOPS
        assert profiled.state.env_state.simulation.simulators is simulators
    for one, two in zip(wanted, got, strict=True):
        assert_same(one, two)


def test_nothing_is_left_behind_after_an_exception_either():
    def rigged():
        made.append(Rigged())
        return made[-1]

    made = []
    check(fc.profile(fc.make_env([rigged] * 2), frames=20, length=5))
    assert len(made) >= 2
    assert {each.closed for each in made} == {1}
    with (
        fc.SyncDataCollector("CartPole-v1", None, frames_per_batch=20, seed=0) as one,
        multi(transport="serial", create_env_fn=["CartPole-v1"] * 2, policy=None, frames_per_batch=20) as two,
    ):
        for collector in (one, two):
            with pytest.raises(ArithmeticError):
                fc.profile(collector, reader=lambda _: stumble())
        assert one.loops is api.LOOPS
        assert two.run.timers(False) == []
        assert next(one).numel() == 20
        check(fc.profile(two, frames=20))


def test_bad_arguments():
    with fc.SyncDataCollector("CartPole-v1", None, frames_per_batch=20, total_frames=20) as collector:
        for kwargs, error, words in (
            ({"policy": network()}, ValueError, "policy is .*has its own"),
            ({"length": 3}, ValueError, "length is 3, but target is a collector"),
            ({}, ValueError, "no batches left"),
        ):
            with pytest.raises(error, match=words):
                fc.profile(collector, **kwargs)
    with fc.SyncDataCollector("CartPole-v1", None, frames_per_batch=20) as collector:
        collector.shutdown()
        with pytest.raises(fc.ClosedError):
            fc.profile(collector)


@pytest.mark.parametrize(("kind", "kwargs"), [(SYNC, {}), *in_soak([(ASYNC, {}), (SYNC, {"prefetch": True})])], ids=str)
def test_workers_of_slow_environments_and_a_slow_reader(kind, kwargs):
    frames = 20 if kind is SYNC else 10
    pair = [functools.partial(fc.make_env, Sleeping)] * 2
    with multi(kind, create_env_fn=pair, policy=network(2), frames_per_batch=frames, **kwargs) as collector:
        profile = check(fc.profile(collector, frames=60))
        assert profile.parts["environment"] >= SLEPT
        assert [timeline.where for timeline in profile.timelines] == ["in each of 2 workers", "in this process"]
        assert {*profile.parts} == HOST | {"hand-over", "waiting"}
        assert {*profile.timelines[1].parts} <= {"hand-over", "waiting"}
        assert profile.limits[0].frames_per_second <= 200 * 64
        assert next(collector).numel() == frames
        if kind is SYNC and not kwargs:
            profile = check(fc.profile(collector, frames=60, reader=slow_reader))
            assert (largest(profile.parts), largest(profile.timelines[1].parts)) == ("waiting", "reader")


def test_workers_in_this_process():
    batches = []
    with multi(transport="serial", create_env_fn=["CartPole-v1"] * 2, policy=None, frames_per_batch=20) as collector:
        profile = check(fc.profile(collector, frames=40, reader=batches.append))
        assert collector.frames == 20 * len(batches) == 80
    assert len(profile.timelines) == 1
    assert {*profile.parts} == HOST | {"hand-over", "reader"}
    env = fc.make_env("gymnax/CartPole-v1", num_envs=2)
    with multi(transport="serial", create_env_fn=[env] * 2, policy=None, frames_per_batch=32) as collector:
        profile = check(fc.profile(collector, frames=64))
    assert profile.loop == "fused"
    assert "environment and policy" in profile.parts


@pytest.mark.evening
@FORKS_OF_RAY
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("kind", [fc.SyncDataCollector, SYNC], ids=lambda kind: kind.__name__)
def test_over_ray(kind):
    nested = {} if kind is fc.SyncDataCollector else {"num_workers_per_collector": 2}
    kwargs = {"frames_per_batch": 40, "sync": True, "collector_class": kind, **nested}
    with ray_collector([functools.partial(fc.make_env, Sleeping)] * 2, network(2), **kwargs) as collector:
        profile = check(fc.profile(collector, frames=80))
    assert profile.parts["environment"] >= SLEPT / (2 if nested else 1)
    assert len(profile.timelines) == 2
