"""The environment, the policy and the state that a collector runs, in its own process or in a worker."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from funcollect.collectors.in_use import InUse, exclusive
from funcollect.collectors.options import Options, RunnerSpec
from funcollect.core import api
from funcollect.core.apply import apply
from funcollect.core.env_params import set_env_params
from funcollect.core.exploration import check_given, own_action_warning
from funcollect.core.loops import RunsRollouts
from funcollect.core.loops.device import check_uncut
from funcollect.core.request import NOWHERE, OwnColumns
from funcollect.core.restore import SAVED, counts_of, go_on, next_seed, reseed, resume, saved_state
from funcollect.core.rollout_trajectories import check_limited, is_limited
from funcollect.core.saving import Episodes, state_data, state_from
from funcollect.core.state import CollectorState
from funcollect.errors import ClosedError, InUseError
from funcollect.interop.plain_data import from_data, to_data
from funcollect.policies.jax_functions.jax_policy import as_given
from funcollect.policies.torch_modules.torch_backed import TorchBacked, replaced
from funcollect.policies.weights import check_dtypes
from funcollect.protocols import DeviceEnv
from funcollect.trajectories.final_observations import attach, is_compact
from funcollect.trajectories.next_observations import compact
from funcollect.trajectories.split import CUT

_SAVED = ("policy_state_dict", "own_weights", *SAVED, "frames", "iter")


def given_weights(params: Any, policy_or_weights: Any, policy: Any) -> Any:
    """The parameters that a call passes; None for the policy's own, also if the policy itself is passed."""
    given = policy_or_weights if params is None else params
    own = given is policy or (isinstance(policy, TorchBacked) and policy.owns(given))
    return None if own else given


