"""Lanes over worker processes: the data of one process, losses, and nothing that is left behind."""

import os
from dataclasses import replace
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import funcollect as fc
from funcollect.envs.host.lane_workers import lane_pool
from funcollect.envs.host.lane_workers.block import STEP
from funcollect.errors import EnvError, ReplayError
from funcollect.processes.child import ChildSetup
from funcollect.processes.system import PORTABLE
from tests.support.cases import POLICIES
from tests.support.compare import assert_same, collect, fresh
from tests.support.envs.light_envs import Nested
from tests.support.faulty.faulty_workers import INFOS, Doomed, Late, kill, pids_of
from tests.support.misuse import Misuse, refused_then_mended, runs, table
from tests.support.running import AN_EVENING_OVER_RAY, FORKS_OF_RAY, in_soak
from tests.support.workers import descendants, ray_collector


def transformed():
    from torchrl.envs import GymEnv, StepCounter, TransformedEnv

    return TransformedEnv(GymEnv("CartPole-v1"), StepCounter(20))


SOURCES = {
    "CartPole-v1": ("CartPole-v1", {"max_episode_steps": 20}),
    "one-hot": ("CartPole-v1", {"one_hot": True}),
    "a factory": (Doomed, {"info_keys": INFOS}),
    "a list of lambdas": ([lambda: Nested()] * 5, {"info_keys": ["draw"]}),
    "an Atari game": ("ale/Pong", {"max_episode_steps": 15, "noop_max": 3}),
    "TorchRL's": (transformed, {}),
}


FEW, GAME = ("a factory", "a list of lambdas"), "an Atari game"  # which the next test plays
SPREAD = [{"num_workers": 2}, {"num_workers": 3}, {"parallel": True}]
DATA = [(name, SPREAD[name != "TorchRL's"]) for name in SOURCES if name != GAME]
DATA += [(FEW[0], SPREAD[2]), (FEW[1], SPREAD[0])]
DATA += in_soak((name, spread) for name in SOURCES for spread in SPREAD if (name, spread) not in DATA)
DATA = [(*each, "random") for each in DATA] + [("CartPole-v1", SPREAD[0], kind) for kind in ("torch_mlp", "jax_mlp")]
DATA = [pytest.param(*each, marks=[pytest.mark.needs("torchrl")] * (each[0] == "TorchRL's")) for each in DATA]


@pytest.mark.parametrize(("name", "spread", "kind"), DATA, ids=str)
def test_the_data_are_those_of_one_process(name, spread, kind):
    source, kwargs = SOURCES[name]
    kwargs = kwargs | ({} if isinstance(source, list) else {"num_envs": 5})
    envs = [fc.make_env(source, **kwargs, **more) for more in ({}, spread)]
    batches = [collect(env, POLICIES[kind](env), 30, 25, seed=3) for env in envs]
    assert_same(*batches)
    assert batches[0]["next", "done"].any(-1).any(-1).all()


def with_and_without(env, **kwargs):
    """An environment in this process, and the same over two workers."""
    return [fc.make_env(env, **kwargs, **spread) for spread in ({}, {"num_workers": 2})]


SHORT = {"max_episode_steps": 4, "noop_max": 3}


@pytest.mark.parametrize(("name", "kwargs", "steps"), [("CartPole-v1", {}, 20), ("ale/Pong", SHORT, 6)])
def test_limits_resets_and_finished_lanes(name, kwargs, steps):
    """Lanes of games also end together for different reasons, and are reset once."""
    batches, evaluations = [], []
    for env in with_and_without(name, num_envs=4, **kwargs):
        _, policy, state = fresh(env, steps=2, seed=2)
        state = fc.reset(env, state, torch.tensor([True, False, False, True]))
        state, first = fc.rollout(env, policy, state, 6, max_frames_per_traj=2)
        batches.append(torch.cat([first, fc.rollout(env, policy, state, steps)[1]], 1))
        evaluations.append(fc.evaluate(env, policy, episodes=5, seed=4).returns.tolist())
    assert_same(*batches)
    assert evaluations[0] == evaluations[1]


