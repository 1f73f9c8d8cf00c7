"""Priorities beside frames on a device: sampling and updates neither copy to the host nor wait for the device."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from funcollect.buffers import Floats, Ints, indices, samplers
from funcollect.buffers.indices import BufferView, RandomSource, SampleIndices
from funcollect.buffers.slots import later
from funcollect.buffers.sum_tree import WIDTH, sizes_of

_LARGEST = torch.finfo(torch.float64).max


class DeviceTree:
    """A `SumTree` on a device, whose slots, weights and places are tensors there."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        options: dict[str, Any] = {"dtype": torch.float64, "device": device}
        self._sums = [torch.zeros(size, **options) for size in sizes_of(capacity)]
        self._least = [torch.full((size,), torch.inf, **options) for size in sizes_of(capacity)]
        self._running = torch.zeros(len(self._sums[-1]) + 1, **options)

    def put(self, slots: Tensor, weights: Tensor) -> None:
        """Set the weights of slots; if a slot is repeated, one of its weights counts, on the CPU the last."""
        self._sums[0][slots] = weights
        self._least[0][slots] = torch.where(weights > 0, weights, torch.inf)
        for (sums, least), (above, least_above) in pairwise(zip(self._sums, self._least, strict=True)):
            slots = slots // WIDTH
            above[slots] = sums.view(-1, WIDTH)[slots].sum(1)
            least_above[slots] = least.view(-1, WIDTH)[slots].amin(1)
        torch.cumsum(self._sums[-1], 0, out=self._running[1:])

    def get(self, slots: Tensor) -> Tensor:
        """The weights of slots."""
        return self._sums[0][slots]

    @property
    def weights(self) -> Tensor:
        """The weights of all slots, a view."""
        return self._sums[0]

    @property
    def least(self) -> Tensor:
        """The least positive weight; infinite if there is none."""
        return self._least[-1].amin()

    def find(self, places: Tensor) -> Tensor:
        """The slots at the given places in ``[0, 1)``, if all weights are laid end to end on that interval."""
        upto, zero = self._running, torch.zeros_like(places)
        rest = torch.minimum(places * upto[-1], torch.nextafter(upto[-1], zero[0]))
        found = torch.searchsorted(upto, rest, right=True) - 1
        rest = rest - upto[found]
        for sums in self._sums[-2::-1]:
            ends = sums.view(-1, WIDTH)[found].cumsum(1)
            rest = torch.minimum(rest, torch.nextafter(ends[:, -1], zero))  # not past the end, see `SumTree.find`
            child = (ends > rest[:, None]).to(torch.uint8).argmax(1)
            rest = rest - torch.where(child > 0, ends.gather(1, (child - 1).clamp(min=0)[:, None])[:, 0], 0.0)
            found = found * WIDTH + child
        return found


class PrioritizedSampler(samplers.PrioritizedSampler):
    """The sampler of this name for a storage on a device, where its tree is; dumps of both are alike."""

    device: torch.device

    @override
    def stored(self) -> tuple[Floats, float]:
        return self._tree.weights[: self.max_capacity].numpy(force=True).copy(), float(self._most)

    @override
    def begin(self, weights: Floats, highest: float) -> None:
        self._tree = DeviceTree(self.max_capacity, self.device)
        self._tree.put(torch.arange(len(weights), device=self.device), self._moved(weights))
        self._most = torch.full((), highest, dtype=torch.float64, device=self.device)

    @override
    def extended(self, memory: BufferView, slots: Ints) -> None:
        held = self._moved(slots[slots >= 0])
        if self.max_priority_within_buffer:
            self._tree.put(held, torch.zeros(len(held), dtype=torch.float64, device=self.device))
            most = self._tree.weights.amax()
            weight = torch.where(most > 0, most, self._power(torch.ones_like(most)))
        else:
            weight = self._power(self._most)
        self._tree.put(held, weight.expand(len(held)))

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
        after: Any = 0 if written is None else later(written, before + memory.written, len(slots))
        after = self._moved(after) if isinstance(after, np.ndarray) else after
        kept = (slots >= 0) & (slots < len(memory)) & (given >= 0) & (given <= _LARGEST)
        kept &= (memory.written - 1 - slots) % memory.capacity >= after
        kept &= after < memory.written
        slots = slots.clamp(0, self.max_capacity - 1)
        self._tree.put(slots, torch.where(kept, self._power(given), self._tree.get(slots)))
        self._most = torch.maximum(self._most, torch.where(kept, given, 0.0).amax()) if len(slots) else self._most

    @override
    def draw(self, memory: BufferView, batch_size: int, random_source: RandomSource) -> SampleIndices:
        indices.check_filled(memory)
        slots: Any = self._tree.find(self._moved(random_source.uniform(batch_size)))
        weight = (self._tree.get(slots) / self._tree.least) ** -float(self.beta)
        return SampleIndices(slots=slots, info={"priority_weight": weight.float()})


def move_to(device: torch.device, sampler: indices.Sampler) -> None:
    """Move the priorities of single frames to a device; other samplers need the index of trajectories, on the host."""
    if type(sampler) is samplers.PrioritizedSampler and sampler.returns is None:
        stored, here = sampler.stored(), cast(PrioritizedSampler, sampler)
        here.__class__, here.device = PrioritizedSampler, device
        here.begin(*stored)
