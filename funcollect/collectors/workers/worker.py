"""One worker: the lanes that it owns, and the calls that it answers. Every transport runs this."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from funcollect.collectors.options import HOOKS, Options, RunnerSpec
from funcollect.collectors.sync import RolloutTimes, SyncDataCollector, timed
from funcollect.core.env_params import param_shapes
from funcollect.core.request import NOWHERE, OwnColumns
from funcollect.core.saving import Episodes, go_on
from funcollect.core.whole_episodes import is_limited
from funcollect.files import from_data
from funcollect.policies.torch_modules.settings import dumps, unpack
from funcollect.policies.torch_modules.torch_backed import replaced
from funcollect.processes.failures import UnsentResultError, check_sendable, sending
from funcollect.processes.serving import Served
from funcollect.specs import ActionSpec, Leaf, Space
from funcollect.trajectories.final_observations import FinalObservations, detach
from funcollect.tree import Path, flatten

# Calls that have changed the environments of a worker: names of methods of `Worker`, with packed arguments.
EnvCalls = tuple[tuple[str, bytes], ...]


class Progress(NamedTuple):
    """How far a worker has come; its replacement continues from there."""

    steps: int = 0  # of every lane
    episode: int = -1  # the highest number of an episode that has begun
    batches: int = 0
    frames: int = 0


SAVED = ("workers", "frames", "iter", "policy_version", "own_weights", "own_workers")


def runners_of(state_dict: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The states of a worker's runners: its own, or those of its workers."""
    workers: Mapping[str, Mapping[str, Any]] | None = state_dict.get("workers")
    return [state_dict] if workers is None else [workers[name] for name in sorted(workers, key=int)]


def restored(saved: Mapping[str, Any], episodes: Episodes | None) -> tuple[Progress, EnvCalls]:
    """The progress of a worker that has loaded this state, and calls that give new environments its parameters."""
    runners = runners_of(saved)
    steps, episode = max(each["steps"] for each in runners), max(int(each["episode"].max()) for each in runners)
    progress = Progress(steps, episode, max(saved["iter"], 1), saved["frames"])
    states = [each if episodes is None else from_data(*each["state"]) for each in runners]
    if all(state.get("varying_params") is None for state in states):
        return progress, ()
    bare: dict[str, Any] = {"policy_state_dict": {}, "own_weights": True}  # the latest weights are sent apart
    if "workers" in saved:
        bare = {"workers": {name: {**each, **bare} for name, each in saved["workers"].items()}, "ready": []}
    return progress, (("begin_from", dumps(({**saved, **bare}, episodes and "restart"))),)


def turned(batch: TensorDictBase, single: bool) -> dict[Path, Tensor]:
    """The leaves [P, T, ...] of a batch, or [T, ...] of a `single` environment's, as columns [T, P, ...]."""
    return {path: leaf.unsqueeze(1) if single else leaf.transpose(0, 1) for path, leaf in flatten(batch).items()}