@pytest.mark.parametrize("name", ["a factory", *in_soak(["an Atari game"])])  # test_around.py copies such games
def test_forks_and_files_continue_as_the_run_does(name, tmp_path):
    source, kwargs = SOURCES[name]
    alone = fc.make_env(source, num_envs=4, **kwargs)
    env, policy, state = fresh(source, steps=20, seed=5, num_envs=4, num_workers=2, **kwargs)
    fc.save(tmp_path / "state", state)
    fork = fc.fork(env, state)
    loaded, elsewhere = (fc.load(tmp_path / "state", each, policy) for each in (env, alone))
    _, batch = fc.rollout(env, policy, state, 20)
    for other, where in ((fork, env), (loaded, env), (elsewhere, alone)):
        assert_same(batch, fc.rollout(where, policy, other, 20)[1])
        fc.close(other)


def test_a_lane_is_filmed(tmp_path):
    films = []
    for spread in ({}, {"parallel": True}):
        env = fc.make_env("CartPole-v1", render_mode="rgb_array", max_episode_steps=5, **spread)
        fc.record(env, fc.random_policy(env), tmp_path / "film.gif", seed=1)
        films.append((tmp_path / "film.gif").read_bytes())
    assert films[0] == films[1]


COLLECTORS = {
    "sync": lambda make, **kwargs: fc.SyncDataCollector(make, **kwargs),
    "workers": lambda make, **kwargs: fc.MultiSyncDataCollector([make], **kwargs),
    "first come, first served": lambda make, **kwargs: fc.MultiaSyncDataCollector([make], **kwargs),
    "threads": lambda make, **kwargs: fc.MultiSyncDataCollector([make], in_process=True, **kwargs),
    "Ray": lambda make, **kwargs: ray_collector([make], sync=True, **kwargs),
}


OVER_RAY = pytest.param("Ray", marks=(*AN_EVENING_OVER_RAY, FORKS_OF_RAY))


@pytest.mark.parametrize("kind", ["sync", "workers", *in_soak(["first come, first served", "threads"]), OVER_RAY])
def test_collectors(kind, request):
    if kind == "Ray":
        request.getfixturevalue("ray_cluster")
    batches = []
    for spread in ({}, {"num_workers": 2}):
        make = partial(fc.make_env, "CartPole-v1", num_envs=4, **spread)
        with COLLECTORS[kind](make, policy=None, frames_per_batch=80, total_frames=160, seed=7) as collector:
            batches.append(torch.cat([batch.clone() for batch in collector], -1))
    assert_same(*batches)


class Unseeded(gymnasium.Env):
    """Draws from the global generators of NumPy and Torch, in spite of its seed."""

    observation_space, action_space = spaces.Box(0, 1, (2,)), spaces.Discrete(2)

    def reset(self, **options):
        return np.array([np.random.random(), torch.rand(())], np.float32), {}


def test_workers_do_not_share_the_states_of_global_generators():
    *_, state = fresh(Unseeded, num_envs=4, num_workers=2)
    assert all(len(column.unique()) == 4 for column in state.observation["observation",].T)


def test_explain_says_where_it_runs():
    env = fc.make_env("CartPole-v1", num_envs=2, parallel=True)
    assert "CartPole-v1 in 2 worker processes" in fc.explain(env, fc.random_policy(env)).env
    game = fc.make_env("ale/Pong", num_envs=2, num_workers=1)
    plan = fc.explain(game, fc.random_policy(game))
    assert "Pong-v5 in 1 worker process" in plan.env
    assert plan.seeding.startswith("lane")
    assert "snapshot" in plan.forking


def test_ids_that_a_script_has_registered(monkeypatch):
    spec = replace(gymnasium.spec("CartPole-v1"), id="OnlyHere-v0")
    monkeypatch.setitem(gymnasium.registry, spec.id, spec)

    def make():
        return gymnasium.make("OnlyHere-v0")

    mend = r"not registered in this process .*OnlyHere.*'module:Name-v0'.*register it in the factory"
    with pytest.raises(ValueError, match=mend):
        fresh(make, num_envs=2, num_workers=2)
    with pytest.raises(fc.errors.WorkerError, match=mend):
        COLLECTORS["workers"](make, policy=None, frames_per_batch=8)
    fresh("OnlyHere-v0", num_envs=2, num_workers=2)


