"""Lanes over worker processes: the data of one process, losses, and nothing that is left behind."""

import contextlib
import gc
import os
import random
import re
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import funcollect as fc
from funcollect.envs.host.lane_workers import lane_pool
from funcollect.envs.host.lane_workers.block import STEP
from funcollect.envs.host.lane_workers.simulators import WorkerLanes
from funcollect.errors import EnvError, ReplayError
from funcollect.processes.child import ChildSetup
from funcollect.processes.pool import FailurePolicy
from funcollect.processes.system import PORTABLE
from tests.envs.conftest import begun
from tests.support.cases import POLICIES
from tests.support.compare import assert_same, collect
from tests.support.envs.light_envs import Nested
from tests.support.faulty.faulty_workers import Doomed, check_lanes, pids_of, workers_of
from tests.support.misuse import Misuse, refused_then_mended, runs, table
from tests.support.running import AN_EVENING_OVER_RAY, FORKS_OF_RAY, in_soak, scaled
from tests.support.workers import descendants, gone, held, ray_collector, wait_until

INFOS = ["draw", "vector"]


def transformed():
    from torchrl.envs import GymEnv, StepCounter, TransformedEnv

    return TransformedEnv(GymEnv("CartPole-v1"), StepCounter(20))


SOURCES = {
    "CartPole-v1": ("CartPole-v1", {"max_episode_steps": 20}),
    "one-hot": ("CartPole-v1", {"one_hot": True}),
    "a factory": (Doomed, {"info_keys": INFOS}),
    "a list of lambdas": ([lambda: Nested()] * 5, {"info_keys": ["draw"]}),
    "an Atari game": ("ale/Pong", {"max_episode_steps": 15}),
    "TorchRL's": (transformed, {}),
}
FEW = ("a factory", "a list of lambdas")
SPREAD = [{"num_workers": 2}, {"num_workers": 3}, {"parallel": True}]
DATA = [*((name, SPREAD[1]) for name in SOURCES), *((name, SPREAD[place]) for name in FEW for place in (0, 2))]
DATA += in_soak((name, spread) for name in SOURCES for spread in SPREAD if (name, spread) not in DATA)
DATA = [(*each, "random") for each in DATA] + [("CartPole-v1", SPREAD[0], kind) for kind in ("torch_mlp", "jax_mlp")]


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


@pytest.mark.parametrize(("name", "kwargs"), [("CartPole-v1", {}), ("ale/Pong", {"max_episode_steps": 4})])
def test_limits_resets_and_finished_lanes(name, kwargs):
    """Lanes of games also end together for different reasons, and are reset once."""
    batches, evaluations = [], []
    for env in with_and_without(name, num_envs=4, **kwargs):
        _, policy, state = begun(env, 2, seed=2)
        state = fc.reset(env, state, torch.tensor([True, False, False, True]))
        state, first = fc.rollout(env, policy, state, 12, max_frames_per_traj=2)
        batches.append(torch.cat([first, fc.rollout(env, policy, state, 40)[1]], 1))
        evaluations.append(fc.evaluate(env, policy, episodes=6, seed=4).returns.tolist())
    assert_same(*batches)
    assert evaluations[0] == evaluations[1]


@pytest.mark.parametrize("name", ["a factory", "an Atari game"])
def test_forks_and_files_continue_as_the_run_does(name, tmp_path):
    source, kwargs = SOURCES[name]
    alone = fc.make_env(source, num_envs=4, **kwargs)
    env, policy, state = begun(source, 20, seed=5, num_envs=4, num_workers=2, **kwargs)
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
        env = fc.make_env("CartPole-v1", render_mode="rgb_array", **spread)
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


