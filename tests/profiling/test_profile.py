"""`fc.profile` of functions and of collectors in this process."""

import pytest
import torch

import funcollect as fc
from funcollect.core import api
from funcollect.profiling import local_run
from tests.envs.torch.test_torch_vector_env import LikeManiSkill
from tests.profiling.cases import Slow, check, largest, network, slow_env, slow_reader
from tests.support.compare import assert_same
from tests.support.running import in_soak

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
LANES = [{"num_workers": 2}]


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


@pytest.mark.parametrize("options", LANES, ids=str)
def test_lanes_in_workers(options):
    env = fc.make_env(slow_env, num_envs=4, **options)
    profile = fc.profile(env, network(), frames=64, length=8)
    check(profile)
    assert {*profile.parts} == {*HOST, "hand-over"}
    assert profile.parts["environment"] >= 2_500  # two of four lanes, one after the other; waking up may take longer
    assert "slowest worker" in str(profile)


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


def test_a_slow_reader(monkeypatch):
    monkeypatch.setattr(local_run, "cores_here", lambda: 2)
    with fc.SyncDataCollector(slow_env, None, frames_per_batch=20, seed=0) as collector:
        profile = fc.profile(collector, frames=40, reader=slow_reader)
    check(profile)
    assert largest(profile) == "reader"
    assert "MultiSyncDataCollector(prefetch=True)" in profile.advice


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
