"""JAX's settings of random numbers and of promotion change no data; those that change numbers hold in workers, too."""

import subprocess
import sys
from typing import ClassVar

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium import spaces

import funcollect as fc
from funcollect.interop.settings import FrameworkSettings
from tests.support.compare import assert_same
from tests.support.running import FORKS_OF_RAY, ROOT, in_soak
from tests.support.workers import multi, ray_collector

GYMNAX = "gymnax/CartPole-v1"
SETTINGS = {
    "rbg": lambda: jax.default_prng_impl("rbg"),
    "unsafe_rbg": lambda: jax.default_prng_impl("unsafe_rbg"),
    "not partitionable": lambda: jax.threefry_partitionable(False),
    "no raw keys": lambda: jax.legacy_prng_key("error"),
}
OTHERS = in_soak(["brax/inverted_pendulum", "navix/Navix-Empty-5x5-v0", "jumanji/Snake-v1"])
DRAWS_AS_IT_IS_MADE = "gymnax/DeepSea-bsuite"
SUITES = [GYMNAX, "pgx/tic_tac_toe", DRAWS_AS_IT_IS_MADE, *OTHERS]


def drawn_by_keys(params, observation, keys):
    return jax.vmap(lambda key: (jax.random.normal(key, (3,)).sum() > 0).astype(jnp.int32))(keys)


def drawn_by_key(params, observation, key):
    return jax.random.randint(key, (len(observation),), 0, 2)


class OwnPolicy(fc.PolicyBase):
    """Draws an action from each lane's key, as a policy that a user derives from the base."""

    backend: ClassVar = "jax"
    params = None

    def noise(self, spec):
        return fc.Noise(kind="keys")

    def __call__(self, params, state, observation, noise, spec, exploration):
        return state, {"action": drawn_by_keys(None, observation, jnp.asarray(noise))}


def policies(env):
    yield fc.random_policy(env)
    if env.observation_space.shape == (4,) and env.action_spec.categories:
        yield fc.jax_policy(drawn_by_keys, jnp.zeros(()))
        yield fc.jax_policy(drawn_by_key, jnp.zeros(()))
        yield OwnPolicy()
        head = fc.heads.from_distribution(distrax_like, "logits")
        yield fc.jax_policy(lambda params, x: x @ params, jnp.ones((4, 2)), head=head)


def distrax_like(logits):
    class Categorical:
        def sample(self, seed):
            return jax.random.categorical(seed, logits)

        def log_prob(self, action):
            return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], -1)[..., 0]

    return Categorical()


def collected(name):
    env = fc.make_env(name, num_envs=3)
    return [fc.rollout(env, each, fc.init(env, each, seed=7), 30)[1] for each in policies(env)]


@pytest.fixture(scope="module")
def plain():
    return {name: collected(name) for name in [*SUITES, "CartPole-v1"]}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", [*SUITES, "CartPole-v1"])
def test_settings_of_random_numbers_change_no_data(name, setting, plain):
    with SETTINGS[setting]():
        for one, other in zip(plain[name], collected(name), strict=True):
            assert_same(one, other)


def test_a_key_of_another_generator_is_refused():
    env = fc.make_env(GYMNAX, num_envs=3)
    with (
        jax.default_prng_impl("rbg"),
        pytest.raises(TypeError, match=r"key is uint32 \[4\], .*jax.random.key\(0, impl='threefry2x32'\)"),
    ):
        fc.traced.init(env, fc.random_policy(env), None, key=jax.random.key(0))


class Walk(fc.envs.JaxEnvBase):
    """Adds arrays of one rank and one dtype only, as networks and environments have to under strict promotion."""

    observation_space = spaces.Box(-9, 9, (2,))

    def __init__(self, action_space):
        self.action_space = action_space
        super().__init__(3)

    def reset(self, key, params):
        place = jax.random.uniform(key, (2,), jnp.float32)
        return place, place

    def step(self, key, place, action, params):
        moved = place + jnp.float32(0.5)
        lost = moved.sum() > 4
        return fc.envs.Transition(moved, moved, moved[0], lost, jnp.zeros_like(lost))


