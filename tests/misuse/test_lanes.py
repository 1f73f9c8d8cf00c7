"""Environments that go wrong once, in lane 1 of 3, or all lanes at once: named, and a reset is the way back."""

import functools
import subprocess
import sys

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import funcollect as fc
from funcollect.errors import EnvError
from tests.support.envs.torch_parts import InParts
from tests.support.misuse import FAULT, Misuse, Rigged, fails_then_runs, raises, refused, runs, swaps, table
from tests.support.running import ROOT

ONWARD = "begin new episodes with funcollect.recover(env, state)"
DICT = spaces.Dict({"position": spaces.Box(-9, 9, (2,)), "mode": spaces.Discrete(4)})
GOOD_DICT = {"position": np.ones(2, np.float32), "mode": 2}
PAIR = spaces.Tuple((spaces.Discrete(4), spaces.Box(-9, 9, (2,))))
GOOD_PAIR = (1, np.ones(2, np.float32))


def lanes(spoil, at=FAULT, info_keys=(), **how):
    return fc.make_env([Rigged(**how), Rigged(spoil, at=at, **how), Rigged(**how)], info_keys=info_keys)


def step(what, spoil, *says, **how):
    return Misuse(what, lambda: lanes(spoil, **how), EnvError, ("lane 1", *says))


def frames(*shape):
    return np.ones(shape, np.float32)


BYTES = {"space": spaces.Box(0, 255, (2,), np.uint8), "good": np.ones(2, np.uint8)}
CHOICE = {"space": spaces.Discrete(4), "good": 1}
NESTED = {"space": DICT, "good": GOOD_DICT}
TUPLE = {"space": PAIR, "good": GOOD_PAIR}


def seen(what, observation, *says, **how):
    return step(what, swaps(0, observation), *says, **how)


@table(
    step("step raises", raises(RuntimeError("out of petrol")), "step(", "out of petrol", ONWARD),
    step("four values", lambda answer: answer[:4], "step returned", "expected the five values", "use Gymnasium's"),
    step("a NaN reward", swaps(1, float("nan")), "step 2 of this batch", "the reward is NaN", "expected a number"),
    step("an array of rewards", swaps(1, np.ones(3)), "the reward array([1., 1., 1.])", "expected a number", "return"),
    step("a word for a reward", swaps(1, "high"), "the reward 'high'", "expected a number", "return a float"),
    step("an array of flags", swaps(2, np.zeros(2, bool)), "the terminated array", "expected a bool", "return (obs"),
    step("no info key", swaps(4, {"time": 0.1}), "no info key 'speed'", "['time']", "name one", info_keys=["speed"]),
    step("no info", swaps(4, None), "the info None", "expected a dict", "return one", info_keys=["speed"]),
    seen("a wrong shape", frames(3), "'observation' has shape (3,)", "wants (2,)", "correct the space"),
    seen("a shape that would broadcast", frames(1), "'observation' has shape (1,)", "wants (2,)", "correct"),
    seen("a list without a shape", [1.0, [2.0, 3.0]], "'observation' is list and no array", "wants", "correct"),
    seen("complex numbers", np.ones(2, complex), "'observation' has dtype complex128", "wants float32", "cast"),
    seen("a float for an integer", 1.5, "has dtype float64", "wants int64", "cast", **CHOICE),
    seen("a number beyond its bytes", np.array([1, 300]), "has dtype int64", "wants uint8", "cast", **BYTES),
    seen("a missing key", {"position": frames(2)}, "the keys ['position']", "['mode', 'position']", "return", **NESTED),
    seen("a shape under a key", GOOD_DICT | {"position": frames(3)}, "'position' has", "(3,)", "wants (2,)", **NESTED),
    seen("a tuple too short", (1,), "a tuple of 1", "lacks the structure", "a tuple of 2", "return", **TUPLE),
)
def test_a_step_that_goes_wrong(misuse):
    fails_then_runs(misuse.do, fc.random_policy, misuse.error, misuse.says)


