"""A collector's keywords, checked once where they are given."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, get_args

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from funcollect.arguments import check_flags, check_positive
from funcollect.core.request import OwnColumns, Request, check_ends, check_exploration
from funcollect.devices import checked_device
from funcollect.messages import shown
from funcollect.protocols import Env
from funcollect.specs import ExplorationType
from funcollect.trajectories.split import split_trajectories
from funcollect.tree import Path

Postproc = Callable[[TensorDictBase], TensorDictBase]
Device = torch.device | str | None
OnFailure = Literal["raise", "restart"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What all collectors are given.

    Raises:
        TypeError, ValueError: for a value out of its range, naming the keyword.
    """

    frames_per_batch: int
    total_frames: int = -1
    device: Device = None
    storing_device: Device = None
    env_device: Device = None
    policy_device: Device = None
    max_frames_per_traj: int | None = None
    init_random_frames: int | None = None
    reset_at_each_iter: bool = False
    split_trajs: bool = False
    postproc: Postproc | None = None
    exploration_type: ExplorationType = ExplorationType.RANDOM
    reset_when_done: bool = True
    update_at_each_batch: bool = False
    set_truncated: bool = False
    env_device_given: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        """Check every field; `device` fills those that are unset."""
        check_positive("frames_per_batch", self.frames_per_batch)
        check_exploration(self.exploration_type)
        if isinstance(self.total_frames, int) and self.total_frames < 1 and self.total_frames != -1:
            raise ValueError(
                f"total_frames is {self.total_frames}, expected at least 1: give a number, or -1 for an endless run"
            )
        if self.total_frames != -1:
            check_positive("total_frames", self.total_frames)
        check_flags(
            reset_at_each_iter=self.reset_at_each_iter,
            split_trajs=self.split_trajs,
            reset_when_done=self.reset_when_done,
            update_at_each_batch=self.update_at_each_batch,
            set_truncated=self.set_truncated,
        )
        for name in ("max_frames_per_traj", "init_random_frames"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer))):
                raise TypeError(f"{name} is {value!r}, expected an int: give one, or None for none")
        if self.max_frames_per_traj == 0:
            raise ValueError("max_frames_per_traj is 0, expected a positive int, or None (or negative) for no limit")
        if self.postproc is not None and not callable(self.postproc):
            raise TypeError(f"postproc is {shown(self.postproc)}, expected a function from batch to batch: pass one")
        check_ends(self.max_frames_per_traj, self.reset_when_done)
        object.__setattr__(self, "env_device_given", self.env_device is not None)
        for name in ("storing_device", "env_device", "policy_device"):
            given = getattr(self, name)
            device = checked_device(self.device) if given is None else checked_device(given, name)
            object.__setattr__(self, name, device)

    def length(self, env: Env) -> int:
        """T: the steps of a batch."""
        return math.ceil(self.frames_per_batch / (env.num_envs or 1))

    def request(self, length: int, params: Any, lanes: int, columns: OwnColumns) -> Request:
        """One batch's rollout of `length` steps; `lanes` are those of the whole run."""
        limit = self.max_frames_per_traj
        return Request(
            length=length,
            params=params,
            exploration_type=self.exploration_type,
            max_frames_per_traj=limit if limit is not None and limit > 0 else None,
            random_steps=length * math.ceil(max(self.init_random_frames or 0, 0) / (lanes * length)),
            reset_when_done=self.reset_when_done,
            columns=columns,
        )

    def finish(self, batch: TensorDictBase) -> TensorDictBase:
        """What the caller gets: moved, split, post-processed, without keys that begin with an underscore."""
        if self.storing_device is not None and batch.device != self.storing_device:
            batch = batch.to(self.storing_device)
        if self.split_trajs:
            batch = split_trajectories(batch)
        if self.postproc is not None:
            batch = self.postproc(batch)
            if not isinstance(batch, TensorDictBase):
                raise TypeError(f"postproc returned {type(batch).__name__}, expected a TensorDict: return the batch")
        hidden = _hidden(batch)
        return batch.exclude(*hidden, inplace=True) if hidden else batch


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(Options):
    """What collectors that have workers are given besides."""

    num_threads: int = 1
    timeout: float = 60.0
    start_timeout: float = 300.0
    on_failure: OnFailure = "raise"
    in_process: bool = False

    def __post_init__(self) -> None:
        """Check every field."""
        super().__post_init__()
        check_flags(in_process=self.in_process)
        check_positive("num_threads", self.num_threads)
        for name in ("timeout", "start_timeout"):
            seconds = getattr(self, name)
            if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
                raise ValueError(f"{name} is {seconds!r}, expected seconds, more than 0: pass for example {name}=60")
        if self.on_failure not in get_args(OnFailure):
            raise ValueError(
                f"on_failure is {self.on_failure!r}, expected 'raise' (a worker's failure ends the run) or 'restart' "
                "(a new worker replaces it): pass one of them"
            )


class Keywords(TypedDict, total=False):
    """The keywords whose defaults stand in `WorkerOptions`."""

    total_frames: int
    device: Device | Sequence[Device]
    storing_device: Device
    env_device: Device | Sequence[Device]
    policy_device: Device | Sequence[Device]
    max_frames_per_traj: int | None
    init_random_frames: int | None
    reset_at_each_iter: bool
    split_trajs: bool
    postproc: Postproc | None
    exploration_type: ExplorationType
    reset_when_done: bool
    update_at_each_batch: bool
    set_truncated: bool
    num_threads: int
    timeout: float
    start_timeout: float
    on_failure: OnFailure
    in_process: bool


_ELSEWHERE = {
    "backend": "the class says it: SyncDataCollector, MultiSyncDataCollector, MultiaSyncDataCollector or RayCollector",
    "num_collectors": "MultiSyncDataCollector and MultiaSyncDataCollector have num_workers=, RayCollector has this one",
    "sync": "MultiSyncDataCollector collects so, MultiaSyncDataCollector does not; RayCollector has this argument",
}  # of TorchRL's `Collector`, which chooses another class by them


def check_known(keywords: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise TypeError for a keyword that is not among those `known`."""
    if not (unknown := sorted(keywords.keys() - known)):
        return
    if here := [f"{name} ({_ELSEWHERE[name]})" for name in unknown if name in _ELSEWHERE]:
        raise TypeError(f"this collector has no argument {', '.join(here)}")
    some = ", ".join(sorted(known))
    raise TypeError(f"the keywords {unknown} are unknown, expected some of {some}: check the spelling")


def _hidden(batch: TensorDictBase, prefix: Path = ()) -> list[Path]:
    """The keys that begin with an underscore; ``batch.keys(True)`` would cost more than the rest of a hand-over."""
    found = []
    for name, value in batch.items():
        if name.startswith("_"):
            found.append((*prefix, name))
        elif not isinstance(value, Tensor) and isinstance(value, TensorDictBase):
            found += _hidden(value, (*prefix, name))
    return found


def check_env_device(env: Env, given: Device) -> None:
    """Raise ValueError where `env_device` asks for another device than the environment's own."""
    if given is None:
        return
    own = getattr(env, "device", torch.device("cpu"))
    if checked_device(given, "env_device") != checked_device(own):
        raise ValueError(
            f"env_device is {given}, but {env!r} runs on {own}: build the environment there, or leave env_device out"
        )
