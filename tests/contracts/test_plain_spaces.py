"""Every kind of space against the plain loop: what the environment gave, what it was given, what the policy saw."""

import copy

import gymnasium
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import TensorDictModule

import funcollect as fc
from tests.support.cases import mlp
from tests.support.compare import assert_same, collect, leaves
from tests.support.plain import check_lanes
from tests.support.running import pairwise

LENGTHS = (12, 1, 12)
BOX = spaces.Box(-1, 1, (2,), np.float32)


class Sampling(gymnasium.Env):
    """Observations drawn from their space, seeded with the episode; the reward tells which action came."""

    def __init__(self, observation_space=BOX, action_space=BOX):
        self.observation_space = copy.deepcopy(observation_space)
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.left = 3 + seed % 5
        return self.observation_space.sample(), {"half": 0.5}

    def step(self, action):
        assert self.action_space.contains(action), action
        flat = np.ravel(action).astype(np.float64)
        self.left -= 1
        info = {"half": self.left / 2, "pair": np.array([self.left, -self.left]), "flag": self.left > 2}
        reward = float(flat @ (np.arange(flat.size) + 1))
        return self.observation_space.sample(), reward, self.left == 0, self.left % 4 == 1, info


def collected(factory, policy_of=fc.random_policy, num_envs=None, **kwargs):
    """The environment, and its run under the policy that `policy_of` makes for it."""
    env = fc.make_env(factory, num_envs=num_envs, **kwargs)
    return env, collect(env, policy_of(env), *LENGTHS, seed=3)


def in_a_vector(factory, **kwargs):
    env = fc.make_env(SyncVectorEnv([factory] * 3, autoreset_mode=AutoresetMode.DISABLED), **kwargs)
    return collect(env, fc.random_policy(env), *LENGTHS, seed=3)


OBSERVATIONS = {
    "box": BOX,
    "float64": spaces.Box(-5, 5, (3, 2), np.float64),
    "image": spaces.Box(0, 255, (4, 4, 1), np.uint8),
    "integers": spaces.Box(-9, 9, (2,), np.int32),
    "scalar": spaces.Box(-1, 1, (), np.float32),
    "discrete": spaces.Discrete(5),
    "discrete from -2": spaces.Discrete(5, start=-2),
    "multidiscrete": spaces.MultiDiscrete([3, 4]),
    "multidiscrete 2-D": spaces.MultiDiscrete([[3, 4], [5, 6]]),
    "multibinary": spaces.MultiBinary(4),
    "multibinary 2-D": spaces.MultiBinary((2, 3)),
    "tuple": spaces.Tuple((BOX, spaces.Discrete(3), spaces.Dict({"deep": spaces.MultiBinary(2)}))),
    "dict": spaces.Dict(
        {
            "vector": spaces.Box(-5, 5, (3,), np.float64),
            "image": spaces.Box(0, 255, (2, 2), np.uint8),
            "inner": spaces.Dict({"count": spaces.Discrete(7), "pair": spaces.Tuple((BOX, spaces.Discrete(2)))}),
        }
    ),
}


@pytest.mark.parametrize(("name", "num_envs"), pairwise(OBSERVATIONS, [None, 3]))
def test_observation_spaces(name, num_envs):
    def factory():
        return Sampling(OBSERVATIONS[name])

    env, batch = collected(factory, num_envs=num_envs)
    check_lanes(batch, factory, 3)
    assert {leaf.path for leaf in env.observation_leaves} <= leaves(batch).keys()
    if num_envs == 3:
        assert_same(batch, in_a_vector(factory))


def seen_in(observation):
    """Something of every part of the "dict" space, of which an action is a part."""
    count, (box, two) = observation["inner"]["count"], observation["inner"]["pair"]
    own = {"seen": observation["vector"], "image_seen": observation["image"], "sum": count * 10 + two, "box": box}
    return {"action": two, **own}


def modular(env):
    """A module over the keys, as a collector adopts it."""

    def module(vector, image, count, box, two):
        return two.clone(), vector.clone(), image.clone(), count * 10 + two, box.clone()

    keys = ["vector", "image", ("inner", "count"), ("inner", "pair", "0"), ("inner", "pair", "1")]
    outputs = ["action", "seen", "image_seen", "sum", "box"]
    return fc.tensordict_policy(TensorDictModule(module, keys, outputs))


SEEING = {
    "torch": lambda env: fc.torch_policy(seen_in),
    "jax": lambda env: fc.jax_policy(lambda _, x: seen_in(x), {}),
    "tensordict": modular,
}


@pytest.mark.parametrize(("backend", "num_envs"), pairwise(SEEING, [None, 3]))
def test_a_policy_sees_the_rows_that_are_recorded(backend, num_envs):
    _, batch = collected(lambda: Sampling(OBSERVATIONS["dict"], spaces.Discrete(2)), SEEING[backend], num_envs)
    assert torch.equal(batch["seen"], batch["vector"])
    assert torch.equal(batch["image_seen"], batch["image"])
    assert torch.equal(batch["box"], batch["inner", "pair", "0"])
    assert torch.equal(batch["sum"].long(), batch["inner", "count"] * 10 + batch["inner", "pair", "1"])
    assert torch.equal(batch["action"], batch["inner", "pair", "1"])
    assert batch["image_seen"].dtype == torch.uint8
    assert len(batch["sum"].unique()) > 3