MENDED = partial(fc.make_env, "CartPole-v1", num_envs=2, num_workers=2)
VECTOR = partial(gymnasium.make_vec, "CartPole-v1", 2, vectorization_mode="sync")
CARTPOLE, KIND = "CartPole-v1", "env is int … expected a Gymnasium id, an EnvSpec, a factory … pass one of these"
OLD = "is no keyword of environments any more … leave it out"
UNEQUAL = [CARTPOLE, "Acrobot-v1"]


def serial():
    from torchrl.envs import GymEnv, SerialEnv

    return SerialEnv(2, lambda: GymEnv("CartPole-v1"))


def given(what, says, env="CartPole-v1", error=ValueError, **kwargs):
    return Misuse(what, partial(fc.make_env, env, **kwargs), error, says, MENDED)


def over_two(what, says, env="CartPole-v1", error=ValueError, **kwargs):
    return given(what, says, env, error, **{"num_envs": 4, "num_workers": 2} | kwargs)


@table(
    given("an instance", "with the instance … cannot move … its id", gymnasium.make("CartPole-v1"), parallel=True),
    given("no id", "cannot make 'No-v0' … gymnasium.registry", ["CartPole-v1", "No-v0"], parallel=True),
    given("no module", "cannot make 'no:A-v1' … import the package", "no:A-v1", parallel=True),
    given("a vector", "num_workers, timeout cannot … with a VectorEnv … leave", VECTOR(), num_workers=2, timeout=-3),
    given("a time for no workers", "timeout=5 was given without workers … pass num_workers", num_envs=4, timeout=5),
    over_two("too many", "num_workers is 6, expected at most num_envs=4 … num_envs=6, or fewer", num_workers=6),
    over_two("two numbers", "parallel=True means num_workers=4 … num_workers=2 was given", parallel=True),
    over_two("no time", "timeout is 0, expected a positive number … pass for example timeout=60", timeout=0),
    over_two("another wait", "wait must be one of ['all', 'any'], but is 'some' … choose", wait="some"),
    given("nobody waits", "wait='any' was given without workers … pass num_workers", num_envs=4, wait="any"),
    over_two("a number for all", "min_ready=2 was given, which is for wait='any' … pass that", min_ready=2),
    over_two("too many ready", "min_ready is 5, expected at most num_envs=4 … fewer", wait="any", min_ready=5),
    given("a vector's wait", "wait, min_ready cannot … with a VectorEnv … leave", VECTOR(), wait="any", min_ready=1),
    over_two("TorchRL's", "SerialEnv, which is a batch of 2 already … a factory of a single", serial, num_envs=2),
    *(over_two("old", f"overlap {OLD}", env, TypeError, overlap=2) for env in ("ale/Pong", Nested)),
    over_two("TorchRL's, old", f"overlap {OLD}", transformed, TypeError, overlap=2),
    *(over_two("old", f"on_failure {OLD}", env, TypeError, on_failure="restart") for env in ("ale/Pong", Nested)),
    *(("a number", partial(fc.envs.from_gymnasium, env, parallel=True), TypeError, KIND) for env in (3, [CARTPOLE, 3])),
    ("other spaces", lambda: runs(fc.make_env(UNEQUAL, num_workers=2)), ValueError, "lane 1 has the obs … use equal"),
)
def test_an_environment_given_wrongly(misuse):
    refused_then_mended(misuse)


def test_infos_that_are_too_large_for_the_memory():
    envs = with_and_without(Late, num_envs=4, info_keys=INFOS)
    assert_same(*(collect(env, fc.random_policy(env), 12, 12, seed=0) for env in envs))


def test_new_workers_of_games_get_seeds():
    env = fc.make_env("ale/Pong", num_envs=2, num_workers=2, max_episode_steps=6)
    batches = []
    for _ in range(2):
        _, policy, state = fresh(env, steps=3)
        kill(state, 1)
        with pytest.raises(EnvError, match=r"lane 1 \(worker 1\)"):
            fc.fork(env, state)
        state, batch = fc.rollout(env, policy, fc.recover(env, state), 9)
        batches.append(batch)
        fc.close(state)
    assert_same(*batches)


