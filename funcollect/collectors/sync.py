"""`SyncDataCollector`: collection in this process, one batch after another."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tensordict import TensorDictBase

from funcollect.collectors.collector import CollectorBase
from funcollect.collectors.options import Device, Options, Postproc, check_known
from funcollect.collectors.runner import ALONE, Runner, Shard
from funcollect.collectors.source import RunnerSpec
from funcollect.specs import ExplorationType


class SyncDataCollector(Runner, CollectorBase):
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
        init_random_frames: frames at the start of the run with random actions, rounded up to whole batches; the policy
            runs all the same.
        reset_at_each_iter: begin every batch with new episodes.
        split_trajs: deliver `split_trajectories` of each batch.
        postproc: applied to each batch, after splitting.
        exploration_type: whether heads sample or act deterministically.
        reset_when_done: False keeps a finished lane finished until `reset`.
        update_at_each_batch: count a new policy version with every batch.
        set_truncated: mark the last frame of each lane in a batch as truncated, so that nothing is bootstrapped across
            batches; the episode goes on all the same. ``("collector", "cut")`` is True at these frames, by which
            `episode_stats` and `track` know that it does.
        seed: an int, or None to draw one.
        shard: which lanes are its own, where it is a part of a larger run.

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
        set_truncated: bool = False,
        seed: int | None = None,
        shard: Shard = ALONE,
        **others: Any,
    ) -> None:
        check_known(others, inspect.signature(SyncDataCollector).parameters.keys() - {"others"})
        options = Options(
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
            set_truncated=set_truncated,
        )
        source = RunnerSpec(
            create_env_fn=create_env_fn,
            create_env_kwargs=create_env_kwargs,
            policy=policy,
            policy_factory=policy_factory,
        )
        super().__init__(source, options, seed=seed, shard=shard)
        self.create_env_fn, self.create_env_kwargs, self.policy_factory = (
            create_env_fn,
            create_env_kwargs,
            policy_factory,
        )

    @property
    def frames_of_batch(self) -> int:
        """The frames that every batch has: `frames_per_batch`, rounded up to whole steps of all lanes."""
        return self.length * self.state.num_lanes

    def _gather(self) -> TensorDictBase:
        self.begin_batch()
        return self.rollout()

    def __repr__(self) -> str:
        frames = f"frames_per_batch={self.options.frames_per_batch}, frames={self.frames}"
        return f"{type(self).__name__}({self.env!r}, {frames})"


Collector = SyncDataCollector  # its name in TorchRL since 0.14