def test_a_tuple_reaches_the_policy_as_a_tuple():
    for policy in (
        fc.torch_policy(lambda x: {"action": x[1] // 2, "seen": x[2]["deep"]}),
        fc.jax_policy(lambda _, x: {"action": x[1] // 2, "seen": x[2]["deep"]}, {}),
    ):
        _, batch = collected(lambda: Sampling(OBSERVATIONS["tuple"], spaces.Discrete(2)), lambda _, p=policy: p, 2)
        assert torch.equal(batch["seen"], batch["observation", "2", "deep"])
        assert torch.equal(batch["action"], batch["observation", "1"] // 2)


ACTIONS = {
    "discrete": spaces.Discrete(3),
    "discrete from 5": spaces.Discrete(4, start=5),
    "multidiscrete": spaces.MultiDiscrete([3, 4]),
    "multidiscrete from": spaces.MultiDiscrete([3, 2], start=[1, -2]),
    "multidiscrete 2-D": spaces.MultiDiscrete([[2, 3], [4, 5]]),
    "multibinary": spaces.MultiBinary(5),
    "multibinary 2-D": spaces.MultiBinary((2, 3)),
    "box": BOX,
    "box 2-D": spaces.Box(-2, 3, (2, 2), np.float32),
    "float64": spaces.Box(-1, 1, (3,), np.float64),
    "unbounded": spaces.Box(np.float32([-np.inf, 0]), np.float32([np.inf, np.inf])),
    "integers": spaces.Box(-2, 7, (2,), np.int32),
    "bytes": spaces.Box(0, 255, (2,), np.uint8),
}
CHOICES = [name for name, space in ACTIONS.items() if isinstance(space, spaces.Discrete | spaces.MultiDiscrete)]


def counts_of(space):
    return [int(space.n)] if isinstance(space, spaces.Discrete) else space.nvec.ravel().tolist()


def from_one_hot(space):
    """An action from a row of ones and zeros."""
    counts = counts_of(space)

    def decode(row):
        assert row.shape == (sum(counts),)
        parts = np.split(row, np.cumsum(counts)[:-1])
        assert all(sorted(part) == [0] * (len(part) - 1) + [1] for part in parts)
        chosen = np.array([part.argmax() for part in parts]).reshape(space.shape) + space.start
        return int(chosen) if isinstance(space, spaces.Discrete) else chosen

    return decode


def choosing(kind, space):
    """A function that makes a policy of this kind, the same at every call."""
    outputs = sum(counts_of(space))
    if kind == "torch":
        return lambda env: fc.torch_policy(mlp(2, outputs), head=fc.heads.categorical)
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(2, outputs)), jnp.float32)
    return lambda env: fc.jax_policy(lambda params, x: x @ params, weights, head=fc.heads.categorical)


@pytest.mark.parametrize(("name", "num_envs"), pairwise(ACTIONS, [None, 3]))
def test_random_actions_of_every_space(name, num_envs):
    space = ACTIONS[name]
    _, batch = collected(lambda: Sampling(BOX, space), num_envs=num_envs)
    assert batch["action"].shape == (*batch.batch_size, *space.shape)
    assert batch["action"].numpy().dtype == space.dtype
    assert len(batch["action"].flatten().unique()) > 1
    check_lanes(batch, lambda: Sampling(BOX, space), 3)


@pytest.mark.parametrize(
    ("name", "kind", "one_hot", "num_envs"), pairwise(CHOICES, ["random", "torch", "jax"], [True, False], [3, None])
)
def test_choices_as_integers_and_one_hot(name, kind, one_hot, num_envs):
    space = ACTIONS[name]
    make = fc.random_policy if kind == "random" else choosing(kind, space)
    _, batch = collected(lambda: Sampling(BOX, space), make, num_envs, one_hot=one_hot)
    assert batch["action"].dtype == torch.int64
    check_lanes(batch, lambda: Sampling(BOX, space), 3, **({"decode": from_one_hot(space)} if one_hot else {}))
    if one_hot:
        _, twin = collected(lambda: Sampling(BOX, space), make, num_envs)
        assert_same(batch.exclude("action"), twin.exclude("action"))


@pytest.mark.parametrize(
    ("name", "kind", "head", "num_envs"),
    pairwise(["box", "box 2-D", "float64"], ["torch", "jax"], [fc.heads.normal, fc.heads.tanh_normal], [None, 3]),
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_continuous_actions(name, kind, head, num_envs):
    wide = spaces.Box(-100, 100, ACTIONS[name].shape, ACTIONS[name].dtype)
    space = wide if head is fc.heads.normal else ACTIONS[name]
    size = int(np.prod(space.shape))

    def split(x):
        return x[..., :size].reshape(-1, *space.shape), abs(x[..., size:].reshape(-1, *space.shape)) + 0.1

    def policy(env):
        if kind == "torch":
            net = mlp(2, 2 * size)
            return fc.torch_policy(lambda x: split(net(x)), head=head)
        weights = jnp.linspace(-1, 1, 4 * size).reshape(2, 2 * size)
        return fc.jax_policy(lambda params, x: split(x @ params), weights, head=head)

    _, batch = collected(lambda: Sampling(BOX, space), policy, num_envs)
    assert batch["action"].numpy().dtype == space.dtype
    check_lanes(batch, lambda: Sampling(BOX, space), 3)


@pytest.mark.parametrize("num_envs", [None, 3])
def test_infos_of_every_shape(num_envs):
    keys = ["half", "pair", "flag"]
    _, batch = collected(Sampling, num_envs=num_envs, info_keys=keys)
    check_lanes(batch, Sampling, 3, info_keys=keys)
    infos = batch["next", "info"]
    assert [infos[key].dtype for key in keys] == [torch.float32, torch.int64, torch.bool]
    assert infos["pair"].shape == (*batch.batch_size, 2)
    if num_envs:
        assert_same(batch, in_a_vector(Sampling, info_keys=keys))