def test_workers_on_other_processors_are_woken_first(monkeypatch):
    """A worker takes its processor as soon as it is woken; on that of the caller, it would keep the others waiting."""
    *_, state = fresh("CartPole-v1", num_envs=4, num_workers=4)
    processes, rung = state.env_state.simulation.simulators, []
    assert len({*processes.cpus}) == min(4, len(os.sched_getaffinity(0)))
    monkeypatch.setattr(processes, "cpus", [0, 1, 2, 3])
    for number, bell in enumerate(processes.bells):
        monkeypatch.setattr(bell, "ring", lambda number=number, ring=bell.ring: (rung.append(number), ring()))
    for here in range(4):
        monkeypatch.setattr(lane_pool, "current_cpu", lambda here=here: here)
        rung.clear()
        processes.order(STEP, [0, 1, 2, 3])
        processes.await_answers([0, 1, 2, 3])
        assert rung == [*({0, 1, 2, 3} - {here}), here]


def test_workers_of_several_collector_workers_are_spread():
    """Whatever process ids they have: other programs may start in between."""
    cpus = len(os.sched_getaffinity(0))
    for count in range(2, 5):
        setups = [ChildSetup.like_this(index=index) for index in range(count)]
        assert [setup.place - setups[0].place for setup in setups] == [*range(count)]
    env = partial(fc.make_env, "CartPole-v1", num_envs=2, num_workers=1)
    before = {*descendants(os.getpid())}
    with fc.MultiSyncDataCollector(env, None, num_workers=2, frames_per_batch=8, total_frames=8) as collector:
        next(iter(collector))
        pinned = [pid for pid in {*descendants(os.getpid())} - before if len(os.sched_getaffinity(pid)) < cpus]
        assert len(pinned) == (0 if PORTABLE else 2)
        assert len({frozenset(os.sched_getaffinity(pid)) for pid in pinned}) == min(len(pinned), cpus)


class Holds(gymnasium.Wrapper):
    """Has an object that is no plain data, and cannot be filmed."""

    def __init__(self, env):
        super().__init__(env)
        self.stats = Stats()

    def render(self):
        raise RuntimeError("no screen")


class Stats:
    pass


def test_games_that_cannot_be_saved_can_be_forked_and_errors_leave_workers_alive(tmp_path):
    game = partial(gymnasium.make, "ale_py:ALE/Pong-v5", render_mode="rgb_array")
    # From 128 steps on there is a snapshot.
    env, policy, state = fresh(lambda: Holds(game()), steps=140, num_envs=2, num_workers=2)
    pids, fork = pids_of(state), fc.fork(env, state)
    with pytest.raises(ReplayError, match=r"'stats'\] is <.*Stats object"):
        fc.save(tmp_path / "state", state)
    with pytest.raises(RuntimeError, match="no screen"):
        state.env_state.simulation.simulators.camera(0).shoot()
    (after, batch), (_, other) = (fc.rollout(env, policy, each, 4) for each in (state, fork))
    assert_same(batch, other)
    assert pids_of(after) == pids


class Paying(gymnasium.Wrapper):
    """Returns `reward` from its second step on. With `over`, each step ends the episode."""

    def __init__(self, reward, over=False):
        super().__init__(gymnasium.make("Pendulum-v1"))
        self.reward, self.over, self.steps = reward, over, 0

    def step(self, action):
        self.steps += 1
        observation, reward, terminated, *rest = super().step(action)
        return observation, reward if self.steps == 1 else self.reward, terminated or self.over, *rest


BAD_REWARDS = [10**400, torch.ones((), requires_grad=True), object(), [1.0, 2.0], "bad"]


PAID = [*((number, False, 0) for number in range(5)), (0, True, 0), (0, False, 1), (1, False, 1), (4, True, 1)]
PAID += in_soak([(2, False, 1), (3, False, 1), (4, False, 1), (0, True, 1), (4, True, 0)])


@pytest.mark.parametrize(("number", "finished", "workers"), PAID)
def test_a_reward_that_is_no_number_or_too_large_names_its_lane(number, finished, workers):
    lanes = [partial(Paying, 1.0, finished), partial(Paying, BAD_REWARDS[number])]
    env = fc.make_env(lanes, num_workers=workers)
    kwargs = {"frames_per_batch": 8, "reset_when_done": not finished}
    says = "lane 1: step returned the reward .*, expected a number: return a float"
    with fc.SyncDataCollector(env, **kwargs) as collector, pytest.raises(EnvError, match=says):
        next(collector)
