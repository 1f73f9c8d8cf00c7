"""JAX's settings of random numbers change no data; settings that change numbers hold in workers, too."""

import contextlib

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium import spaces

import funcollect as fc
from tests.support.compare import assert_same, collect
from tests.support.running import AN_EVENING_OVER_RAY, FORKS_OF_RAY, SCALE, in_soak
from tests.support.workers import multi, ray_collector

GYMNAX = "gymnax/CartPole-v1"
SETTINGS = {"default_prng_impl": "rbg", "threefry_partitionable": False, "legacy_prng_key": "error"}
SETS = [SETTINGS, *in_soak([{name: value} for name, value in SETTINGS.items()] + [{"default_prng_impl": "unsafe_rbg"}])]
DRAWS_AS_IT_IS_MADE = "gymnax/DeepSea-bsuite"
NAMES = [GYMNAX, *in_soak(["CartPole-v1", DRAWS_AS_IT_IS_MADE])]
NAMES += in_soak(["pgx/tic_tac_toe", "brax/inverted_pendulum", "navix/Navix-Empty-5x5-v0", "jumanji/Snake-v1"])


def drawn_by_keys(params, observation, keys):
    return jax.vmap(lambda key: (jax.random.normal(key, (3,)).sum() > 0).astype(jnp.int32))(keys)


def scored_by_key(params, observation, key):
    return observation @ params + jax.random.normal(key, (len(observation), 2))


def drawing(name, env):
    """Policies that draw in each way: all of them in a compiled loop, and step by step those that take keys."""
    yield fc.random_policy(env)
    if name in ("CartPole-v1", GYMNAX):
        yield fc.jax_policy(drawn_by_keys, jnp.zeros(()))
    if name == GYMNAX or (name == "CartPole-v1" and SCALE > 1):
        head = fc.heads.from_distribution(distrax_like, "logits")
        yield fc.jax_policy(scored_by_key, jnp.ones((4, 2)), head=head)


def distrax_like(logits):
    class Categorical:
        def sample(self, seed):
            return jax.random.categorical(seed, logits)

        def log_prob(self, action):
            return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], -1)[..., 0]

    return Categorical()


def collected(name):
    env = fc.make_env(name, num_envs=3)
    return [collect(env, each, 30, seed=7) for each in drawing(name, env)]


@pytest.fixture(scope="module")
def plain():
    return {name: collected(name) for name in NAMES}


@pytest.mark.parametrize("settings", SETS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_settings_of_random_numbers_change_no_data(name, settings, plain):
    with contextlib.ExitStack() as stack:
        for setting, value in settings.items():
            stack.enter_context(getattr(jax, setting)(value))
        for one, other in zip(plain[name], collected(name), strict=True):
            assert_same(one, other)


def test_a_key_of_another_generator_is_refused():
    env = fc.make_env(GYMNAX, num_envs=3)
    says = r"key is uint32 \[4\], .*jax.random.key\(0, impl='threefry2x32'\)"
    with jax.default_prng_impl("rbg"), pytest.raises(TypeError, match=says):
        fc.traced.init(env, fc.random_policy(env), None, key=jax.random.key(0))


class Showing(gymnasium.Env):
    """The reward is the size of a number in Torch's default dtype, if JAX multiplies matrices in high precision."""

    observation_space, action_space = spaces.Box(-1, 1, (1,)), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        high = jax.config.jax_default_matmul_precision == "high"
        return np.zeros(1, np.float32), torch.zeros(()).itemsize * high, False, False, {}


def first_batch(make, name, **keywords):
    with make(create_env_fn=[name], frames_per_batch=12, **keywords) as collector:
        return next(collector).clone().reshape(-1)


@FORKS_OF_RAY
@pytest.mark.parametrize("over", ["processes", pytest.param("ray_cluster", marks=AN_EVENING_OVER_RAY)])
def test_workers_have_the_settings_of_the_collectors_process(over, request):
    make, keywords = (multi, {}) if over == "processes" else (ray_collector, {"sync": True})
    if make is ray_collector:
        request.getfixturevalue(over)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with jax.enable_x64(True), jax.default_matmul_precision("high"):
            assert_same(first_batch(make, GYMNAX, **keywords), first_batch(multi, GYMNAX, transport="serial"))
            assert (first_batch(make, Showing, **keywords)["next", "reward"] == 8).all()
    finally:
        torch.set_default_dtype(dtype)
