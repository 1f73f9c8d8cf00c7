"""Real environments against a plain loop over them, with the same seeds and the batch's own actions, to the bit."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import funcollect as fc
from tests.support.cases import POLICIES
from tests.support.compare import assert_same, collect, joined
from tests.support.plain import check_lanes
from tests.support.running import pairwise, scaled

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


@pytest.mark.parametrize("name", LIMITS)
def test_a_vector_environment_equals_its_environments(name):
    vector = SyncVectorEnv([lambda: make(name)] * 3, autoreset_mode=AutoresetMode.DISABLED)
    runs = []
    for source in (vector, [lambda: make(name)] * 3, [make(name) for _ in range(3)]):
        env = fc.make_env(source)
        state = fc.init(env, POLICIES["torch_mlp"](env), seed=2)
        batches = []
        for mask in (None, [True, False, True], [False, True, False], [True, True, True]):
            state = state if mask is None else fc.reset(env, state, torch.tensor(mask))
            for length in (1, 40, 13):
                state, batch = fc.rollout(env, POLICIES["torch_mlp"](env), state, length)
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
        runs += [collect(env, POLICIES["torch_mlp"](env), 90, seed=3) for _ in range(2)]  # instances are built anew
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


@pytest.mark.parametrize(("name", "limit"), [("Humanoid-v5", 12), ("BipedalWalker-v3", 15), ("CarRacing-v3", 4)])
def test_larger_simulators(name, limit):
    """Many numbers in float64, contacts, and pixels."""
    env = fc.make_env(name, num_envs=2, max_episode_steps=limit)
    batch = collect(env, fc.random_policy(env), 2 * limit + 3, seed=0)
    check_lanes(batch, lambda: gymnasium.make(name, max_episode_steps=limit, disable_env_checker=True), 0)
    assert batch["next", "done"].sum() >= 4
    assert batch["observation"].dtype == (torch.uint8 if name == "CarRacing-v3" else torch.float32)
