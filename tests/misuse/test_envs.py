"""Environments given wrongly, and such as go wrong once, in lane 1 of 3 or in all lanes: named, and how to go on."""

import functools
import subprocess
import sys
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import funcollect as fc
from funcollect.errors import EnvError, InUseError, ReplayError
from tests.support.envs.own_envs import InParts
from tests.support.misuse import FAULT, Acting, Misuse, Rigged, fails_then_runs, raises, refused, runs, swaps, table
from tests.support.running import ROOT

make = fc.make_env
CARTPOLE = "CartPole-v1"
WALK = "tests.support.faulty.faulty_envs:Walk"


def gym(name=CARTPOLE):
    return gymnasium.make(name, disable_env_checker=True)


def vector():
    return SyncVectorEnv([gym] * 2, autoreset_mode=AutoresetMode.DISABLED)


def good():
    return make(CARTPOLE, num_envs=2)


class Unbuilt(fc.envs.CartPole):
    def __init__(self, num_envs=None):
        self.scale = 2.0


class Incomplete(InParts):
    observation_space = spaces.Box(-1, 1, (1,))


class Spaceless(gymnasium.Env):
    """It has both functions, but declares no space."""


def five():
    return Acting(spaces.Discrete(5))


def shared_behind_wrappers():
    env = gym()
    return runs(make(lambda: gymnasium.wrappers.TimeLimit(env, 9), num_envs=2))


def second_state(made_again):
    """A state of an instance, then another one, of the same Env or of one that is made again."""
    instance = Rigged()
    env = make(instance)
    state = runs(env)
    try:
        runs(make(instance) if made_again else env)
    finally:
        runs(env, state=state)  # the first one goes on


class Raising:
    """Like a batch of environments that is not open yet, whose attributes cannot be read."""

    def __getattr__(self, name):
        return getattr(self, name)


def keyed(*names, space=None):
    box = Rigged.observation_space if space is None else space
    return Rigged(space=spaces.Dict(dict.fromkeys(names, box)), good=dict.fromkeys(names, Rigged().good))


BUILT = "backs a state already … it has no spec … pass an id or a factory"
BASE = "sets: call super().__init__(**kwargs)"


@table(
    ("an id", lambda: make("No-v0"), ValueError, "'No-v0' … doesn't exist … gymnasium.registry … import"),
    ("a class by name", lambda: make(WALK), ValueError, f"{WALK!r} … pass the class … import Walk … make_env(Walk,"),
    ("no module", lambda: make("no:A-v1"), ValueError, "'no:A-v1' … No module named 'no' … import the package"),
    ("of Torch", lambda: make("torch/Ant"), ValueError, "'Ant' … one of ['CartPole-v1', 'Pendulum-v1'] … leave"),
    ("a keyword of none", lambda: make(CARTPOLE, gravity=3), TypeError, "'CartPole-v1' … 'gravity' … leave out"),
    ("one of Torch", lambda: make("torch/CartPole-v1", a=1), TypeError, "'torch/CartPole-v1' … 'a' … it takes num"),
    ("a key twice", lambda: make(Rigged, info_keys=["a"] * 2), ValueError, "info_keys is ['a', 'a'] … each key once"),
    ("an instance twice", lambda: make([gym()] * 2), ValueError, "same environment instance … one instance per lane"),
    ("one that is made", lambda: make([good()]), TypeError, "holds HostEnv('CartPole-v1' … its own: pass it alone"),
    ("an empty list", lambda: make([]), ValueError, "list of environments is empty … at least"),
    ("a count", lambda: make([gym, gym], num_envs=3), ValueError, "is 3 … the list holds 2 … leave num_envs out"),
    ("one for two", lambda: make(gym(), num_envs=2), ValueError, "is 2 … one environment instance … its id or a"),
    ("two of a vector", lambda: make(vector(), num_envs=2), ValueError, "num_envs cannot … a VectorEnv … leave"),
    ("a limit", lambda: make(gym(), max_episode_steps=5), ValueError, "max_episode_steps cannot … an environment in"),
    ("two of an Env", lambda: make(good(), num_envs=2), ValueError, "num_envs cannot be given with HostEnv( … pass"),
    ("two of a made", lambda: make(lambda: fc.envs.CartPole(), num_envs=2), ValueError, "cannot … CartPole() … pass"),
    ("nothing", lambda: make(lambda: None), TypeError, "factory returned NoneType … expected an Env … return the"),
    ("nothing later", lambda: runs(make([gym, lambda: None])), TypeError, "lane 1 … NoneType … expected … return"),
    ("wrapped twice", shared_behind_wrappers, ValueError, "lane 1 … backs a lane already … build a new one at each"),
    ("not open", lambda: fc.init(Raising(), fc.random_policy(good()), seed=0), TypeError, "env is Raising … make_env"),
    ("not open, sampled", lambda: fc.random_policy(Raising()), TypeError, "Raising … make_env"),
    ("a number", lambda: make(3), TypeError, "env is int … expected a Gymnasium id … or a list"),
    ("a second state", lambda: second_state(False), InUseError, BUILT),
    ("a second Env", lambda: second_state(True), InUseError, BUILT),
    ("no space", Incomplete, TypeError, "Incomplete lacks ['action_space'] … of the class … before super()."),
    ("not built", lambda: make(Unbuilt, num_envs=2), TypeError, f"Unbuilt lacks … {BASE}"),
    ("no spaces", lambda: make(Spaceless), TypeError, "Spaceless lacks ['observation_space', 'action_space'] … set"),
    ("two spaces", lambda: make([gym(), gym("Acrobot-v1")]), ValueError, "lane 1 has … (6,) … lane 0 has … use equal"),
    ("two actions", lambda: runs(make([Rigged, five])), ValueError, "lane 1 has … Discrete(5) … Discrete(3) … use"),
    ("the key next", lambda: make(keyed("next")), ValueError, "key 'next' collides … rename it … taken are"),
    ("the key info", lambda: make(keyed("info"), info_keys=["a"]), ValueError, "'info' collides with info_keys"),
)
def test_an_environment_given_wrongly(misuse):
    with refused(misuse.error, misuse.says):
        misuse.do()


