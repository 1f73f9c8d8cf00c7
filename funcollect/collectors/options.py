"""The keywords of collectors, declared, documented and checked once, and the environment and policy they build."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, get_args

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from typing_extensions import override

from funcollect import arguments
from funcollect.arguments import check_function, check_kind, check_positive, checked_device
from funcollect.collectors.in_use import check_extends
from funcollect.core.request import NO_VALUES, Request, Value, check_ends, check_exploration, check_values
from funcollect.envs.registry import make_env
from funcollect.interop.jax_setup import default_device_type
from funcollect.policies.as_policy import as_policy
from funcollect.policies.normalized import Normalized
from funcollect.protocols import Env, Policy
from funcollect.specs import ExplorationType
from funcollect.trajectories.split import split_trajectories
from funcollect.trajectories.whole_trajectories import TrajectoryFormat
from funcollect.tree import Path

Device = torch.device | str | None
Hook = Callable[..., object] | None  # its result is not used
HOOKS = {"pre_collect_hook": 0, "post_collect_hook": 1}  # the number of arguments of each
_NOT_WHOLE = {  # options that contradict whole trajectories: `reset_when_done` if False, the others if True
    "reset_at_each_iter": "a reset would interrupt them",
    "split_trajs": "they are split already, or for traj_format='padded' padded",
    "set_truncated": "it would cut them",
    "reset_when_done": "lanes have to go on",
}


def check_hook(name: str, hook: Any) -> None:
    """Raise TypeError unless a hook is None, or a function of as many arguments as `HOOKS` has."""
    if hook is not None:
        check_function(name, hook, ("a function without arguments", "a function of a batch")[HOOKS[name]], HOOKS[name])


def check_updated(update_statistics: bool, policy: Any) -> None:
    """Raise TypeError if `update_statistics` was asked for with a policy that has none."""
    if update_statistics and not isinstance(policy, Normalized):
        what = f"update_statistics is True, but the policy is {type(policy).__name__}, which has no statistics"
        mend = "pass the result of funcollect.normalized(policy, stats) as policy, without lower_policy or"
        mend += " policy_factory; for members of a population, call funcollect.running_statistics.update"
        raise TypeError(f"{what} to update: {mend}")


@dataclass(frozen=True)
class Shard:
    """The lanes of one part of a larger run: part `index` of `count` has ``index * L`` to ``index * L + L - 1``.

    L is the number of lanes in each part, those of all its workers together. Parts that are added later have an index
    of `count` or more. A negative index, or a count below 1, raises ValueError.

    >>> import funcollect as fc
    >>> with fc.SyncDataCollector("CartPole-v1", frames_per_batch=2, shard=fc.Shard(index=1, count=2)) as second:
    ...     next(second)["collector", "lane"]
    tensor([1, 1])
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        arguments.check_count("index", self.index)
        check_positive("count", self.count, example=2)

    def within(self, worker: int, count: int) -> Shard:
        """The shard of one of the `count` workers of a collector with this shard."""
        return Shard(self.index * count + worker, self.count * count)


FRAMES = 1000  # collected at a time for `trajs_per_batch` if `frames_per_batch` is not given


class WorkerShard(Shard):
    """A shard of a run whose parts have different numbers of workers: `index` is its first worker, `count` are all."""

    @override
    def within(self, worker: int, count: int) -> Shard:
        return Shard(self.index + worker, self.count)