@pytest.mark.parametrize("kind", [*(kind for kind in COLLECTORS if kind != "Ray"), OVER_RAY])
def test_collectors(kind, request):
    if kind == "Ray":
        request.getfixturevalue("ray_cluster")
    batches = []
    for spread in ({}, {"num_workers": 2}):
        make = partial(fc.make_env, "CartPole-v1", num_envs=4, **spread)
        with COLLECTORS[kind](make, policy=None, frames_per_batch=80, total_frames=160, seed=7) as collector:
            batches.append(torch.cat([batch.clone() for batch in collector], -1))
    assert_same(*batches)


DEEDS = {
    "die": "was killed by SIGKILL",
    "exit": "ended with exit code 3",
    "raise": "out of petrol",
    "leave": "raised SystemExit: no more",
    "hang": "has not answered for",
    "stop": "has not answered for",
}


def doomed(folder, deed, lane, step, wait="all"):
    """Six lanes over three workers, one of which does `deed` at a step of its life."""
    (folder / f"{lane} {step}").write_text(deed)
    factories = [partial(Doomed, str(folder), lane) for lane in range(6)]
    return fc.make_env(factories, num_workers=3, info_keys=INFOS, timeout=2.0, wait=wait)


LOSSES = [*((deed, 9, "all") for deed in DEEDS), ("hang", 4, "all")]  # also in the last step
LOSSES += [(deed, 9, "any") for deed in ("die", "raise", "hang")]


@pytest.mark.parametrize(("deed", "length", "wait"), LOSSES)
def test_a_lost_worker_is_reported_with_its_lanes_and_a_recovery_goes_on(deed, length, wait, tmp_path):
    env, policy, state = begun(doomed(tmp_path, deed, 3, 4, wait))
    with pytest.raises(EnvError, match=rf"{DEEDS[deed]}.*funcollect.recover\(env, state\)") as caught:
        fc.rollout(env, policy, state, length)
    assert re.match(r"lane 3: step|lanes 2 to 3 \(worker 1\)", str(caught.value))
    notes = "".join(getattr(caught.value, "__notes__", ()))
    assert ("Doomed" in notes or "in step" in notes) == (deed in ("raise", "leave", "hang"))
    state, batch = fc.rollout(env, policy, fc.recover(env, state), 9)
    assert batch["collector", "step"][:, 0].eq(0).all()
    check_lanes(batch)
    fork = fc.fork(env, state)
    assert_same(fc.rollout(env, policy, fork, 9)[1], fc.rollout(env, policy, state, 9)[1])
    for each in (fork, state):
        fc.close(each)


def test_a_collector_goes_on_with_another_worker(tmp_path):
    env = doomed(tmp_path, "die", 3, 14)
    with fc.SyncDataCollector(env, None, frames_per_batch=60, total_frames=180, seed=0) as collector:
        first = next(collector).clone()
        pids = pids_of(collector.state)
        with pytest.raises(EnvError, match="was killed by SIGKILL"):
            next(collector)
        batch = next(collector).clone()
        assert [one == other for one, other in zip(pids, pids_of(collector.state), strict=True)] == [True, False, True]
    check_lanes(batch)
    ids = [set(each["collector", "traj_ids"].flatten().tolist()) for each in (first, batch)]
    assert not ids[0] & ids[1]


@pytest.mark.parametrize("how", ["closed", "dropped", "killed", "broken off"])
def test_nothing_is_left_behind(how):
    env = fc.make_env([Nested, Unmade] if how == "broken off" else ["CartPole-v1"] * 4, num_workers=2)

    def cycle():
        if how == "broken off":
            with pytest.raises(RuntimeError, match="no such car"):
                begun(env)
            return
        *_, state = begun(env, 5)
        pids = pids_of(state)
        if how == "killed":
            kill(state, 0)
        if how in ("closed", "killed"):
            fc.close(state)
        del state
        gc.collect()
        wait_until(lambda: all(map(gone, pids)))

    cycle()
    before = held()
    for _ in range(scaled(3)):
        cycle()
    assert held() == before


def kill(state, worker):
    os.kill(pids_of(state)[worker], signal.SIGKILL)
    wait_until(partial(workers_of(state)[worker].ended_by, 0))


