"""EnvPool: batches of environments that are stepped in C++, all lanes in one call."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from funcollect.arguments import check_keys, check_not_given, check_num_envs, check_positive
from funcollect.envs.envpool_envs.lanes import EnvPoolLanes
from funcollect.envs.host.extras import import_extra
from funcollect.envs.host.host_env import SimulatedEnv
from funcollect.envs.host.rows import Rows
from funcollect.specs import ActionSpec, Space, observation_leaves

Imported = TypeVar("Imported")
_OURS = {
    "seed": "pass it to funcollect.init, or to a collector",
    "env_seed": "pass a seed to funcollect.init, or to a collector",
    "batch_size": "all lanes are stepped together",
    "env_type": "Gymnasium's interface is used",
    "parallel": "EnvPool is parallel itself: num_threads=",
}
_WELL_KNOWN = ["CartPole-v1", "Pong-v5", "HalfCheetah-v4"]
_LARGEST_SEED = 2**31 - 1  # EnvPool takes int32


def from_envpool(
    task_id: str,
    *,
    num_envs: int | None = None,
    num_threads: int = 1,
    info_keys: Sequence[str] = (),
    dtype: npt.DTypeLike | None = None,
    one_hot: bool = False,
    **kwargs: Any,
) -> SimulatedEnv:
    """A host environment over EnvPool, seeded by run: the pool is built with one seed for each lane, once.

    Lanes that are done are reset in the same step, as everywhere here; EnvPool alone would do that in the next one.
    Where an episode ends by itself in the very step in which its time is up, EnvPool says truncated, not terminated.

    Args:
        task_id: one of `envpool.list_all_envs`, such as ``"Pong-v5"``.
        num_envs: P; None for a single environment without a batch dimension.
        num_threads: threads that step the lanes; the data do not depend on it.
        info_keys: keys of `info` to be recorded under ``next.info``, such as ``"lives"``.
        dtype: the dtype of floating observations in a batch; float32 unless given.
        one_hot: discrete actions as one-hot int64 rows instead of integers.
        **kwargs: for `envpool.make_gymnasium`: `max_episode_steps`, and what the task itself takes.

    Raises:
        ImportError: where EnvPool is not installed.
        ValueError: for an unknown task, one for several players, a number out of range, an info key that the task does
            not have, or a keyword argument that is not the caller's to set.
        TypeError: for a pool that is built already, and a keyword argument that the task does not take.

    >>> from_envpool("CartPole-v1", num_envs=8)
    HostEnv('envpool/CartPole-v1', num_envs=8)
    """
    if not isinstance(task_id, str):
        raise TypeError(
            f"task_id is {type(task_id).__name__}, expected its name, since each run builds a pool "
            "with its own seeds: make_env('envpool/CartPole-v1')"
        )
    check_keys("info_keys", info_keys, "x_position")
    check_num_envs(num_envs)
    check_positive("num_threads", num_threads)
    check_not_given("EnvPool here", kwargs, _OURS)
    count = num_envs or 1
    envpool = import_extra("envpool", "envpool", "envs")
    config = kwargs | {"num_envs": count, "num_threads": num_threads}
    spec = _spec_of(envpool, task_id, config)
    _check_task(task_id, spec, info_keys)
    space, action_spec = _quietly(lambda: (_widened(spec.observation_space), ActionSpec(spec.action_space, one_hot)))
    leaves = observation_leaves(space, dtype)
    build = partial(_pool_of, envpool, task_id, config)
    return SimulatedEnv(
        label=f"envpool/{task_id}",
        num_envs=num_envs,
        observation_space=space,
        action_spec=action_spec,
        observation_leaves=leaves,
        opener=lambda: EnvPoolLanes(build, Rows(space, leaves, count), action_spec, tuple(info_keys)),
        info_keys=tuple(info_keys),
        seeding="run",
        forking="none",
    )


def _spec_of(envpool: Any, task_id: str, config: dict[str, Any]) -> Any:
    known = envpool.list_all_envs()
    if task_id not in known:
        near = difflib.get_close_matches(task_id, known, 3, 0.4) or _WELL_KNOWN
        raise ValueError(f"EnvPool has no task {task_id!r}, expected one of envpool.list_all_envs(), such as {near}")
    if "max_episode_steps" in config:
        check_positive("max_episode_steps", config["max_episode_steps"])
    try:
        return envpool.make_spec(task_id, **config)
    except TypeError as error:
        reason = str(error).partition("\n")[0]
        raise TypeError(
            f"EnvPool cannot make {task_id!r} with {config}: {reason} leave out what the task does not take; it takes "
            f"{sorted(set(envpool.make_spec(task_id).config._fields) - _OURS.keys())}"
        ) from error


def _check_task(task_id: str, spec: Any, info_keys: Sequence[str]) -> None:
    if spec.config.max_num_players > 1:
        raise ValueError(f"{task_id} is for {spec.config.max_num_players} players, expected one: take another task")
    infos = {key.removeprefix("info:") for key in spec.state_array_spec if key.startswith("info:")} | {"elapsed_step"}
    if unknown := [key for key in info_keys if key not in infos]:
        raise ValueError(
            f"EnvPool's {task_id} has no info key {unknown[0]!r}, expected one of {sorted(infos)}: name one of these"
        )


def _pool_of(envpool: Any, task_id: str, config: dict[str, Any], seeds: Sequence[int]) -> Any:
    pool = envpool.make_gymnasium(task_id, seed=[seed & _LARGEST_SEED for seed in seeds], **config)
    _quietly(lambda: pool.observation_space)  # it is made once, and at the first step otherwise
    return pool


def _widened(space: Space) -> Space:
    """Boxes without bounds, which EnvPool gives as the least positive and the largest float of C++, made unbounded."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: _widened(child) for name, child in space.spaces.items()})
    if not isinstance(space, spaces.Box) or space.dtype is None or space.dtype.kind != "f":
        return space
    dtype: Any = space.dtype.type
    limits = np.finfo(dtype)
    without = (space.low == limits.tiny) & (space.high == limits.max)
    low, high = np.where(without, -np.inf, space.low), np.where(without, np.inf, space.high)
    return spaces.Box(low.astype(dtype), high.astype(dtype), dtype=dtype)


def _quietly(make: Callable[[], Imported]) -> Imported:
    """Without the warnings of Gymnasium's boxes about the bounds that EnvPool gives them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()