def test_what_was_opened_for_nothing_is_closed_and_an_instance_is_given_back():
    made = []

    def factory():
        made.append(Rigged())
        return made[-1]

    wrong = [True]
    instance = Rigged()
    last = lambda: Acting(spaces.Discrete(5)) if wrong else Rigged()  # noqa: E731
    with refused(ValueError, ("lane 2 has the action_space",)):
        make([instance, factory, last])
    assert [each.closed for each in made] == [1]
    assert instance.closed == 0
    wrong.clear()
    fc.close(runs(make([instance, factory, last])))
    assert instance.closed == 1


class OneOfAProcess(Rigged):
    """As stable-retro's games."""

    live: ClassVar = []

    def __init__(self):
        if self.live:
            raise RuntimeError("Cannot create multiple emulator instances per process, make sure to call env.close()")
        super().__init__()
        self.live.append(self)

    def close(self):
        self.live.clear()


@pytest.mark.usefixtures("sent_by_value")
def test_an_environment_of_which_a_process_holds_one_names_num_workers():
    env = make(OneOfAProcess, num_envs=2)
    with refused(EnvError, "lane 1 … one environment in each process (Cannot create … num_workers=, as many as num"):
        runs(env)
    OneOfAProcess.live.clear()
    fc.close(runs(make(OneOfAProcess, num_envs=2, num_workers=2)))


class Unseeded(Rigged):
    def reset(self, *, seed=None, options=None):
        self.generator = np.random.default_rng()
        return super().reset(seed=seed)

    def step(self, action):
        return self.generator.uniform(-9, 9, 2).astype(np.float32), *super().step(action)[1:]


def test_a_simulator_that_is_no_function_of_its_seed_is_reported():
    with pytest.raises(fc.CheckError, match=r"'same_seed' .* function of its seed .* pass replayable=False"):
        fc.testing.check_env(Unseeded, num_envs=2)
    env = make(Unseeded, num_envs=2)
    assert "if the simulator is a function of its seed" in fc.explain(env, fc.random_policy(env)).seeding
    with pytest.raises(ReplayError):
        fc.fork(env, runs(env))


ONWARD = "begin new episodes with funcollect.recover(env, state)"


def lanes(spoil, at=FAULT, info_keys=(), **how):
    return fc.make_env([Rigged(**how), Rigged(spoil, at=at, **how), Rigged(**how)], info_keys=info_keys)


def step(what, spoil, *says, **how):
    return Misuse(what, lambda: lanes(spoil, **how), EnvError, ("lane 1", *says))


BYTES = {"space": spaces.Box(0, 255, (2,), np.uint8), "good": np.ones(2, np.uint8)}
CHOICE = {"space": spaces.Discrete(4), "good": 1}
NESTED = {"space": spaces.Dict({"position": spaces.Box(-9, 9, (2,)), "mode": spaces.Discrete(4)})}
NESTED["good"] = {"position": np.ones(2, np.float32), "mode": 2}
TUPLE = {"space": spaces.Tuple((spaces.Discrete(4), spaces.Box(-9, 9, (2,)))), "good": (1, np.ones(2, np.float32))}


def seen(what, observation, *says, **how):
    return step(what, swaps(0, observation), *says, **how)


