"""Gymnasium environments: an id, a factory, an instance, a list of these, or a `VectorEnv`."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import gymnasium
import numpy.typing as npt
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from funcollect.arguments import check_flags, check_keys, check_num_envs
from funcollect.envs.base import EnvBase, built, check_spaces, with_time_limit
from funcollect.envs.gymnasium_envs.atari_lanes import AtariLanes, check_lives, is_atari
from funcollect.envs.gymnasium_envs.lanes import GymEnv, Lanes
from funcollect.envs.gymnasium_envs.vector_lanes import GymVectorEnv, VectorLanes, check_autoreset
from funcollect.envs.host.host_env import OpenerOf, SimulatedEnv
from funcollect.envs.host.lane_workers.options import LaneWorkers, refuse_removed
from funcollect.envs.host.lane_workers.simulators import WorkerLanes
from funcollect.envs.recognise import has_time_limit, refuse_foreign, running_statistics
from funcollect.errors import InUseError
from funcollect.processes.system import SIGNS
from funcollect.protocols import Forking, Simulators, is_env
from funcollect.specs import ActionSpec, observation_leaves

EnvSource = str | EnvSpec | GymEnv | Callable[..., GymEnv]
Opener = Callable[[SimulatedEnv], Simulators]  # makes the simulators of an adapted environment, once for each state
_ATARI = re.compile(r"ALE/(?P<game>\w+)-v\d+|(?P<old>[A-Z]\w+?)(NoFrameskip|Deterministic)-v\d+")  # ids of Atari games
_A_CLASS = re.compile(r"[\w.]+:[A-Za-z_]\w*")  # an address of Python, not an id of Gymnasium

# By id: the environments that back a state, or did until it was closed.
_TAKEN: WeakValueDictionary[int, Any] = WeakValueDictionary()


def from_gymnasium(
    env: EnvSource | GymVectorEnv | Sequence[EnvSource],
    *,
    num_envs: int | None = None,
    num_workers: int = 0,
    parallel: bool = False,
    timeout: float = 60.0,
    info_keys: Sequence[str] = (),
    dtype: npt.DTypeLike | None = None,
    one_hot: bool = False,
    replayable: bool = True,
    **kwargs: Any,
) -> SimulatedEnv:
    """A host environment over Gymnasium's.

    Each episode is seeded. Atari games (ale-py's, under any wrappers) are seeded once per lane instead, since a seeded
    reset reloads the game; `fork` takes a snapshot of them. Under ``AtariPreprocessing(terminal_on_life_loss=True)``,
    the episode after a lost life goes on with the next life (see `from_ale`), except in an `AsyncVectorEnv`.

    Args:
        env: a registered id, an `EnvSpec`, a factory, an instance, a list of these (one per lane), or a `VectorEnv`
            built with ``autoreset_mode=AutoresetMode.DISABLED``. An instance backs one state; another state over it is
            rebuilt from its spec.
        num_envs: P, made from one id, spec or factory; None for a single environment without a batch dimension.
        num_workers: the number of worker processes, each with a contiguous group of lanes; 0 for none. The data are the
            same. Workers pay where a simulator's step takes long (`funcollect.explain` shows whether they do).
            Factories and lambdas are sent by cloudpickle; instances cannot be sent.
        parallel: True means one worker for each lane.
        timeout: seconds after which a worker that has neither answered nor stepped a lane counts as hung; it may take
            300 to make an environment. A worker that dies, hangs or raises ends the rollout; `recover`, or a
            collector's next batch, starts another in its place.
        info_keys: keys of `info` that a batch records under ``next.info``. Every step has to return them
            (`RecordEpisodeStatistics` returns ``episode`` at ends only: use `funcollect.episode_stats`).
        dtype: the dtype of floating observations in a batch; float32 by default.
        one_hot: discrete actions as one-hot int64 rows, TorchRL's encoding, instead of integers.
        replayable: False keeps no actions of the current episodes (at most 128 MiB for each state), from which `fork`
            and `save` replay them. Both then raise `ReplayError`, except ``save(…, episodes="restart")``.
        **kwargs: for `gymnasium.make`, or for the factory.

    Raises:
        ValueError: for an unknown id, a count that does not fit, an instance given twice, spaces that differ between
            lanes, a vector environment that resets itself, keys that collide with a batch's own, or
            ``replayable=False`` for an Atari game.
        TypeError: for anything else as `env`, and for spaces without arrays of fixed size.

    >>> from_gymnasium("CartPole-v1", num_envs=8)
    HostEnv('CartPole-v1', num_envs=8)
    """
    refuse_removed(kwargs)
    check_keys("info_keys", info_keys, "x_position")
    check_flags(one_hot=one_hot, replayable=replayable)
    workers, open_group = None, None
    if isinstance(env, VectorEnv):
        own = {"num_envs": num_envs, "parallel": parallel or None, "num_workers": num_workers or None}
        _refuse("a VectorEnv", **own, timeout=None if timeout == LaneWorkers.timeout else timeout, **kwargs)
        first: Any = env
        num_envs, opener, limited = env.num_envs, _open_vector(env), has_time_limit(env)
        label = f"{type(env).__name__} of {env.spec.id}" if env.spec else type(env).__name__
        space, action_space = env.single_observation_space, env.single_action_space
    else:
        sources = _sources_of(env, num_envs)
        if num_envs is not None or (isinstance(env, Sequence) and not isinstance(env, str)):
            num_envs = len(sources)
        workers = LaneWorkers.checked(len(sources), parallel=parallel, num_workers=num_workers, timeout=timeout)
        if workers:
            opener = WorkerLanes
            first, open_group = _open_in_workers(sources, kwargs)
            alike = "max_episode_steps" in kwargs or all(source is sources[0] for source in sources)
            limited = alike and has_time_limit(first)  # unlike ones are made in the workers only
        else:
            made, opener = _open_here(sources, kwargs)
            first, limited = made[0], all(map(has_time_limit, made))
        label = first.spec.id if first.spec is not None else type(first.unwrapped).__name__
        space, action_space = first.observation_space, first.action_space
    leaves, spec = observation_leaves(space, dtype), ActionSpec(action_space, one_hot)
    if info_keys and any(leaf.path[0] == "info" for leaf in leaves):
        raise ValueError("the observation key 'info' collides with info_keys: rename it, or leave info_keys out")
    statistics, atari = running_statistics(first), is_atari(first)
    if atari and not replayable:
        raise ValueError("replayable=False was given for Atari games, which are copied by snapshots: leave it out")
    copying: Forking = "snapshot" if atari else "replay" if replayable else "none"
    return SimulatedEnv(
        label=f"{label} in {workers}" if workers else label,
        num_envs=num_envs,
        observation_space=space,
        action_spec=spec,
        observation_leaves=leaves,
        opener=opener,
        info_keys=tuple(info_keys),
        seeding="lane" if atari else "episode",
        forking="none" if statistics else copying,
        running_statistics=statistics,
        workers=workers,
        truncates=atari or limited,
        open_group=open_group,
    )


def _sources_of(env: EnvSource | Sequence[EnvSource], num_envs: int | None) -> list[EnvSource]:
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


def _open_here(sources: list[EnvSource], kwargs: dict[str, Any]) -> tuple[list[GymEnv], Opener]:
    """Environments for the first state (of the first lane, and of those with another source), and the opener."""
    factories = [_factory_of(source, kwargs) for source in sources]
    made: list[GymEnv] = []
    with contextlib.ExitStack() as on_failure:
        for lane, (source, factory) in enumerate(zip(sources, factories, strict=True)):
            if lane and source is sources[0]:
                continue
            factories[lane] = own = factory if isinstance(factory, _Made) else _Made(factory(), factory)
            made.append(own.env)
            _check_lane(lane, own.env, made[0], atari=is_atari(made[0]))
            if own is not factory:
                on_failure.callback(own.env.close)
        on_failure.pop_all()
    return made, partial(_open_lanes, factories, is_atari(made[0]))


def _open_in_workers(sources: list[EnvSource], kwargs: dict[str, Any]) -> tuple[GymEnv, OpenerOf]:
    """A closed copy of the first lane's environment, for its spaces, and the openers of lanes in worker processes."""
    factories = [_factory_of(source, kwargs, in_worker=True) for source in sources]
    first = _factory_of(sources[0], kwargs)()
    atari = is_atari(first)
    _check_lane(0, first, first, atari=atari)
    first.close()
    return first, lambda first, end: partial(_open_lanes, factories[first:end], atari)


def _open_vector(vector: GymVectorEnv) -> Opener:
    """The opener over a vector environment: the first state gets it, and each later one a copy."""
    check_autoreset(vector)
    check_lives(vector)
    build = partial(_rebuild, vector)
    made = _Made(vector, build)
    return lambda env: VectorLanes(_taken(made()), env, build)


@dataclass(frozen=True)
class _Made:
    """A factory over an environment that exists: a call returns it, or a new one if it backs a state already."""

    env: Any
    build: Callable[[], Any]  # makes a new one

    def __call__(self) -> Any:
        return self.build() if id(self.env) in _TAKEN else self.env


def _taken(env: Any) -> Any:
    _TAKEN[id(env)] = env
    return env


def _open_lanes(factories: Sequence[Callable[[], Any]], atari: bool, env: SimulatedEnv) -> Lanes:
    """The simulators of an environment, one lane for each factory; whether these make Atari games.

    On failure, the user's instances are released, and the environments built here are closed.
    """
    lanes: list[GymEnv] = []
    try:
        for lane, factory in enumerate(factories, env.first_lane):
            made = factory()
            _check_lane(lane, made, env, atari=atari)
            if id(made) in _TAKEN or any(made.unwrapped is other.unwrapped for other in lanes):
                raise ValueError(
                    f"lane {lane}: the factory returned an environment that backs a lane already: build a new one at "
                    "each call"
                )
            lanes.append(_taken(made))
            SIGNS.count[0] += 1
    except BaseException:
        for factory, made in zip(factories, lanes, strict=False):
            del _TAKEN[id(made)]
            if not isinstance(factory, _Made) or factory.env is not made:
                made.close()
        raise
    return (AtariLanes if atari else Lanes)(lanes, env)


def _factory_of(source: EnvSource, kwargs: dict[str, Any], *, in_worker: bool = False) -> Callable[[], Any]:
    """A function without arguments that makes the environment of one lane, in this process or in a worker.

    A worker's needs no import of what registers an id.
    """
    if isinstance(source, gymnasium.Env):
        if in_worker:
            raise ValueError(
                f"num_workers, or parallel=True, was given with the instance {source}, which cannot move to another "
                "process: pass its id or a factory"
            )
        _refuse("an environment instance", **kwargs)
        return _Made(source, partial(_rebuild, source))
    if isinstance(source, (str, EnvSpec)):
        return partial(_make, _spec_of(source) if in_worker and isinstance(source, str) else source, kwargs)
    refuse_foreign(source)
    if is_env(source):
        raise TypeError(f"the list of environments holds {source}, which has lanes of its own: pass it alone")
    name = type(source).__name__
    if isinstance(source, EnvBase):
        raise TypeError(
            f"{name} lacks what the constructor of its base class sets: call super().__init__(**kwargs) in its own, "
            "after it has set the spaces"
        )
    if not callable(source):
        raise TypeError(
            f"env is {name}, expected a Gymnasium id, an EnvSpec, a factory, a gymnasium.Env or a list: pass one of "
            "these (an environment of a JAX suite goes to its adapter, such as funcollect.envs.from_gymnax)"
        )
    factory, kwargs = with_time_limit(source, kwargs)
    return partial(built, factory, kwargs)


def _spec_of(env_id: str) -> EnvSpec:
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        return gymnasium.spec(name)
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise _not_made(env_id, error) from error


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
    mend = (
        "look the id up in gymnasium.registry, and import the package that registers it first, or name the module in "
        "the id ('module:Name-v0'), as workers of collectors need it"
    )
    if _A_CLASS.fullmatch(name):
        module, _, member = name.partition(":")
        mend = f"pass the class: from {module} import {member}, then make_env({member}, …)"
    if found := _ATARI.fullmatch(name):
        mend = (
            f"write 'ale/{found['game'] or found['old']}', which has the usual preprocessing, or 'ale_py:{name}' for "
            "the raw game"
        )
    return ValueError(f"Gymnasium cannot make {name!r}: {str(error).rstrip('.')}; {mend}")


def _rebuild(env: Any) -> Any:
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


def _check_lane(lane: int, env: Any, first: GymEnv | SimulatedEnv, *, atari: bool) -> None:
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


def _refuse(what: str, **arguments: Any) -> None:
    """Raise ValueError for arguments other than None, which cannot be given with `what`, since it is built already."""
    if given := [name for name, value in arguments.items() if value is not None]:
        raise ValueError(f"{', '.join(given)} cannot be given with {what}, which is built already: leave it out")
