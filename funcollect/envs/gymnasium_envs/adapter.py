"""Gymnasium environments: an id, a factory, an instance, a list of these, or a `VectorEnv`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv

from funcollect.arguments import check_flags, check_keys
from funcollect.envs.gymnasium_envs.atari_lanes import AtariLanes, is_atari
from funcollect.envs.gymnasium_envs.lanes import Lanes
from funcollect.envs.gymnasium_envs.making import (
    EnvSource,
    Made,
    check_lane,
    factory_of,
    open_lanes,
    refuse,
    sources_of,
    taken,
    worker_factory_of,
)
from funcollect.envs.gymnasium_envs.vector_lanes import VectorLanes, check_autoreset
from funcollect.envs.gymnasium_envs.worker_processes import open_processes
from funcollect.envs.host.host_env import SimulatedEnv
from funcollect.envs.recognise import running_statistics
from funcollect.protocols import Forking, Simulators
from funcollect.specs import ActionSpec, Leaf, observation_leaves

Opener = Callable[[tuple[Leaf, ...], ActionSpec, tuple[str, ...]], Simulators]


def from_gymnasium(
    env: EnvSource | VectorEnv[Any, Any, Any] | Sequence[EnvSource],
    *,
    num_envs: int | None = None,
    parallel: bool = False,
    info_keys: Sequence[str] = (),
    dtype: npt.DTypeLike | None = None,
    one_hot: bool = False,
    **kwargs: Any,
) -> SimulatedEnv:
    """A host environment over Gymnasium's.

    Each episode is seeded. Atari games (ale-py's, under any wrappers) are seeded once per lane instead, since a seeded
    reset loads the game anew; `fork` takes a snapshot of them.

    Args:
        env: a registered id, an `EnvSpec`, a factory, an instance, a list of these (one per lane), or a `VectorEnv`
            built with ``autoreset_mode=AutoresetMode.DISABLED``. An instance backs one state; another state over it is
            rebuilt from its spec.
        num_envs: P, made from one id, spec or factory; None for a single environment without a batch dimension.
        parallel: a process of its own for every lane, for simulators whose step takes longer than a message to it (some
            50 µs); the data are the same. Factories and lambdas travel by cloudpickle, instances do not.
        info_keys: keys of `info` to be recorded under ``next.info``, present at every step (`RecordEpisodeStatistics`
            gives its ``episode`` at ends only: use `funcollect.episode_stats`).
        dtype: the dtype of floating observations in a batch; float32 unless given.
        one_hot: discrete actions as one-hot int64 rows, TorchRL's encoding, instead of integers.
        **kwargs: for `gymnasium.make`, or for the factory.

    Raises:
        ValueError: for an unknown id, a count that does not fit, an instance given twice, spaces that differ between
            lanes, a vector environment that resets itself, or keys that collide with a batch's own.
        TypeError: for anything else as `env`, and for spaces without arrays of fixed size.

    >>> from_gymnasium("CartPole-v1", num_envs=8)
    HostEnv('CartPole-v1', num_envs=8)
    """
    check_keys("info_keys", info_keys, "x_position")
    check_flags(parallel=parallel, one_hot=one_hot)
    describe = partial(_described, info_keys=tuple(info_keys), dtype=dtype, one_hot=one_hot)
    if isinstance(env, VectorEnv):
        refuse("a VectorEnv", num_envs=num_envs, parallel=parallel or None, **kwargs)
        return _vector(env, describe)
    sources = sources_of(env, num_envs)
    single = num_envs is None and (isinstance(env, str) or not isinstance(env, Sequence))
    count = None if single else len(sources)
    return (_parallel if parallel else _in_process)(sources, kwargs, count, describe)


def _in_process(
    sources: list[EnvSource], kwargs: dict[str, Any], num_envs: int | None, describe: Callable[..., SimulatedEnv]
) -> SimulatedEnv:
    factories = [factory_of(source, kwargs) for source in sources]
    made = factories[0] if isinstance(factories[0], Made) else Made(factories[0](), factories[0])
    factories[0], first = made, made.env
    for lane, factory in enumerate(factories):
        if isinstance(factory, Made):
            check_lane(lane, factory.env, first)
    lanes = AtariLanes if is_atari(first) else Lanes
    return describe(
        first,
        num_envs,
        lambda *parts: lanes(open_lanes(factories, first), *parts),
        forking="snapshot" if is_atari(first) else "replay",
    )


def _parallel(
    sources: list[EnvSource], kwargs: dict[str, Any], num_envs: int | None, describe: Callable[..., SimulatedEnv]
) -> SimulatedEnv:
    build = partial(open_processes, [worker_factory_of(source, kwargs) for source in sources])
    first = factory_of(sources[0], kwargs)()
    check_lane(0, first, first)
    first.close()  # only its spaces are wanted
    return describe(
        first,
        num_envs,
        lambda *parts: VectorLanes(build(), *parts, rebuild=build),
        where=" in processes",
        forking="none" if is_atari(first) else "replay",
    )


def _vector(env: VectorEnv[Any, Any, Any], describe: Callable[..., SimulatedEnv]) -> SimulatedEnv:
    check_autoreset(env)
    rebuild = partial(_rebuild_vector, env)
    made = Made(env, rebuild)
    return describe(env, env.num_envs, lambda *parts: VectorLanes(taken(made()), *parts, rebuild=rebuild))


def _described(
    env: Any,
    num_envs: int | None,
    opener: Opener,
    *,
    where: str = "",
    forking: Forking = "replay",
    info_keys: tuple[str, ...],
    dtype: npt.DTypeLike | None,
    one_hot: bool,
) -> SimulatedEnv:
    """The host environment of which `env` shows the spaces: one lane, or a vector environment."""
    vector = isinstance(env, VectorEnv)
    space = env.single_observation_space if vector else env.observation_space
    leaves = observation_leaves(space, dtype)
    spec = ActionSpec(env.single_action_space if vector else env.action_space, one_hot)
    statistics = running_statistics(env)
    if info_keys and any(leaf.path[0] == "info" for leaf in leaves):
        raise ValueError("the observation key 'info' collides with info_keys: rename it, or leave info_keys out")
    return SimulatedEnv(
        label=_label(env) + where,
        num_envs=num_envs,
        observation_space=space,
        action_spec=spec,
        observation_leaves=leaves,
        opener=lambda: opener(leaves, spec, info_keys),
        info_keys=info_keys,
        seeding="lane" if not vector and is_atari(env) else "episode",
        forking="none" if statistics else forking,
        running_statistics=statistics,
    )


def _rebuild_vector(env: VectorEnv[Any, Any, Any]) -> VectorEnv[Any, Any, Any]:
    try:
        rebuilt: VectorEnv[Any, Any, Any] = type(env)(env.env_fns, autoreset_mode=AutoresetMode.DISABLED)  # type: ignore
    except Exception as error:
        raise ValueError(
            f"{env} backs a state already and cannot be rebuilt from its env_fns ({error!r}): build another, or pass a "
            "list of factories"
        ) from error
    return rebuilt


def _label(env: Any) -> str:
    if isinstance(env, VectorEnv):
        return f"{type(env).__name__} of {env.spec.id}" if env.spec else type(env).__name__
    return env.spec.id if env.spec is not None else type(env.unwrapped).__name__
