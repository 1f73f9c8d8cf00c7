"""Parameters of environments in the user's own `jit`, `scan` and `vmap`: given by lane at first, or changed later."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium import spaces

import funcollect as fc
from tests.core.test_env_params import PARAMS, make
from tests.support.compare import assert_same, compilations
from tests.support.running import in_soak, once

KEY = jnp.array([0, 7], jnp.uint32)  # the key of seed=7
GAINS = jnp.array([[2.0, 3.0, 4.0], [5.0, 5.0, 6.0], [7.0, 8.0, 9.0]])  # for three updates and three lanes
GRAVITIES = jnp.array([3.7, 9.8, 24.8])
BLOW = make()
PAIR = BLOW, fc.random_policy(BLOW)


def begun(env, policy, key=KEY):
    return fc.traced.init(env, policy, policy.params, key=key)


def gain(env, level):
    return PARAMS | {"gain": level}


def gravity(env, level):
    return env.default_params.replace(gravity=level)


def train(env, policy, params, levels, *, length=3, at_once=False, key=KEY):
    """A loop of updates, each with parameters of another level: the last state, and the batch [N * T, P] of all."""

    def update(state, level):
        state = fc.traced.set_env_params(env, state, params(env, level), at_once=at_once)
        return fc.traced.rollout(env, policy, policy.params, state, length)

    state = fc.traced.set_env_params(env, begun(env, policy, key), params(env, levels[0]), at_once=at_once)
    after, batches = jax.lax.scan(update, state, levels)
    return after, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batches)


def eager(env, policy, params, levels, *, length=3, at_once=False, seed=7):
    state, batches = fc.init(env, policy, seed=seed), []
    state = fc.set_env_params(env, state, params(env, levels[0]), at_once=at_once)
    for level in levels:
        state = fc.set_env_params(env, state, params(env, level), at_once=at_once)
        state, batch = fc.rollout(env, policy, state, length)
        batches.append(batch.clone())
    return torch.cat(batches, 1)


@pytest.mark.parametrize(("at_once", "levels"), once([False, True], [GAINS, GAINS[:, 0]]))
def test_a_scan_of_updates_gives_what_the_eager_function_gives(at_once, levels):
    env, policy = PAIR
    _, arrays = jax.jit(lambda levels: train(env, policy, gain, levels, at_once=at_once))(levels)
    assert_same(fc.deliver(arrays, env).clone(), eager(env, policy, gain, levels, at_once=at_once))


def test_vmap_over_seeds_each_with_levels_of_its_own_compiles_once():
    env, policy = PAIR
    keys, levels = jnp.stack([KEY, KEY.at[1].set(8)]), jnp.stack([GAINS, GAINS + 10])
    run = jax.jit(jax.vmap(lambda key, levels: train(env, policy, gain, levels, key=key)[1]))
    many = fc.deliver(run(keys, levels), env)
    for own, seed, each in zip(many, (7, 8), levels, strict=True):
        assert_same(own.clone(), eager(env, policy, gain, each, seed=seed))
    others = levels * 2
    with compilations() as seen:
        jax.block_until_ready(run(keys, others))
    assert not seen


@pytest.mark.parametrize("at_once", [False, *in_soak([True])])
def test_gymnax_holds_for_each_lane_only_what_changes(at_once):
    env = fc.make_env("gymnax/CartPole-v1", num_envs=3, param_keys=["gravity", "length"])
    policy = fc.random_policy(env)
    run = jax.jit(lambda levels: train(env, policy, gravity, levels, length=20, at_once=at_once))
    after, arrays = run(GRAVITIES)
    assert getattr(after.env_params.gravity, "current", after.env_params.gravity).shape == (() if at_once else (3,))
    assert after.env_params.length.leaf.shape == ()
    batch = fc.deliver(arrays, env).clone()
    assert_same(batch, eager(env, policy, gravity, GRAVITIES, length=20, at_once=at_once))
    assert len(batch["env_params", "gravity"].unique()) >= 2
    assert batch["env_params", "length"].eq(env.default_params.length).all()


def test_eager_calls_and_files_take_its_states_and_it_takes_those_of_the_eager_function(tmp_path):
    env, policy = PAIR
    state, _ = jax.jit(lambda levels: train(env, policy, gain, levels))(GAINS[:, 0])
    fc.save(tmp_path / "state", state)
    _, wanted = fc.rollout(env, policy, state, 9)
    _, batch = fc.rollout(env, policy, fc.load(tmp_path / "state", env, policy), 9)
    assert_same(batch, wanted)
    assert batch["env_params", "gain"][:, -1].tolist() == [7] * 3
    state = fc.set_env_params(env, state, gain(env, jnp.array([1.0, 2.0, 3.0])), at_once=True)
    _, batch = fc.rollout(env, policy, state, 9)
    assert batch["env_params", "gain"][:, 0].tolist() == [1, 2, 3]
    state = fc.set_env_params(env, fc.init(env, policy, seed=7), gain(env, 2.0), at_once=True)

    @jax.jit
    def twice(state):
        state = fc.traced.set_env_params(env, state, gain(env, 5.0))
        return fc.traced.rollout(env, policy, None, fc.traced.set_env_params(env, state, gain(env, 6.0)), 6)[1]

    rewards = twice(state)["next"]["reward"]
    assert rewards[:, 0].tolist() == [2, 2, 2, 2, 6, 6]


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda env, state: (env, state, {"gain": 1.0}), ValueError, "params is .*, expected .*: change leaves of env"),
    (lambda env, state: (env, state, gain(env, jnp.ones(2))), ValueError, r"params\['gain'\] has the shape \[2\]"),
    (lambda env, state: (fc.make_env("CartPole-v1"), state, PARAMS), TypeError, "env is .*, expected JaxEnv"),
    (lambda env, state: (make(4), state, PARAMS), ValueError, "the state belongs to another environment"),
])  # fmt: skip
def test_what_does_not_fit_is_named_as_it_is_traced(call, error, message):
    env, policy = PAIR
    with pytest.raises(error, match=message):
        jax.jit(lambda key: fc.traced.set_env_params(*call(env, begun(env, policy, key))))(KEY)


def test_first_params_that_do_not_fit_and_the_eager_function_inside_of_jit():
    (env, policy), says = PAIR, r"gainn|params\['gain'\] has the shape .*, expected \[\], or \[3\] for one in"
    for change in ({"gainn": 2.0}, {"gain": jnp.zeros((3, 1))}):
        with pytest.raises(ValueError, match=says):
            fc.traced.init(env, policy, None, key=KEY, env_params=PARAMS | change)
    with pytest.raises(TypeError, match=r"call funcollect.traced.set_env_params over a JAX environment"):
        jax.jit(lambda key: fc.set_env_params(env, begun(env, policy, key), PARAMS))(KEY)


class Ramp(fc.envs.JaxEnvBase):
    """Rises from `slope` by `slope` at each step."""

    observation_space, action_space = spaces.Box(-99.0, 99.0, (1,)), spaces.Discrete(2)
    max_episode_steps = 5
    params = {"slope": jnp.float32(1.0), "other": jnp.zeros(2)}  # noqa: RUF012

    def reset(self, key, params, /):
        place = jnp.ones(1) * params["slope"]
        return place, place

    def step(self, key, place, action, params, /):
        place = place + params["slope"]
        return fc.envs.Transition(place, place, jnp.int32(place[0]), jnp.int32(0), False)  # or floats, or a flag


ENV = Ramp(num_envs=3)
POLICY = fc.random_policy(ENV)


def with_slopes(slopes):
    return {"slope": slopes, "other": jnp.zeros(2)}


def test_starts_and_all_episodes_have_them():
    @jax.jit
    def run(slopes):
        state = fc.traced.init(ENV, POLICY, None, key=KEY, env_params=with_slopes(slopes))
        state, batch = fc.traced.rollout(ENV, POLICY, None, state, 7)
        stats = fc.traced.evaluate(ENV, POLICY, None, KEY, 6, env_params=with_slopes(slopes))
        return batch["observation"][..., 0], stats.returns

    slopes = jnp.array([1.0, 2.0, 3.0])
    places, returns = run(slopes)
    np.testing.assert_array_equal(places, jnp.outer(jnp.array([1, 2, 3, 4, 5, 1, 2]), slopes))
    np.testing.assert_array_equal(returns, [20.0, 20.0, 40.0, 40.0, 60.0, 60.0])


def test_the_first_lane_may_be_traced_and_schedules_are_refused():
    begin = partial(fc.traced.init, ENV, POLICY, None, key=KEY)
    assert jax.jit(lambda lane: begin(first_lane=lane).lane)(3).tolist() == [3, 4, 5]
    assert begin(first_lane=np.int64(3)).lane.tolist() == [3, 4, 5]
    policy = fc.jax_policy(lambda _, x: jnp.zeros((len(x), 2)), {}, head=fc.heads.epsilon_greedy(0.1))
    env = fc.make_env("gymnax/CartPole-v1", num_envs=2)
    state = fc.traced.init(env, policy, {}, key=KEY)
    with pytest.raises(TypeError, match=r"functions for \['epsilon'\], expected numbers in traced code"):
        fc.traced.rollout(env, policy, {}, state, 3, exploration={"epsilon": lambda frames: 0.1})


@pytest.mark.parametrize("limit", [-1, 0, 2.5, "40", True])
def test_limits_of_a_class_are_checked(limit):
    class Limited(Ramp):
        max_episode_steps = limit

    for begin in (partial(fc.init, seed=0), partial(fc.traced.init, params=None, key=KEY)):
        with pytest.raises((TypeError, ValueError), match=r"max_episode_steps of Limited\(num_envs=2\) is"):
            begin(Limited(num_envs=2), POLICY)
