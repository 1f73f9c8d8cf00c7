"""Parameters of the environment for each lane, from the first episode on."""

from __future__ import annotations

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


def test_other_shapes_are_named() -> None:
    for shape in ((2,), (3, 1)):
        with pytest.raises(ValueError, match=r"params\['slope'\] has the shape .*, expected \[\], or \[3\] for one in"):
            traced.init(ENV, POLICY, None, key=KEY, env_params=with_slopes(jnp.zeros(shape)))