@table(
    step("step raises", raises(RuntimeError("out of petrol")), "step(", "out of petrol", ONWARD),
    step("four values", lambda answer: answer[:4], "step returned", "expected the five values", "use Gymnasium's"),
    step("a NaN reward", swaps(1, float("nan")), "step 2 of this batch", "the reward is NaN", "expected a number"),
    step("an array of rewards", swaps(1, np.ones(3)), "the reward array([1., 1., 1.])", "expected a number", "return"),
    step("no info key", swaps(4, {"time": 0.1}), "no info key 'speed'", "['time']", "name one", info_keys=["speed"]),
    step("no info", swaps(4, None), "the info None", "expected a dict", "return one", info_keys=["speed"]),
    seen("a shape that would broadcast", np.ones(1, np.float32), "has shape (1,)", "wants (2,)", "correct the space"),
    seen("a list without a shape", [1.0, [2.0, 3.0]], "'observation' is list and no array", "wants", "correct"),
    seen("a float for an integer", 1.5, "has dtype float64", "wants int64", "cast", **CHOICE),
    seen("a number beyond its bytes", np.array([1, 300]), "has dtype int64", "wants uint8", "cast", **BYTES),
    seen("a missing key", {"position": np.ones(2)}, "keys ['position']", "['mode', 'position']", "return", **NESTED),
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


AT_RESETS = [
    (raises(RuntimeError("no table")), ("reset(seed=", "no table", ONWARD)),
    (raises(TypeError("unexpected keyword argument 'seed'")), ("use Gymnasium's reset API",)),
    (lambda answer: answer[0], ("reset returned array", "expected the two values", "use Gymnasium's reset")),
    (swaps(0, np.ones(3, np.float32)), ("'observation' has shape (3,)", "wants (2,)", "correct")),
]


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


@pytest.mark.parametrize(("spoil", "says"), AT_RESETS)
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


def spoilt_vector(spoil):
    class Vector(SyncVectorEnv):
        times = 0

        def step(self, actions):
            self.times += 1
            answer = super().step(actions)
            return spoil(answer) if self.times == FAULT else answer

    return fc.make_env(Vector([Rigged] * 2, autoreset_mode=AutoresetMode.DISABLED))


def joined(what, spoil, *says):
    return Misuse(what, lambda: spoilt_vector(spoil), EnvError, says)


@table(
    joined("step raises", raises(OSError("cut")), VECTOR, "step raised OSError('cut')", "begin new episodes"),
    joined("rows of one lane", swaps(0, np.ones((1, 2))), VECTOR, "'observation' has shape (1, 2)", "wants (2, 2)"),
    joined("flags for one lane", swaps(2, np.zeros(1, bool)), RETURNED, "2 values each", "use Gymnasium's"),
    joined("NaN", swaps(1, np.array([0.0, np.nan])), "lane 1, step 2", "the reward is NaN", "expected a number"),
)
def test_a_vector_environment_that_goes_wrong(misuse):
    fails_then_runs(misuse.do, fc.random_policy, misuse.error, misuse.says)


class Walk(InParts):
    observation_space = spaces.Box(-9, 9, (2,))
    action_space = spaces.Discrete(3)
    draws = 2


TWO = {"observation_space": spaces.Dict(dict.fromkeys(("left", "right"), Walk.observation_space))}


def walk(what, method, change, *says, **members):
    """A `Walk` whose method's answer goes through `change`."""
    own = getattr(Walk, method)
    wrong = type("Walk", (Walk,), {method: lambda self, *given: change(own(self, *given)), **members})
    return Misuse(what, lambda: wrong(num_envs=3), EnvError, says)


@table(
    walk("a wrong shape", "observe", lambda x: x[:, :1], "'observation' of Walk", "(3, 1)", "(3, 2)", "correct"),
    walk("a missing key", "observe", lambda x: {"left": x}, "the observation of Walk", "lacks the structure", **TWO),
    walk("no tensor", "observe", lambda x: x.tolist(), "'observation' of Walk", "is list", "expected", "correct"),
    walk("a wide reward", "move", swaps(1, torch.ones(3, 1)), "reward of Walk", "(3, 1)", "(3,)", "correct"),
    walk("NaN", "move", swaps(1, torch.tensor([0.0, torch.nan, 0.0])), "lane 1, step 0 of this batch", "is NaN"),
    walk("one flag", "move", swaps(2, torch.tensor(True)), "terminated of Walk", "()", "(3,)", "correct"),
)
def test_a_torch_environment_that_goes_wrong_is_found_at_once(misuse):
    with refused(misuse.error, misuse.says):
        runs(misuse.do())
    runs(Walk(num_envs=3))


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