@dataclass(kw_only=True, eq=False, repr=False)
class RunOptions:
    """The keywords of every collector, each with its meaning below it."""

    frames_per_batch: int | Sequence[int] = FRAMES
    """frames in a batch. A frame is one step of one environment."""
    total_frames: int = -1
    """frames after which the iteration ends, with a whole last batch; -1 for no end."""
    max_frames_per_traj: int | None = None
    """steps after which a trajectory is truncated; None or negative for no limit."""
    init_random_frames: int | None = None
    """frames at the start of the run with random actions, rounded up to whole batches. Their log-probabilities are
    those of the uniform distribution. The policy runs all the same; a warning is given if it may carry its own action,
    which was not executed, from step to step."""
    reset_at_each_iter: bool = False
    """begin every batch with new episodes."""
    split_trajs: bool = False
    """deliver `split_trajectories` of each batch."""
    postproc: Callable[[TensorDictBase], TensorDictBase] | None = None
    """applied to each batch, after splitting."""
    exploration_type: ExplorationType = ExplorationType.RANDOM
    """whether heads sample or act deterministically."""
    exploration: Mapping[str, Value] = field(default_factory=lambda: NO_VALUES)
    """other values for the numbers in `Policy.exploration`, as for `rollout`: ``{"epsilon": 0.1}``; tensors [L] for the
    lanes of the whole run, those of all workers; or functions of the number of its frames so far, such as an annealing
    schedule. Batches hold the values, also beside the random actions of `init_random_frames`."""
    reset_when_done: bool = True
    """False keeps a finished lane finished until `reset`. Batches then hold repeated frames, whose ``done`` is True;
    leave them out of a buffer from which single frames are sampled."""
    set_truncated: bool = False
    """mark the last frame of each lane in a batch as truncated, so that nothing is bootstrapped across batches. The
    episode continues; ``("collector", "cut")``, which `episode_stats` and `track` read, is True at such frames unless
    the episode ended there."""
    trajs_per_batch: int | None = None
    """deliver this many whole trajectories in each batch, as `rollout_trajectories` does: those that began first, of
    all lanes or of the worker that delivers. `frames_per_batch` are collected at a time, 1,000 if they are not given;
    `frames` and `total_frames` count them, including those that wait for the next batch. None for batches of frames,
    which need `frames_per_batch`."""
    traj_format: TrajectoryFormat = "cat"
    """how `trajs_per_batch` delivers them: ``"cat"`` for one after another, ``[F]``; ``"padded"`` for ``[N, Tmax]``
    with zeros where ``("collector", "mask")`` is False."""
    replay_buffer: Any = None
    """the object whose ``extend`` gets every batch: a buffer, or a list, which gets rows. The iteration then yields
    None, and `start` without an argument fills it in a thread. A buffer whose storage has ``ndim=1``, TorchRL's too,
    gets the frames as ``[F]``; with `trajs_per_batch`, any buffer gets trajectories once they are whole, one after
    another, ``[F]``. If ``extend`` raises, the next call gives it the same frames again."""
    trajs_per_write: int | None = None
    """whole trajectories in one call of ``replay_buffer.extend``; None for all that have become whole."""
    pre_collect_hook: Hook = None
    """called without arguments before each rollout, where that is collected: by every worker."""
    post_collect_hook: Hook = None
    """called with each batch, which it may change, before it is delivered; by every worker with its own rollout. In
    processes, keys that it adds have to be there from the first batch on."""
    track_traj_ids: bool = True
    """False leaves out the keys below ``"collector"``: trajectory ids, steps, lanes and policy versions."""
    track_policy_version: bool = False
    """whether batches have ``("collector", "policy_version")`` as ``"policy_version"``, too, also below ``"next"``."""
    compact_obs: bool = False
    """leave out the next observations that the following frames have; `next_observations` restores them."""
    update_statistics: bool = False
    """add each batch to the running statistics of a policy that `normalized` returned, when the next batch is
    requested. Until then ``policy.statistics`` and `state_dict` hold the statistics that acted in the batch."""


@dataclass(kw_only=True, eq=False, repr=False)
class LocalOptions(RunOptions):
    """The further keywords of collectors that run on this machine."""

    storing_device: Device = None
    """where batches are delivered."""
    update_at_each_batch: bool = False
    """before each batch, take the weights as they are then, the policy's or those given, as a new policy version."""
    shard: Shard = Shard()
    """which lanes the collector has, if it is a part of a larger run."""


@dataclass(kw_only=True, eq=False, repr=False)
class RunnerOptions(LocalOptions):
    """The keywords of one runner: those of `SyncDataCollector`, and of each worker."""

    frames_per_batch: int = FRAMES
    """frames in a batch, rounded up to a whole step of all lanes. A frame is one step of one environment."""
    device: Device = None
    """for `storing_device`, `env_device` and `policy_device` if they are not given."""
    env_device: Device = None
    """where the environment runs; it has to be there already."""
    policy_device: Device = None
    """where the policy runs: a Torch policy is moved; one in JAX, or made of others, has to be there already."""


