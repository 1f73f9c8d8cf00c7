"""`SyncDataCollector`: collection in this process, one batch after another."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase
from typing_extensions import override

from funcollect.collectors.collector import CollectorBase
from funcollect.collectors.keywords import collector
from funcollect.collectors.options import RunnerOptions, RunnerSpec, SourceOptions, options_of
from funcollect.collectors.runner import Runner


@collector
class SyncDataCollector(Runner, CollectorBase, SourceOptions, RunnerOptions):
    """An iterator over batches of experience, each collected when it is requested.

    It holds a `state` and `params` and calls the functions of the core. A loop over it can stop and be continued by
    another loop. Batches are ``[P, T]`` (``[T]`` for a single environment) with ``T = ceil(frames_per_batch / P)``,
    unlocked, and not shared with the collector.

    After an exception, or Ctrl-C, the next batch begins new episodes under new trajectory ids.

    A call before the last one has returned, from another thread, a signal handler or a callback, raises RuntimeError;
    only `stats`, `update_policy_weights_` and `shutdown` may be called at any time.

    Raises:
        TypeError, ValueError: for a bad argument, here and not in the first batch.

    >>> import funcollect as fc
    >>> collector = SyncDataCollector("CartPole-v1", frames_per_batch=50, total_frames=100, seed=0)
    >>> [batch.batch_size for batch in collector]
    [torch.Size([50]), torch.Size([50])]
    >>> collector.shutdown()
    """

    def __post_init__(self) -> None:
        """Build the environment and the policy."""
        options = options_of(self)
        source = RunnerSpec(
            create_env_fn=self.create_env_fn,
            create_env_kwargs=self.create_env_kwargs,
            policy=self.policy,
            policy_factory=self.policy_factory,
        )
        Runner.__init__(self, source, options, seed=self.seed)
        if self.warning:
            warnings.warn(self.warning, stacklevel=4)
        self._check_statistics()
        self._fill(**{name: getattr(options, name) for name in ("storing_device", "env_device", "policy_device")})

    @property
    @override
    def frames_of_batch(self) -> int:
        return self.length * self.state.num_lanes

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._forget()

    @override
    def _gather(self) -> TensorDictBase:
        self.begin_batch()
        return self.rollout()

    def __repr__(self) -> str:
        frames = f"frames_per_batch={self.options.frames_per_batch}, frames={self.frames}"
        return f"{type(self).__name__}({self.env!r}, {frames})"


Collector = SyncDataCollector  # its name in TorchRL since 0.14
