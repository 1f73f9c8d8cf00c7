"""`SyncDataCollector`: collects batches one after another, in this process and in each worker."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from funcollect.collectors.collector import CollectorBase
from funcollect.collectors.in_use import exclusive
from funcollect.collectors.keywords import collector
from funcollect.collectors.options import (
    Options,
    RunnerOptions,
    RunnerSpec,
    SourceOptions,
    check_updated,
    options_of,
)
from funcollect.core import api
from funcollect.core.env_params import set_env_params
from funcollect.core.loops.device import check_uncut
from funcollect.core.loops.eager import TimedLoops
from funcollect.core.request import NOWHERE, OwnColumns, check_given, own_action_warning
from funcollect.core.saving import COUNTS, Episodes, counts_in, reseed, restore, resume, snapshot
from funcollect.core.state import CollectorState
from funcollect.core.whole_episodes import check_limited, is_limited
from funcollect.errors import InUseError
from funcollect.files import from_data, to_data
from funcollect.policies.torch_modules.torch_backed import TorchBacked
from funcollect.policies.weights import check_dtypes
from funcollect.protocols import DeviceEnv
from funcollect.trajectories.final_observations import attach, is_compact
from funcollect.trajectories.next_observations import compact
from funcollect.trajectories.split import CUT

_SAVED = ("policy_state_dict", "own_weights", *COUNTS, "policy_state", "frames", "iter")


def given_weights(params: Any, policy_or_weights: Any, policy: Any) -> Any:
    """The parameters that a call passes; None for the policy's own, also if the policy itself is passed."""
    weights = policy_or_weights if params is None else params
    are_own = weights is policy or (isinstance(policy, TorchBacked) and policy.owns(weights))
    return None if are_own else weights