@dataclass(kw_only=True, eq=False, repr=False)
class Options(RunnerOptions):
    """The keywords of one runner, checked: TypeError or ValueError for a value out of its range, naming the keyword."""

    env_device_given: bool = field(init=False, default=False)  # by the user, not taken from `device`

    def __post_init__(self) -> None:
        check_positive("frames_per_batch", self.frames_per_batch)
        check_kind("shard", self.shard, Shard, "pass for example Shard(index=0, count=2)")
        check_exploration(self.exploration_type)
        check_values(self.exploration)
        if (total := self.total_frames) != -1:
            if isinstance(total, int) and total < 1:
                raise ValueError(f"total_frames is {total}, expected at least 1: pass one, or -1 for an endless run")
            check_positive("total_frames", total)
        arguments.check_flags(**{each.name: getattr(self, each.name) for each in fields(self) if each.type == "bool"})
        for name in ("max_frames_per_traj", "init_random_frames"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer))):
                raise TypeError(f"{name} is {value!r}, expected an int: give one, or None for none")
        if self.max_frames_per_traj == 0:
            raise ValueError("max_frames_per_traj is 0, expected a positive int, or None (or negative) for no limit")
        if self.postproc is not None:
            check_function("postproc", self.postproc, "a function from batch to batch", 1)
        check_ends(self.max_frames_per_traj, self.reset_when_done)
        self._check_delivery()
        self._check_trajectories()
        self.env_device_given = self.env_device is not None
        if self.device is None and self.storing_device is None and self.env_device == self.policy_device:
            self.storing_device = self.env_device
        for name in ("storing_device", "env_device", "policy_device"):
            given = getattr(self, name)
            setattr(self, name, checked_device(self.device) if given is None else checked_device(given, name))

    def _check_delivery(self) -> None:
        buffer, write = self.replay_buffer, self.trajs_per_write
        if buffer is not None:
            check_extends("replay_buffer", buffer)
        arguments.check_optional_positive("trajs_per_write", write)
        if buffer is not None and self.split_trajs and self.postproc is None:
            what = "split_trajs is True, so replay_buffer would store padding, expected rows without"
            mend = "pass trajs_per_batch for whole trajectories, or a postproc that leaves the padding out"
            raise ValueError(f"{what}: {mend}")
        if write is not None and (buffer is None or self.trajs_per_batch is None):
            raise ValueError(f"trajs_per_write is {write}, but trajs_per_batch or replay_buffer is None: pass both")
        for name in HOOKS:
            check_hook(name, getattr(self, name))
        padded = self.traj_format == "padded" and buffer is None
        bare = self.compact_obs and self.postproc is None  # which might restore next observations
        if not self.track_traj_ids and (self.split_trajs or self.set_truncated or padded or bare):
            what = "track_traj_ids is False, so batches lack the keys of 'collector', which show padding and cuts, and"
            mend = "leave it out, or split_trajs, set_truncated, traj_format='padded' and compact_obs"
            raise ValueError(f"{what} have the last observations of compact_obs: {mend}")

    def _check_trajectories(self) -> None:
        arguments.check_optional_positive("trajs_per_batch", self.trajs_per_batch)
        arguments.check_choice("traj_format", self.traj_format, get_args(TrajectoryFormat))
        if self.trajs_per_batch is None:
            if self.traj_format != "cat":
                raise ValueError(f"traj_format is {self.traj_format!r}, but trajs_per_batch is None: pass both")
            return
        for name, reason in _NOT_WHOLE.items():
            if bool(value := getattr(self, name)) != (name == "reset_when_done"):
                what = f"{name} is {value}, which does not go together with trajs_per_batch, since {reason}"
                raise ValueError(f"{what}: leave one of them out")

    def request(self, length: int, lanes: int) -> Request:
        """The request for one batch: a rollout of `length` steps. `lanes` counts the lanes of the whole run."""
        limit = self.max_frames_per_traj
        return Request(
            length=length,
            exploration_type=self.exploration_type,
            exploration=self.exploration,
            max_frames_per_traj=limit if limit is not None and limit > 0 else None,
            random_steps=length * math.ceil(max(self.init_random_frames or 0, 0) / (lanes * length)),
            reset_when_done=self.reset_when_done,
            owned=True,
            compact_obs=self.compact_obs,
        )

    def finish(self, batch: TensorDictBase) -> TensorDictBase:
        """The batch as it is delivered: moved, split, post-processed, without keys that begin with an underscore."""
        if self.storing_device is not None and batch.device != self.storing_device:
            batch = batch.to(self.storing_device)
        if self.track_policy_version:
            for key in ("policy_version", ("next", "policy_version")):
                batch.set(key, batch["collector", "policy_version"])
        if self.split_trajs or (self.traj_format == "padded" and self.replay_buffer is None):
            batch = split_trajectories(batch)
        if self.postproc is not None:
            batch = self.postproc(batch)
            if not isinstance(batch, TensorDictBase):
                raise TypeError(f"postproc returned {type(batch).__name__}, expected a TensorDict: return the batch")
        hidden = _hidden(batch)
        if not self.track_traj_ids:
            hidden.append(("collector",))
        return batch.exclude(*hidden, inplace=True) if hidden else batch


