"""One worker: the lanes that it owns, and the calls that it answers. Every transport runs this."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from tensordict import TensorDictBase
from torch import Tensor

from funcollect.collectors.options import Options, RunnerSpec
from funcollect.collectors.sync import RolloutTimes, RunnerTimer, SyncDataCollector, check_saved
from funcollect.core.env_params import param_shapes
from funcollect.core.request import NOWHERE, OwnColumns
from funcollect.core.saving import Episodes, counts_in
from funcollect.core.whole_episodes import is_limited
from funcollect.interop.plain_data import from_data
from funcollect.policies.torch_modules.sending import dumps, unpack
from funcollect.processes.failures import Failure, UnsentResultError, check_sendable, sending
from funcollect.specs import ActionSpec, Leaf, Space
from funcollect.trajectories.final_observations import FinalObservations, detach

# Calls that have changed the environments of a worker: the names of methods of `Worker`, and packed arguments.
EnvCalls = tuple[tuple[str, bytes], ...]


class Progress(NamedTuple):
    """How far a worker has come; its replacement continues from there."""

    steps: int = 0  # of every lane
    episode: int = -1  # the highest number of an episode that has begun
    batches: int = 0
    frames: int = 0


START = Progress()
_SAVED = ("workers", "frames", "iter", "policy_version", "own_weights")


def progress_of(state_dict: Mapping[str, Any]) -> Progress:
    """The progress of a worker that has loaded this state."""
    runners = runners_of(state_dict)
    steps, episodes = max(each["steps"] for each in runners), [int(each["episode"].max()) for each in runners]
    return Progress(steps, max(episodes), max(state_dict["iter"], 1), state_dict["frames"])


def saved_workers(state_dict: Any, count: int) -> list[Mapping[str, Any]]:
    """The states of `count` workers, from the state of their collector; ValueError for another number of workers."""
    check_saved(state_dict, _SAVED)
    saved = runners_of(state_dict)
    if len(saved) != count:
        raise ValueError(f"the state_dict has {len(saved)} workers, this collector {count}: build it with as many")
    return saved


def runners_of(state_dict: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The states of a worker's runners: its own, or those of its workers."""
    workers: Mapping[str, Mapping[str, Any]] | None = state_dict.get("workers")
    return [state_dict] if workers is None else [workers[name] for name in sorted(workers, key=int)]


def env_calls_of(saved: Mapping[str, Any]) -> EnvCalls:
    """What brings a new worker's environments to the parameters in `saved`, a `state_dict` or a saved run."""
    counts = _restart_of(saved)
    if all(each.get("varying_params") is None for each in runners_of(counts)):
        return ()
    return (("begin_from", dumps(counts)),)


