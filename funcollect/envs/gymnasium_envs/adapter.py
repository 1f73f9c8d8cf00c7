"""Gymnasium environments: an id, a factory, an instance, a list of these, or a `VectorEnv`."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy.typing as npt
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from funcollect import arguments
from funcollect.envs import base
from funcollect.envs.gymnasium_envs.atari_lanes import AtariLanes, check_lives, is_atari
from funcollect.envs.gymnasium_envs.lanes import TAKEN, GymEnv, Lanes, Made, make_lane, own_spaces, rebuild
from funcollect.envs.gymnasium_envs.vector_lanes import GAMES, is_of_kind, over_vector
from funcollect.envs.host.host_env import Opener, OpenerOf, SimulatedEnv
from funcollect.envs.host.lane_workers.block import LaneWorkers, refuse_removed
from funcollect.envs.host.lane_workers.simulators import WorkerLanes
from funcollect.envs.plain_spaces import plain_actions, plain_observations
from funcollect.processes.system import SIGNS
from funcollect.protocols import Forking, is_env
from funcollect.specs import ActionSpec, observation_leaves

EnvSource = str | EnvSpec | GymEnv | Callable[..., GymEnv]
_ATARI = re.compile(r"ALE/(?P<game>\w+)-v\d+|(?P<old>[A-Z]\w+?)(NoFrameskip|Deterministic)-v\d+")  # ids of Atari games
_A_CLASS = re.compile(r"[\w.]+:[A-Za-z_]\w*")  # an address of Python, not an id of Gymnasium


def from_gymnasium(
    env: EnvSource | VectorEnv[Any, Any, Any] | Sequence[EnvSource],
    *,
    num_envs: int | None = None,
    num_workers: int = 0,
    parallel: bool = False,
    timeout: float = 60.0,
    wait: str = "all",
    min_ready: int | None = None,
    info_keys: Sequence[str] = (),
    dtype: npt.DTypeLike | None = None,
    one_hot: bool = False,
    replayable: bool = True,
    drop: Sequence[str] = (),
    text: int | None = None,
    autoreset_mode: str | AutoresetMode | None = None,
    max_carry: int | None = None,
    **kwargs: Any,
) -> SimulatedEnv:
    """A host environment over Gymnasium's.

    Each episode is seeded. Atari games (ale-py's, under any wrappers) are seeded once per lane instead, since a seeded
    reset reloads the game; `fork` takes a snapshot of them. Under ``AtariPreprocessing(terminal_on_life_loss=True)``,
    the episode after a lost life goes on with the next life (see `from_ale`); a `SyncVectorEnv` of these is refused.

    Actions of a Tuple or Dict space are one array in a batch: its parts in their order, flattened and joined. Discrete,
    MultiDiscrete and MultiBinary parts become one MultiDiscrete, Box parts one Box with all their bounds. The
    environment gets its own structure. A space with parts of both kinds is refused.

    Args:
        env: a registered id, an `EnvSpec`, a factory, an instance (which backs one state; others are rebuilt from its
            spec), a list of these (one per lane), or a `VectorEnv`, whichever way it resets its lanes.
        num_envs: P, made from one id, spec or factory; None for a single environment without a batch dimension.
        num_workers: the number of worker processes, each with a contiguous group of lanes; 0 for none. The data are the
            same. The guide to many simulators says when they pay, what can be sent to them, and what a lost one means.
        parallel: True means one worker for each lane.
        timeout: seconds after which a worker that has neither answered nor stepped a lane counts as hung.
        wait: ``"any"`` lets each worker make the steps of a rollout at its own pace: the policy is called for all lanes
            as soon as `min_ready` have answered, and only the end of the rollout is a barrier. The data are those of
            ``"all"``. For slow simulators whose steps or resets take unequal time.
        min_ready: the number of lanes for ``wait="any"``; by default an eighth of all.
        info_keys: keys of `info` that a batch records under ``next.info``. Every step has to return them
            (`RecordEpisodeStatistics` returns ``episode`` at ends only: use `funcollect.episode_stats`).
            ``"rewards.x"`` is ``info["rewards"]["x"]``, or the info of that very name if there is one.
        dtype: the dtype of floating observations in a batch; float32 by default.
        one_hot: discrete actions as one-hot int64 rows, TorchRL's encoding, instead of integers.
        replayable: False keeps no actions of the current episodes, from which `fork` and `save` replay them. Both then
            raise `ReplayError`, except ``save(…, episodes="restart")``.
        drop: keys of a Dict observation that are left out, whatever their spaces, such as MiniGrid's ``["mission"]``;
            ``"a.x"`` is the key ``x`` of a Dict ``a`` in it.
        text: Text spaces become uint8 [text]: the bytes of the text in UTF-8, and zeros after them. A longer text is an
            EnvError, which names its length.
        autoreset_mode: how a `VectorEnv` that does not say so resets its lanes, ``"DISABLED"``, ``"NEXT_STEP"`` or
            ``"SAME_STEP"``, or Gymnasium's `AutoresetMode`; see the guide to many simulators.
        max_carry: the most rows, 1024 by default, by which a lane of a `VectorEnv` may run ahead of a rollout, where a
            reset takes a step of all lanes (``"NEXT_STEP"`` without masks). They open the next batch, with the
            `policy_version` that made them.
        **kwargs: for `gymnasium.make`, or for the factory.

    Raises ValueError for an unknown id, a count that does not fit, an instance given twice, spaces that differ between
    lanes, a vector environment that loses ends or starts of episodes, keys that collide with a batch's own, or
    ``replayable=False`` for an Atari game; TypeError for anything else as `env`, and for spaces without arrays of fixed
    size.

    >>> from_gymnasium("CartPole-v1", num_envs=8)
    HostEnv('CartPole-v1', num_envs=8)
    """
    refuse_removed(kwargs)
    arguments.check_keys("info_keys", info_keys, "x_position")
    arguments.check_flags(one_hot=one_hot, replayable=replayable)
    arguments.check_optional_positive("max_carry", max_carry)
    first, build = (env.env, env.build) if isinstance(env, Made) else (env, None)
    workers, open_group, seeding, replayed, spec = None, None, None, True, None
    opener: Opener
    if isinstance(first, VectorEnv):
        env = first
        given: dict[str, Any] = {"num_envs": num_envs, "parallel": parallel or None, "num_workers": num_workers or None}
        given |= {"wait": None if wait == "all" else wait, "min_ready": min_ready}
        _refuse("a VectorEnv", **given, timeout=None if timeout == LaneWorkers.timeout else timeout, **kwargs)
        num_envs, limited = env.num_envs, base.has_time_limit(env) or is_of_kind(env, GAMES)
        opener, seeding, replayed = over_vector(env, build, autoreset_mode, max_carry)
        check_lives(env)
        label = f"{type(env).__name__} of {env.spec.id}" if env.spec else type(env).__name__
        spaces = env.single_observation_space, env.single_action_space
    else:
        for name, value in ("autoreset_mode", autoreset_mode), ("max_carry", max_carry):
            if value is not None:
                raise ValueError(f"{name}={value!r} is for a VectorEnv, got {env!r}: leave it out")
        sources, num_envs = _sources_of(first, num_envs)
        workers = LaneWorkers.checked(
            len(sources), parallel=parallel, num_workers=num_workers, timeout=timeout, wait=wait, min_ready=min_ready
        )
        made, open_group = _made(sources, kwargs, in_workers=workers is not None)
        first, opener = made[0], WorkerLanes if workers else open_group(0, len(sources))
        # Lanes in workers are made there only, so the limits of other sources than the first are unknown here.
        known = not workers or "max_episode_steps" in kwargs or all(source is sources[0] for source in sources)
        limited = known and all(map(base.has_time_limit, made))
        label = first.spec.id if first.spec is not None else type(first.unwrapped).__name__
        spaces, spec = (first.observation_space, first.action_space), first.spec
    space, action_space = plain_observations(spaces[0], drop, text), plain_actions(spaces[1])
    leaves = observation_leaves(space, dtype)
    if info_keys and any(leaf.path[0] == "info" for leaf in leaves):
        raise ValueError("the observation key 'info' collides with info_keys: rename it, or leave info_keys out")
    statistics, atari = base.running_statistics(first), is_atari(first)
    if atari and not replayable:
        raise ValueError("replayable=False was given for Atari games, which are copied by snapshots: leave it out")
    copying: Forking = "snapshot" if atari else "replay" if replayable and replayed else "none"
    return SimulatedEnv(
        label=f"{label} in {workers}" if workers else label,
        num_envs=num_envs,
        observation_space=space,
        action_spec=ActionSpec(action_space, one_hot),
        observation_leaves=leaves,
        opener=opener,
        info_keys=tuple(info_keys),
        seeding=seeding or ("lane" if atari else "episode"),
        forking="none" if statistics else copying,
        running_statistics=statistics,
        workers=workers,
        truncates=atari or limited,
        open_group=open_group if workers else None,
        own_spaces=spaces,
        spec=spec,
    )


def _sources_of(env: EnvSource | Sequence[EnvSource], num_envs: int | None) -> tuple[list[EnvSource], int | None]:
    """The source of each lane, and P; ValueError for an empty list, a wrong count, or an instance for two lanes."""
    if isinstance(env, Sequence) and not isinstance(env, str):
        if not env:
            raise ValueError("the list of environments is empty: pass at least one")
        if num_envs not in (None, len(env)):
            raise ValueError(f"num_envs is {num_envs}, but the list holds {len(env)} environments: leave num_envs out")
        instances = [id(one) for one in env if isinstance(one, gymnasium.Env)]
        if len(set(instances)) < len(instances):
            raise ValueError("the same environment instance is in the list twice: pass one instance per lane")
        return list(env), len(env)
    arguments.check_num_envs(num_envs)
    if isinstance(env, gymnasium.Env) and (num_envs or 1) > 1:
        raise ValueError(f"num_envs is {num_envs}, but one environment instance was given: pass its id or a factory")
    return [env] * (num_envs or 1), num_envs and int(num_envs)


def _made(sources: list[EnvSource], kwargs: dict[str, Any], *, in_workers: bool) -> tuple[list[GymEnv], OpenerOf]:
    """Make lane 0's environment and, without workers, those of other sources; return them and what opens lanes."""
    factories = [_factory_of(source, kwargs, in_worker=in_workers) for source in sources]
    made: list[GymEnv] = []
    with contextlib.ExitStack() as unused:
        for lane, (source, factory) in enumerate(zip(sources, factories, strict=True)):
            if lane and (in_workers or source is sources[0]):
                continue
            env_factory = factory if isinstance(factory, Made) else Made(factory(), factory)
            made.append(env_factory.env)
            _check_lane(lane, env_factory.env, made[0], is_atari(made[0]))
            if env_factory is not factory:
                unused.callback(env_factory.env.close)
            if not in_workers:  # else it is made for its spaces only
                factories[lane] = env_factory
        if not in_workers:
            unused.pop_all()
    atari = is_atari(made[0])
    return made, lambda first, end: partial(_open_lanes, factories[first:end], atari)


def _open_lanes(factories: Sequence[Callable[[], Any]], atari: bool, env: SimulatedEnv) -> Lanes:
    """Open the simulators of lanes; on failure, release instances, and close environments that were built here."""
    lanes: list[GymEnv] = []
    try:
        for lane, factory in enumerate(factories, env.first_lane):
            made = make_lane(lane, factory)
            _check_lane(lane, made, env, atari)
            if id(made) in TAKEN or any(made.unwrapped is other.unwrapped for other in lanes):
                mend = "build a new one at each call"
                raise ValueError(f"lane {lane}: the factory returned an environment that backs a lane already: {mend}")
            TAKEN[id(made)] = made
            lanes.append(made)
            SIGNS.count[0] += 1
    except BaseException:
        for factory, made in zip(factories, lanes, strict=False):
            del TAKEN[id(made)]
            if not isinstance(factory, Made) or factory.env is not made:
                made.close()
        raise
    return (AtariLanes if atari else Lanes)(lanes, env)


def _factory_of(source: EnvSource, kwargs: dict[str, Any], *, in_worker: bool = False) -> Callable[[], Any]:
    """A function that makes the environment of one lane; for a worker, an id is looked up here and sent as a spec."""
    if isinstance(source, gymnasium.Env):
        if in_worker:
            what = f"num_workers, or parallel=True, was given with the instance {source}"
            raise ValueError(f"{what}, which cannot move to another process: pass its id or a factory")
        _refuse("an environment instance", **kwargs)
        return Made(source, partial(rebuild, source))
    if isinstance(source, (str, EnvSpec)):
        return partial(_make, _spec_of(source) if in_worker and isinstance(source, str) else source, kwargs)
    base.refuse_foreign(source)
    if is_env(source):
        raise TypeError(f"the list of environments holds {source}, which has lanes of its own: pass it alone")
    name, known = type(source).__name__, "a Gymnasium id, an EnvSpec, a factory, a gymnasium.Env or a list"
    mend = "call super().__init__(**kwargs) in its own, after it has set the spaces"
    if isinstance(source, base.EnvBase):
        raise TypeError(f"{name} lacks what the constructor of its base class sets: {mend}")
    if not callable(source):
        raise TypeError(f"env is {name}, expected {known}: {base.adapter_of(source)}")
    return partial(base.built, *base.with_time_limit(source, kwargs))


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Raise ValueError, with a fix, where Gymnasium cannot find or make an id."""
    try:
        yield
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        mend = (
            "look the id up in gymnasium.registry, and import the package that registers it first, or name the module "
            "in the id ('module:Name-v0'), as workers of collectors need it"
        )
        if _A_CLASS.fullmatch(name):
            module, _, member = name.partition(":")
            mend = f"pass the class: from {module} import {member}, then make_env({member}, …)"
        if found := _ATARI.fullmatch(name):
            game = found["game"] or found["old"]
            mend = f"write 'ale/{game}', which has the usual preprocessing, or 'ale_py:{name}' for the raw game"
        raise ValueError(f"Gymnasium cannot make {name!r}: {str(error).rstrip('.')}; {mend}") from error


def _spec_of(env_id: str) -> EnvSpec:
    module, _, name = env_id.rpartition(":")
    with _naming(env_id):
        if module:
            importlib.import_module(module)
        return gymnasium.spec(name)


def _make(spec: str | EnvSpec, kwargs: dict[str, Any]) -> GymEnv:
    """Call `gymnasium.make` without its checks at each step: outcomes are checked here, and the loop resets first."""
    name = spec if isinstance(spec, str) else spec.id
    try:
        with _naming(name):
            env = gymnasium.make(spec, disable_env_checker=True, **kwargs)
    except TypeError as error:
        if not kwargs:
            raise
        what = f"Gymnasium cannot make {name!r}: {error}; leave out the arguments that its constructor lacks"
        mend = "check the spelling of those that funcollect.envs.from_gymnasium documents, such as num_envs"
        raise TypeError(f"{what}, or {mend}") from error
    if isinstance(env, TimeLimit) and isinstance(env.env, OrderEnforcing):
        env.env = env.env.env
    return env.env if isinstance(env, OrderEnforcing) else env


def _check_lane(lane: int, env: Any, first: GymEnv | SimulatedEnv, atari: bool) -> None:
    """Raise unless `env` is a Gymnasium environment with the first lane's spaces, and an Atari game if they are."""
    base.refuse_foreign(env)
    if not isinstance(env, gymnasium.Env):
        mend = "return the environment"
        raise TypeError(f"lane {lane}: the factory returned {type(env).__name__}, expected a gymnasium.Env: {mend}")
    base.check_spaces(env)
    for name, wanted in zip(("observation_space", "action_space"), own_spaces(first), strict=True):
        space = getattr(env, name)
        if space != wanted:
            raise ValueError(f"lane {lane} has the {name} {space}, lane 0 has {wanted}: use equal spaces in one batch")
    if is_atari(env) != atari:
        mend = "put Atari games, which are seeded differently, in a separate batch"
        raise ValueError(f"lane {lane} is {env}, lane 0 is {first}: {mend}")


def _refuse(what: str, **given: Any) -> None:
    """Raise ValueError for arguments other than None, which have no effect on `what`, since it is built already."""
    if names := [name for name, value in given.items() if value is not None]:
        raise ValueError(f"{', '.join(names)} cannot be given with {what}, which is built already: leave it out")
