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
from tests.support.plain import check_lane, plain_loop

LENGTHS = (12, 1, 12)
STEPS = sum(LENGTHS)
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


def check(batch, factory, decode, extras=(), **kwargs):
    lanes = [batch] if batch.batch_dims == 1 else list(batch)
    ignored = {path for path in leaves(batch) if path[0] in extras}
    for lane, rows in enumerate(lanes):
        actions = [decode(action.copy()) for action in rows["action"].numpy()]
        wanted = plain_loop(factory(), seed=3, actions=actions, lane=lane, lanes=len(lanes), **kwargs)
        check_lane(rows, wanted, ignored)


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


@pytest.mark.parametrize("num_envs", [None, 1, 3])
@pytest.mark.parametrize("name", OBSERVATIONS)
def test_observation_spaces(name, num_envs):
    def factory():
        return Sampling(OBSERVATIONS[name])

    env = fc.make_env(factory, num_envs=num_envs)
    batch = collect(env, fc.random_policy(env), *LENGTHS, seed=3)
    check(batch, factory, lambda action: action)
    assert {leaf.path for leaf in env.observation_leaves} <= leaves(batch).keys()
    if num_envs == 3:
        vector = fc.make_env(SyncVectorEnv([factory] * 3, autoreset_mode=AutoresetMode.DISABLED))
        assert_same(batch, collect(vector, fc.random_policy(vector), *LENGTHS, seed=3))


def test_names_of_nested_observations():
    paths = {name: [leaf.path for leaf in fc.make_env(lambda: Sampling(OBSERVATIONS[name])).observation_leaves]  # noqa: B023
             for name in ("box", "tuple", "dict")}  # fmt: skip
    assert paths["box"] == [("observation",)]
    assert paths["tuple"] == [("observation", "0"), ("observation", "1"), ("observation", "2", "deep")]
    assert set(paths["dict"]) == {
        ("vector",),
        ("image",),
        ("inner", "count"),
        ("inner", "pair", "0"),
        ("inner", "pair", "1"),
    }


def seen_in(observation):
    """Something of every part of the "dict" space."""
    count, (box, two) = observation["inner"]["count"], observation["inner"]["pair"]
    return {"seen": observation["vector"], "image_seen": observation["image"], "sum": count * 10 + two, "box": box}


@pytest.mark.parametrize("num_envs", [None, 3])
@pytest.mark.parametrize("backend", ["torch", "jax", "tensordict"])
def test_a_policy_sees_the_rows_that_are_recorded(backend, num_envs):
    env = fc.make_env(lambda: Sampling(OBSERVATIONS["dict"], spaces.Discrete(2)), num_envs=num_envs)
    if backend == "torch":
        policy = fc.torch_policy(lambda x: {"action": x["inner"]["pair"][1], **seen_in(x)})
    elif backend == "jax":
        policy = fc.jax_policy(lambda _, x: {"action": x["inner"]["pair"][1], **seen_in(x)}, {})
    else:

        def module(vector, image, count, box, two):
            return two.clone(), vector.clone(), image.clone(), count * 10 + two, box.clone()

        keys = ["vector", "image", ("inner", "count"), ("inner", "pair", "0"), ("inner", "pair", "1")]
        outputs = ["action", "seen", "image_seen", "sum", "box"]
        collector = fc.SyncDataCollector(env, TensorDictModule(module, keys, outputs), frames_per_batch=1)
        policy = collector.policy
    batch = collect(env, policy, *LENGTHS, seed=3)
    assert torch.equal(batch["seen"], batch["vector"])
    assert torch.equal(batch["image_seen"], batch["image"])
    assert torch.equal(batch["box"], batch["inner", "pair", "0"])
    assert torch.equal(batch["sum"].long(), batch["inner", "count"] * 10 + batch["inner", "pair", "1"])
    assert torch.equal(batch["action"], batch["inner", "pair", "1"])
    assert batch["image_seen"].dtype == torch.uint8
    assert len(batch["sum"].unique()) > 3


