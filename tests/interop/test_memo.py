"""Values kept on a user's object: one memo for each object, whatever way the object was made."""

import copy
import gc
import pickle
import weakref
from dataclasses import dataclass
from typing import NamedTuple

import cloudpickle
import gymnasium
import jax.numpy as jnp
import pytest

import funcollect as fc
from funcollect.core.state import origin_of
from funcollect.interop.memo import memo_of, variables_of
from tests.support.compare import assert_same, collect


class Plain:
    pass


class _Pair(NamedTuple):
    one: int
    two: int


class PairWithAttributes(_Pair):  # has a __dict__, but cannot be referred to weakly
    pass


class Climb(fc.envs.JaxEnvBase):
    observation_space = gymnasium.spaces.Box(-1e9, 1e9, (1,))
    action_space = gymnasium.spaces.Discrete(2)
    height = 1.0

    def reset(self, key, params):
        return jnp.zeros(1), jnp.zeros(1)

    def step(self, key, env_state, action, params):
        after = env_state + self.height
        return fc.envs.Transition(after, after, after[0], False, False)


@dataclass
class DataClimb(Climb):  # without a hash, since it compares by value
    height: float = 1.0
    num_envs: int | None = 2


def highest(env):
    policy = fc.random_policy(env)
    return float(fc.rollout(env, policy, fc.init(env, policy, seed=0), 3)[1]["observation"].max())


def test_a_copy_begins_a_memo_of_its_own():
    owner = Plain()
    memo_of(owner)["x"] = 1
    others = [copy.copy(owner), copy.deepcopy(owner), pickle.loads(pickle.dumps(owner))]
    assert [dict(memo_of(other)) for other in others] == [{}, {}, {}]
    memo_of(others[0])["x"] = 2
    assert memo_of(owner) == {"x": 1}
    assert memo_of(copy.copy(others[0])) == {}
    for _ in range(100):  # the copy of an unused copy may stand where the first object stood
        owner = copy.copy(owner)
    assert memo_of(owner) == {}
    seen = weakref.ref(owner)  # which the memo does not keep alive
    gc.disable()
    try:
        del owner
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("owner", [_Pair(1, 2), PairWithAttributes(1, 2), object(), 3])
def test_an_object_without_a_dict_is_an_error(owner):
    with pytest.raises(TypeError, match=rf"{type(owner).__name__} has no __dict__ or .* both, .*: remove __slots__"):
        memo_of(owner)


def test_a_modified_copy_of_an_environment_runs_its_own_programs():
    env = Climb(num_envs=2)
    assert highest(env) == 2.0
    other = copy.copy(env)
    other.height = 10.0
    assert highest(other) == 20.0
    assert len({*map(origin_of, (env, other, copy.deepcopy(env), copy.deepcopy(env)))}) == 4
    policy = fc.random_policy(env)
    with pytest.raises(ValueError, match="belongs to another environment"):
        fc.rollout(copy.copy(env), policy, fc.init(env, policy, seed=0), 3)
    assert highest(env) == 2.0


@pytest.mark.parametrize("env", [Climb(num_envs=2), fc.make_env("CartPole-v1", num_envs=2)], ids=repr)
def test_a_modified_copy_of_a_policy_runs_its_own_programs(env):
    class Fixed:
        choice = 0

        def __call__(self, params, observation):
            return jnp.full(observation.shape[:1], self.choice)

    def actions(policy):
        return set(fc.rollout(env, policy, fc.init(env, policy, seed=0), 3)[1]["action"].unique().tolist())

    policy = fc.jax_policy(Fixed(), jnp.zeros(1))
    assert actions(policy) == {0}
    other = copy.copy(policy)
    other.apply = Fixed()
    other.apply.choice = 1
    assert (actions(other), actions(policy)) == ({1}, {0})
    assert dict(memo_of(cloudpickle.loads(cloudpickle.dumps(policy)))) == {}


def test_environments_without_a_hash_run_and_used_ones_can_be_pickled():
    assert (highest(DataClimb()), highest(DataClimb(height=3.0))) == (2.0, 6.0)
    env = fc.make_env("CartPole-v1", num_envs=2)
    one, two = (collect(each, fc.random_policy(each), 30) for each in (env, pickle.loads(pickle.dumps(env))))
    assert_same(one, two)
    used = Climb(num_envs=2)
    highest(used)
    twin = pickle.loads(pickle.dumps(used))
    assert "_memo" not in vars(twin) or dict(memo_of(twin)) == {}
    assert highest(twin) == 2.0


def test_a_name_that_only_an_inner_function_sets_is_watched_outside():
    x = 1.0

    def apply(params, y):
        def inner():
            x = 5.0  # its own
            return lambda: x

        return inner()() * x * y

    def counting(params, y):
        def inner():
            nonlocal count
            count += 1

        inner()
        return y + count

    count = 0
    assert [name for name, _ in variables_of(apply)] == ["x"]
    assert variables_of(counting) == []
