"""From a collector's arguments to what each of its workers is to do."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import cloudpickle
import gymnasium
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from funcollect.arguments import check_kind, check_positive
from funcollect.collectors.options import Keywords, Options, WorkerOptions, check_known
from funcollect.collectors.runner import ALONE, Shard
from funcollect.collectors.source import RunnerSpec
from funcollect.collectors.workers.worker import Job, WorkerInfo
from funcollect.envs.recognise import is_torchrl
from funcollect.errors import WorkerError
from funcollect.messages import clipped, shown

_OF_THE_READER = ("total_frames", "storing_device", "split_trajs", "postproc", "update_at_each_batch")
_OF_WORKERS = ("device", "env_device", "policy_device")


def worker_options(
    frames: int, keywords: Mapping[str, Any], known: Collection[str] = Keywords.__annotations__
) -> WorkerOptions:
    """The collector's own keywords, which are among those `known`: without those that list a device for each worker.

    Raises:
        TypeError, ValueError: for an unknown keyword, or a value out of its range.
    """
    check_known(keywords, known)
    if isinstance(keywords.get("storing_device"), (list, tuple)):
        raise TypeError(
            f"storing_device is {keywords['storing_device']!r}, expected one device, on which a batch of several "
            "workers lies: pass one; RayCollector takes a list"
        )
    listed = {name: keywords[name] for name in _OF_WORKERS if isinstance(keywords.get(name), (list, tuple))}
    own = {name: value for name, value in keywords.items() if name not in listed}
    devices = list(listed.get("device", ())) if known is Keywords.__annotations__ else []  # over Ray each has its own
    if devices and all(device == devices[0] for device in devices):
        own["device"] = devices[0]  # which fills storing_device
    return WorkerOptions(frames_per_batch=frames, **own)


def environments(create_env_fn: Any, num_workers: int | None) -> list[Any]:
    """What each worker's environment is made from.

    Raises:
        TypeError: for one environment without a number of workers, or a number that is none.
        ValueError: for a list of another length, an empty one, or a live environment that cannot be built again for
            several workers.
    """
    if num_workers is not None:
        check_positive("num_workers", num_workers, example=4)
    if not isinstance(create_env_fn, (list, tuple)):
        if num_workers is None:
            raise TypeError(
                "create_env_fn is one environment, and num_workers is not given: pass a list with an entry for each "
                "worker, [make_env] * 4, or num_workers=4"
            )
        create_env_fn = [create_env_fn] * num_workers
    if not create_env_fn or num_workers not in (None, len(create_env_fn)):
        raise ValueError(
            f"create_env_fn has {len(create_env_fn)} entries, expected {num_workers or 'at least one'}: pass an entry "
            "for each worker and leave num_workers out"
        )
    return one_each(create_env_fn)


def one_each(environments: Sequence[Any]) -> list[Any]:
    """What each worker builds its environment from, also if one live environment was given for several workers.

    Those of TorchRL are sent to each worker by value. One of Gymnasium's is made again from its spec.

    Raises:
        ValueError: for a live environment of several workers that cannot be built again.
    """
    live = [env for env in environments if isinstance(env, (gymnasium.Env, VectorEnv)) or is_torchrl(env)]
    shared = {number for number, count in Counter(map(id, live)).items() if count > 1}
    rebuilt = {id(env): _again(env) for env in live if id(env) in shared}
    return [rebuilt.get(id(env), env) for env in environments]


def _again(env: Any) -> Any:
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
    raise ValueError(
        f"the same live environment {shown(env)} is given to several workers and cannot be built again "
        f"({clipped(reason, 200)}), expected one for each: pass a function that makes it, "
        "[lambda: gymnasium.make(...)] * 4"
    )


def each(name: str, given: Any, count: int) -> list[Any]:
    """One value for each worker, from a list of them or from one for all.

    Raises:
        ValueError: for a list of another length.
    """
    if not isinstance(given, (list, tuple)):
        return [given] * count
    if len(given) != count:
        raise ValueError(f"{name} has {len(given)} entries for {count} workers: pass one for each, or one for all")
    return list(given)


def make_jobs(
    create_env_fn: Sequence[Any],
    create_env_kwargs: Mapping[str, Any] | Sequence[Any] | None,
    policy: Any,
    policy_factory: Callable[[], Any] | Sequence[Any] | None,
    frames: Sequence[int],
    keywords: Mapping[str, Any],
    seed: int,
    shard: Shard = ALONE,
) -> list[Job]:
    """One job per worker; `frames` says how many frames each collects for a batch, `shard` which lanes are theirs.

    Raises:
        TypeError, ValueError: for arguments that no worker would take.
    """
    check_kind("shard", shard, Shard, "pass for example Shard(index=0, count=2)")
    count = len(create_env_fn)
    names = {field.name for field in fields(Options)} - set(_OF_THE_READER)
    columns = {name: each(name, value, count) for name, value in keywords.items() if name in names}
    kwargs, factories = (
        each("create_env_kwargs", create_env_kwargs, count),
        each("policy_factory", policy_factory, count),
    )
    return [
        Job(
            source=RunnerSpec(
                create_env_fn=create_env_fn[worker],
                create_env_kwargs=kwargs[worker],
                policy=policy,
                policy_factory=factories[worker],
            ),
            options=Options(
                frames_per_batch=frames[worker], **{name: values[worker] for name, values in columns.items()}
            ),
            seed=seed,
            shard=shard.within(worker, count),
        )
        for worker in range(count)
    ]


def shares(frames_per_batch: int | Sequence[int], count: int) -> list[int]:
    """The frames of each worker in a batch of all: equal shares, rounded up, or as they are listed."""
    listed = isinstance(frames_per_batch, (list, tuple))
    frames = each("frames_per_batch", frames_per_batch, count)
    for share in frames:
        check_positive("frames_per_batch", share)
    return frames if listed else [math.ceil(share / count) for share in frames]


def masks_of(mask: Tensor | None, lanes: Sequence[int]) -> Sequence[Tensor | None]:
    """Each worker's part of a mask over all lanes, of which the workers have so many.

    Raises:
        ValueError: for a mask of another shape or dtype.
    """
    if mask is None:
        return [None] * len(lanes)
    if mask.dtype != torch.bool or mask.shape != (sum(lanes),):
        raise ValueError(
            f"mask is {mask.dtype} {tuple(mask.shape)}, expected bool ({sum(lanes)},): pass one flag per lane"
        )
    return torch.split(mask, list(lanes))


def want_accelerators(jobs: Sequence[Job]) -> bool:
    """Whether an environment or a policy is to be on another device than the CPU."""
    devices = [device for job in jobs for device in (job.options.env_device, job.options.policy_device)]
    return any(device is not None and str(device) != "cpu" for device in devices)


def check_alike(infos: Mapping[int, WorkerInfo]) -> None:
    """Raise WorkerError unless the workers' environments suit one batch: equal spaces, as many lanes."""
    first = infos[0]
    for worker, info in infos.items():
        for name in ("num_envs", "leaves", "action"):
            own, wanted = getattr(info, name), getattr(first, name)
            if own != wanted:
                raise WorkerError(
                    f"worker {worker}: {info.label} has {_SHOWN[name]} {own}, worker 0 has {wanted}: give all workers "
                    "environments with equal spaces and as many lanes",
                    worker,
                )


_SHOWN = {"num_envs": "num_envs", "leaves": "the observation", "action": "the action"}
