"""Priorities beside frames on a device: sampling and updates neither copy to the host nor wait for the device."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from funcollect.buffers import Floats, Ints, indices, samplers
from funcollect.buffers.indices import BufferView, RandomSource, SampleIndices

_LARGEST = torch.finfo(torch.float64).max


def move_to(device: torch.device, sampler: indices.Sampler) -> None:
    """Move the priorities of single frames to a device; other samplers need the index of trajectories, on the host."""
    if type(sampler) is samplers.PrioritizedSampler and sampler.returns is None:
        stored, here = sampler.stored(), cast(DevicePrioritizedSampler, sampler)
        here.__class__, here.device = DevicePrioritizedSampler, device
        here.begin(*stored)


class DevicePrioritizedSampler(samplers.PrioritizedSampler):
    """A `PrioritizedSampler` for a storage on a device; dumps of both are alike.

    In place of a tree, it has the running sums of all weights, which a GPU makes again as fast as it runs through one.
    """

    device: torch.device

    @override
    def stored(self) -> tuple[Floats, float]:
        return self._there.numpy(force=True).copy(), float(self._most)

    @override
    def begin(self, weights: Floats, highest: float) -> None:
        self._there = torch.zeros(self.max_capacity, dtype=torch.float64, device=self.device)
        self._there[: len(weights)] = self._moved(weights)
        self._most = torch.full((), highest, dtype=torch.float64, device=self.device)
        self._upto: Tensor | None = None  # the running sums, until a weight changes

    @override
    def extended(self, memory: BufferView, slots: Ints) -> None:
        held, weight = self._moved(slots[slots >= 0]), self._power(self._most)
        if self.max_priority_within_buffer:
            most = self._there.index_fill(0, held, 0.0).amax()
            weight = torch.where(most > 0, most, self._power(torch.ones_like(most)))
        self._there[held], self._upto = weight.expand(len(held)), None

    def _moved(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _power(self, priority: Tensor) -> Tensor:
        return (priority + self.eps) ** float(self.alpha)

    @override
    def update_priority(self, memory: BufferView, index: Any, priority: Any, written: Any, before: int) -> None:
        """See `ReplayBuffer.update_priority`. Priorities that are negative or not finite are ignored: nothing waits."""
        slots = torch.as_tensor(index, device=self.device).reshape(-1).long()
        given = torch.as_tensor(priority, device=self.device).detach().reshape(-1).double()
        if len(given) not in (1, len(slots)):
            raise ValueError(f"{len(given)} priorities are given for {len(slots)} frames: give one each, or for all")
        after: Any = 0 if written is None else samplers.later(written, before + memory.written, len(slots))
        after = self._moved(after) if isinstance(after, np.ndarray) else after
        kept = (slots >= 0) & (slots < len(memory)) & (given >= 0) & (given <= _LARGEST)
        kept &= (memory.written - 1 - slots) % memory.capacity >= after
        kept &= after < memory.written
        slots = slots.clamp(0, self.max_capacity - 1)
        self._there[slots], self._upto = torch.where(kept, self._power(given), self._there[slots]), None
        self._most = torch.cat([self._most[None], torch.where(kept, given, 0.0)]).amax()

    @override
    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        indices.check_filled(memory)
        upto = self._upto = self._there.cumsum(0) if self._upto is None else self._upto
        places = self._moved(random_source.uniform(batch_size)) * upto[-1]
        below = torch.nextafter(upto[-1], torch.zeros_like(upto[-1]))
        slots: Any = torch.searchsorted(upto, torch.minimum(places, below), right=True)
        least = torch.where(self._there > 0, self._there, torch.inf).amin()
        weight = (self._there[slots] / least) ** -float(self.beta)
        return SampleIndices(slots=slots, info={"priority_weight": weight.float()})


DevicePrioritizedSampler.__name__ = samplers.PrioritizedSampler.__name__  # which dumps and texts have
