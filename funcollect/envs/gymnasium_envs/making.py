"""Make Gymnasium environments from ids, specs, factories and instances; an instance backs one state."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from funcollect.arguments import check_num_envs, check_positive
from funcollect.envs.base import EnvBase, check_spaces
from funcollect.envs.gymnasium_envs.atari_lanes import AtariLanes, is_atari
from funcollect.envs.gymnasium_envs.lanes import GymEnv, Lanes
from funcollect.envs.host.host_env import SimulatedEnv
from funcollect.envs.recognise import refuse_foreign
from funcollect.errors import InUseError
from funcollect.processes.life import SIGNS
from funcollect.protocols import is_env

EnvSource = str | EnvSpec | GymEnv | Callable[..., GymEnv]
LaneFactory = Callable[[], Any]
_ATARI = re.compile(r"ALE/(?P<game>\w+)-v\d+|(?P<old>[A-Z]\w+?)(NoFrameskip|Deterministic)-v\d+")  # ids of Atari games
_A_CLASS = re.compile(r"[\w.]+:[A-Za-z_]\w*")  # an address of Python, not an id of Gymnasium

# By id: the environments that back a state, or did until it was closed.
_TAKEN: WeakValueDictionary[int, Any] = WeakValueDictionary()


@dataclass(frozen=True)
class Made:
    """A factory over an environment that exists: a call returns it, or a new one if it backs a state already."""

    env: Any
    build: LaneFactory  # makes a new one

    def __call__(self) -> Any:
        """An environment that backs no state yet."""
        return self.build() if id(self.env) in _TAKEN else self.env


def taken(env: Any) -> Any:
    """Record that `env` backs a state from now on, and return it."""
    _TAKEN[id(env)] = env
    return env


def open_lanes(factories: Sequence[LaneFactory], atari: bool, env: SimulatedEnv) -> Lanes:
    """The simulators of an environment, one lane for each factory; whether these make Atari games.

    On failure, the user's instances are released, and the environments built here are closed.
    """
    lanes: list[GymEnv] = []
    try:
        for lane, factory in enumerate(factories, env.first_lane):
            made = factory()
            check_lane(lane, made, env, atari=atari)
            if id(made) in _TAKEN or any(made.unwrapped is other.unwrapped for other in lanes):
                raise ValueError(
                    f"lane {lane}: the factory returned an environment that backs a lane already: build a new one at "
                    "each call"
                )
            lanes.append(taken(made))
            SIGNS.count[0] += 1
    except BaseException:
        for factory, made in zip(factories, lanes, strict=False):
            del _TAKEN[id(made)]
            if not isinstance(factory, Made) or factory.env is not made:
                made.close()
        raise
    return (AtariLanes if atari else Lanes)(lanes, env)


def sources_of(env: EnvSource | Sequence[EnvSource], num_envs: int | None) -> list[EnvSource]:
    """The source of each lane; ValueError for an empty list, a wrong count, or an instance given for two lanes."""
    if isinstance(env, Sequence) and not isinstance(env, str):
        if not env:
            raise ValueError("the list of environments is empty: pass at least one")
        if num_envs not in (None, len(env)):
            raise ValueError(f"num_envs is {num_envs}, but the list holds {len(env)} environments: leave num_envs out")
        instances = [id(one) for one in env if isinstance(one, gymnasium.Env)]
        if len(set(instances)) < len(instances):
            raise ValueError("the same environment instance is in the list twice: pass one instance per lane")
        return list(env)
    check_num_envs(num_envs)
    if isinstance(env, gymnasium.Env) and (num_envs or 1) > 1:
        raise ValueError(
            f"num_envs is {num_envs}, but one environment instance was given: pass its id or a factory, or a list"
        )
    return [env] * (num_envs or 1)


def factory_of(source: EnvSource, kwargs: dict[str, Any], *, in_worker: bool = False) -> LaneFactory:
    """A function without arguments that makes the environment of one lane, in this process or in a worker.

    A worker's needs no import of what registers an id.
    """
    if isinstance(source, gymnasium.Env):
        if in_worker:
            raise ValueError(
                f"num_workers, or parallel=True, was given with the instance {source}, which cannot move to another "
                "process: pass its id or a factory"
            )
        refuse("an environment instance", **kwargs)
        return Made(source, partial(rebuild, source))
    if isinstance(source, (str, EnvSpec)):
        return partial(_make, _spec_of(source) if in_worker and isinstance(source, str) else source, kwargs)
    refuse_foreign(source)
    if is_env(source):
        raise TypeError(f"the list of environments holds {source}, which has lanes of its own: pass it alone")
    if not callable(source):
        raise _no_source(source)
    factory, kwargs = with_time_limit(source, kwargs)
    return partial(built, factory, kwargs)


def _no_source(given: Any) -> TypeError:
    """The error for something from which no environment can be made."""
    name = type(given).__name__
    if isinstance(given, EnvBase):
        return TypeError(
            f"{name} lacks what the constructor of its base class sets: call super().__init__(**kwargs) in its own, "
            "after it has set the spaces"
        )
    return TypeError(
        f"env is {name}, expected a Gymnasium id, an EnvSpec, a factory, a gymnasium.Env or a list: pass one of these "
        "(an environment of a JAX suite goes to its adapter, such as funcollect.envs.from_gymnax)"
    )


def _spec_of(env_id: str) -> EnvSpec:
    """The spec of an id; ValueError for an unknown one."""
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        return gymnasium.spec(name)
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise _not_made(env_id, error) from error


def with_time_limit(factory: Callable[..., Any], kwargs: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A factory and its keywords. If it does not take `max_episode_steps`, Gymnasium's wrapper sets the limit."""
    if "max_episode_steps" not in kwargs or _takes(factory, "max_episode_steps"):
        return factory, kwargs
    others = {name: value for name, value in kwargs.items() if name != "max_episode_steps"}
    check_positive("max_episode_steps", kwargs["max_episode_steps"], 500)
    return partial(_limited, factory, kwargs["max_episode_steps"]), others


