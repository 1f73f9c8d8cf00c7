"""Gymnasium environments: an id, a factory, an instance, a list of these, or a `VectorEnv`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy.typing as npt
from gymnasium.vector import VectorEnv

from funcollect.arguments import check_flags, check_keys
from funcollect.envs.gymnasium_envs.atari_lanes import check_lives, is_atari
from funcollect.envs.gymnasium_envs.lanes import GymEnv
from funcollect.envs.gymnasium_envs.making import (
    EnvSource,
    Made,
    check_lane,
    factory_of,
    open_lanes,
    rebuild,
    refuse,
    sources_of,
    taken,
)
from funcollect.envs.gymnasium_envs.vector_lanes import GymVectorEnv, VectorLanes, check_autoreset
from funcollect.envs.host.host_env import OpenerOf, SimulatedEnv
from funcollect.envs.host.lane_workers.options import LaneWorkers, refuse_removed
from funcollect.envs.host.lane_workers.simulators import WorkerLanes
from funcollect.envs.recognise import has_time_limit, running_statistics
from funcollect.protocols import Forking, Simulators
from funcollect.specs import ActionSpec, observation_leaves

Opener = Callable[[SimulatedEnv], Simulators]  # makes the simulators of an adapted environment, once for each state


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
        refuse(
            "a VectorEnv",
            num_envs=num_envs,
            parallel=parallel or None,
            num_workers=num_workers or None,
            timeout=None if timeout == LaneWorkers.timeout else timeout,
            **kwargs,
        )
        first: Any = env
        num_envs, opener, limited = env.num_envs, _open_vector(env), has_time_limit(env)
        label = f"{type(env).__name__} of {env.spec.id}" if env.spec else type(env).__name__
        space, action_space = env.single_observation_space, env.single_action_space
    else:
        sources = sources_of(env, num_envs)
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
    leaves = observation_leaves(space, dtype)
    spec = ActionSpec(action_space, one_hot)
    if info_keys and any(leaf.path[0] == "info" for leaf in leaves):
        raise ValueError("the observation key 'info' collides with info_keys: rename it, or leave info_keys out")
    statistics = running_statistics(first)
    atari = is_atari(first)
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


def _open_here(sources: list[EnvSource], kwargs: dict[str, Any]) -> tuple[list[GymEnv], Opener]:
    """Environments that back the first state, and the opener of lanes in this process.

    They are those of the first lane, and of every lane with another source.
    """
    factories = [factory_of(source, kwargs) for source in sources]
    made: list[GymEnv] = []
    with contextlib.ExitStack() as on_failure:
        for lane, (source, factory) in enumerate(zip(sources, factories, strict=True)):
            if lane and source is sources[0]:
                continue
            factories[lane] = own = factory if isinstance(factory, Made) else Made(factory(), factory)
            made.append(own.env)
            check_lane(lane, own.env, made[0], atari=is_atari(made[0]))
            if own is not factory:
                on_failure.callback(own.env.close)
        on_failure.pop_all()
    return made, partial(open_lanes, factories, is_atari(made[0]))


def _open_in_workers(sources: list[EnvSource], kwargs: dict[str, Any]) -> tuple[GymEnv, OpenerOf]:
    """A closed copy of the first lane's environment, for its spaces, and the openers of lanes in worker processes."""
    factories = [factory_of(source, kwargs, in_worker=True) for source in sources]
    first = factory_of(sources[0], kwargs)()
    atari = is_atari(first)
    check_lane(0, first, first, atari=atari)
    first.close()
    return first, lambda first, end: partial(open_lanes, factories[first:end], atari)


def _open_vector(vector: GymVectorEnv) -> Opener:
    """The opener over a vector environment: the first state gets it, and each later one a copy."""
    check_autoreset(vector)
    check_lives(vector)
    build = partial(rebuild, vector)
    made = Made(vector, build)
    return lambda env: VectorLanes(taken(made()), env, build)
