"""Wrappers that normalise by running statistics: recognised, and neither evaluated nor forked with empty ones."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import NormalizeObservation, NormalizeReward, RecordEpisodeStatistics
from gymnasium.wrappers import vector as vector_wrappers

import funcollect as fc
from tests.support.running import in_soak


class OwnStatistics(gymnasium.ObservationWrapper):  # type: ignore[type-arg]
    """Like many in people's scripts: no class of Gymnasium's."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.rms = NormalizeObservation(env).obs_rms

    def observation(self, observation: Any) -> Any:
        self.rms.update(observation[None])
        return (observation / np.sqrt(self.rms.var + 1)).astype(np.float32)


def both() -> Any:
    return RecordEpisodeStatistics(NormalizeReward(NormalizeObservation(gymnasium.make("CartPole-v1"))))


def frozen() -> Any:
    env = NormalizeObservation(gymnasium.make("CartPole-v1"))
    env.update_running_mean = False
    return env


def vectors(kind: Any, factory: Callable[[], Any]) -> Any:
    spawned = {"context": "spawn"} if kind is AsyncVectorEnv else {}
    return kind([factory] * 2, autoreset_mode=AutoresetMode.DISABLED, **spawned)


def transformed(frozen: bool) -> Any:
    from torchrl.envs import GymEnv, TransformedEnv, VecNormV2

    norm = VecNormV2(in_keys=["observation"])
    return TransformedEnv(GymEnv("CartPole-v1"), norm.freeze() if frozen else norm)


def several(kind: str) -> Any:
    import torchrl.envs

    spawned = {"mp_start_method": "spawn"} if kind == "ParallelEnv" else {}
    return getattr(torchrl.envs, kind)(2, partial(transformed, False), **spawned)


def in_torchrl() -> Any:
    from torchrl.envs import GymWrapper

    return GymWrapper(NormalizeObservation(gymnasium.make("CartPole-v1")))


WITH: dict[str, tuple[Callable[[], Any], dict[str, Any], set[str]]] = {
    "both": (lambda: both, {"num_envs": 2}, {"NormalizeObservation", "NormalizeReward"}),
    "an instance": (both, {}, {"NormalizeObservation", "NormalizeReward"}),
    "processes": (lambda: both, {"num_envs": 2, "parallel": True}, {"NormalizeObservation", "NormalizeReward"}),
    "of one's own": (lambda: lambda: OwnStatistics(gymnasium.make("CartPole-v1")), {}, {"OwnStatistics"}),
    "in a vector": (lambda: vectors(SyncVectorEnv, both), {}, {"NormalizeObservation", "NormalizeReward"}),
    "in its processes": (lambda: vectors(AsyncVectorEnv, both), {}, {"NormalizeObservation", "NormalizeReward"}),
}
WITH_TORCHRL: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "VecNorm": (lambda: transformed(False), {"VecNormV2"}),
    "several": (lambda: several("SerialEnv"), {"VecNormV2"}),
    "in processes": (lambda: several("ParallelEnv"), {"VecNormV2"}),
    "Gymnasium's in TorchRL": (in_torchrl, {"NormalizeObservation"}),
}


def assert_refused(env: Any, names: set[str]) -> None:
    assert {*env.running_statistics} == names
    policy = fc.random_policy(env)
    plan = fc.explain(env, policy)
    for name in names:
        assert name in plan.seeding
        assert name in plan.forking
    assert "seed of its own" not in plan.seeding
    with pytest.raises(fc.EvaluationError, match=r"statistics .*funcollect.normalized"):
        fc.evaluate(env, policy, episodes=1, seed=0)
    state = fc.init(env, policy, seed=0)
    state, _ = fc.rollout(env, policy, state, 4)
    with pytest.raises(fc.ReplayError, match=r"statistics .*funcollect.normalized"):
        fc.fork(env, state)
    state, _ = fc.rollout(env, policy, state, 4)  # a refusal loses nothing
    fc.close(state)


