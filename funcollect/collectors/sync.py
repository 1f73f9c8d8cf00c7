"""`SyncDataCollector`: collection in this process, one batch after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tensordict import TensorDictBase
from typing_extensions import override

from funcollect.collectors.collector import CollectorBase, collector
from funcollect.collectors.options import Device, options_of
from funcollect.collectors.runner import ALONE, Runner, Shard
from funcollect.collectors.source import RunnerSpec


@collector
class SyncDataCollector(Runner, CollectorBase):
    """An iterator over batches of experience, each collected when it is asked for.

    It holds a `state` and `params` and calls the functions of the core. A loop over it can stop and be continued by
    another loop. Batches are ``[P, T]`` (``[T]`` for a single environment) with ``T = ceil(frames_per_batch / P)``,
    unlocked, and not shared with the collector.

    After an exception, or Ctrl-C, the next batch begins new episodes under new trajectory ids.

    Args:
        policy: a `Policy`, a `TensorDictModule` or callable on a TensorDict, a module or function from observation to
            action, or None for random actions. Not copied if it is on its device already.
        policy_factory: makes the policy, in place of `policy`.
        frames_per_batch: frames (steps of one environment) in a batch, rounded up to a whole step of all lanes.
        device: for `storing_device`, `env_device` and `policy_device` if they are not given.
        storing_device: where batches are delivered.
        env_device: where the environment runs; it has to be there already.
        policy_device: where the policy runs.
        create_env_kwargs: keyword arguments for `make_env` or for the callable.
        update_at_each_batch: count a new policy version with every batch.
        shard: which lanes are its own, if it is a part of a larger run.

    Raises:
        TypeError, ValueError: for a bad argument, here and not in the first batch.

    >>> import funcollect as fc
    >>> collector = SyncDataCollector("CartPole-v1", frames_per_batch=50, total_frames=100, seed=0)
    >>> [batch.batch_size for batch in collector]
    [torch.Size([50]), torch.Size([50])]
    >>> collector.shutdown()
    """

    frames_per_batch: int
    policy_factory: Callable[[], Any] | None = None
    create_env_kwargs: Mapping[str, Any] | None = None
    device: Device = None
    storing_device: Device = None
    env_device: Device = None
    policy_device: Device = None
    update_at_each_batch: bool = False
    shard: Shard = ALONE

    def __post_init__(self) -> None:
        """Build the environment and the policy."""
        options = options_of(self)
        source = RunnerSpec(
            create_env_fn=self.create_env_fn,
            create_env_kwargs=self.create_env_kwargs,
            policy=self.policy,
            policy_factory=self.policy_factory,
        )
        Runner.__init__(self, source, options, seed=self.seed, shard=self.shard)
        self.storing_device = options.storing_device
        self.env_device, self.policy_device = options.env_device, options.policy_device

    @property
    @override
    def frames_of_batch(self) -> int:
        return self.length * self.state.num_lanes

    @override
    def _gather(self) -> TensorDictBase:
        self.begin_batch()
        return self.rollout()

    def __repr__(self) -> str:
        frames = f"frames_per_batch={self.options.frames_per_batch}, frames={self.frames}"
        return f"{type(self).__name__}({self.env!r}, {frames})"


Collector = SyncDataCollector  # its name in TorchRL since 0.14
