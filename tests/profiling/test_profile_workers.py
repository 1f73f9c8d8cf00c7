"""`fc.profile` of collectors with workers."""

import functools

import pytest

import funcollect as fc
from tests.profiling.cases import check, largest, network, slow_env, slow_reader
from tests.support.running import FORKS_OF_RAY, in_soak
from tests.support.workers import multi, ray_collector

ROLLOUT = {"environment", "policy", "recording", "preparation", "delivery"}
SLEPT = 2_500  # microseconds per frame that two workers sleep; on a busy machine waking up may take longer
SYNC, ASYNC = fc.MultiSyncDataCollector, fc.MultiaSyncDataCollector
KINDS = [(SYNC, {}), (ASYNC, {}), *in_soak([(SYNC, {"prefetch": True})])]


@pytest.mark.parametrize(("kind", "kwargs"), KINDS, ids=str)
def test_slow_environments(kind, kwargs):
    frames = 20 if kind is SYNC else 10
    factory = functools.partial(fc.make_env, slow_env)
    with multi(kind, create_env_fn=[factory] * 2, policy=network(), frames_per_batch=frames, **kwargs) as collector:
        profile = fc.profile(collector, frames=60)
        check(profile)
        assert profile.parts["environment"] >= SLEPT
        assert [timeline.where for timeline in profile.timelines] == ["in each of 2 workers", "in this process"]
        assert {*profile.parts} == ROLLOUT | {"hand-over", "waiting"}
        assert {*profile.timelines[1].parts} <= {"hand-over", "waiting"}
        assert profile.limits[0].frames_per_second <= 200 * 64
        assert next(collector).numel() == frames


@pytest.mark.parametrize(("prefetch", "words"), [(False, "prefetch=True"), (True, "fewer workers would do")])
def test_a_slow_reader(prefetch, words):
    pair = [functools.partial(fc.make_env, slow_env)] * 2
    with multi(create_env_fn=pair, policy=None, frames_per_batch=20, prefetch=prefetch) as collector:
        profile = fc.profile(collector, frames=60, reader=slow_reader)
    check(profile)
    assert largest(profile) == "waiting"
    assert max(profile.timelines[1].parts.items(), key=lambda item: item[1])[0] == "reader"
    assert words in profile.advice


def test_workers_in_this_process():
    batches = []
    with multi(transport="serial", create_env_fn=["CartPole-v1"] * 2, policy=None, frames_per_batch=20) as collector:
        profile = fc.profile(collector, frames=40, reader=batches.append)
        assert collector.frames == 20 * len(batches) == 80
    check(profile)
    assert len(profile.timelines) == 1
    assert {*profile.parts} == ROLLOUT | {"hand-over", "reader"}


def test_compiled_loops():
    env = fc.make_env("gymnax/CartPole-v1", num_envs=2)
    with multi(transport="serial", create_env_fn=[env] * 2, policy=None, frames_per_batch=32) as collector:
        profile = fc.profile(collector, frames=64)
    check(profile)
    assert profile.loop == "fused"
    assert "environment and policy" in profile.parts
    assert "profile the functions" in str(profile)


def test_an_exception_stops_the_timers():
    def fail(batch):
        raise ArithmeticError

    with multi(transport="serial", create_env_fn=["CartPole-v1"] * 2, policy=None, frames_per_batch=20) as collector:
        with pytest.raises(ArithmeticError):
            fc.profile(collector, reader=fail)
        assert collector.run.stop_timers() == []
        check(fc.profile(collector, frames=20))


@FORKS_OF_RAY
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("kind", [fc.SyncDataCollector, *in_soak([SYNC])], ids=lambda kind: kind.__name__)
def test_over_ray(kind):
    nested = {} if kind is fc.SyncDataCollector else {"num_workers_per_collector": 2}
    kwargs = {"frames_per_batch": 40, "sync": True, "collector_class": kind, **nested}
    with ray_collector([functools.partial(fc.make_env, slow_env)] * 2, network(), **kwargs) as collector:
        profile = fc.profile(collector, frames=80)
    check(profile)
    assert profile.parts["environment"] >= SLEPT / (2 if nested else 1)
    assert len(profile.timelines) == 2
