"""One process per lane: the data of the same environment in this one, and processes that die or are closed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest

import funcollect as fc
from tests.support.compare import assert_same, collect
from tests.support.light_envs import Failing, Nested
from tests.support.misuse import Misuse, refused, refused_then_mended, runs, table

SOURCES: dict[str, Any] = {
    "CartPole-v1": ("CartPole-v1", {"max_episode_steps": 20}),
    "a factory": (Nested, {"info_keys": ["draw"]}),
    "a list of lambdas": ([lambda: Nested()] * 2, {"info_keys": ["draw"]}),
    "an Atari game": ("ale/Pong", {"max_episode_steps": 15}),
}


@pytest.mark.parametrize("name", SOURCES)
def test_it_gives_the_data_of_the_same_environment_in_process(name: str) -> None:
    source, kwargs = SOURCES[name]
    count = {} if isinstance(source, list) else {"num_envs": 2}
    batches = []
    for parallel in (False, True):
        env = fc.make_env(source, parallel=parallel, **count, **kwargs)
        batches.append(collect(env, fc.random_policy(env), 30, 25, seed=3))
    assert_same(batches[0], batches[1])
    assert batches[0]["next", "done"].any(-1).any(-1).all()
    assert multiprocessing.active_children() == []


def processes(state: Any) -> Any:
    return state.env_state.simulation.simulators._env.processes


def test_a_process_that_is_killed_is_named_and_a_reset_is_the_way_back() -> None:
    env = fc.make_env("CartPole-v1", num_envs=2, parallel=True)
    policy = fc.random_policy(env)
    state, _ = fc.rollout(env, policy, fc.init(env, policy, seed=0), 5)
    os.kill(processes(state)[1].pid, signal.SIGKILL)
    with refused(fc.EnvError, ("lane 1: its process is gone (exit code -9)", "funcollect.recover(env, state)")):
        fc.rollout(env, policy, state, 5)
    state, batch = fc.rollout(env, policy, fc.recover(env, state), 5)
    assert batch["collector", "step"].tolist() == [[0, 1, 2, 3, 4]] * 2
    fork = fc.fork(env, state)
    assert_same(fc.rollout(env, policy, fork, 9)[1], fc.rollout(env, policy, state, 9)[1])
    for each in (fork, state):
        fc.close(each)
    assert multiprocessing.active_children() == []


def test_a_process_that_is_killed_between_calls_lets_the_others_close() -> None:
    env = fc.make_env("CartPole-v1", num_envs=2, parallel=True)
    state = runs(env)
    victim = processes(state)[0]
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    fc.close(state)
    assert multiprocessing.active_children() == []


@pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium logs what workers raise
def test_an_environment_that_raises_ends_no_run() -> None:
    env = fc.make_env([Nested, Failing], parallel=True)
    policy = fc.random_policy(env)
    state = fc.init(env, policy, seed=0)
    with refused(fc.EnvError, ("step raised RuntimeError(", "out of petrol", "funcollect.recover(env, state)")):
        fc.rollout(env, policy, state, 6)
    _, batch = fc.rollout(env, policy, fc.recover(env, state), 2)
    assert batch["collector", "step"][:, 0].eq(0).all()
    fc.close(state)
    assert multiprocessing.active_children() == []


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


def test_a_script_needs_no_main_guard_and_leaves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    home = str(Path(fc.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": home}
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["begun", f"(2, 5) {script} None"]


def test_explain_says_where_it_runs() -> None:
    env = fc.make_env("CartPole-v1", num_envs=2, parallel=True)
    assert "CartPole-v1 in processes" in fc.explain(env, fc.random_policy(env)).env
    game = fc.make_env("ale/Pong", num_envs=2, parallel=True)
    plan = fc.explain(game, fc.random_policy(game))
    assert plan.seeding.startswith("lane")
    assert plan.forking.startswith("impossible")


def good() -> Any:
    return fc.make_env("CartPole-v1", parallel=True)


@table(
    Misuse(
        "an instance",
        lambda: fc.make_env(gymnasium.make("CartPole-v1"), parallel=True),
        ValueError,
        ("parallel=True was given with the instance", "cannot move to another process", "pass its id or a factory"),
        good,
    ),
    Misuse(
        "an unknown id",
        lambda: fc.make_env(["CartPole-v1", "NoSuch-v0"], parallel=True),
        ValueError,
        ("cannot make 'NoSuch-v0'", "gymnasium.registry"),
        good,
    ),
    Misuse(
        "an unknown module",
        lambda: fc.make_env("nosuch:CartPole-v1", parallel=True),
        ValueError,
        ("cannot make 'nosuch:CartPole-v1'", "import the package"),
        good,
    ),
    *(
        Misuse(
            f"{env} is no environment",
            lambda env=env: fc.envs.from_gymnasium(env, parallel=True),
            TypeError,
            ("env is int", "expected a Gymnasium id, an EnvSpec, a factory", "pass one of these"),
            good,
        )
        for env in (3, [3], ["CartPole-v1", 3])
    ),
    Misuse(
        "a vector environment",
        lambda: fc.make_env(gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync"), parallel=True),
        ValueError,
        ("parallel cannot be given with a VectorEnv", "leave it out"),
        good,
    ),
)
def test_an_environment_given_wrongly(misuse: Misuse) -> None:
    refused_then_mended(misuse)
