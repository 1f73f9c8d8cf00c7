"""The same seed gives the same bits: again, in another process, however the run is cut, and under settings of JAX."""

import contextlib
import os
import random
import subprocess
import sys

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium import spaces

import funcollect as fc
from tests.support.cases import ENVS, KINDS, POLICIES, digests, make_env, pair
from tests.support.compare import assert_same, bits, collect
from tests.support.running import AN_EVENING_OVER_RAY, FORKS_OF_RAY, ROOT, SCALE, in_soak, once, scaled
from tests.support.workers import multi, ray_collector

TOTAL = 200 if SCALE == 1 else 400


def cut(length, total):
    return [length] * (total // length) + [total % length] * (total % length > 0)


@pytest.mark.parametrize(("name", "kind", "num_envs"), once(ENVS, POLICIES, [None, 3, *in_soak([1, 8])]))
def test_a_run_gives_the_same_data_again_and_however_it_is_cut(name, kind, num_envs):
    """Whatever ran before in this process, and whatever the global generators hold."""
    env, policy = pair(name, kind, num_envs)
    whole = collect(env, policy, *cut(TOTAL, TOTAL), seed=0)
    torch.rand(7), np.random.rand(3), random.random()
    if name == "torch/CartPole-v1" or SCALE > 1:
        env = make_env(name, num_envs)
        policy = POLICIES[kind](env)
    for length, total in ((64, 130), (7, 35), (1, 10)):
        total = min(TOTAL, scaled(total))
        assert_same(whole[..., :total], collect(env, policy, *cut(length, total), seed=0))
    assert whole["next", "done"].sum() >= 6 * (env.num_envs or 1)  # episodes did end on the way
    other = collect(env, policy, 30, seed=1)
    for key in ("observation", "action"):
        assert not torch.equal(whole[..., :30][key], other[key])


@pytest.mark.parametrize(("name", "kind"), once(ENVS, ["torch_mlp", "torch_recurrent", "jax_mlp", "random"]))
def test_a_batch_of_one_equals_a_single_environment(name, kind):
    assert_same(collect(*pair(name, kind, None), 90), collect(*pair(name, kind, 1), 90)[0])


@pytest.mark.evening  # `make test` has the bits of runs in other processes in tests/test_frozen.py
def test_another_process_gives_the_same_bits():
    """One whose hashes differ, and whose JAX dispatches as it does unless told otherwise."""
    environment = os.environ | {"PYTHONHASHSEED": "17", "JAX_CPU_ENABLE_ASYNC_DISPATCH": "true"}
    kinds = KINDS if SCALE > 1 else ("torch_recurrent", "jax_mlp", "tensordict_actor", "random")
    command = [sys.executable, "-m", "tests.support.cases", "3", "40,1,9", *kinds]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    theirs = dict(line.split(": ") for line in done.stdout.splitlines())
    ours = digests(3, [50], kinds)
    assert theirs == ours
    assert len(set(ours.values())) == len(ours) >= 4


def generators():
    name, words, *rest = np.random.get_state()
    return bits(torch.get_rng_state()), name, words.tobytes(), rest, random.getstate()


@pytest.fixture
def unchanged():
    torch.manual_seed(123)
    np.random.seed(5)
    random.seed(9)

    def call(function, *args, **kwargs):
        before = generators()
        answer = function(*args, **kwargs)
        assert generators() == before, function
        return answer

    return call


@pytest.mark.parametrize(("kind", "name", "num_envs"), once(POLICIES, ENVS, (3, None)))
def test_global_generators_are_left_alone(name, kind, num_envs, unchanged):
    env, policy = pair(name, kind, num_envs)
    state = unchanged(fc.init, env, policy, seed=0)
    state, _ = unchanged(fc.rollout, env, policy, state, 12)
    state, _ = unchanged(fc.step, env, policy, state)
    other = unchanged(fc.fork, env, state)
    state = unchanged(fc.reset, env, state)
    unchanged(fc.rollout, env, policy, other, 3, exploration_type=fc.ExplorationType.DETERMINISTIC)
    unchanged(fc.evaluate, env, policy, episodes=2, seed=0)
    unchanged(fc.explain, env, policy)
    unchanged(fc.close, state)
    collector = unchanged(fc.SyncDataCollector, env, policy, frames_per_batch=20, init_random_frames=9)
    for call in (next, fc.SyncDataCollector.reset, next, fc.SyncDataCollector.state_dict):
        unchanged(call, collector)
    unchanged(collector.set_seed, 4)
    unchanged(collector.shutdown)


@pytest.mark.parametrize("name", ["torch/CartPole-v1", "CartPole-v1"])
def test_generators_are_put_back_after_an_exception(name, unchanged):
    def failing(observation):
        raise KeyError(torch.rand(3))

    env, policy = make_env(name, 2), fc.torch_policy(failing)
    state = unchanged(fc.init, env, policy, seed=0)
    unchanged(pytest.raises, KeyError, fc.rollout, env, policy, state, 10)


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