def built(factory: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """What a factory returns; ValueError if it asks Gymnasium for an id that is not registered in this process."""
    try:
        return factory(**kwargs)
    except gymnasium.error.UnregisteredEnv as error:
        raise ValueError(
            f"the factory asks for an id that is not registered in this process ({str(error).rstrip('.')}), and a "
            "worker process lacks what a script has registered: name the module in the id ('module:Name-v0', "
            "'ale_py:ALE/Pong-v5'), register it in the factory, or pass the id itself to make_env(…, num_workers=…)"
        ) from error


def _takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function takes a keyword argument, as far as its signature shows."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _limited(factory: Callable[..., Any], steps: int, **kwargs: Any) -> GymEnv:
    made = factory(**kwargs)
    if not isinstance(made, gymnasium.Env):
        raise TypeError(
            f"max_episode_steps was given with a factory that does not take it, and that made {type(made).__name__}, "
            "expected a gymnasium.Env: leave it out"
        )
    return TimeLimit(made, steps)


def _make(spec: str | EnvSpec, kwargs: dict[str, Any]) -> GymEnv:
    """What Gymnasium makes, without its checks at each step: outcomes are checked here, and the loop resets first."""
    name = spec if isinstance(spec, str) else spec.id
    try:
        env = gymnasium.make(spec, disable_env_checker=True, **kwargs)
    except TypeError as error:
        if not kwargs:
            raise
        raise TypeError(
            f"Gymnasium cannot make {name!r}: {error}; leave out the arguments that its constructor lacks, or "
            "check the spelling of those that funcollect.envs.from_gymnasium documents, such as num_envs"
        ) from error
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise _not_made(name, error) from error
    if isinstance(env, TimeLimit) and isinstance(env.env, OrderEnforcing):
        env.env = env.env.env
    return env.env if isinstance(env, OrderEnforcing) else env


def _not_made(name: str, error: Exception) -> ValueError:
    """The error for an id that Gymnasium cannot make."""
    mend = (
        "look the id up in gymnasium.registry, and import the package that registers it first, or name the module in "
        "the id ('module:Name-v0'), as workers of collectors need it"
    )
    if _A_CLASS.fullmatch(name):
        module, _, member = name.partition(":")
        mend = f"pass the class: from {module} import {member}, then make_env({member}, …)"
    if found := _ATARI.fullmatch(name):
        game = found["game"] or found["old"]
        mend = f"write 'ale/{game}', which has the usual preprocessing, or 'ale_py:{name}' for the raw game"
    return ValueError(f"Gymnasium cannot make {name!r}: {str(error).rstrip('.')}; {mend}")


def rebuild(env: Any) -> Any:
    """Build another instance of `env` from its spec or, for a vector environment, its functions; else InUseError."""
    is_vector = isinstance(env, VectorEnv)
    try:
        if is_vector:
            return type(env)(env.env_fns, autoreset_mode=AutoresetMode.DISABLED)
        if env.spec is not None:
            return gymnasium.make(env.spec, disable_env_checker=True)
        reason = "it has no spec"
    except Exception as error:
        reason = repr(error)
    raise InUseError(
        f"{env} backs a state already and cannot be rebuilt ({reason}): pass an id or a factory, or a list of "
        "factories, instead of an instance"
    )


def check_lane(lane: int, env: Any, first: GymEnv | SimulatedEnv, *, atari: bool) -> None:
    """Raise unless `env` is a Gymnasium environment with the spaces of the first lane's, and Atari if that is."""
    refuse_foreign(env)
    if not isinstance(env, gymnasium.Env):
        raise TypeError(
            f"lane {lane}: the factory returned {type(env).__name__}, expected a gymnasium.Env: return the environment"
        )
    check_spaces(env)
    for name in ("observation_space", "action_space"):
        own, wanted = getattr(env, name), getattr(first, name)
        if own != wanted:
            raise ValueError(f"lane {lane} has the {name} {own}, lane 0 has {wanted}: use equal spaces in one batch")
    if is_atari(env) != atari:
        raise ValueError(
            f"lane {lane} is {env}, lane 0 is {first}: put Atari games, which are seeded differently, in a "
            "separate batch"
        )


def refuse(what: str, **arguments: Any) -> None:
    """Raise ValueError for arguments other than None, which cannot be given with `what`, since it is built already."""
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise ValueError(f"{', '.join(given)} cannot be given with {what}, which is built already: leave it out")