def copy_into(columns: Mapping[Path, Tensor], leaves: Mapping[Path, Tensor]) -> None:
    """Copy leaves into columns of the same paths, shapes and dtypes, unless they lie there already; else ValueError."""
    if leaves.keys() != columns.keys():
        differing = sorted(".".join(path) for path in leaves.keys() ^ columns.keys())
        raise ValueError(f"the keys {differing} are not in every batch: record the same ones in all")
    storage = next(iter(columns.values())).untyped_storage()
    memory = range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
    moved = {}
    for path, leaf in leaves.items():
        column = columns[path]
        if leaf.shape != column.shape or not torch.can_cast(leaf.dtype, column.dtype):
            was = f"in the first batch it was {column.dtype} {list(column.shape)}"
            what = f"{'.'.join(path)} is {leaf.dtype} {list(leaf.shape)}, {was}"
            raise ValueError(f"{what}: keep shapes and dtypes the same in all")
        if (leaf.data_ptr(), leaf.stride(), leaf.dtype) != (column.data_ptr(), column.stride(), column.dtype):
            moved[path] = leaf.clone() if leaf.data_ptr() in memory else leaf  # which another column may overwrite
    for path, leaf in moved.items():
        columns[path].copy_(leaf)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that a worker is built from; sent by cloudpickle."""

    source: RunnerSpec  # makes the environment and the policy
    options: Options  # with the shard whose lanes the worker owns
    seed: int  # of the run, the same for all workers
    progress: Progress = field(default_factory=Progress)  # where the worker continues from
    applied: EnvCalls = ()  # so far, for a replacement to repeat
    kind: type[Any] | None = None  # in an actor: the class of its collector; None for a runner
    keywords: Mapping[str, Any] = field(default_factory=dict)  # of that class, without those of the whole run
    config: Mapping[str, Any] = field(default_factory=dict)  # Ray's options for the actor

    @property
    def place(self) -> int:
        """The worker's place among those of the run."""
        return self.options.shard.index

    def collector(self) -> Any:
        """Build the collector that makes the rollouts."""
        if self.kind is None:
            return SyncDataCollector.of_worker(self.source, self.options, self.seed)
        keywords = {"seed": self.seed, "shard": self.options.shard, **self.keywords}
        return self.kind(self.source.create_env_fn, self.source.policy, **keywords)

    def pack(self) -> bytes:
        """The job as bytes, with functions of a notebook or script by value; TypeError if it cannot be sent."""
        mend = "build what cannot be sent in functions, create_env_fn and policy_factory"
        try:
            return dumps(self)
        except Exception:
            functions = {name: getattr(self.options, name) for name in ("postproc", *HOOKS)}
            given: dict[str, Any] = vars(self.source) | functions
            for name, value in (given | {"its environment or policy": self}).items():
                with sending(f"worker {self.place}: {name}", "a worker", mend):
                    dumps(value)
            raise


class WorkerInfo(NamedTuple):
    """The description of a worker that has been built."""

    num_envs: int | None  # P
    length: int  # T
    space: Space
    leaves: tuple[Leaf, ...]
    action: ActionSpec
    label: str
    lanes: int  # of the worker: P, or those of all its own workers
    frames: int  # of each of its batches
    limited: bool  # whether every trajectory ends after some number of steps
    param_shapes: list[tuple[int, ...]] | None  # of the environment's parameters, if it has some that can be set
    warning: str  # for the user; empty if there is none


class RolloutReport(NamedTuple):
    """The figures that come with each rollout."""

    progress: Progress
    version: int  # of the weights that acted
    restarts: int  # of its own workers, since the last rollout
    lost: int  # frames lost with them
    idle: float  # seconds between the last rollout and this one
    final: FinalObservations | None  # of a compact batch, which is sent without them


