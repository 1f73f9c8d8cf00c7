"""Samples single frames with n-step returns, which are computed when a frame is sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from funcollect.buffers.arrays import Ints
from funcollect.buffers.samplers.indices import BufferView, SampleIndices, Slices, check_filled, trajectory_index_of
from funcollect.buffers.samplers.randomness import RandomSource
from funcollect.buffers.samplers.uniform import RandomSampler
from funcollect.buffers.trajectory_index.trajectory_keys import Trajectories
from funcollect.trajectories.multi_step import MultiStep
from funcollect.trajectories.split import MASK
from funcollect.tree import Path

__all__ = ["MultiStepSampler"]


@dataclass(kw_only=True, slots=True)
class _Lookahead(SampleIndices):
    """N frames, each with those that follow it: ``slots`` is ``[N * n_steps]``."""

    returns: MultiStep

    @property
    @override
    def index(self) -> Ints:
        return self.slots[:: self.returns.n_steps]

    @override
    def finish(self, batch: Any) -> Any:
        table = batch.reshape(-1, self.returns.n_steps)
        had = table.get("collector", None)
        if had is not None:
            table.set("collector", had.clone(False))
        table.set(MASK, torch.from_numpy(self.mask).to(batch.device).reshape(table.shape))
        first = self.returns(table)[:, 0]
        return first.exclude("collector" if had is None else MASK)


class MultiStepSampler(RandomSampler):
    """Single frames, drawn uniformly with replacement, with the n-step returns and next observations of `MultiStep`.

    They are computed from the trajectories in the buffer, also across batches, up to the newest frame of each.

    For `gamma`, `n_steps` and the errors, see `MultiStep`; for `traj_key` and `end_key`, see `SliceSampler`.

    >>> import funcollect as fc
    >>> sampler = MultiStepSampler(gamma=0.9, n_steps=3)
    >>> buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(1000), sampler=sampler, batch_size=64)
    >>> with fc.SyncDataCollector("CartPole-v1", frames_per_batch=2, total_frames=200, seed=0) as collector:
    ...     for batch in collector:
    ...         indices = buffer.extend(batch)
    >>> buffer.sample()["next", "reward"].max()
    tensor(2.7100)
    """

    def __init__(
        self, *, gamma: float, n_steps: int, traj_key: str | Path | None = None, end_key: str | Path | None = None
    ) -> None:
        self.returns = MultiStep(gamma, n_steps)
        self.trajectories = Trajectories(traj_key=traj_key, end_key=end_key)

    @override
    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        check_filled(memory)
        index, slots = trajectory_index_of(memory), random_source.below(len(memory), batch_size)
        spec = Slices(num_slices=batch_size, slice_len=self.returns.n_steps, strict_length=False, pad_output=True)
        drawn = spec.along(index, index.member.take(slots).astype(np.int64), index.position.take(slots))
        return _Lookahead(slots=drawn.slots, mask=drawn.mask, returns=self.returns)

    def __repr__(self) -> str:
        return f"MultiStepSampler(gamma={self.returns.gamma}, n_steps={self.returns.n_steps})"