def answering(space):
    """A function of JAX whose answer a head for this space takes."""
    count = {spaces.Discrete: 3, spaces.MultiDiscrete: 5}.get(type(space))

    def answer(params, observation):
        if count:
            return jnp.tile(observation[:, :1], count)
        loc = jnp.broadcast_to(observation.sum(-1)[:, None, None] - 1, (len(observation), *space.shape))
        return loc, jnp.exp(loc)

    return answer


CHOICES, SEVERAL, BOX = spaces.Discrete(3, start=2), spaces.MultiDiscrete([2, 3]), spaces.Box(-1, 1, (2, 3))
INTEGERS, UNBOUNDED = spaces.Box(-5, 5, (2,), np.int32), spaces.Box(-np.inf, 1, (2,))
HEADS = [(CHOICES, fc.heads.epsilon_greedy(0.3)), (BOX, fc.heads.tanh_normal), (SEVERAL, None), (INTEGERS, None)]
HEADS += in_soak([(CHOICES, fc.heads.categorical), (SEVERAL, fc.heads.categorical), (BOX, fc.heads.normal)])
HEADS += in_soak([(space, None) for space in (CHOICES, BOX, UNBOUNDED, spaces.MultiBinary(3))])


def all_of(space, head):
    """What the loops, the traced functions, statistics and buffers give."""
    env = Walk(space)
    policy = fc.random_policy(env) if head is None else fc.jax_policy(answering(space), None, head=head)
    state, first = fc.rollout(env, policy, fc.init(env, policy, seed=7), 20)
    _, second = fc.rollout(env, policy, state, 20, max_frames_per_traj=4)
    key = jnp.array([0, 7], jnp.uint32)
    _, batch = fc.traced.rollout(env, policy, None, fc.traced.init(env, policy, None, key=key), 20)
    results = [first.to_dict(), second.to_dict(), batch, fc.traced.episode_stats(batch)]
    results.append(fc.traced.evaluate(env, policy, None, key, 4))
    if head is not None:
        results.append(fc.evaluate_actions(policy, None, batch))
    stats = fc.running_statistics.init(env.observation_space, backend="jax")
    stats = fc.running_statistics.update(fc.running_statistics.update(stats, batch), batch)
    ring = fc.jax_ring.extend(fc.jax_ring.init(batch, steps=30), batch)
    scaled = fc.running_statistics.normalize(stats, batch["observation"])
    results += [stats, fc.running_statistics.denormalize(stats, scaled), fc.jax_ring.sample(ring, key, 4)]
    results.append(fc.jax_ring.sample_slices(ring, key, num_slices=4, slice_len=3))
    return jax.tree.map(np.asarray, results)


@pytest.mark.parametrize(("space", "head"), HEADS)
def test_strict_promotion_is_kept(space, head):
    wanted = all_of(space, head)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.tree.map(np.testing.assert_array_equal, all_of(space, head), wanted)


class Default(gymnasium.Env):
    """The reward is the size of a number in Torch's default dtype."""

    observation_space, action_space = spaces.Box(-1, 1, (1,)), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), torch.zeros(()).itemsize, False, False, {}


def first_batch(make, name, **keywords):
    with make(create_env_fn=[name] * 2, frames_per_batch=24, **keywords) as collector:
        return next(collector).clone().reshape(-1)


IN_A_NEW_PROCESS = """
import sys
from funcollect.interop.settings import FrameworkSettings
settings = FrameworkSettings.current()._replace(jax={jax!r})
settings.apply()
assert "jax" not in sys.modules  # which takes a second to import
import jax
assert FrameworkSettings.current() == settings
"""


def test_jax_in_another_process_has_them_once_it_is_imported():
    others = {"jax_numpy_dtype_promotion": "strict", "jax_default_matmul_precision": "high", "jax_enable_x64": True}
    program = IN_A_NEW_PROCESS.format(jax=FrameworkSettings.current().jax | others)
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


@pytest.mark.parametrize("over", ["processes", pytest.param("ray", marks=FORKS_OF_RAY)])
def test_workers_have_the_settings_of_the_collectors_process(over):
    make, keywords = (ray_collector, {"sync": True}) if over == "ray" else (multi, {"transport": over})
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with jax.enable_x64(True):
            assert_same(first_batch(make, GYMNAX, **keywords), first_batch(multi, GYMNAX, transport="serial"))
            assert (first_batch(make, Default, **keywords)["next", "reward"] == 8).all()
    finally:
        torch.set_default_dtype(dtype)
