"""Environments given wrongly, and their spaces and keys: said at construction, or at the first `init`."""

import gymnasium
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import funcollect as fc
from funcollect.errors import InUseError
from tests.support.envs.torch_parts import InParts
from tests.support.misuse import Acting, Rigged, refused, refused_then_mended, runs, table

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


class Complete(Incomplete):
    action_space = spaces.Discrete(2)


class Spaceless(gymnasium.Env):
    """It has both functions, but declares no space."""


def five():
    return Acting(spaces.Discrete(5))


def twice():
    env = gym()
    return make([env, env])


def shared_behind_wrappers():
    env = gym()
    return runs(make(lambda: gymnasium.wrappers.TimeLimit(env, 9), num_envs=2))


def second_init():
    env = make(Rigged())
    state = runs(env)
    try:
        runs(env)
    finally:
        runs(env, state=state)  # the first one goes on
    return


def second_env_of_one_instance():
    instance = Rigged()
    env = make(instance)
    state = runs(env)
    try:
        runs(make(instance))
    finally:
        runs(env, state=state)
    return


def keyed(*names, space=None):
    """An environment whose observation is a Dict of these."""
    box = Rigged.observation_space if space is None else space
    return Rigged(space=spaces.Dict(dict.fromkeys(names, box)), good=dict.fromkeys(names, Rigged().good))


BUILT = "backs a state already … it has no spec … pass an id or a factory"
BASE = "sets: call super().__init__(**kwargs)"


@table(
    ("an id", lambda: make("No-v0"), ValueError, "'No-v0' … doesn't exist … gymnasium.registry … import", good),
    ("a version", lambda: make("CartPole-v99"), ValueError, "'CartPole-v99' … `v1` … gymnasium.registry"),
    ("a class by name", lambda: make(WALK), ValueError, f"{WALK!r} … pass the class … import Walk … make_env(Walk,"),
    ("no module", lambda: make("no:A-v1"), ValueError, "'no:A-v1' … No module named 'no' … import the package"),
    ("of Torch", lambda: make("torch/Ant"), ValueError, "'Ant' … one of ['CartPole-v1', 'Pendulum-v1'] … leave"),
    ("a keyword of none", lambda: make(CARTPOLE, gravity=3), TypeError, "'CartPole-v1' … 'gravity' … leave out"),
    ("one of Torch", lambda: make("torch/CartPole-v1", a=1), TypeError, "'torch/CartPole-v1' … 'a' … it takes num"),
    ("a key twice", lambda: make(Rigged, info_keys=["a"] * 2), ValueError, "info_keys is ['a', 'a'] … each key once"),
    ("an instance twice", twice, ValueError, "same environment instance … one instance per lane"),
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
    ("a number", lambda: make(3), TypeError, "env is int … expected a Gymnasium id … or a list"),
    ("a second state", second_init, InUseError, BUILT, lambda: make(Rigged)),
    ("a second Env", second_env_of_one_instance, InUseError, BUILT),
    ("no space", Incomplete, TypeError, "Incomplete lacks ['action_space'] … of the class … before super().", Complete),
    ("not built", lambda: make(Unbuilt, num_envs=2), TypeError, f"Unbuilt lacks … {BASE}"),
    ("no spaces", lambda: make(Spaceless), TypeError, "Spaceless lacks ['observation_space', 'action_space'] … set"),
    ("two spaces", lambda: make([gym(), gym("Acrobot-v1")]), ValueError, "lane 1 has … (6,) … lane 0 has … use equal"),
    ("two actions", lambda: runs(make([Rigged, five])), ValueError, "lane 1 has … Discrete(5) … Discrete(3) … use"),
    ("the key next", lambda: make(keyed("next")), ValueError, "key 'next' collides … rename it … taken are"),
    ("the key info", lambda: make(keyed("info"), info_keys=["a"]), ValueError, "'info' collides with info_keys"),
)
def test_an_environment_given_wrongly(misuse):
    refused_then_mended(misuse)


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
