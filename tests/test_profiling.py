"""`fc.profile` of functions, of collectors in this process, and of collectors with workers."""

import functools
import time

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import funcollect as fc
from funcollect.core import api
from tests.envs.test_torch_vector_env import LikeManiSkill
from tests.support.compare import assert_same
from tests.support.running import FORKS_OF_RAY, in_soak
from tests.support.workers import multi, ray_collector

HOST = ["environment", "policy", "recording", "preparation", "delivery"]
CROSSING = ["environment", "policy", "preparation", "delivery"]
FUSED = ["environment", "policy", "delivery"]
LOOPS = {
    "host": ("CartPole-v1", {}, HOST),
    "torch": ("torch/CartPole-v1", {}, HOST),
    "crossing": ("gymnax/CartPole-v1", {"compile": "eager"}, CROSSING),
    "fused": ("gymnax/CartPole-v1", {}, FUSED),
}
RUNS = [*((loop, {}) for loop in LOOPS), *in_soak([("host", {"compile": "xla"})])]
KEYWORDS = [{"init_random_frames": 60}, {"max_frames_per_traj": 7, "compact_obs": True}]
SLEPT = 2_500  # microseconds per frame that two workers sleep; on a busy machine waking up may take longer
SYNC, ASYNC = fc.MultiSyncDataCollector, fc.MultiaSyncDataCollector
KINDS = [(SYNC, {}), (ASYNC, {}), *in_soak([(SYNC, {"prefetch": True})])]


class Sleeping(gymnasium.Env):
    """Sleeps in each step; an episode has ten."""

    observation_space, action_space = spaces.Box(-1, 1, (4,)), spaces.Discrete(2)
    steps = 0

    def __init__(self, seconds=0.0):
        self.seconds = seconds

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action):
        time.sleep(self.seconds)
        self.steps += 1
        return np.zeros(4, np.float32), 1.0, self.steps == 10, False, {}


def slow_env():
    return Sleeping(0.005)


class Slow(torch.nn.Linear):
    """A network that sleeps."""

    def __init__(self):
        super().__init__(4, 2)

    def forward(self, x):
        time.sleep(0.005)
        return super().forward(x)


def network(**kwargs):
    return fc.torch_policy(torch.nn.Linear(4, 2), head=fc.heads.categorical, **kwargs)


def slow_reader(batch):
    """Works on a batch for long."""
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


def largest(profile):
    """The largest part where frames are collected."""
    return max(profile.parts, key=profile.parts.get)


@pytest.mark.parametrize(("loop", "kwargs"), RUNS, ids=str)
@pytest.mark.parametrize("num_envs", [4, *in_soak([None])])
def test_each_loop(loop, kwargs, num_envs):
    name, own, parts = LOOPS[loop]
    kwargs = own | kwargs
    env = fc.make_env(name, num_envs=num_envs)
    profile = fc.profile(env, network(**kwargs), frames=64, length=16)
    check(profile)
    assert profile.loop == fc.explain(env, network(**kwargs)).loop == loop
    assert {*profile.parts} == {*parts}
    assert profile.frames == 64


def test_simulators_over_tensors():
    env = fc.envs.from_torch_vector_env(LikeManiSkill)
    profile = fc.profile(env, frames=64, length=16)
    check(profile)
    assert (profile.loop, {*profile.parts}) == ("device", {*HOST})


def test_lanes_in_workers():
    env = fc.make_env(slow_env, num_envs=4, num_workers=2)
    profile = fc.profile(env, network(), frames=64, length=8)
    check(profile)
    assert {*profile.parts} == {*HOST, "hand-over"}
    assert profile.parts["environment"] >= 2_500  # two of four lanes, one after the other; waking up may take longer


def test_a_slow_environment():
    profile = fc.profile(fc.make_env(slow_env), network(), frames=16, length=8)
    assert largest(profile) == "environment"
    assert profile.parts["environment"] >= 5_000
    assert profile.limits[0].frames_per_second <= 200


def test_a_slow_policy():
    policy = fc.torch_policy(Slow(), head=fc.heads.categorical)
    profile = fc.profile(fc.make_env("CartPole-v1", num_envs=2), policy, frames=32, length=8)
    assert largest(profile) == "policy"
    assert profile.parts["policy"] >= 2_500


def test_a_slow_reader():
    with fc.SyncDataCollector(slow_env, None, frames_per_batch=20, seed=0) as collector:
        profile = fc.profile(collector, frames=40, reader=slow_reader)
    check(profile)
    assert largest(profile) == "reader"
    with pytest.raises(AttributeError, match="compare its parts and limits"):
        _ = profile.advice