def test_a_wrong_count_of_values_is_named_within_a_wrapper_too():
    wrapped = {"num_envs": 1, "max_episode_steps": 100}
    make = functools.partial(fc.make_env, functools.partial(Rigged, lambda answer: answer[:4]), **wrapped)
    says = ("lane 0", "within a wrapper", "expected 5", "expected the five values", "use Gymnasium's step API")
    fails_then_runs(make, fc.random_policy, EnvError, says)


@pytest.mark.parametrize(("place", "value"), [(1, None), (2, "no"), (3, {})])
def test_an_environment_that_is_always_wrong_is_found_in_its_first_batch(place, value):
    class Wrong(Rigged):
        def step(self, action):
            return swaps(place, value)(super().step(action))

    env, name = fc.make_env(Wrong), ("reward", "terminated", "truncated")[place - 1]
    policy = fc.random_policy(env)
    with refused(EnvError, ("lane 0", f"step returned the {name} {value!r}", "expected a", "return")):
        fc.rollout(env, policy, fc.init(env, policy, seed=0), 6, max_frames_per_traj=4)


AT_RESETS = (
    ("reset raises", raises(RuntimeError("no table")), ("reset(seed=", "no table", ONWARD)),
    ("an old reset", raises(TypeError("unexpected keyword argument 'seed'")), ("use Gymnasium's reset API",)),
    ("no info", lambda answer: answer[0], ("reset returned array", "expected the two values", "use Gymnasium's reset")),
    ("a wrong shape", swaps(0, frames(3)), ("'observation' has shape (3,)", "wants (2,)", "correct")),
)


class Ending(Rigged):
    """Episodes of three steps; the second reset goes wrong once."""

    def __init__(self, spoil):
        super().__init__(None)
        self.later = spoil

    def reset(self, **how):
        answer = super().reset(**how)
        self.spoil, self.later, self.at = self.later, None, 0
        return answer

    def step(self, action):
        return swaps(2, self.time == 2)(super().step(action))


@pytest.mark.parametrize(("spoil", "says"), [each[1:] for each in AT_RESETS], ids=[each[0] for each in AT_RESETS])
def test_a_reset_that_goes_wrong(spoil, says):
    made = []

    def build():
        made.append(Rigged(spoil, at=0))
        return made[-1]

    env = fc.make_env([Rigged, build])
    for begin in (lambda: fc.init(env, fc.random_policy(env), seed=0), lambda: fc.Collector(env, frames_per_batch=8)):
        with refused(EnvError, ("lane 1", *says)):
            begin()
        assert made[-1].closed == 1
    fails_then_runs(lambda: fc.make_env([Rigged(), Ending(spoil)]), fc.random_policy, EnvError, ("lane 1", *says))


@pytest.mark.parametrize("index", [0, 1])
def test_ctrl_c_leaves_a_way_back(index):
    """While stepping, and while resetting at the end of an episode."""
    spoil = raises(KeyboardInterrupt())
    make = (lambda: lanes(spoil), lambda: fc.make_env([Rigged(), Ending(spoil)]))[index]
    fails_then_runs(make, fc.random_policy, KeyboardInterrupt, ())


def test_a_reset_of_the_collector_that_is_broken_off_is_made_again():
    with fc.SyncDataCollector(lanes(raises(KeyboardInterrupt()), at=-1), frames_per_batch=6) as collector:
        next(collector)
        collector.state.env_state.simulation.simulators._envs[1].at = 0
        with pytest.raises(KeyboardInterrupt):
            collector.reset()
        assert next(collector)["collector", "step"].tolist() == [[0, 1]] * 3


def test_an_environment_that_does_not_close_lets_the_others_close():
    class Stuck(Rigged):
        def close(self):
            raise OSError("stuck")

    last = Rigged()
    state = runs(fc.make_env([Rigged(), Stuck(), last]))
    with refused(EnvError, ("lane 1", "close raised OSError('stuck')", "the others are closed")):
        fc.close(state)
    assert last.closed == 1
    fc.close(state)