def options_of(collector: RunOptions, **others: Any) -> Options:
    """The checked options of a collector: its keywords, with `others` in place of the same ones."""
    names = {each.name for each in fields(Options) if each.init} & {*vars(collector)}
    return Options(**{name: getattr(collector, name) for name in names} | others)


def _hidden(batch: TensorDictBase, prefix: Path = ()) -> list[Path]:
    """The keys that begin with an underscore. ``batch.keys(True)`` would cost more than the rest of a delivery."""
    found = []
    for name, value in batch.items():
        if name.startswith("_"):
            found.append((*prefix, name))
        elif not isinstance(value, Tensor) and isinstance(value, TensorDictBase):
            found += _hidden(value, (*prefix, name))
    return found


@dataclass(kw_only=True, eq=False, repr=False)
class SourceOptions:
    """The keywords of one environment and one policy besides themselves."""

    create_env_kwargs: Mapping[str, Any] | None = None
    """keyword arguments for `make_env` or for the callable."""
    policy_factory: Callable[[], Any] | None = None
    """a function that makes the policy, in place of `policy`."""


@dataclass(kw_only=True, eq=False)
class RunnerSpec(SourceOptions):
    """An environment and a policy before they are built."""

    create_env_fn: Any
    policy: Any = None

    def __post_init__(self) -> None:
        mend = "pass a dict of keyword arguments for make_env"
        check_kind("create_env_kwargs", self.create_env_kwargs, (Mapping, type(None)), mend)
        if (factory := self.policy_factory) is None:
            return
        if self.policy is not None:
            raise ValueError("policy and policy_factory are both given, expected one: leave the other out")
        if isinstance(factory, nn.Module):
            what = f"policy_factory is {type(factory).__name__}, expected a function that returns a policy"
            raise TypeError(f"{what}: pass one, or pass the policy as policy")
        check_function("policy_factory", factory, "a function without arguments that returns a policy", 0)

    def build(self, options: Options) -> tuple[Env, Policy]:
        """Build both, on the devices that `options` name."""
        policy = self.policy if self.policy_factory is None else self.policy_factory()
        if policy is None and self.policy_factory is not None:
            raise TypeError("policy_factory returned None, expected a policy: return it")
        env = make_env(self.create_env_fn, **(self.create_env_kwargs or {}))
        # `device` may name an accelerator for the policy while simulators stay on the host; `env_device` may not.
        wanted = options.env_device if env.backend != "host" or options.env_device_given else None
        if env.backend in ("torch", "device"):
            actual = str(checked_device(env.device))
        else:
            actual = default_device_type() if env.backend == "jax" else "cpu"
        if wanted is not None and actual not in (str(wanted), torch.device(wanted).type):
            mend = "build the environment there, or leave env_device out"
            raise ValueError(f"env_device is {wanted}, but {env!r} runs on {actual}: {mend}")
        return env, as_policy(policy, env, options.policy_device)
