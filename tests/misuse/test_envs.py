"""Environments given wrongly, and their spaces and keys: said at construction, or at the first `init`."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import funcollect as fc
from funcollect.errors import InUseError
from tests.support.envs.torch_parts import InParts
from tests.support.misuse import Acting, Misuse, Rigged, refused, refused_then_mended, runs, table

CARTPOLE = "CartPole-v1"


def gym(name: str = CARTPOLE) -> Any:
    return gymnasium.make(name, disable_env_checker=True)


def vector(mode: AutoresetMode) -> Any:
    return SyncVectorEnv([gym] * 2, autoreset_mode=mode)


def good() -> Any:
    return fc.make_env(CARTPOLE, num_envs=2)


class Unbuilt(fc.envs.CartPole):
    def __init__(self, num_envs: int | None = None) -> None:
        self.scale = 2.0


class Incomplete(InParts):
    observation_space = spaces.Box(-1, 1, (1,))

    def start(self, uniforms: Any) -> Any:
        return uniforms

    def observe(self, place: Any) -> Any:
        return place.float()

    def move(self, place: Any, action: Any) -> Any:
        return place, place[:, 0], place[:, 0] > 1


class Complete(Incomplete):
    action_space = spaces.Discrete(2)


class Spaceless(gymnasium.Env[Any, Any]):
    """It has both functions, but declares no space."""


def twice() -> Any:
    env = gym()
    return fc.make_env([env, env])


def shared_behind_wrappers() -> Any:
    env = gym()
    return runs(fc.make_env(lambda: gymnasium.wrappers.TimeLimit(env, 9), num_envs=2))


def second_init() -> Any:
    env = fc.make_env(Rigged())
    state = runs(env)
    try:
        runs(env)
    finally:
        runs(env, state=state)  # the first one goes on
    return None


def second_env_of_one_instance() -> Any:
    instance = Rigged()
    env = fc.make_env(instance)
    state = runs(env)
    try:
        runs(fc.make_env(instance))
    finally:
        runs(env, state=state)
    return None


def keyed(*names: str, space: Any = None) -> Rigged:
    """An environment whose observation is a Dict of these."""
    box = Rigged.observation_space if space is None else space
    return Rigged(space=spaces.Dict(dict.fromkeys(names, box)), good=dict.fromkeys(names, Rigged().good))


@table(
    Misuse(
        "an unknown id",
        lambda: fc.make_env("NoSuch-v0"),
        ValueError,
        ("'NoSuch-v0'", "doesn't exist", "gymnasium.registry", "import the package"),
        good,
    ),
    Misuse(
        "an unknown version",
        lambda: fc.make_env("CartPole-v99"),
        ValueError,
        ("'CartPole-v99'", "`v1`", "gymnasium.registry"),
        good,
    ),
    Misuse(
        "the address of a class",
        lambda: fc.make_env("tests.support.faulty.faulty_envs:Walk"),
        ValueError,
        ("'tests.support.faulty.faulty_envs:Walk'", "pass the class", "import Walk", "make_env(Walk, …)"),
        good,
    ),
    Misuse(
        "an id of a module that is not there",
        lambda: fc.make_env("nosuch:CartPole-v1"),
        ValueError,
        ("'nosuch:CartPole-v1'", "No module named 'nosuch'", "import the package"),
        good,
    ),
    Misuse(
        "an unknown Torch environment",
        lambda: fc.make_env("torch/HalfCheetah-v5"),
        ValueError,
        ("'HalfCheetah-v5'", "expected one of ['CartPole-v1', 'Pendulum-v1']", "leave 'torch/' out"),
        lambda: fc.make_env("torch/CartPole-v1"),
    ),
    Misuse(
        "an argument that a Torch environment lacks",
        lambda: fc.make_env("torch/CartPole-v1", one_hot=True),
        TypeError,
        ("'torch/CartPole-v1'", "'one_hot'", "it takes num_envs, device and max_episode_steps"),
        lambda: fc.make_env("torch/CartPole-v1", num_envs=2, device="cpu"),
    ),
    Misuse(
        "an argument that a Gymnasium environment lacks",
        lambda: fc.make_env(CARTPOLE, gravity=3),
        TypeError,
        ("cannot make 'CartPole-v1'", "'gravity'", "leave out"),
        good,
    ),
    Misuse("an instance twice", twice, ValueError, ("same environment instance", "one instance per lane"), good),
    Misuse(
        "an environment that is made",
        lambda: fc.make_env([fc.make_env("CartPole-v1", num_envs=2)]),
        TypeError,
        ("holds HostEnv('CartPole-v1', num_envs=2)", "lanes of its own", "pass it alone"),
        good,
    ),
    Misuse("an empty list", lambda: fc.make_env([]), ValueError, ("list of environments is empty", "at least"), good),
    Misuse(
        "num_envs against a list",
        lambda: fc.make_env([gym, gym], num_envs=3),
        ValueError,
        ("num_envs is 3", "the list holds 2", "leave num_envs out"),
        lambda: fc.make_env([gym, gym]),
    ),
    Misuse(
        "num_envs with an instance",
        lambda: fc.make_env(gym(), num_envs=2),
        ValueError,
        ("num_envs is 2", "one environment instance was given", "pass its id or a factory"),
        lambda: fc.make_env(gym, num_envs=2),
    ),
    Misuse(
        "num_envs with a vector environment",
        lambda: fc.make_env(vector(AutoresetMode.DISABLED), num_envs=2),
        ValueError,
        ("num_envs cannot be given with a VectorEnv", "leave it out"),
        lambda: fc.make_env(vector(AutoresetMode.DISABLED)),
    ),
    Misuse(
        "keyword arguments with an instance",
        lambda: fc.make_env(gym(), max_episode_steps=5),
        ValueError,
        ("max_episode_steps cannot be given with an environment instance", "leave it out"),
        lambda: fc.make_env(gym()),
    ),
    Misuse(
        "keyword arguments with an Env",
        lambda: fc.make_env(good(), num_envs=2),
        ValueError,
        ("num_envs cannot be given with HostEnv('CartPole-v1', num_envs=2)", "pass it when you make that"),
        good,
    ),
    Misuse(
        "num_envs with a factory of an Env",
        lambda: fc.make_env(lambda: fc.envs.CartPole(), num_envs=2),
        ValueError,
        ("num_envs cannot be given with CartPole()", "pass it when you make that"),
        lambda: fc.make_env(lambda: fc.envs.CartPole(num_envs=2)),
    ),
    Misuse(
        "a factory that returns nothing",
        lambda: fc.make_env(lambda: None),
        TypeError,
        ("factory returned NoneType", "expected an Env", "return the environment"),
        lambda: fc.make_env(lambda: gym()),
    ),
    Misuse(
        "a factory for the second lane that returns nothing",
        lambda: runs(fc.make_env([gym, lambda: None])),
        TypeError,
        ("lane 1", "returned NoneType", "expected a gymnasium.Env", "return the environment"),
        lambda: fc.make_env([gym, gym]),
    ),
    Misuse(
        "a factory that wraps the same instance",
        shared_behind_wrappers,
        ValueError,
        ("lane 1", "backs a lane already", "build a new one at each call"),
        lambda: fc.make_env(gym, num_envs=2),
    ),
    Misuse("a number", lambda: fc.make_env(3), TypeError, ("env is int", "expected a Gymnasium id", "or a list"), good),
    Misuse(
        "a second state over an instance without a spec",
        second_init,
        InUseError,
        ("backs a state already", "it has no spec", "pass an id or a factory"),
        lambda: fc.make_env(Rigged),
    ),
    Misuse(
        "a second Env over an instance in use",
        second_env_of_one_instance,
        InUseError,
        ("backs a state already", "it has no spec", "pass an id or a factory"),
        lambda: fc.make_env(Rigged),
    ),
    Misuse(
        "a vector environment that resets its lanes",
        lambda: fc.make_env(vector(AutoresetMode.NEXT_STEP)),
        ValueError,
        ("autoreset_mode=NEXT_STEP", "expected autoreset_mode=AutoresetMode.DISABLED", "or pass the list"),
        lambda: fc.make_env(vector(AutoresetMode.DISABLED)),
    ),
    Misuse(
        "a Torch environment without a space",
        Incomplete,
        TypeError,
        ("Incomplete lacks ['action_space']", "expected as attributes of the class", "before super().__init__()"),
        Complete,
    ),
    Misuse(
        "a Torch environment whose constructor does not call that of the base class",
        lambda: fc.make_env(Unbuilt, num_envs=2),
        TypeError,
        ("Unbuilt lacks what the constructor of its base class sets", "call super().__init__(**kwargs)"),
        Complete,
    ),
    Misuse(
        "a Gymnasium environment without spaces",
        lambda: fc.make_env(Spaceless, num_envs=2),
        TypeError,
        (
            "Spaceless lacks ['observation_space', 'action_space']",
            "expected as attributes",
            "before super().__init__()",
        ),
        good,
    ),
    Misuse(
        "lanes with different observations",
        lambda: fc.make_env([gym(), gym("Acrobot-v1")]),
        ValueError,
        ("lane 1 has the observation_space", "(6,)", "lane 0 has", "(4,)", "use equal spaces"),
        good,
    ),
    Misuse(
        "factories of different actions",
        lambda: runs(fc.make_env([Rigged, lambda: Acting(spaces.Discrete(5))])),
        ValueError,
        ("lane 1 has the action_space Discrete(5)", "lane 0 has Discrete(3)", "use equal spaces"),
        lambda: fc.make_env([Rigged, Rigged]),
    ),
    Misuse(
        "an observation key of a batch",
        lambda: fc.make_env(keyed("position", "next")),
        ValueError,
        ("the observation key 'next' collides", "rename it", "taken are"),
        lambda: fc.make_env(keyed("position", "my_next")),
    ),
    Misuse(
        "an info key twice",
        lambda: fc.make_env(Rigged, info_keys=["speed", "speed"]),
        ValueError,
        ("info_keys is ['speed', 'speed']", "expected each key once", "leave"),
        lambda: fc.make_env(Rigged, info_keys=["speed"]),
    ),
    Misuse(
        "the observation key info with info_keys",
        lambda: fc.make_env(keyed("info"), info_keys=["speed"]),
        ValueError,
        ("'info' collides with info_keys", "rename it"),
        lambda: fc.make_env(keyed("info")),
    ),
)
def test_an_environment_given_wrongly(misuse: Misuse) -> None:
    refused_then_mended(misuse)


def test_what_was_opened_for_nothing_is_closed_and_an_instance_is_given_back() -> None:
    made: list[Rigged] = []

    def factory() -> Rigged:
        made.append(Rigged())
        return made[-1]

    wrong = [True]
    instance = Rigged()
    last = lambda: Acting(spaces.Discrete(5)) if wrong else Rigged()  # noqa: E731
    with refused(ValueError, ("lane 2 has the action_space",)):
        fc.make_env([instance, factory, last])
    assert [each.closed for each in made] == [1]
    assert instance.closed == 0
    wrong.clear()
    fc.close(runs(fc.make_env([instance, factory, last])))
    assert instance.closed == 1