def _restart_of(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A `state_dict` without weights, from a `state_dict` or a saved run."""
    if (workers := saved.get("workers")) is not None:
        return {
            **{name: saved[name] for name in _SAVED},
            "workers": {name: _restart_of(each) for name, each in workers.items()},
        }
    state = saved.get("state")
    counts = saved if state is None else {**saved, **counts_in(from_data(*state))}
    kept = {name: value for name, value in counts.items() if name != "state"}
    return kept | {"policy_state_dict": {}, "own_weights": True}


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that a worker is built from; sent by cloudpickle."""

    source: RunnerSpec  # makes the environment and the policy
    options: Options  # with the shard whose lanes the worker owns
    seed: int  # of the run, the same for all workers
    progress: Progress = START  # where the worker continues from
    applied: EnvCalls = ()  # those so far
    kind: type[Any] | None = None  # in an actor: the class of its collector; None for a runner
    keywords: Mapping[str, Any] = field(default_factory=dict)  # of that class, apart from those of the whole run
    config: Mapping[str, Any] = field(default_factory=dict)  # Ray's options for the actor

    @property
    def place(self) -> int:
        """The worker's place among those of the run."""
        return self.options.shard.index

    def collector(self) -> Any:
        """Build what makes the rollouts."""
        if self.kind is None:
            return SyncDataCollector.of_worker(self.source, self.options, self.seed)
        given = {"seed": self.seed, "shard": self.options.shard, **self.keywords}
        return self.kind(self.source.create_env_fn, self.source.policy, **given)

    def pack(self) -> bytes:
        """The job as bytes, functions of a notebook or a script by value; TypeError if it cannot be sent."""
        mend = "build what cannot be sent in functions, create_env_fn and policy_factory"
        try:
            return dumps(self)
        except Exception:
            given: dict[str, Any] = vars(self.source) | {"postproc": self.options.postproc}
            for name, value in (given | {"its environment or policy": self}).items():
                with sending(f"worker {self.options.shard.index}: {name}", "a worker", mend):
                    dumps(value)
            raise


class WorkerInfo(NamedTuple):
    """The description of a worker that has been built."""

    num_envs: int | None
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
    idle: float  # seconds between the last rollout and this one
    restarts: int = 0  # by its own workers, since then
    lost: int = 0  # frames with them
    final: FinalObservations | None = None  # of a compact batch, which is sent without them

    def packed(self) -> tuple[Any, ...]:
        """As plain tuples, without `final`: a class by name costs the reader more to unpickle than all numbers."""
        return (tuple(self.progress), *self[1:-1])


class Worker:
    """Collects in a worker, for the collector that holds it. Each public method answers one call.

    A replacement continues from the job's `progress`, and repeats the calls that had changed the lost environments.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._policy: bytes | None = None  # packed, if another one than the job's was sent
        self._runner: SyncDataCollector = job.collector()
        self._timer: RunnerTimer | None = None
        self._begin(self._runner, job.progress, job.applied)

    def _begin(self, collector: Any, progress: Progress, applied: EnvCalls) -> None:
        """Use this collector, which makes the rollouts: a `SyncDataCollector`, or one that has workers itself."""
        self._collector = collector
        self.reset, self.set_seed = collector.reset, collector.set_seed
        self.state_dict, self.saved_run = collector.state_dict, collector.saved_run
        self.close = collector.shutdown
        for name, packed in applied:
            with contextlib.suppress(UnsentResultError):  # nobody asks for the results again
                getattr(self, name)(packed)
        self._batches, self._frames = progress.batches, progress.frames
        if progress.batches:
            self.go_on(progress)
        self._ended = time.monotonic()

    def describe(self) -> WorkerInfo:
        """The worker's description."""
        env = self._runner.env
        lanes = env.num_envs or 1
        return WorkerInfo(
            env.num_envs,
            self._runner.length,
            env.observation_space,
            env.observation_leaves,
            env.action_spec,
            repr(env),
            lanes,
            self._runner.length * lanes,
            is_limited(env, self._job.options.max_frames_per_traj),
            param_shapes(env),
            self._runner.warning,
        )

    def collect(self) -> tuple[Any, Any]:
        """One rollout, and its report, as the transport sends them."""
        return self.roll_out(NOWHERE)

    def roll_out(self, columns: OwnColumns) -> tuple[TensorDictBase, RolloutReport]:
        """One rollout, recorded into `columns` as far as they fit."""
        idle = time.monotonic() - self._ended
        batch = self._rollout(columns)
        self._ended = time.monotonic()
        self._batches += 1
        self._frames += batch.numel()
        return batch, RolloutReport(*self._standing(), idle, *self._losses(), detach(batch))

    def _rollout(self, columns: OwnColumns) -> TensorDictBase:
        self._runner.begin_batch()
        return self._runner.rollout_into(columns)

    def _standing(self) -> tuple[Progress, int]:
        """The progress after the last rollout, and the version of the weights that acted in it."""
        state = self._runner.state
        progress = Progress(state.steps_made, int(np.asarray(state.episode).max()), self._batches, self._frames)
        return progress, int(state.policy_version)

    def _losses(self) -> tuple[int, int]:
        """How many of its own workers were replaced since the last rollout, and the lost frames."""
        return 0, 0

    def go_on(self, progress: Progress) -> None:
        """Begin new episodes as if the lanes had made this progress."""
        self._runner.go_on(steps=progress.steps, episode=progress.episode)

    def adopt(self, weights: Mapping[str, Tensor], version: int, policy: bytes | None = None) -> None:
        """Copy weights, by their names in the policy's `state_dict`, and act with them from now on.

        `version` is their number. `policy` is the policy's module or function, packed, if it has changed.
        """
        self._replace(policy)
        self._runner.policy.load(dict(weights))
        self._runner.count_as(None, version)

    def take_params(self, params: Any, version: int, policy: bytes | None = None) -> None:
        """Act with `params` from now on; None for the policy's own."""
        self._replace(policy)
        if params is not None:
            self._runner.policy.prepare(params)
        self._runner.count_as(params, version)

    def _replace(self, policy: bytes | None) -> None:
        if policy is not None and policy != self._policy:
            self._runner.replace_policy(unpack(policy))
            self._policy = policy

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

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._collector.load_state_dict(state_dict)
        self._batches, self._frames = state_dict["iter"], state_dict["frames"]

    def begin_from(self, packed: bytes) -> None:
        """Begin with the parameters of the environment that `env_calls_of` has packed, under the seed of now."""
        state_dict, own = cloudpickle.loads(packed), runners_of(self.state_dict())[0]
        loaded: list[Any] = [*runners_of(state_dict)]
        for each in loaded:
            each["key"] = own["key"]
        self.load_state_dict(state_dict)

    def continue_run(self, saved: Mapping[str, Any], episodes: Episodes) -> None:
        """Continue from the result of `saved_run`."""
        self._collector.continue_run(saved, episodes)
        self._batches, self._frames = saved["iter"], saved["frames"]

    def start_timer(self) -> None:
        """Time the rollouts from now on."""
        self._timer = RunnerTimer(self._runner)

    def stop_timer(self) -> list[RolloutTimes]:
        """Stop timing, and return the times of each runner; empty unless a timer was started."""
        timer, self._timer = self._timer, None
        return [] if timer is None else [timer.stop()]

    def failure(self, error: BaseException) -> Failure:
        """The `Failure` to send for an exception that was raised in this worker."""
        return Failure.of(error, self._job.options.shard.index * (self._runner.env.num_envs or 1))
