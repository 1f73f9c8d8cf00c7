"""Environments whose spaces, keys and lanes do not do: said before anything is collected."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

import funcollect as fc
from tests.support.misuse import Acting, Misuse, Rigged, refused, runs, table

CARTPOLE = "CartPole-v1"


def gym(name: str = CARTPOLE) -> Any:
    return gymnasium.make(name, disable_env_checker=True)


def good() -> Any:
    return fc.make_env(CARTPOLE, num_envs=2)


def keyed(*names: str, space: Any = None) -> Rigged:
    """An environment whose observation is a Dict of these."""
    box = Rigged.observation_space if space is None else space
    return Rigged(space=spaces.Dict(dict.fromkeys(names, box)), good=dict.fromkeys(names, Rigged().good))


def observing(space: Any) -> Any:
    return fc.make_env(Rigged(space=space))


def unsupported(space: Any) -> Misuse:
    says = ("the observation space at observation", type(space).__name__, "expected Box", "flatten it")
    return Misuse(f"a {type(space).__name__} space", lambda: observing(space), TypeError, says, good)


def collides(name: str) -> Misuse:
    return Misuse(
        f"the observation key {name}",
        lambda: fc.make_env(keyed("position", name)),
        ValueError,
        (f"the observation key {name!r} collides", "rename it", "taken are"),
        lambda: fc.make_env(keyed("position", f"my_{name}")),
    )


@table(
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
    *map(collides, ("action", "next", "collector", "done", "reward", "terminated", "truncated", "action_log_prob")),
    Misuse(
        "an observation key with a dot",
        lambda: fc.make_env(keyed("arm.left")),
        ValueError,
        ("the observation key ('arm.left',)", "holds a dot", "rename it"),
        lambda: fc.make_env(keyed("arm_left")),
    ),
    *map(
        unsupported,
        (
            spaces.Text(5),
            spaces.Graph(spaces.Box(-1, 1, (2,)), None),
            spaces.Sequence(spaces.Discrete(2)),
            spaces.OneOf([spaces.Discrete(2)]),
        ),
    ),
    *(
        Misuse(
            f"{space} for observations",
            lambda space=space: observing(space),
            ValueError,
            ("the observation space", "has no arrays", "expected at least one", "add one"),
            good,
        )
        for space in (spaces.Dict(), spaces.Tuple(()), spaces.Dict({"inner": spaces.Dict()}))
    ),
    Misuse(
        "a Text space inside a Dict",
        lambda: observing(spaces.Dict({"position": spaces.Box(-1, 1), "label": spaces.Text(5)})),
        TypeError,
        ("the observation space at label is Text", "expected Box", "flatten it"),
        good,
    ),
    Misuse(
        "no components of actions",
        lambda: fc.make_env(Acting(spaces.MultiDiscrete([]))),
        ValueError,
        ("the action space MultiDiscrete([])", "has no components", "expected at least one", "add one"),
        good,
    ),
    Misuse(
        "a Dict of actions",
        lambda: fc.make_env(Acting(spaces.Dict({"left": spaces.Discrete(2)}))),
        TypeError,
        ("the action space is Dict", "expected Box", "flatten it"),
        good,
    ),
    Misuse(
        "one_hot on a Box",
        lambda: fc.make_env("Pendulum-v1", one_hot=True),
        ValueError,
        ("one_hot=True needs a Discrete", "got Box"),
        lambda: fc.make_env(CARTPOLE, one_hot=True),
    ),
    Misuse(
        "an integer dtype",
        lambda: fc.make_env(CARTPOLE, dtype=np.int32),
        ValueError,
        ("dtype is int32", "expected a floating one"),
        lambda: fc.make_env(CARTPOLE, dtype=np.float64),
    ),
    Misuse(
        "info_keys as one string",
        lambda: fc.make_env(Rigged, info_keys="speed"),
        TypeError,
        ("info_keys is 'speed'", "expected a list of strings"),
        lambda: fc.make_env(Rigged, info_keys=["speed"]),
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
def test_spaces_that_do_not_do(misuse: Misuse) -> None:
    with refused(misuse.error, misuse.says):
        misuse.do()
    assert misuse.mend is not None
    fc.close(runs(misuse.mend()))


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