def check_saved(state_dict: Any, names: Sequence[str]) -> None:
    """Raise TypeError for a `state_dict` that is not a dict, and ValueError for one that lacks some of `names`."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict is {type(state_dict).__name__}, expected a dict: pass the result of state_dict")
    if missing := [name for name in names if name not in state_dict]:
        raise ValueError(f"the state_dict lacks {missing}, expected {list(names)}: pass the result of state_dict")


@collector
class SyncDataCollector(CollectorBase, SourceOptions, RunnerOptions):
    """An iterator over batches of experience, each collected when it is requested.

    Batches are ``[P, T]`` (``[T]`` for a single environment) with ``T = ceil(frames_per_batch / P)``, unlocked, and not
    shared with the collector. After an exception, or Ctrl-C, the next one begins new episodes under new trajectory ids.

    TypeError or ValueError for a bad argument, here and not in the first batch. A call before the last one has
    returned, from another thread, a signal handler or a callback, raises RuntimeError; only `stats`,
    `update_policy_weights_` and `shutdown` may be called at any time.

    Attributes:
        env: the environment.
        state: the collector state between two rollouts.
        lanes: the number of lanes in the whole run.
        length: T, the steps of a batch.

    >>> import funcollect as fc
    >>> with SyncDataCollector("CartPole-v1", frames_per_batch=50, total_frames=100, seed=0) as collector:
    ...     [batch.batch_size for batch in collector]
    [torch.Size([50]), torch.Size([50])]
    """

    _interrupted = False  # whether an exception has left the state unusable

    def __post_init__(self) -> None:
        source = RunnerSpec(**{each.name: getattr(self, each.name) for each in fields(RunnerSpec)})
        self._build(source, options_of(self))
        try:
            check_updated(self.update_statistics, self.policy)
            if self.warning:
                warnings.warn(self.warning, stacklevel=4)
        except BaseException:
            self._close()
            raise
        self._set(**{name: getattr(self.options, name) for name in ("storing_device", "env_device", "policy_device")})

    @classmethod
    def of_worker(cls, source: RunnerSpec, options: Options, seed: int) -> Self:
        """The collector of a worker. The parent has checked the keywords; those for the parent alone stay unset."""
        runner = cls.__new__(cls)
        runner.seed = seed
        runner.pre_collect_hook, runner.post_collect_hook = options.pre_collect_hook, options.post_collect_hook
        runner._build(source, options)
        return runner

    def _build(self, source: RunnerSpec, options: Options) -> None:
        self.options, self.params, self.frames = options, None, 0
        self._latest, self._counted = (None, 0), 0  # (weights, version), replaced together; the version in the state
        self.env, self.policy = source.build(options)
        shard, lanes = options.shard, self.env.num_envs or 1
        self.lanes = shard.count * lanes
        api.check_pair(self.env, self.policy)
        check_given(self.policy, options.exploration, self.lanes)
        if isinstance(self.env, DeviceEnv):
            check_uncut(self.env, options.max_frames_per_traj)
        if options.trajs_per_batch is not None:
            check_limited(is_limited(self.env, options.max_frames_per_traj), repr(self.env))
        first = shard.index * lanes
        self.state = api.init_lanes(self.env, self.policy, seed=self.seed, first_lane=first, total_lanes=self.lanes)
        self.seed = self.state.seed
        self.warning = own_action_warning(self.policy, options.init_random_frames)  # for the user; may be empty
        self.length = math.ceil(options.frames_per_batch / lanes)
        self._request = options.request(self.length, self.lanes)
        self.loops: Mapping[str, api.RunLoop] = api.LOOPS  # the loops for rollouts, by `Route.loop`

    @property
    @override
    def frames_of_batch(self) -> int:
        return self.length * self.state.num_lanes

    @override
    def _gather(self) -> TensorDictBase:
        self.begin_batch()
        return self.rollout()

    def begin_batch(self) -> None:
        """Call the hook, reset, and take the weights as a new version, as far as the keywords ask for it."""
        if self.pre_collect_hook is not None:
            self.pre_collect_hook()
        if self.options.reset_at_each_iter and self._batches:
            self.reset()
        if self.options.update_at_each_batch and self._batches:
            with self._updating:
                self.update_policy_weights_(self.params)

    @exclusive
    def rollout(self, columns: OwnColumns = NOWHERE) -> TensorDictBase:
        """One batch as the core returns it, even if the run has ended: counted, not split, not post-processed.

        It is recorded into `columns` as far as they fit; see `funcollect.core.request.Request`.
        """
        if self._interrupted:
            self._recover()
        started = time.perf_counter()
        request = self._request.given(self._take_latest())
        self._interrupted = True
        if columns is not NOWHERE:
            request = replace(request, columns=columns)
        self.state, batch = api.run(self.env, self.policy, self.state, request, loops=self.loops)
        self._interrupted = False
        self._seconds += time.perf_counter() - started
        self._batches += 1
        self.frames += batch.numel()
        if self.options.set_truncated:
            last = torch.zeros_like(batch["next", "done"])
            last[..., -1, :] = True
            batch.unlock_().set(CUT, (last & ~batch["next", "done"])[..., 0])
            for name in ("truncated", "done"):
                batch["next", name][last] = True
        batch.unlock_()
        if self.options.compact_obs and not is_compact(batch):  # the loop has recorded everything
            attach(batch, compact(batch, [*self.state.observation]))
        return batch

    @override
    def show(self, batch: TensorDictBase) -> TensorDictBase:
        if self.post_collect_hook is not None:
            self.post_collect_hook(batch)
        return batch

    def _recover(self) -> bool:
        """After an interruption, begin new episodes in all lanes, since simulators may be in any state; return True."""
        if interrupted := self._interrupted:
            self.state = api.recover(self.env, self.state)  # whose memory may have been reused, too
            self._interrupted = False
        return interrupted

    @contextmanager
    def _changing(self, *refusals: type[Exception]) -> Iterator[None]:
        """Mark the run as interrupted if the block raises anything but `refusals`, which leave the state unchanged."""
        try:
            yield
        except BaseException as error:
            self._interrupted = not isinstance(error, refusals)
            raise

    @exclusive
    def reset(self, mask: Tensor | None = None) -> None:
        """Begin new episodes in the lanes of `mask` [P]; in all lanes for None, or after an exception in a rollout."""
        if not self._recover() or mask is not None:
            with self._changing(TypeError, ValueError):
                self.state = api.reset(self.env, self.state, mask)

    @exclusive
    def apply(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The results of a function of each lane's environment, in the order of lanes, as `funcollect.apply` has it."""
        self._recover()
        with self._changing(TypeError):
            self.state, results = api.apply(self.env, self.state, function, *args)
        return results

    @exclusive
    def set_env_params(self, params: Any, *, at_once: bool = False) -> None:
        """Change the parameters of a JAX environment, as `funcollect.set_env_params` does, from the next rollout on."""
        self._recover()
        self.state = set_env_params(self.env, self.state, params, at_once=at_once)

    @override
    def _reseed(self, seed: int) -> int:
        self.state = reseed(self.env, self.policy, self.state, seed)
        self.seed, self._interrupted = self.state.seed, False
        return self.state.num_lanes

    def update_policy_weights_(self, params: Any = None, *, policy_or_weights: Any = None) -> None:
        """Act with `params` from the next batch on; None for the policy's own, which are read again for each batch.

        `params`, or `policy_or_weights` as TorchRL calls them, are the policy's parameters, or a module like its own;
        the policy's own module means None. ValueError if they do not fit. They are not copied: tensors that are changed
        in place act under the same version.
        """
        self._check_open()
        params = given_weights(params, policy_or_weights, self.policy)
        if params is not None:
            self.policy.prepare(params)
        with self._updating:
            self.count_as(params, self._latest[1] + 1)

    def count_as(self, params: Any, version: int) -> None:
        """Act with prepared `params`, under this version number, from the next rollout on; called in any thread."""
        self.params, self._latest = params, (params, version)

    def _take_latest(self) -> Any:
        """Return the latest weights, and write their version into the state."""
        params, version = self._latest
        if version != self._counted:  # added, since over JAX environments the state has an array
            updated = self.state.policy_version + (version - self._counted)
            self.state, self._counted = self.state.replace(policy_version=updated), version
        return params

    @override
    def get_policy_version(self) -> int:
        self._check_filler()
        return self._latest[1]

    @override
    def state_dict(self) -> dict[str, Any]:
        """The state that `load_state_dict` takes: weights, key and counts, which ``weights_only=True`` can read."""
        return self._saved(None) if self._closed and not self._in_use else self.saved_run(None)

    @override
    @exclusive
    def saved_run(self, episodes: Episodes | None) -> dict[str, Any]:
        if episodes is not None:
            self._recover()  # as the next rollout would do
        return self._saved(episodes)

    def _saved(self, episodes: Episodes | None) -> dict[str, Any]:
        params = self._take_latest()
        state = snapshot(self.state, episodes)
        counts = counts_in(state, copies=episodes is None)
        if episodes is not None:  # plain, since JAX arrays should not leave a worker
            counts = {**{name: counts[name] for name in COUNTS}, "state": to_data(state)}
        weights = {"policy_state_dict": dict(self.policy.state_dict(params)), "own_weights": params is None}
        return {**weights, **counts, "frames": self.frames, "iter": self._batches}

    @override
    @exclusive
    def continue_run(self, saved: Mapping[str, Any], episodes: Episodes | None) -> None:
        if episodes is None:
            check_saved(saved, _SAVED)
            self._continue(saved, lambda: resume(self.env, self.state, saved))
            return
        data, shard = from_data(*saved["state"]), self.options.shard
        was, now = (data["lanes"][0], data["total_lanes"]), (shard.index * self.state.num_lanes, self.lanes)
        if was != now:
            mend = "build it with as many workers and environments, and the same shard"
            what = f"the saved run begins with lane {was[0]} of {was[1]}, this one with lane {now[0]} of {now[1]}"
            raise ValueError(f"{what}: {mend}")
        if saved["own_weights"] and saved["policy_state_dict"]:
            check_dtypes(self.policy.state_dict(None), saved["policy_state_dict"])
        before, make_state = self.state, partial(restore, data, self.env, self.policy, episodes=episodes)
        try:
            self._continue(saved, make_state)
            api.close(before)
        except InUseError:  # the environment is a single live instance, which `before` uses
            self._continue(saved, partial(make_state, over=before))

    def _continue(self, saved: Mapping[str, Any], make_state: Callable[[], CollectorState]) -> None:
        """Continue with saved weights and counts, and with the state that `make_state` returns."""
        weights = saved["policy_state_dict"] or None
        if weights is not None:
            self.policy.prepare(weights)
        self.state = make_state()
        if weights is not None and saved["own_weights"]:
            self.policy.load(weights)
        self._take_over(saved, self.state.seed, weights)
        self._counted = int(self.state.policy_version)
        self.count_as(self.params, self._counted)
        self._interrupted = False

    @override
    def _close(self) -> None:
        if (filler := self._other_filler) is not None:
            filler.join()  # its rollout runs in the environments
        api.close(self.state)

    def __repr__(self) -> str:
        frames = f"frames_per_batch={self.options.frames_per_batch}, frames={self.frames}"
        return f"{type(self).__name__}({self.env!r}, {frames})"


class RolloutTimes(NamedTuple):
    """Where a collector spent its time, in seconds. Rollouts and the time between them add up to all of it."""

    loop: str  # the name of the one that ran
    frames: int  # collected
    seconds: float  # in all
    parts: Mapping[str, float]  # of the rollouts, by name
    busy: float  # CPU time of the process between them

    @property
    def between(self) -> float:
        """Seconds between the rollouts."""
        return max(self.seconds - sum(self.parts.values()), 0.0)


def timed(runner: SyncDataCollector) -> Callable[[], RolloutTimes]:
    """Time the rollouts of a collector. Returns a function that ends this, and returns the times."""
    loops, frames = TimedLoops(api.LOOPS), runner.frames
    runner.loops, cpu, began = loops, time.process_time(), time.perf_counter()

    def stop() -> RolloutTimes:
        seconds, busy = time.perf_counter() - began, time.process_time() - cpu
        runner.loops = api.LOOPS
        new, parts = runner.frames - frames, dict(loops.seconds)
        return RolloutTimes(loops.loop, new, seconds, parts, max(busy - loops.cpu, 0.0))

    return stop
