"""Wrappers that normalise by running statistics: recognised, and neither evaluated nor forked with empty ones."""

import gc
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import NormalizeObservation, NormalizeReward, RecordEpisodeStatistics
from gymnasium.wrappers import vector as vector_wrappers

import funcollect as fc
from tests.support.compare import fresh
from tests.support.running import in_soak


class OwnStatistics(gymnasium.ObservationWrapper):
    """Like many in people's scripts: no class of Gymnasium's."""

    def __init__(self, env):
        super().__init__(env)
        self.rms = NormalizeObservation(env).obs_rms

    def observation(self, observation):
        self.rms.update(observation[None])
        return (observation / np.sqrt(self.rms.var + 1)).astype(np.float32)


def both():
    return RecordEpisodeStatistics(NormalizeReward(NormalizeObservation(gymnasium.make("CartPole-v1"))))


def frozen():
    env = NormalizeObservation(gymnasium.make("CartPole-v1"))
    env.update_running_mean = False
    return env


def vectors(kind, factory):
    spawned = {"context": "spawn"} if kind is AsyncVectorEnv else {}
    return kind([factory] * 2, autoreset_mode=AutoresetMode.DISABLED, **spawned)


def transformed(frozen):
    from torchrl.envs import GymEnv, TransformedEnv, VecNormV2

    norm = VecNormV2(in_keys=["observation"])
    return TransformedEnv(GymEnv("CartPole-v1"), norm.freeze() if frozen else norm)


def several(kind):
    import torchrl.envs

    spawned = {"mp_start_method": "spawn"} if kind == "ParallelEnv" else {}
    return getattr(torchrl.envs, kind)(2, partial(transformed, False), **spawned)


def in_torchrl():
    from torchrl.envs import GymWrapper

    return GymWrapper(NormalizeObservation(gymnasium.make("CartPole-v1")))


NAMES = ["NormalizeObservation", "NormalizeReward"]
WITH = {
    "both": (lambda: both, {"num_envs": 2}, {*NAMES}),
    "an instance": (both, {}, {*NAMES}),
    "processes": (lambda: both, {"num_envs": 2, "parallel": True}, {*NAMES}),
    "of one's own": (lambda: lambda: OwnStatistics(gymnasium.make("CartPole-v1")), {}, {"OwnStatistics"}),
    "in a vector": (lambda: vectors(SyncVectorEnv, both), {}, {*NAMES}),
    "in its processes": (lambda: vectors(AsyncVectorEnv, both), {}, {*NAMES}),
    "around a vector": (lambda: vector_wrappers.NormalizeReward(vectors(SyncVectorEnv, CartPoleEnv)), {}, {NAMES[1]}),
}
WITH_TORCHRL = {
    "VecNorm": (lambda: transformed(False), {}, {"VecNormV2"}),
    "several": (lambda: several("SerialEnv"), {}, {"VecNormV2"}),
    "Gymnasium's in TorchRL": (in_torchrl, {}, {"NormalizeObservation"}),
    "in processes": (lambda: several("ParallelEnv"), {}, {"VecNormV2"}),
}
FEW = [*WITH_TORCHRL][:3]
OF_TORCHRL = [pytest.param(case, marks=pytest.mark.needs("torchrl")) for case in FEW + in_soak(["in processes"])]


IN_PROCESSES = "in its processes"
CASES = [case for case in WITH if case != IN_PROCESSES] + in_soak([IN_PROCESSES])


@pytest.mark.parametrize("case", [*CASES, *OF_TORCHRL])
def test_they_are_recognised_and_refused(case):
    make, kwargs, names = (WITH | WITH_TORCHRL)[case]
    env, policy, state = fresh(make(), steps=4, **kwargs)
    assert {*env.running_statistics} == names
    plan = fc.explain(env, policy)
    for name in names:
        assert name in plan.seeding
        assert name in plan.forking
    assert "seed of its own" not in plan.seeding
    with pytest.raises(fc.EvaluationError, match=r"statistics .*funcollect.normalized"):
        fc.evaluate(env, policy, episodes=1, seed=0)
    with pytest.raises(fc.ReplayError, match=r"statistics .*funcollect.normalized"):
        fc.fork(env, state)
    state, _ = fc.rollout(env, policy, state, 4)  # a refusal loses nothing
    fc.close(state)


def test_fixed_statistics_are_evaluated_and_forked():
    env, policy, state = fresh(frozen, num_envs=2)
    assert "seed of its own" in fc.explain(env, policy).seeding
    assert len(fc.evaluate(env, policy, episodes=3, seed=0)) == 3
    fc.fork(env, state)


@pytest.mark.needs("torchrl")
def test_fixed_statistics_are_evaluated_over_torchrl():
    assert fc.make_env(lambda: transformed(True)).running_statistics == ()


class OwnMean(gymnasium.ObservationWrapper):
    """Nothing shows that it keeps a mean, but what it returns."""

    def __init__(self, env):
        super().__init__(env)
        self.mean, self.count = np.zeros(4), 1

    def observation(self, observation):
        self.count += 1
        self.mean += (observation - self.mean) / self.count
        return (observation - self.mean).astype(np.float32)


class Holds(gymnasium.Wrapper):
    """Steps another environment than the one that it wraps."""

    def __init__(self, env):
        super().__init__(env)
        self.inner = NormalizeObservation(env)


def test_an_environment_of_ones_own_that_keeps_something_is_warned_of():
    env = fc.make_env(lambda: OwnMean(gymnasium.make("CartPole-v1")), num_envs=2)
    with pytest.warns(UserWarning, match=r"begun again from its seed begins with another observation.*check_env"):
        assert len(fc.evaluate(env, fc.random_policy(env), episodes=3, seed=0)) == 3


def test_parts_may_refer_to_each_other_and_stand_behind_any_attribute():
    env = gymnasium.make("CartPole-v1")
    env.unwrapped.outermost = env
    assert fc.make_env(env).running_statistics == ()
    assert fc.make_env(lambda: Holds(gymnasium.make("CartPole-v1"))).running_statistics == ("NormalizeObservation",)


def test_attributes_of_a_simulator_are_not_moved_into_a_dict():
    """CPython reads them more slowly from there, at every step."""
    made = []

    class Simulator(CartPoleEnv):
        """A class of its own: what other tests did to instances of CartPole's has no effect on its instances."""

    class Layer(gymnasium.Wrapper):
        """Likewise."""

    def factory():
        made.append(Layer(Simulator()))
        return made[-1]

    def any_dict():
        held = gc.get_referents(*made, *(env.env for env in made))
        return any(type(each) is dict and each.keys() & {"action_space", "_action_space"} for each in held)

    for arguments in ({}, {"num_envs": 2}):
        fresh(factory, steps=64, **arguments)
    assert not any_dict()
    assert vars(made[-1].env)
    assert any_dict()


def test_check_env_finds_them():
    with pytest.raises(fc.CheckError, match="running statistics, do that in the network"):
        fc.testing.check_env(both, num_envs=2)
