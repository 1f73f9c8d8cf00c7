"""Environments, and every kind of space, against a plain loop with the same seeds and the actions of the batch."""

import gymnasium
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import TensorDictModule

import funcollect as fc
from tests.support.cases import POLICIES, mlp
from tests.support.compare import assert_same, collect, joined, leaves, rollouts
from tests.support.envs.light_envs import BOX, Sampling
from tests.support.plain import check_lanes
from tests.support.running import in_soak, once, pairwise, scaled

LENGTHS = [1, 30, 64, 7, 58]
LIMITS = {"CartPole-v1": 30, "LunarLander-v3": 70, "HalfCheetah-v5": 25, "Pendulum-v1": 40}
TERMINATING = ("CartPole-v1", "LunarLander-v3")


def make(name):
    return gymnasium.make(name, max_episode_steps=LIMITS[name], disable_env_checker=True)


@pytest.mark.parametrize("seed", range(2, 2 + scaled(1)))
@pytest.mark.parametrize(
    ("name", "kind", "num_envs"),
    [*pairwise(LIMITS, ["random", "torch_mlp"], (None, 1, 3)), *((name, "jax_mlp", 3) for name in LIMITS)],
)
def test_every_leaf_equals_the_plain_loop(name, num_envs, kind, seed):
    env = fc.make_env(name, num_envs=num_envs, max_episode_steps=LIMITS[name])
    batch = collect(env, POLICIES[kind](env), *LENGTHS, seed=seed)
    check_lanes(batch, lambda: make(name), seed)
    assert batch["next", "done"].any()
    if seed == 2:  # both kinds of end are among them
        assert batch["next", "truncated"].any()
        assert num_envs != 3 or name not in TERMINATING or batch["next", "terminated"].any()


@pytest.mark.parametrize("name", ["CartPole-v1", "LunarLander-v3", *in_soak(["HalfCheetah-v5", "Pendulum-v1"])])
def test_a_vector_environment_equals_its_environments(name):
    vector = SyncVectorEnv([lambda: make(name)] * 3, autoreset_mode=AutoresetMode.DISABLED)
    runs = []
    for source in (vector, [lambda: make(name)] * 3, [make(name) for _ in range(3)]):
        env = fc.make_env(source)
        state = fc.init(env, POLICIES["torch_mlp"](env), seed=2)
        batches = []
        for mask in (None, [True, False, True], [False, True, False], [True, True, True]):
            state = state if mask is None else fc.reset(env, state, torch.tensor(mask))
            state, batch = rollouts(env, POLICIES["torch_mlp"](env), state, (1, 40, 13))
            batches.append(batch)
        fc.close(state)
        runs.append(joined(batches))
    assert_same(runs[0], runs[1])
    assert_same(runs[0], runs[2])
    assert runs[0]["next", "done"].sum() >= 3
    check_lanes(runs[0][:, :54], lambda: make(name), 2)


@pytest.mark.parametrize(("dtype", "num_envs"), [(np.float64, None), (np.float16, 2)])
def test_observations_in_another_dtype(num_envs, dtype):
    env = fc.make_env("HalfCheetah-v5", num_envs=num_envs, max_episode_steps=25, dtype=dtype)
    batch = collect(env, fc.random_policy(env), 40, seed=1)
    assert batch["observation"].dtype == torch.from_numpy(np.empty(0, dtype)).dtype
    check_lanes(batch, lambda: make("HalfCheetah-v5"), 1, dtype=dtype)


def test_an_instance_and_a_factory_run_as_the_id_does():
    runs = []
    for source in ("CartPole-v1", make("CartPole-v1"), lambda: make("CartPole-v1"), gymnasium.spec("CartPole-v1")):
        limited = isinstance(source, str | gymnasium.envs.registration.EnvSpec)
        env = fc.make_env(source, **({"max_episode_steps": 30} if limited else {}))
        runs += [collect(env, POLICIES["torch_mlp"](env), 90, seed=3) for _ in range(2)]  # instances are built again
    for other in runs[1:]:
        assert_same(runs[0], other)


class Meddling(gymnasium.Env):
    """Has one buffer, its observation and info, which it writes, as it does its action; moves by the action before."""

    observation_space = gymnasium.spaces.Box(-9, 9, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self):
        self.buffer = np.zeros(2, np.float32)
        self.before = np.zeros(2, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.buffer[:] = self.np_random.random(2)
        self.before = np.zeros(2, np.float32)
        return self.buffer, {"place": self.buffer}

    def step(self, action):
        self.buffer += self.before
        self.before = action
        action *= 0.5
        return self.buffer, float(action.sum()), False, bool(self.buffer.sum() > 2), {"place": self.buffer}


SOURCES = {
    "one": lambda: Meddling,
    "three": lambda: [Meddling] * 3,
    "vector": lambda: SyncVectorEnv([Meddling] * 3, autoreset_mode=AutoresetMode.DISABLED),
}


@pytest.mark.parametrize(("source", "kind"), pairwise(SOURCES, ["random", "torch_mlp", "jax_mlp", "tensordict_actor"]))
def test_an_environment_that_writes_in_what_it_gives_and_gets(source, kind):
    env = fc.make_env(SOURCES[source](), info_keys=["place"])
    batch = collect(env, POLICIES[kind](env), 40, 90, seed=0)
    check_lanes(batch, Meddling, 0, info_keys=["place"])


@pytest.mark.parametrize("over", ["lane processes", "workers"])
def test_processes_record_infos_as_they_were_at_each_step(over):
    kwargs = {"info_keys": ["place"], "num_envs": 2}
    kind, source = fc.MultiSyncDataCollector, [Meddling] * 2
    if over == "lane processes":
        kind, source, kwargs = fc.SyncDataCollector, Meddling, kwargs | {"num_workers": 2}
    with kind(source, frames_per_batch=60, total_frames=120, create_env_kwargs=kwargs, seed=0) as collector:
        for batch in collector:
            assert torch.equal(batch["next", "info", "place"], batch["next", "observation"])
            assert (batch["next", "observation"] != batch["observation"]).any()


CUTS = (12, 1, 12)


def collected(factory, policy_of=fc.random_policy, num_envs=None, **kwargs):
    env = fc.make_env(factory, num_envs=num_envs, **kwargs)
    return env, collect(env, policy_of(env), *CUTS, seed=3)


def in_a_vector(factory, **kwargs):
    env = fc.make_env(SyncVectorEnv([factory] * 3, autoreset_mode=AutoresetMode.DISABLED), **kwargs)
    return collect(env, fc.random_policy(env), *CUTS, seed=3)


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


@pytest.mark.parametrize(("name", "num_envs"), once(OBSERVATIONS, [3, None]))
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
    counts = counts_of(space)

    def decode(row):
        assert row.shape == (sum(counts),)
        parts = np.split(row, np.cumsum(counts)[:-1])
        assert all(sorted(part) == [0] * (len(part) - 1) + [1] for part in parts)
        chosen = np.array([part.argmax() for part in parts]).reshape(space.shape) + space.start
        return int(chosen) if isinstance(space, spaces.Discrete) else chosen

    return decode


def choosing(kind, space):
    outputs = sum(counts_of(space))
    if kind == "torch":
        return lambda env: fc.torch_policy(mlp(2, outputs), head=fc.heads.categorical)
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(2, outputs)), jnp.float32)
    return lambda env: fc.jax_policy(lambda params, x: x @ params, weights, head=fc.heads.categorical)


@pytest.mark.parametrize(("name", "num_envs"), once(ACTIONS, [3, None]))
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
