"""`SyncDataCollector`: collection in this process, one batch after another."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from tensordict import TensorDictBase
from torch import Tensor, nn

from funcollect.collectors.options import Device, Options, Postproc, check_env_device
from funcollect.core import api
from funcollect.core.reseed import next_seed, reseed, resume, saved_counts, saved_leaves
from funcollect.envs.registry import make_env
from funcollect.errors import ClosedError
from funcollect.policies.coerce import as_policy
from funcollect.specs import ExplorationType

_SAVED = (
    "policy_state_dict",
    "own_weights",
    "key",
    "episode",
    "steps",
    "policy_version",
    "policy_state",
    "frames",
    "iter",
)


def _from_factory(policy: Any, factory: Any) -> Any:
    if policy is not None:
        raise ValueError("policy and policy_factory are both given, expected one: leave the other out")
    if isinstance(factory, nn.Module) or not callable(factory):
        raise TypeError(
            f"policy_factory is {type(factory).__name__}, expected a function that returns a policy: pass one, or pass "
            "the policy as policy"
        )
    if (made := factory()) is None:
        raise TypeError("policy_factory returned None, expected a policy: return it")
    return made


class SyncDataCollector:
    """An iterator over batches of experience, each collected when it is asked for.

    It holds a `state` and `params` and calls the functions of the core. A loop over it can be broken off and taken up
    again. Batches are ``[P, T]`` (``[T]`` for a single environment) with ``T = ceil(frames_per_batch / P)``, unlocked
    and the caller's own.

    After an exception, or Ctrl-C, the next batch begins new episodes under new trajectory ids.

    Args:
        create_env_fn: an `Env`, whatever `make_env` takes, or a callable that returns one of these.
        policy: a `Policy`, a `TensorDictModule` or callable on a TensorDict, a module or function from observation to
            action, or None for random actions. Not copied where it is on its device already.
        policy_factory: makes the policy, in place of `policy`.
        frames_per_batch: frames (steps of one environment) in a batch, rounded up to a whole step of all lanes.
        total_frames: frames after which the iteration ends, with a whole last batch; -1 for no end.
        device: for `storing_device`, `env_device` and `policy_device` where they are unset.
        storing_device: where batches are delivered.
        env_device: where the environment runs; it has to be there.
        policy_device: where the policy runs.
        create_env_kwargs: keyword arguments for `make_env` or for the callable.
        max_frames_per_traj: steps after which a trajectory is truncated; None or negative for no limit.
        init_random_frames: frames at the start of the run with random actions; the policy runs all the same.
        reset_at_each_iter: begin every batch with new episodes.
        split_trajs: deliver `split_trajectories` of each batch.
        postproc: applied to each batch, after splitting.
        exploration_type: whether heads sample or act deterministically.
        reset_when_done: False keeps a finished lane finished until `reset`.
        update_at_each_batch: count a new policy version with every batch.
        seed: an int, or None to draw one.

    Raises:
        TypeError, ValueError: for a bad argument, here and not in the first batch.

    >>> import funcollect as fc
    >>> collector = SyncDataCollector("CartPole-v1", frames_per_batch=50, total_frames=100, seed=0)
    >>> [batch.batch_size for batch in collector]
    [torch.Size([50]), torch.Size([50])]
    >>> collector.shutdown()
    """

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        frames_per_batch: int,
        total_frames: int = -1,
        policy_factory: Callable[[], Any] | None = None,
        device: Device = None,
        storing_device: Device = None,
        env_device: Device = None,
        policy_device: Device = None,
        create_env_kwargs: Mapping[str, Any] | None = None,
        max_frames_per_traj: int | None = None,
        init_random_frames: int | None = None,
        reset_at_each_iter: bool = False,
        split_trajs: bool = False,
        postproc: Postproc | None = None,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        reset_when_done: bool = True,
        update_at_each_batch: bool = False,
        seed: int | None = None,
    ) -> None:
        self.options = Options(
            frames_per_batch=frames_per_batch,
            total_frames=total_frames,
            device=device,
            storing_device=storing_device,
            env_device=env_device,
            policy_device=policy_device,
            max_frames_per_traj=max_frames_per_traj,
            init_random_frames=init_random_frames,
            reset_at_each_iter=reset_at_each_iter,
            split_trajs=split_trajs,
            postproc=postproc,
            exploration_type=exploration_type,
            reset_when_done=reset_when_done,
            update_at_each_batch=update_at_each_batch,
        )
        if policy_factory is not None:
            policy = _from_factory(policy, policy_factory)
        if not isinstance(create_env_kwargs, (Mapping, type(None))):
            raise TypeError(
                f"create_env_kwargs is {create_env_kwargs!r:.80}, expected a dict of keyword arguments for make_env: "
                "pass one"
            )
        self.create_env_fn, self.create_env_kwargs, self.policy_factory = (
            create_env_fn,
            create_env_kwargs,
            policy_factory,
        )
        self.env = make_env(create_env_fn, **(create_env_kwargs or {}))
        # `device` may name an accelerator for the policy while simulators stay on the host; `env_device` may not.
        if self.env.backend != "host" or env_device is not None:
            check_env_device(self.env, self.options.env_device)
        self.policy = as_policy(policy, self.env, self.options.policy_device)
        self.params: Any = None
        self.state = api.init(self.env, self.policy, seed=seed)
        self.request = self.options.request(self.env, None)
        self.frames = 0
        self._batches = 0
        self._seconds = 0.0
        self._interrupted = False
        self._closed = False

    def __getattr__(self, name: str) -> Any:
        """The keywords of `Options`, as given; devices as `device` filled them."""
        if name != "options" and name in Options.__dataclass_fields__:
            return getattr(self.options, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *Options.__dataclass_fields__]

    @property
    def seed(self) -> int:
        """The seed of the run; what was drawn where None was given."""
        return self.state.seed

    def __len__(self) -> int:
        """Batches in the whole run.

        Raises:
            TypeError: for an endless run.
        """
        if self.options.total_frames < 0:
            raise TypeError("an endless collector (total_frames=-1) has no length: give total_frames")
        return -(-self.options.total_frames // (self.request.length * self.state.num_lanes))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TensorDictBase:
        if 0 <= self.options.total_frames <= self.frames:
            raise StopIteration
        if self.options.reset_at_each_iter and self._batches:
            self.reset()
        if self.options.update_at_each_batch and self._batches:
            self.update_policy_weights_(self.params)
        return self.options.finish(self.rollout())

    def rollout(self) -> TensorDictBase:
        """One batch as the core returns it, whether or not the run has ended: not split, not post-processed.

        Its frames count from here on, also where a `postproc` that raises loses the batch.
        """
        self._check_open()
        if self._interrupted:
            self.reset()
        started = time.perf_counter()
        self._interrupted = True
        request = self.request if self.params is None else self.options.request(self.env, self.params)
        self.state, batch = api.run(self.env, self.policy, self.state, request)
        self._interrupted = False
        self._seconds += time.perf_counter() - started
        self._batches += 1
        self.frames += batch.numel()
        return batch.unlock_()

    def reset(self, mask: Tensor | None = None) -> None:
        """Begin new episodes in the lanes of `mask` [P], or in all."""
        self._check_open()
        try:
            self.state = api.reset(self.env, self.state, mask)
        except (TypeError, ValueError):
            raise  # a bad mask, said before the state is used
        except BaseException:
            self._interrupted = True
            raise
        self._interrupted = self._interrupted and mask is not None

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Begin new episodes, seeded by `seed`: before the first batch, as if the collector had been built with it.

        Returns:
            The seed for the next collector, as TorchRL works it out; `seed` itself for `static_seed`.
        """
        self._check_open()
        self.state = reseed(self.env, self.policy, self.state, seed)
        self._interrupted = False
        return seed if static_seed else next_seed(seed, self.state.num_lanes)

    def update_policy_weights_(self, params: Any = None) -> None:
        """Act with `params` from the next batch on; None for the policy's own, which are read anew at each batch.

        Raises:
            ValueError: for parameters that do not fit the policy.
        """
        self._check_open()
        if params is not None:
            self.policy.prepare(params)
        self.params = params
        self.state = self.state.replace(policy_version=self.state.policy_version + 1)

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs: weights, key, counters. Episodes in flight begin anew after loading.

        Tensors, numbers and strings only: `torch.load` reads it with ``weights_only=True``.
        """
        weights = getattr(self.policy, "state_dict", None)
        return {
            "policy_state_dict": {} if weights is None else weights(self.params),
            "own_weights": self.params is None,
            **saved_counts(self.state),
            "policy_state": saved_leaves(self.state.policy_state),
            "frames": self.frames,
            "iter": self._batches,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`: the same weights, key and counts; new episodes under ids not used before.

        Weights that were the policy's own at saving are written into the policy; others become `params`.

        Raises:
            ValueError: for a state of another number of lanes, or weights that do not fit.
        """
        self._check_open()
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict is {type(state_dict).__name__}, expected a dict: pass what state_dict gave")
        if missing := [key for key in _SAVED if key not in state_dict]:
            raise ValueError(f"the state_dict lacks {missing}, expected {list(_SAVED)}: pass what state_dict gave")
        weights = state_dict["policy_state_dict"] or None
        if weights is not None:
            self.policy.prepare(weights)
        self.state = resume(self.env, self.state, state_dict)
        self.params = None if state_dict["own_weights"] else weights
        if weights is not None and self.params is None:
            self.policy.load(weights)  # type: ignore[attr-defined]
        self.frames = state_dict["frames"]
        self._batches = state_dict["iter"]
        self._interrupted = False

    def stats(self) -> dict[str, float]:
        """Counts of the run: frames, batches, seconds spent collecting, frames per second, the policy's version."""
        return {
            "frames": self.frames,
            "batches": self._batches,
            "seconds": self._seconds,
            "frames_per_second": self.frames / self._seconds if self._seconds else 0.0,
            "policy_version": int(self.state.policy_version),
        }

    def shutdown(self) -> None:
        """Free the simulators; nothing can be collected afterwards. Does nothing the second time."""
        self._closed = True
        api.close(self.state)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self!r} was shut down: build another collector")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        frames = f"frames_per_batch={self.options.frames_per_batch}, frames={self.frames}"
        return f"{type(self).__name__}({self.env!r}, {frames})"