@pytest.mark.parametrize("case", WITH)
def test_they_are_recognised(case: str) -> None:
    make, kwargs, names = WITH[case]
    assert_refused(fc.make_env(make(), **kwargs), names)


@pytest.mark.needs("torchrl")
@pytest.mark.parametrize("case", [case for case in WITH_TORCHRL if case != "in processes"] + in_soak(["in processes"]))
def test_they_are_recognised_in_torchrl(case: str) -> None:
    make, names = WITH_TORCHRL[case]
    assert_refused(fc.make_env(make()), names)


def test_fixed_statistics_are_evaluated_and_forked() -> None:
    env = fc.make_env(frozen, num_envs=2)
    policy = fc.random_policy(env)
    assert "seed of its own" in fc.explain(env, policy).seeding
    assert len(fc.evaluate(env, policy, episodes=3, seed=0)) == 3
    state = fc.init(env, policy, seed=0)
    twin = fc.fork(env, state)
    fc.close(state)
    fc.close(twin)


@pytest.mark.needs("torchrl")
def test_fixed_statistics_are_evaluated_over_torchrl() -> None:
    assert fc.make_env(lambda: transformed(True)).running_statistics == ()


def test_wrappers_of_vectors() -> None:
    vector = vectors(SyncVectorEnv, lambda: gymnasium.make("CartPole-v1"))
    assert_refused(fc.make_env(vector_wrappers.NormalizeReward(vector)), {"NormalizeReward"})


class OwnMean(gymnasium.ObservationWrapper):  # type: ignore[type-arg]
    """Nothing shows that it keeps a mean, but what it returns."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.mean, self.count = np.zeros(4), 1

    def observation(self, observation: Any) -> Any:
        self.count += 1
        self.mean += (observation - self.mean) / self.count
        return (observation - self.mean).astype(np.float32)


class Holds(gymnasium.Wrapper):  # type: ignore[type-arg]
    """Steps another environment than the one that it wraps."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.inner = NormalizeObservation(env)


def test_an_environment_of_ones_own_that_keeps_something_is_warned_of() -> None:
    env = fc.make_env(lambda: OwnMean(gymnasium.make("CartPole-v1")), num_envs=2)
    with pytest.warns(UserWarning, match=r"begun again from its seed begins with another observation.*check_env"):
        assert len(fc.evaluate(env, fc.random_policy(env), episodes=3, seed=0)) == 3


def test_parts_may_refer_to_each_other_and_stand_behind_any_attribute() -> None:
    env = gymnasium.make("CartPole-v1")
    env.unwrapped.outermost = env  # type: ignore[attr-defined]
    assert fc.make_env(env).running_statistics == ()
    assert fc.make_env(lambda: Holds(gymnasium.make("CartPole-v1"))).running_statistics == ("NormalizeObservation",)


def test_attributes_of_a_simulator_are_not_moved_into_a_dict() -> None:
    """CPython reads them more slowly from there, at every step."""
    made: list[Any] = []

    class Simulator(CartPoleEnv):
        """A class of its own: what other tests did to instances of CartPole's has no effect on its instances."""

    class Layer(gymnasium.Wrapper[Any, Any, Any, Any]):
        """Likewise."""

    def factory() -> Any:
        made.append(Layer(Simulator()))
        return made[-1]

    def any_dict() -> bool:
        held = gc.get_referents(*made, *(env.env for env in made))
        return any(type(each) is dict and each.keys() & {"action_space", "_action_space"} for each in held)

    for arguments in ({}, {"num_envs": 2}):
        env = fc.make_env(factory, **arguments)
        policy = fc.random_policy(env)
        fc.rollout(env, policy, fc.init(env, policy, seed=0), 64)
    assert not any_dict()
    assert vars(made[-1].env)
    assert any_dict()


def test_check_env_finds_them() -> None:
    with pytest.raises(fc.CheckError, match="running statistics, do that in the network"):
        fc.testing.check_env(both, num_envs=2)
