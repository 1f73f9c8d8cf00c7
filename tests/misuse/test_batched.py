"""Vector environments and Torch environments that go wrong: all their lanes step at once."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import funcollect as fc
from funcollect.errors import EnvError
from tests.support.envs.torch_parts import InParts
from tests.support.misuse import FAULT, Misuse, Rigged, fails_then_runs, raises, refused, runs, swaps, table
from tests.support.running import ROOT

VECTOR = "the vector environment"
RETURNED = f"{VECTOR}: step returned"
SHAPE = f"{VECTOR}: observation 'observation' has shape"


def spoilt_vector(spoil: Any) -> Any:
    """A vector environment of which one step is spoilt, once."""

    class Vector(SyncVectorEnv):
        times = 0

        def step(self, actions: Any) -> Any:
            self.times += 1
            answer = super().step(actions)
            return spoil(answer) if self.times == FAULT else answer

    return fc.make_env(Vector([Rigged] * 2, autoreset_mode=AutoresetMode.DISABLED))


def vector(what: str, spoil: Any, *says: str) -> Misuse:
    return Misuse(what, lambda: spoilt_vector(spoil), EnvError, says)


@table(
    vector("step raises", raises(OSError("cut")), VECTOR, "step raised OSError('cut')", "begin new episodes"),
    vector("flags for one lane", swaps(2, np.zeros(1, bool)), RETURNED, "2 values each", "use Gymnasium's"),
    vector("no rewards", swaps(1, None), RETURNED, "[None", "2 values each", "use Gymnasium's"),
    vector("three values", lambda answer: answer[:3], RETURNED, "expected reward, terminated", "use Gymnasium's"),
    vector("a wrong shape", swaps(0, np.ones((2, 3))), SHAPE, "(2, 3)", "wants (2, 2)", "correct"),
    vector("one lane", swaps(0, np.ones((1, 2))), SHAPE, "(1, 2)", "wants (2, 2)", "correct"),
    vector("complex numbers", swaps(0, np.ones((2, 2), complex)), "lane 0", "complex128", "wants float32", "cast"),
    vector("no array", swaps(0, [[1.0], 2.0]), VECTOR, "is list and no array", "wants", "correct"),
    vector("NaN", swaps(1, np.array([0.0, np.nan])), "lane 1, step 2", "the reward is NaN", "expected a number"),
)
def test_a_vector_environment_that_goes_wrong(misuse: Misuse) -> None:
    fails_then_runs(misuse.do, fc.random_policy, misuse.error, misuse.says)


class Walk(InParts):
    """A Torch environment without a fault."""

    observation_space = spaces.Box(-9, 9, (2,))
    action_space = spaces.Discrete(3)
    draws = 2

    def start(self, uniforms: Any) -> Any:
        return uniforms

    def observe(self, place: Any) -> Any:
        return place.float()

    def move(self, place: Any, action: Any) -> Any:
        return place, place[:, 0], place[:, 0] > 9


def walk(what: str, method: str, change: Any, *says: str) -> Misuse:
    """A `Walk` whose method's answer goes through `change`."""
    own = getattr(Walk, method)
    wrong = type("Walk", (Walk,), {method: lambda self, *given: change(own(self, *given))})
    return Misuse(what, lambda: wrong(num_envs=3), EnvError, says)


@table(
    walk("a wrong shape", "observe", lambda x: x[:, :1], "'observation' of Walk", "(3, 1)", "(3, 2)", "correct"),
    walk("a wrong dtype", "observe", lambda x: x.double(), "'observation' of Walk", "float64", "float32", "correct"),
    walk("no tensor", "observe", lambda x: x.tolist(), "'observation' of Walk", "is list", "expected", "correct"),
    walk("a wide reward", "move", swaps(1, torch.ones(3, 1)), "reward of Walk", "(3, 1)", "(3,)", "correct"),
    walk("a number", "move", swaps(1, 1.0), "reward of Walk", "is float", "(3,)", "correct reset, step"),
    walk("one flag", "move", swaps(2, torch.tensor(True)), "terminated of Walk", "()", "(3,)", "correct"),
    walk("a float flag", "move", swaps(2, torch.zeros(3)), "terminated of Walk", "float32", "bool", "correct"),
)
def test_a_torch_environment_that_goes_wrong_is_found_at_once(misuse: Misuse) -> None:
    with refused(misuse.error, misuse.says):
        runs(misuse.do())
    runs(Walk(num_envs=3))


def test_a_torch_environment_that_lacks_a_key() -> None:
    class Nested(Walk):
        observation_space = spaces.Dict({"left": Walk.observation_space, "right": Walk.observation_space})

        def observe(self, place: Any) -> Any:
            return {"left": place.float()}

    with refused(EnvError, ("the observation of Nested", "lacks the structure", "right", "correct the environment")):
        runs(Nested(num_envs=3))


ASYNC = """
import gymnasium, warnings
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
import funcollect as fc
from tests.support.misuse import Rigged, raises

warnings.simplefilter("ignore")

def dying():
    return Rigged(raises(OSError("gone")))

def interrupted(env, timeout=None):
    raise KeyboardInterrupt

def trial(last, error):
    env = fc.make_env(AsyncVectorEnv([Rigged, last], autoreset_mode=AutoresetMode.DISABLED))
    policy = fc.random_policy(env)
    state = fc.init(env, policy, seed=0)
    try:
        fc.rollout(env, policy, state, 6)
    except error as caught:
        print(type(caught).__name__, caught)
    AsyncVectorEnv.step_wait = original
    state, batch = fc.rollout(env, policy, fc.recover(env, state), 2)
    print(batch["collector", "step"].tolist())
    fc.close(state)

original = AsyncVectorEnv.step_wait
trial(dying, fc.EnvError)
AsyncVectorEnv.step_wait = interrupted
trial(Rigged, KeyboardInterrupt)
"""


def test_workers_of_a_vector_environment_that_die_or_owe_an_answer_are_replaced() -> None:
    """In a process of its own: workers are forked, and by now this one holds JAX's threads."""
    done = subprocess.run([sys.executable, "-c", ASYNC], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    error, steps, interrupt, others = done.stdout.strip().splitlines()
    assert error.startswith("EnvError lane 1: its process is gone (exit code ")
    assert interrupt.strip() == "KeyboardInterrupt"
    assert steps == others == "[[0, 1], [0, 1]]"