class Unmade(Nested):
    def __init__(self):
        raise RuntimeError("no such car")


SCRIPT = """
import gymnasium
import funcollect as fc

class Own(gymnasium.Wrapper):
    pass

print("begun")
env = fc.make_env(lambda: Own(gymnasium.make("CartPole-v1")), num_envs=2, parallel=True)
policy = fc.random_policy(env)
state, batch = fc.rollout(env, policy, fc.init(env, policy, seed=0), 5)
print(tuple(batch.shape), __file__, __spec__)
"""


@pytest.mark.evening
def test_a_script_needs_no_main_guard_and_leaves_nothing(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = {"PYTHONPATH": str(Path(fc.__file__).parents[1])}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=os.environ | path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["begun", f"(2, 5) {script} None"]


@pytest.mark.parametrize("wait", ["all", "any"])
def test_rollouts_that_are_interrupted_at_any_moment_are_followed_by_new_episodes(wait):
    env, policy, state = begun(Nested, num_envs=4, num_workers=2, wait=wait)
    moments, pids = random.Random(1), pids_of(state)
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(scaled(15)):
            batches = []
            signal.setitimer(signal.ITIMER_REAL, moments.uniform(0.0005, 0.02))
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    state, batch = fc.rollout(env, policy, state, 5)
                    batches.append(batch)
            if batches:
                check_lanes(torch.cat(batches, 1))
            state = fc.recover(env, state)
            assert pids_of(state) == pids
            fork = fc.fork(env, state)
            state, batch = fc.rollout(env, policy, state, 9)
            assert batch["collector", "step"][:, 0].eq(0).all()
            check_lanes(batch)
            assert_same(batch, fc.rollout(env, policy, fork, 9)[1])
            fc.close(fork)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        fc.close(state)


@pytest.mark.parametrize("moment", ["submit", "wait"])
def test_a_run_goes_on_after_a_fork_that_was_interrupted(moment, monkeypatch):
    env = fc.make_env("ale/Pong", num_envs=2, num_workers=2)
    batches = []
    for interrupted in (False, True):
        _, policy, state = begun(env, 3)
        with monkeypatch.context() as patch:
            patch.setattr(WorkerLanes, moment, ctrl_c)
            for _ in range(interrupted):
                with pytest.raises(KeyboardInterrupt):
                    fc.fork(env, state)
        for each in (state, fc.fork(env, state)):
            after, batch = fc.rollout(env, policy, each, 6)
            batches.append(batch)
            fc.close(after)
    for batch in batches[1:]:
        assert_same(batch, batches[0])


def ctrl_c(*_):
    raise KeyboardInterrupt


def test_a_hang_is_told_again_by_the_rollout_after_a_fork(monkeypatch):
    env, policy, state = begun("ale/Pong", num_envs=2, num_workers=2)
    processes = state.env_state.simulation.simulators
    os.kill(pids_of(state)[0], signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(processes, "_failure_policy", FailurePolicy(0.5, 0.5))
        for use in (lambda: fc.fork(env, state), lambda: fc.rollout(env, policy, state, 3)):
            with pytest.raises(EnvError, match=r"lane 0 \(worker 0\): its process has not answered"):
                use()
    _, batch = fc.rollout(env, policy, fc.recover(env, state), 3)
    assert batch["collector", "step"][:, 0].eq(0).all()


class Unseeded(gymnasium.Env):
    """Draws from the global generators of NumPy and Torch, in spite of its seed."""

    observation_space, action_space = spaces.Box(0, 1, (2,)), spaces.Discrete(2)

    def reset(self, **options):
        return np.array([np.random.random(), torch.rand(())], np.float32), {}


def test_workers_do_not_share_the_states_of_global_generators():
    *_, state = begun(Unseeded, num_envs=4, num_workers=2)
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
        begun(make, num_envs=2, num_workers=2)
    with pytest.raises(fc.errors.WorkerError, match=mend):
        COLLECTORS["workers"](make, policy=None, frames_per_batch=8)
    begun("OnlyHere-v0", num_envs=2, num_workers=2)


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
    *(over_two("old", f"overlap {OLD}", env, TypeError, overlap=2) for env in ("ale/Pong", Nested, transformed)),
    *(over_two("old", f"on_failure {OLD}", env, TypeError, on_failure="restart") for env in ("ale/Pong", Nested)),
    *(("a number", partial(fc.envs.from_gymnasium, env, parallel=True), TypeError, KIND) for env in (3, [CARTPOLE, 3])),
    ("other spaces", lambda: runs(fc.make_env(UNEQUAL, num_workers=2)), ValueError, "lane 1 has the obs … use equal"),
)
def test_an_environment_given_wrongly(misuse):
    refused_then_mended(misuse)


class Late(Nested):
    """Ends at every third step; its infos are too large for the shared memory."""

    def step(self, action):
        observation, reward, _, _, info = super().step(action)
        self.time = getattr(self, "time", 0) + 1
        return observation, reward, self.time % 3 == 0, False, {**info, "vector": np.full(9_000, info["draw"])}


def test_infos_that_are_too_large_for_the_memory():
    envs = with_and_without(Late, num_envs=4, info_keys=INFOS)
    assert_same(*(collect(env, fc.random_policy(env), 12, 12, seed=0) for env in envs))


def test_infos_that_an_interrupt_left_unread_are_dropped(monkeypatch):
    env, policy, state = begun(Late, 3, num_envs=1, num_workers=1, info_keys=INFOS)
    with monkeypatch.context() as patch:
        patch.setattr(WorkerLanes, "_infos", ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            fc.rollout(env, policy, state, 3)
    infos = fc.rollout(env, policy, fc.recover(env, state), 5)[1]["next", "info"]
    assert torch.equal(infos["vector"][0, :, 0].float(), infos["draw"][0].float())


class NeverAgain(Late):
    """Cannot be reset a second time."""

    def reset(self, *, seed=None, options=None):
        if getattr(self, "time", 0):
            raise RuntimeError("sold")
        return super().reset(seed=seed)


def test_a_reset_ahead_that_fails_is_reported_beside_large_infos():
    env, policy, state = begun(NeverAgain, num_envs=2, num_workers=1, info_keys=INFOS)
    with pytest.raises(EnvError, match=r"lane 0: reset\(seed=\d+\) raised.*sold"):
        fc.rollout(env, policy, state, 9)
    fc.close(state)


def test_new_workers_of_games_get_seeds():
    env = fc.make_env("ale/Pong", num_envs=2, num_workers=2, max_episode_steps=6)
    batches = []
    for _ in range(2):
        _, policy, state = begun(env, 3)
        kill(state, 1)
        with pytest.raises(EnvError, match=r"lane 1 \(worker 1\)"):
            fc.fork(env, state)
        state, batch = fc.rollout(env, policy, fc.recover(env, state), 9)
        batches.append(batch)
        fc.close(state)
    assert_same(*batches)


def test_workers_on_other_processors_are_woken_first(monkeypatch):
    """A worker takes its processor as soon as it is woken; on that of the caller, it would keep the others waiting."""
    *_, state = begun("CartPole-v1", num_envs=4, num_workers=4)
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


def test_a_loss_ends_an_evaluation(tmp_path):
    env = doomed(tmp_path, "die", 3, 4)
    policy = fc.random_policy(env)
    with pytest.raises(EnvError, match=r"lanes 2 to 3 \(worker 1\)"):
        fc.evaluate(env, policy, episodes=6, seed=0)
    assert len(fc.evaluate(env, policy, episodes=6, seed=0)) == 6


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
    env, policy, state = begun(lambda: Holds(game()), 140, num_envs=2, num_workers=2)  # from 128 on there is a snapshot
    pids, fork = pids_of(state), fc.fork(env, state)
    with pytest.raises(ReplayError, match=r"'stats'\] is <.*Stats object"):
        fc.save(tmp_path / "state", state)
    with pytest.raises(RuntimeError, match="no screen"):
        state.env_state.simulation.simulators.camera(0).shoot()
    (after, batch), (_, other) = (fc.rollout(env, policy, each, 4) for each in (state, fork))
    assert_same(batch, other)
    assert pids_of(after) == pids


class Closed(Nested):
    """Leaves a file when a worker closes it, slowly if that is wanted."""

    def __init__(self, folder, parent, seconds=0):
        self.folder, self.parent, self.seconds = folder, parent, seconds

    def close(self):
        if os.getpid() != self.parent:
            time.sleep(self.seconds)
            (self.folder / f"{os.getpid()} {id(self)}").touch()


def test_every_environment_is_closed_however_busy_the_processors_are(tmp_path):
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    try:
        for number in range(1, scaled(5) + 1):
            *_, state = begun(partial(Closed, tmp_path, os.getpid()), num_envs=4, num_workers=4)
            fc.close(state)
            assert len([*tmp_path.iterdir()]) == 4 * number
    finally:
        os.sched_setaffinity(0, cpus)


def test_a_close_that_takes_too_long_is_told(tmp_path):
    *_, state = begun(partial(Closed, tmp_path, os.getpid(), 1.2), num_envs=2, num_workers=2)
    fc.close(state)
    assert len([*tmp_path.iterdir()]) == 2
    *_, state = begun(partial(Closed, tmp_path, os.getpid(), 1e3), num_envs=1, num_workers=1, timeout=0.5)
    with pytest.warns(RuntimeWarning, match=r"lane 0 \(worker 0\): close\(\) has not returned in 0.5 s"):
        fc.close(state)


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


@pytest.mark.parametrize("how", [{}, {"num_workers": 1}], ids=["here", "worker"])
@pytest.mark.parametrize(("number", "finished"), [*((number, False) for number in range(5)), (0, True), (4, True)])
def test_a_reward_that_is_no_number_or_too_large_names_its_lane(number, finished, how):
    env = fc.make_env([partial(Paying, 1.0, finished), partial(Paying, BAD_REWARDS[number])], **how)
    kwargs = {"frames_per_batch": 8, "reset_when_done": not finished}
    says = "lane 1: step returned the reward .*, expected a number: return a float"
    with fc.SyncDataCollector(env, **kwargs) as collector, pytest.raises(EnvError, match=says):
        next(collector)


class Dead(Nested):
    def __init__(self, deed, parent):
        if os.getpid() != parent:
            if deed == "exit":
                os._exit(3)
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("deed", ["die", "exit"])
def test_a_worker_that_ends_as_it_makes_its_environments_is_named(deed):
    with pytest.raises(EnvError, match=rf"lane 1 \(worker 1\): its process {DEEDS[deed]}.*as it made its environments"):
        begun([Nested, partial(Dead, deed, os.getpid())], num_workers=2)


def test_a_forked_process_does_not_use_its_parents_workers():
    env, policy, state = begun(Nested, num_envs=2, num_workers=2)
    meanwhile, gone_on = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
    if not pid:
        refusals = 0
        try:
            os.read(meanwhile, 1)
            for use in (lambda: fc.rollout(env, policy, state, 3), lambda: fc.apply(env, state, id)):
                try:
                    use()
                except fc.ClosedError:
                    refusals += 1
            fc.close(state)
        finally:
            os._exit(refusals)
    state, _ = fc.rollout(env, policy, state, 3)
    block = state.env_state.simulation.simulators.block
    before = [array.copy() for array in (block.action, block.next_seeds, *block.observation.values())]
    os.write(gone_on, b"1")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    for array, own in zip((block.action, block.next_seeds, *block.observation.values()), before, strict=True):
        np.testing.assert_array_equal(array, own)
    _, batch = fc.rollout(env, policy, state, 3)
    check_lanes(batch)
    fc.close(state)
    for fd in (meanwhile, gone_on):
        os.close(fd)
