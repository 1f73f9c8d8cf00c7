"""Parameters of the environment for each lane, from the first episode on."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import funcollect as fc
from funcollect import traced

KEY = jax.random.PRNGKey(0)


class Ramp(fc.envs.JaxEnvBase):
    """Rises from `slope` by `slope` at each step."""

    observation_space, action_space = spaces.Box(-99.0, 99.0, (1,)), spaces.Discrete(2)
    max_episode_steps = 5
    params = {"slope": jnp.float32(1.0), "other": jnp.zeros(2)}  # noqa: RUF012

    def reset(self, key: Any, params: Any, /) -> Any:
        place = jnp.ones(1) * params["slope"]
        return place, place

    def step(self, key: Any, place: Any, action: Any, params: Any, /) -> fc.envs.Transition:
        place = place + params["slope"]
        return fc.envs.Transition(place, place, place[0], False, False)


ENV = Ramp(num_envs=3)
POLICY = fc.random_policy(ENV)


def with_slopes(slopes: Any) -> dict[str, Any]:
    return {"slope": slopes, "other": jnp.zeros(2)}


def test_starts_and_all_episodes_have_them() -> None:
    @jax.jit
    def run(slopes: Any) -> Any:
        state = traced.init(ENV, POLICY, None, key=KEY, env_params=with_slopes(slopes))
        state, batch = traced.rollout(ENV, POLICY, None, state, 7)
        stats = traced.evaluate(ENV, POLICY, None, KEY, 6, env_params=with_slopes(slopes))
        return batch["observation"][..., 0], stats.returns

    slopes = jnp.array([1.0, 2.0, 3.0])
    places, returns = run(slopes)
    np.testing.assert_array_equal(places, jnp.outer(jnp.array([1, 2, 3, 4, 5, 1, 2]), slopes))
    np.testing.assert_array_equal(returns, [20.0, 20.0, 40.0, 40.0, 60.0, 60.0])


def test_other_names_are_refused() -> None:
    for given in ({"slope": 1.0}, with_slopes(1.0) | {"slop": 2.0}):
        with pytest.raises(ValueError, match="slop"):
            traced.init(ENV, POLICY, None, key=KEY, env_params=given)


def test_the_first_lane_is_a_whole_number() -> None:
    begin = partial(traced.init, ENV, POLICY, None, key=KEY)
    for lane in (1.5, jnp.arange(4), jnp.float32(1)):
        with pytest.raises(TypeError, match=r"first_lane is .*, expected an int or an integer array \[\]"):
            begin(first_lane=lane)
    with pytest.raises(ValueError, match="first_lane is -1, expected at least 0"):
        begin(first_lane=-1)
    assert jax.jit(lambda lane: begin(first_lane=lane).lane)(3).tolist() == [3, 4, 5]
    assert begin(first_lane=np.int64(3)).lane.tolist() == [3, 4, 5]


def test_schedules_are_refused() -> None:
    policy = fc.jax_policy(lambda _, x: jnp.zeros((len(x), 2)), {}, head=fc.heads.epsilon_greedy(0.1))
    env = fc.make_env("gymnax/CartPole-v1", num_envs=2)
    state = traced.init(env, policy, {}, key=KEY)
    with pytest.raises(TypeError, match=r"functions for \['epsilon'\], expected numbers in traced code"):
        traced.rollout(env, policy, {}, state, 3, exploration={"epsilon": lambda frames: 0.1})


class Confused(Ramp):
    """Its flags and its reward have the dtypes that are given."""

    def __init__(self, reward: Any, terminated: Any) -> None:
        self.reward, self.terminated = reward, terminated
        super().__init__(num_envs=2)

    def step(self, key: Any, place: Any, action: Any, params: Any) -> Any:
        return super().step(key, place, action, params)._replace(reward=self.reward, terminated=self.terminated)


def test_dtypes_of_rewards_and_flags() -> None:
    for reward, terminated, words in (
        (1.0, 0.7, "the terminated that step of .* returned is float32, expected bool: compare"),
        (jnp.array(True), False, "the reward that step of .* returned is bool, expected a number"),
        (1j, False, "the reward that step of .* returned is complex64, expected a number"),
    ):
        with pytest.raises(fc.EnvError, match=words):
            fc.init(Confused(reward, terminated), POLICY, seed=0)
    fc.init(Confused(1, jnp.int32(1)), POLICY, seed=0)


@pytest.mark.parametrize("limit", [-1, 0, 2.5, "40", True])
def test_limits_of_a_class_are_checked(limit: Any) -> None:
    class Limited(Ramp):
        max_episode_steps = limit

    with pytest.raises((TypeError, ValueError), match=r"max_episode_steps of Limited\(num_envs=2\) is"):
        fc.init(Limited(num_envs=2), POLICY, seed=0)
    with pytest.raises((TypeError, ValueError), match=r"max_episode_steps of Limited\(num_envs=2\) is"):
        traced.init(Limited(num_envs=2), POLICY, None, key=KEY)


def test_other_shapes_are_named() -> None:
    for shape in ((2,), (3, 1)):
        with pytest.raises(ValueError, match=r"params\['slope'\] has the shape .*, expected \[\], or \[3\] for one in"):
            traced.init(ENV, POLICY, None, key=KEY, env_params=with_slopes(jnp.zeros(shape)))