def test_a_tuple_reaches_the_policy_as_a_tuple():
    env = fc.make_env(lambda: Sampling(OBSERVATIONS["tuple"], spaces.Discrete(2)), num_envs=2)
    for policy in (
        fc.torch_policy(lambda x: {"action": x[1] // 2, "seen": x[2]["deep"]}),
        fc.jax_policy(lambda _, x: {"action": x[1] // 2, "seen": x[2]["deep"]}, {}),
    ):
        batch = collect(env, policy, *LENGTHS, seed=3)
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
BOUNDED = ["box", "box 2-D", "float64"]


def integer(space):
    """An action from its row in the batch, as it is."""
    return (lambda row: row.item()) if isinstance(space, spaces.Discrete) else (lambda row: row)


def from_one_hot(space):
    """An action from a row of ones and zeros."""
    counts = [int(space.n)] if isinstance(space, spaces.Discrete) else space.nvec.ravel().tolist()

    def decode(row):
        assert row.shape == (sum(counts),)
        parts = np.split(row, np.cumsum(counts)[:-1])
        assert all(sorted(part) == [0] * (len(part) - 1) + [1] for part in parts)
        chosen = np.array([part.argmax() for part in parts]).reshape(space.shape) + space.start
        return int(chosen) if isinstance(space, spaces.Discrete) else chosen

    return decode


def answers(space):
    counts = [int(space.n)] if isinstance(space, spaces.Discrete) else space.nvec.ravel().tolist()
    return sum(counts)


def policy_for(kind, env, outputs, head):
    if kind == "torch":
        return fc.torch_policy(mlp(2, outputs), head=head)
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(2, outputs)), jnp.float32)
    return fc.jax_policy(lambda params, x: x @ params, weights, head=head)


@pytest.mark.parametrize("num_envs", [None, 3])
@pytest.mark.parametrize("name", ACTIONS)
def test_random_actions_of_every_space(name, num_envs):
    space = ACTIONS[name]
    env = fc.make_env(lambda: Sampling(BOX, space), num_envs=num_envs)
    batch = collect(env, fc.random_policy(env), *LENGTHS, seed=3)
    assert batch["action"].shape == (*batch.batch_size, *space.shape)
    assert batch["action"].numpy().dtype == space.dtype
    assert len(batch["action"].flatten().unique()) > 1
    check(batch, lambda: Sampling(BOX, space), integer(space))


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize(
    ("kind", "num_envs"), [("random", None), ("random", 3), ("torch", None), ("torch", 3), ("jax", 3)]
)
@pytest.mark.parametrize("name", CHOICES)
def test_choices_as_integers_and_one_hot(name, kind, one_hot, num_envs):
    space = ACTIONS[name]
    env = fc.make_env(lambda: Sampling(BOX, space), num_envs=num_envs, one_hot=one_hot)
    random = kind == "random"
    policy = fc.random_policy(env) if random else policy_for(kind, env, answers(space), fc.heads.categorical)
    batch = collect(env, policy, *LENGTHS, seed=3)
    assert batch["action"].dtype == torch.int64
    decode = from_one_hot(space) if one_hot else integer(space)
    check(batch, lambda: Sampling(BOX, space), decode, extras=("action_log_prob",))
    if one_hot:
        twin = fc.make_env(lambda: Sampling(BOX, space), num_envs=num_envs)
        policy = fc.random_policy(twin) if random else policy
        assert_same(batch.exclude("action"), collect(twin, policy, *LENGTHS, seed=3).exclude("action"))


@pytest.mark.parametrize("num_envs", [None, 3])
@pytest.mark.parametrize("head", [fc.heads.normal, fc.heads.tanh_normal], ids=lambda head: head.name)
@pytest.mark.parametrize("kind", ["torch", "jax"])
@pytest.mark.parametrize("name", BOUNDED)
def test_continuous_actions(name, kind, head, num_envs):
    wide = spaces.Box(-100, 100, ACTIONS[name].shape, ACTIONS[name].dtype)
    space = wide if head is fc.heads.normal else ACTIONS[name]
    env = fc.make_env(lambda: Sampling(BOX, space), num_envs=num_envs)
    size = int(np.prod(space.shape))

    def split(x):
        return x[..., :size].reshape(-1, *space.shape), abs(x[..., size:].reshape(-1, *space.shape)) + 0.1

    if kind == "torch":
        net = mlp(2, 2 * size)
        policy = fc.torch_policy(lambda x: split(net(x)), head=head)
    else:
        weights = jnp.linspace(-1, 1, 4 * size).reshape(2, 2 * size)
        policy = fc.jax_policy(lambda params, x: split(x @ params), weights, head=head)
    batch = collect(env, policy, *LENGTHS, seed=3)
    assert batch["action"].numpy().dtype == space.dtype
    extras = ("action_log_prob", *(["action_unsquashed"] if head is fc.heads.tanh_normal else []))
    check(batch, lambda: Sampling(BOX, space), lambda row: row, extras=extras)


@pytest.mark.parametrize("num_envs", [None, 3])
def test_infos_of_every_shape(num_envs):
    keys = ["half", "pair", "flag"]
    env = fc.make_env(Sampling, num_envs=num_envs, info_keys=keys)
    batch = collect(env, fc.random_policy(env), *LENGTHS, seed=3)
    check(batch, Sampling, lambda action: action, info_keys=keys)
    infos = batch["next", "info"]
    assert [infos[key].dtype for key in keys] == [torch.float32, torch.int64, torch.bool]
    assert infos["pair"].shape == (*batch.batch_size, 2)
    if num_envs:
        vector = SyncVectorEnv([Sampling] * 3, autoreset_mode=AutoresetMode.DISABLED)
        env = fc.make_env(vector, info_keys=keys)
        assert_same(batch, collect(env, fc.random_policy(env), *LENGTHS, seed=3))