@pytest.mark.parametrize("kwargs", KEYWORDS, ids=str)
def test_the_data_are_the_same(kwargs):
    def build():
        head = fc.heads.categorical
        torch.manual_seed(0)
        policy = fc.torch_policy(torch.nn.Linear(4, 2), head=head)
        return fc.SyncDataCollector("CartPole-v1", policy, frames_per_batch=40, seed=0, **kwargs)

    with build() as plain, build() as profiled:
        wanted, got = [next(plain) for _ in range(5)], []
        simulators = profiled.state.env_state.simulation.simulators
        profile = fc.profile(profiled, frames=80, reader=got.append)
        got += [next(profiled) for _ in range(2)]
        assert profile.frames == 80
        assert profiled.frames == 200
        assert profiled.loops is api.LOOPS
        assert profiled.state.env_state.simulation.simulators is simulators
    for one, two in zip(wanted, got, strict=True):
        assert_same(one, two)


def test_an_exception_leaves_nothing_behind():
    batches = []

    def reader(batch):
        batches.append(batch)
        if len(batches) == 2:
            raise ArithmeticError

    with fc.SyncDataCollector("CartPole-v1", None, frames_per_batch=20, seed=0) as collector:
        with pytest.raises(ArithmeticError):
            fc.profile(collector, reader=reader)
        assert collector.loops is api.LOOPS
        assert next(collector).numel() == 20


def test_functions_close_what_they_opened():
    closed = []

    class Closing(fc.envs.SimulatorsBase):
        def reset(self, lanes, seeds):
            pass

        def step(self, lanes, action):
            return [0.0] * len(lanes), [False] * len(lanes), [False] * len(lanes), ()

        def close(self):
            closed.append(self)

    spaces = fc.make_env("CartPole-v1", num_envs=2)

    class Env(fc.envs.HostEnvBase):
        num_envs, observation_space, action_space = 2, spaces.observation_space, spaces.action_space

        def open(self):
            return Closing(self)

    check(fc.profile(Env(), frames=20, length=5))
    assert len(closed) == 1


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"policy": network()}, ValueError, "policy is .*has its own"),
        ({"length": 3}, ValueError, "length is 3, but target is a collector"),
        ({"frames": 0}, ValueError, "frames is 0"),
        ({"reader": 3}, TypeError, "reader"),
    ],
    ids=str,
)
def test_bad_arguments(kwargs, error, words):
    with fc.SyncDataCollector("CartPole-v1", None, frames_per_batch=20) as collector, pytest.raises(error, match=words):
        fc.profile(collector, **kwargs)


def test_what_cannot_be_profiled():
    with pytest.raises(TypeError, match="target is str, expected a collector or an Env"):
        fc.profile("CartPole-v1")
    with (
        fc.SyncDataCollector("CartPole-v1", None, frames_per_batch=20, total_frames=20) as collector,
        pytest.raises(ValueError, match="no batches left"),
    ):
        fc.profile(collector)
    collector = fc.SyncDataCollector("CartPole-v1", None, frames_per_batch=20)
    collector.shutdown()
    with pytest.raises(fc.ClosedError):
        fc.profile(collector)


@pytest.mark.parametrize(("kind", "kwargs"), KINDS, ids=str)
def test_slow_environments(kind, kwargs):
    frames = 20 if kind is SYNC else 10
    factory = functools.partial(fc.make_env, slow_env)
    with multi(kind, create_env_fn=[factory] * 2, policy=network(), frames_per_batch=frames, **kwargs) as collector:
        profile = fc.profile(collector, frames=60)
        check(profile)
        assert profile.parts["environment"] >= SLEPT
        assert [timeline.where for timeline in profile.timelines] == ["in each of 2 workers", "in this process"]
        assert {*profile.parts} == {*HOST} | {"hand-over", "waiting"}
        assert {*profile.timelines[1].parts} <= {"hand-over", "waiting"}
        assert profile.limits[0].frames_per_second <= 200 * 64
        assert next(collector).numel() == frames


def test_a_slow_reader_of_workers():
    pair = [functools.partial(fc.make_env, slow_env)] * 2
    with multi(create_env_fn=pair, policy=None, frames_per_batch=20) as collector:
        profile = fc.profile(collector, frames=60, reader=slow_reader)
    check(profile)
    assert largest(profile) == "waiting"
    assert max(profile.timelines[1].parts.items(), key=lambda item: item[1])[0] == "reader"


def test_workers_in_this_process():
    batches = []
    with multi(transport="serial", create_env_fn=["CartPole-v1"] * 2, policy=None, frames_per_batch=20) as collector:
        profile = fc.profile(collector, frames=40, reader=batches.append)
        assert collector.frames == 20 * len(batches) == 80
    check(profile)
    assert len(profile.timelines) == 1
    assert {*profile.parts} == {*HOST} | {"hand-over", "reader"}


def test_compiled_loops():
    env = fc.make_env("gymnax/CartPole-v1", num_envs=2)
    with multi(transport="serial", create_env_fn=[env] * 2, policy=None, frames_per_batch=32) as collector:
        profile = fc.profile(collector, frames=64)
    check(profile)
    assert profile.loop == "fused"
    assert "environment and policy" in profile.parts


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