def check_saved(state_dict: Any, names: Sequence[str]) -> None:
    """Raise TypeError for a `state_dict` that is not a dict, and ValueError for one that lacks some of `names`."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict is {type(state_dict).__name__}, expected a dict: pass the result of state_dict")
    if missing := [name for name in names if name not in state_dict]:
        raise ValueError(
            f"the state_dict lacks {missing}, expected {list(names)}: pass the result of state_dict of such a collector"
        )


class Runner(InUse):
    """Collects one rollout after another.

    After an exception, or Ctrl-C, the next rollout begins new episodes under new trajectory ids.

    Attributes:
        env: the environment.
        params: the parameters that the policy acts with; None for its own.
        state: the collector state between two rollouts.
        lanes: the number of lanes in the whole run.
        length: T, the steps of a batch.
    """

    seed: int | None
    """an int, or None to draw one. Afterwards the one in use."""

    def __init__(self, source: RunnerSpec, options: Options, *, seed: int | None) -> None:
        self.options = options
        self.env, policy = source.build(options)
        self.policy = policy
        """what acts: made from a `Policy`, a `TensorDictModule`, a module or function, or None for random actions."""
        self.params: Any = None
        shard, lanes = options.shard, self.env.num_envs or 1
        self.lanes = shard.count * lanes
        api.check_pair(self.env, self.policy)
        check_given(self.policy, options.exploration)
        if isinstance(self.env, DeviceEnv):
            check_uncut(self.env, options.max_frames_per_traj)
        if options.trajs_per_batch is not None:
            check_limited(is_limited(self.env, options.max_frames_per_traj), repr(self.env))
        self.state = api.init_lanes(
            self.env, self.policy, seed=seed, first_lane=shard.index * lanes, total_lanes=self.lanes
        )
        self.seed = self.state.seed
        self.warning = own_action_warning(self.policy, options.init_random_frames)
        """for the user, about the policy with these options; empty if there is none."""
        self.length = math.ceil(options.frames_per_batch / lanes)
        self.loops: Mapping[str, RunsRollouts] = api.LOOPS
        """what runs the rollouts, by `Route.loop`."""
        self.frames = 0  # collected so far
        self._batches = 0
        self._seconds = 0.0
        self._interrupted = False
        self._closed = False

    def begin_batch(self) -> None:
        """Reset, or count new weights, if the keywords ask for that before each batch."""
        if self.options.reset_at_each_iter and self._batches:
            self.reset()
        if self.options.update_at_each_batch and self._batches:
            self.update_policy_weights_(self.params)

    def rollout(self) -> TensorDictBase:
        """One batch as the core returns it, even if the run has ended: not split, not post-processed.

        Its frames are counted, even if a `postproc` raises afterwards and the batch is lost.
        """
        return self.rollout_into(NOWHERE)

    @exclusive
    def rollout_into(self, columns: OwnColumns) -> TensorDictBase:
        """`rollout`, recorded into `columns` as far as they fit; see `funcollect.core.request.Request`."""
        self._check_open()
        if self._interrupted:
            self._reset()
        started = time.perf_counter()
        self._interrupted = True
        request = self.options.request(self.length, self.params, self.lanes, columns)
        before = self.state
        after, batch = api.run(self.env, self.policy, before, request, loops=self.loops)
        if self.state is not before:  # another thread, or a callback, has updated the weights
            after = after.replace(policy_version=self.state.policy_version)
        self.state = after
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

    @exclusive
    def reset(self, mask: Tensor | None = None) -> None:
        """Begin new episodes in the lanes of `mask` [P]; in all lanes for None, or after an exception in a rollout."""
        self._check_open()
        self._reset(mask)

    def _reset(self, mask: Tensor | None = None) -> None:
        again = self._interrupted
        try:
            if again:  # all lanes: simulators may stand anywhere, and the state's memory may have been used
                self.state = api.recover(self.env, self.state)
                self._interrupted = False
            if not again or mask is not None:
                self.state = api.reset(self.env, self.state, mask)
        except (TypeError, ValueError):
            raise  # for a bad mask; the state has not been used
        except BaseException:
            self._interrupted = True
            raise

    @exclusive
    def apply(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function with the environment of every lane between two rollouts, as `funcollect.apply` does.

        Returns:
            The results in the order of lanes.
        """
        self._check_open()
        if self._interrupted:
            self._reset()
        try:
            self.state, results = apply(self.env, self.state, function, *args)
        except TypeError:
            raise  # for what cannot be called or sent; the state can still be used
        except BaseException:
            self._interrupted = True
            raise
        return results

    @exclusive
    def set_env_params(self, params: Any, *, at_once: bool = False) -> None:
        """Change the parameters of a JAX environment, as `funcollect.set_env_params` does, from the next rollout on."""
        self._check_open()
        if self._interrupted:
            self._reset()
        self.state = set_env_params(self.env, self.state, params, at_once=at_once)

    @exclusive
    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Begin new episodes, seeded by `seed`: before the first batch, as if the collector had been built with it.

        Returns:
            The seed for the next collector, by TorchRL's rule; `seed` itself for `static_seed`.
        """
        self._check_open()
        self.state = reseed(self.env, self.policy, self.state, seed)
        self.seed = self.state.seed
        self._interrupted = False
        return seed if static_seed else next_seed(seed, self.state.num_lanes)

    def update_policy_weights_(self, params: Any = None, *, policy_or_weights: Any = None) -> None:
        """Act with `params` from the next batch on; None for the policy's own, which are read again for each batch.

        Args:
            params: the policy's parameters, or a module like its own; the policy's own module means None. They are not
                copied: tensors that are changed in place later act under the same version.
            policy_or_weights: `params`, by TorchRL's name for it.

        Raises:
            ValueError: for parameters that do not fit the policy.
        """
        self._check_open()
        params = given_weights(params, policy_or_weights, self.policy)
        if params is not None:
            self.policy.prepare(params)
        self.count_as(params, int(self.state.policy_version) + 1)

    def count_as(self, params: Any, version: int) -> None:
        """Act with prepared `params`, under this version number."""
        self.params = params
        own = self.state.policy_version  # an array over JAX environments, and it has to stay one
        self.state = self.state.replace(policy_version=own + (version - int(own)))

    def replace_policy(self, subject: Any) -> None:
        """Act with another module, function or policy from now on, with its own weights."""
        self.policy = replaced(self.policy, subject)
        self.params = None

    def go_on(self, *, steps: int, episode: int) -> None:
        """Begin new episodes as if every lane had made `steps` steps and begun the episodes up to `episode`."""
        self.state = go_on(self.env, self.policy, self.state, steps=steps, episode=episode)

    @exclusive
    def state_dict(self) -> dict[str, Any]:
        """The state that `load_state_dict` takes: weights, key, counters. Episodes in flight start again after loading.

        It holds tensors, numbers and strings only, so that `torch.load` reads it with ``weights_only=True``.
        """
        return {
            "policy_state_dict": dict(self.policy.state_dict(self.params)),
            "own_weights": self.params is None,
            **saved_state(self.state),
            "frames": self.frames,
            "iter": self._batches,
        }

    @exclusive
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`: the same weights, key and counts; new episodes under ids not used before.

        Weights that were the policy's own at saving are written into the policy; others become `params`.

        Raises:
            ValueError: for a state of another number of lanes, or weights that do not fit.
        """
        self._check_open()
        check_saved(state_dict, _SAVED)
        self._continue(state_dict, lambda: resume(self.env, self.state, state_dict))

    @exclusive
    def saved_run(self, episodes: Episodes) -> dict[str, Any]:
        """Everything that `continue_run` needs to collect the next batch as this runner would: plain data."""
        self._check_open()
        if self._interrupted:
            self._reset()  # as the next rollout would
        return {
            "policy_state_dict": dict(self.policy.state_dict(self.params)),
            "own_weights": self.params is None,
            **counts_of(self.state),
            "frames": self.frames,
            "iter": self._batches,
            "state": to_data(state_data(self.state, episodes)),  # here, since JAX arrays should not leave a worker
        }

    @exclusive
    def continue_run(self, saved: Mapping[str, Any], episodes: Episodes) -> None:
        """Continue a saved run; ValueError or ReplayError, as `load` raises them, if that is impossible."""
        self._check_open()
        structure, arrays = saved["state"]
        data, shard = from_data(structure, arrays), self.options.shard
        place, own = (data["lanes"][0], data["total_lanes"]), (shard.index * self.state.num_lanes, self.lanes)
        if place != own:
            raise ValueError(
                f"the saved run begins with lane {place[0]} of {place[1]}, this one with lane {own[0]} of {own[1]}: "
                "build it with as many workers and environments, and the same shard"
            )
        if saved["own_weights"] and saved["policy_state_dict"]:
            check_dtypes(self.policy.state_dict(None), saved["policy_state_dict"])
        before = self.state
        try:
            self._continue(saved, lambda: state_from(data, self.env, self.policy, episodes=episodes))
            api.close(before)
        except InUseError:  # an instance, of which there is one
            self._continue(saved, lambda: state_from(data, self.env, self.policy, episodes=episodes, over=before))

    def _continue(self, saved: Mapping[str, Any], make_state: Callable[[], CollectorState]) -> None:
        """Continue with saved weights and counts, and with the state that `make_state` returns."""
        weights = saved["policy_state_dict"] or None
        if weights is not None:
            self.policy.prepare(weights)
        self.state = make_state()
        self.seed = self.state.seed
        self.params = None if saved["own_weights"] else as_given(self.policy, weights)
        if weights is not None and self.params is None:
            self.policy.load(weights)
        self.frames = saved["frames"]
        self._batches = saved["iter"]
        self._interrupted = False

    def stats(self) -> dict[str, float]:
        """Counts of the run.

        Returns:
            By name:

            - ``frames`` and ``batches`` delivered;
            - ``seconds`` spent in this collector, and the ``frames_per_second`` of that time alone;
            - ``policy_version``, that of the latest weights.
        """
        return {
            "frames": self.frames,
            "batches": self._batches,
            "seconds": self._seconds,
            "frames_per_second": self.frames / self._seconds if self._seconds else 0.0,
            "policy_version": int(self.state.policy_version),
        }

    def shutdown(self, timeout: float | None = None) -> None:
        """Free the simulators. Does nothing the second time."""
        self._closed = True
        api.close(self.state)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self!r} was shut down: build another collector")
