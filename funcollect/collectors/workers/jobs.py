"""Makes the jobs of workers from a collector's arguments: one row of arguments per worker."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import cloudpickle
import gymnasium
from gymnasium.vector import VectorEnv

from funcollect.arguments import check_positive
from funcollect.collectors.options import Options, RunnerSpec, Shard
from funcollect.collectors.workers.worker import Job
from funcollect.envs.base import is_torchrl
from funcollect.messages import clipped, shown

_OF_THE_READER = {  # options that only the collector itself uses
    "total_frames", "storing_device", "split_trajs", "postproc", "update_at_each_batch", "update_statistics", "shard",
    "trajs_per_batch", "traj_format", "replay_buffer", "trajs_per_write", "track_traj_ids", "track_policy_version",
}  # fmt: skip
_OF_OPTIONS = {each.name for each in fields(Options) if each.init} - _OF_THE_READER
_OF_SOURCE = {each.name for each in fields(RunnerSpec)} - {"policy"}
DEVICES = ("device", "env_device", "policy_device")  # each may be a list


def listed(given: Any) -> Sequence[Any] | None:
    """The values of a keyword that has one for each worker; None for a keyword with one value for all."""
    return given if isinstance(given, (list, tuple)) else None


def common(given: Any) -> Any:
    """The value that a keyword has for all workers; None if it lists different ones."""
    values = listed(given)
    return given if values is None else values[0] if values and all(each == values[0] for each in values) else None


def number_of_workers(create_env_fn: Any, num_workers: int | None) -> int:
    """The number of workers, from both keywords; ValueError if they differ, TypeError if neither has it."""
    if num_workers is not None:
        check_positive("num_workers", num_workers, example=4)
    if (entries := listed(create_env_fn)) is None:
        if num_workers is None:
            mend = "pass a list with an entry for each worker, [make_env] * 4, or num_workers=4"
            raise TypeError(f"create_env_fn is one environment, and num_workers is not given: {mend}")
        return num_workers
    if not entries or num_workers not in (None, len(entries)):
        mend = "pass an entry for each worker, as many as num_workers, or as a saved run has"
        raise ValueError(f"create_env_fn has {len(entries)} entries, expected {num_workers or 'at least one'}: {mend}")
    return len(entries)


def _rebuilt(env: Any) -> Any:
    """A live environment to send by value (TorchRL's), or a function that makes it from its spec; or ValueError."""
    try:
        if is_torchrl(env):
            cloudpickle.dumps(env)
            return env
        if isinstance(env, gymnasium.Env) and env.spec is not None:
            gymnasium.make(env.spec, disable_env_checker=True).close()
            return partial(gymnasium.make, env.spec, disable_env_checker=True)
        reason = "it has no spec"
    except Exception as error:
        reason = repr(error)
    what = f"the same live environment {shown(env)} is given to several workers and cannot be built again"
    mend = "pass a function that makes it, [lambda: gymnasium.make(...)] * 4"
    raise ValueError(f"{what} ({clipped(reason, 200)}), expected one for each: {mend}")


def columns_of(collector: Any) -> dict[str, Any]:
    """The keywords of a collector that its workers need; some are lists with a value for each worker."""
    return {name: value for name, value in vars(collector).items() if name in _OF_OPTIONS | _OF_SOURCE}


def rows(count: int, columns: Mapping[str, Any], *, copies: int = 1) -> list[dict[str, Any]]:
    """One dict of arguments per worker, from keywords that have a list with a value for each worker, or one for all.

    Each worker builds `copies` environments from its `create_env_fn`, none of which is another worker's: a live one
    that several share is built again in each, or raises ValueError.
    """
    lists = {name: values for name, given in columns.items() if (values := listed(given)) is not None}
    for name, values in lists.items():
        if len(values) != count:
            raise ValueError(f"{name} has {len(values)} entries for {count} workers: pass one for each, or one for all")
    table = [{**columns, **{name: values[worker] for name, values in lists.items()}} for worker in range(count)]
    envs = [row["create_env_fn"] for row in table if "create_env_fn" in row]
    live = {id(env): env for env in envs if isinstance(env, (gymnasium.Env, VectorEnv)) or is_torchrl(env)}
    counts = Counter(map(id, envs))
    rebuilt = {number: _rebuilt(env) for number, env in live.items() if counts[number] * copies > 1}
    for row, env in zip(table, envs, strict=False):
        row["create_env_fn"] = rebuilt.get(id(env), env)
    return table


def each_of(name: str, given: Any, count: int) -> list[Any]:
    """The values of one keyword for `count` workers."""
    return [row[name] for row in rows(count, {name: given})]


def job_of(row: Mapping[str, Any], shard: Shard, *, policy: Any, seed: int) -> Job:
    """The job of one worker, from its row of arguments, which are checked. Those that no worker needs are left out.

    A `policy` beside the row's factory is only the source of the weights that are sent.
    """
    source = {name: row[name] for name in row.keys() & _OF_SOURCE}
    return Job(
        source=RunnerSpec(**source, policy=policy if source.get("policy_factory") is None else None),
        options=Options(**{name: row[name] for name in row.keys() & _OF_OPTIONS}, shard=shard),
        seed=seed,
    )


def shares(frames_per_batch: int | Sequence[int], count: int) -> list[int]:
    """The frames of each worker in a batch of all workers: equal shares, rounded up, or as listed."""
    frames: list[int] = each_of("frames_per_batch", frames_per_batch, count)
    for share in frames:
        check_positive("frames_per_batch", share)
    return [math.ceil(share / count) for share in frames] if listed(frames_per_batch) is None else frames


def want_accelerators(jobs: Sequence[Job]) -> bool:
    """Whether an environment or a policy is to run on another device than the CPU."""
    devices = [device for job in jobs for device in (job.options.env_device, job.options.policy_device)]
    return any(device is not None and str(device) != "cpu" for device in devices)