VECTOR = "the vector environment"
RETURNED = f"{VECTOR}: step returned"
SHAPE = f"{VECTOR}: observation 'observation' has shape"


def spoilt_vector(spoil):
    class Vector(SyncVectorEnv):
        times = 0

        def step(self, actions):
            self.times += 1
            answer = super().step(actions)
            return spoil(answer) if self.times == FAULT else answer

    return fc.make_env(Vector([Rigged] * 2, autoreset_mode=AutoresetMode.DISABLED))


def vector(what, spoil, *says):
    return Misuse(what, lambda: spoilt_vector(spoil), EnvError, says)


@table(
    vector("step raises", raises(OSError("cut")), VECTOR, "step raised OSError('cut')", "begin new episodes"),
    vector("flags for one lane", swaps(2, np.zeros(1, bool)), RETURNED, "2 values each", "use Gymnasium's"),
    vector("a wrong shape", swaps(0, np.ones((2, 3))), SHAPE, "(2, 3)", "wants (2, 2)", "correct"),
    vector("NaN", swaps(1, np.array([0.0, np.nan])), "lane 1, step 2", "the reward is NaN", "expected a number"),
)
def test_a_vector_environment_that_goes_wrong(misuse):
    fails_then_runs(misuse.do, fc.random_policy, misuse.error, misuse.says)


class Walk(InParts):
    observation_space = spaces.Box(-9, 9, (2,))
    action_space = spaces.Discrete(3)
    draws = 2


def walk(what, method, change, *says):
    """A `Walk` whose method's answer goes through `change`."""
    own = getattr(Walk, method)
    wrong = type("Walk", (Walk,), {method: lambda self, *given: change(own(self, *given))})
    return Misuse(what, lambda: wrong(num_envs=3), EnvError, says)


@table(
    walk("a wrong shape", "observe", lambda x: x[:, :1], "'observation' of Walk", "(3, 1)", "(3, 2)", "correct"),
    walk("a wrong dtype", "observe", lambda x: x.double(), "'observation' of Walk", "float64", "float32", "correct"),
    walk("no tensor", "observe", lambda x: x.tolist(), "'observation' of Walk", "is list", "expected", "correct"),
    walk("a wide reward", "move", swaps(1, torch.ones(3, 1)), "reward of Walk", "(3, 1)", "(3,)", "correct"),
    walk("NaN", "move", swaps(1, torch.tensor([0.0, torch.nan, 0.0])), "lane 1, step 0 of this batch", "is NaN"),
    walk("one flag", "move", swaps(2, torch.tensor(True)), "terminated of Walk", "()", "(3,)", "correct"),
    walk("a float flag", "move", swaps(2, torch.zeros(3)), "terminated of Walk", "float32", "bool", "correct"),
)
def test_a_torch_environment_that_goes_wrong_is_found_at_once(misuse):
    with refused(misuse.error, misuse.says):
        runs(misuse.do())
    runs(Walk(num_envs=3))


def test_a_torch_environment_that_lacks_a_key():
    class Nested(Walk):
        observation_space = spaces.Dict({"left": Walk.observation_space, "right": Walk.observation_space})

        def observe(self, place):
            return {"left": place.float()}

    with refused(EnvError, "the observation of Nested … lacks the structure … right … correct the environment"):
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


def test_workers_of_a_vector_environment_that_die_or_owe_an_answer_are_replaced():
    """In a process of its own: workers are forked, and by now this one holds JAX's threads."""
    done = subprocess.run([sys.executable, "-c", ASYNC], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    error, steps, interrupt, others = done.stdout.strip().splitlines()
    assert error.startswith("EnvError lane 1: its process is gone (exit code ")
    assert interrupt.strip() == "KeyboardInterrupt"
    assert steps == others == "[[0, 1], [0, 1]]"