class Worker(Served):
    """Collects in a worker. Each public method answers one call of the collector that has the workers.

    A replacement continues from the job's `progress`, and repeats the calls that had changed the lost environments.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._policy: bytes | None = None  # packed, if another one than the job's was sent
        self._runner: SyncDataCollector = job.collector()
        self.first_lane = job.place * (self._runner.env.num_envs or 1)
        self._stop_timer: Callable[[], RolloutTimes] | None = None
        self._use(self._runner, job.progress, job.applied)

    def _use(self, collector: Any, progress: Progress, applied: EnvCalls) -> None:
        """Make rollouts with `collector`, which may have workers, from `progress` on, after the calls `applied`."""
        self._collector = collector
        self.reset, self.set_seed, self.save = collector.reset, collector.set_seed, collector.saved_run
        for name, packed in applied:
            with contextlib.suppress(UnsentResultError):  # nobody asks for the results again
                getattr(self, name)(packed)
        self._batches, self._frames = progress.batches, progress.frames
        if progress.batches:
            self.go_on(progress)
        self._idle_since = time.monotonic()

    @override
    def close(self) -> None:
        self._collector.shutdown()

    @override
    def describe(self) -> WorkerInfo:
        env, length = self._runner.env, self._runner.length
        lanes, limited = env.num_envs or 1, is_limited(env, self._job.options.max_frames_per_traj)
        return WorkerInfo(
            *(env.num_envs, length, env.observation_space, env.observation_leaves, env.action_spec, repr(env)),
            *(lanes, length * lanes, limited, param_shapes(env), self._runner.warning),
        )

    def collect(self) -> tuple[Any, Any]:
        """One rollout, and its report, as the transport sends them."""
        return self.roll_out(NOWHERE)

    def roll_out(self, columns: OwnColumns) -> tuple[TensorDictBase, tuple[Any, ...]]:
        """One rollout, recorded into `columns` as far as they fit, and its report.

        The report is a plain tuple: to unpickle a named class would cost the reader more than all the numbers.
        """
        idle = time.monotonic() - self._idle_since
        batch = self._rollout(columns)
        self._idle_since = time.monotonic()
        self._batches += 1
        self._frames += batch.numel()
        progress, *others = self._report_start()
        return batch, (tuple(progress), *others, idle, detach(batch))

    def _rollout(self, columns: OwnColumns) -> TensorDictBase:
        self._runner.begin_batch()
        return self._runner.show(self._runner.rollout(columns))

    def _report_start(self) -> tuple[Progress, int, int, int]:
        """The first four fields of the `RolloutReport` on the last rollout."""
        state = self._runner.state
        progress = Progress(state.steps_made, int(np.asarray(state.episode).max()), self._batches, self._frames)
        return progress, int(state.policy_version), 0, 0

    def go_on(self, progress: Progress) -> None:
        """Begin new episodes as if the lanes had made this progress."""
        runner, (steps, episode, _, _) = self._runner, progress
        runner.state = go_on(runner.env, runner.policy, runner.state, steps=steps, episode=episode)

    def adopt(self, weights: Mapping[str, Tensor], version: int, policy: bytes | None) -> None:
        """Act with a copy of these weights by name from now on, and with a packed `policy` if that has changed."""
        self.take_params(dict(weights), version, policy, own=True)

    def take_params(self, params: Any, version: int, policy: bytes | None, own: bool = False) -> None:
        """Act with `params` from now on, None for the policy's own; if `own`, copy them into the policy."""
        if policy is not None and policy != self._policy:
            self._runner.policy, self._policy = replaced(self._runner.policy, unpack(policy)), policy
            self._runner.count_as(None, self._runner.policy_version)  # its own weights, also if others do not fit
        if own:
            self._runner.policy.load(params)
        elif params is not None:
            self._runner.policy.prepare(params)
        self._runner.count_as(None if own else params, version)

    def set_hook(self, name: str, packed: bytes) -> None:
        """Call another function before or after each rollout."""
        setattr(self._collector, name, cloudpickle.loads(packed))

    def apply(self, packed: bytes) -> list[Any]:
        """Call a function with every lane's environment."""
        function, args = cloudpickle.loads(packed)
        results: list[Any] = self._collector.apply(function, *args)
        check_sendable(results)
        return results

    def set_env_params(self, packed: bytes) -> None:
        """Change the parameters of every lane's environment."""
        params, at_once = cloudpickle.loads(packed)
        self._collector.set_env_params(params, at_once=at_once)

    def load(self, saved: Mapping[str, Any], episodes: Episodes | None) -> None:
        """Continue from the result of `save`."""
        self._collector.continue_run(saved, episodes)
        self._batches, self._frames = saved["iter"], saved["frames"]

    def begin_from(self, packed: bytes) -> None:
        """Begin with the environment's parameters from the state that the lost worker had loaded; see `restored`."""
        self.load(*cloudpickle.loads(packed))
        self.set_seed(self._job.seed)

    def timer(self, on: bool) -> list[RolloutTimes]:
        """Time the rollouts from now on; or stop that, and return the times of each runner, empty if there are none."""
        stop, self._stop_timer = self._stop_timer, timed(self._runner) if on else None
        return [] if on or stop is None else [stop()]
