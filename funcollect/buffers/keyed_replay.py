"""TorchRL's buffers of TensorDicts: samples have their slots as a key, and priorities are read from the data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import override

from funcollect.buffers.editing import note_written, rows_of
from funcollect.buffers.indices import wanted_size
from funcollect.buffers.keywords import part_of
from funcollect.buffers.replay import ReplayBuffer
from funcollect.buffers.samplers import PrioritizedSampler
from funcollect.buffers.storages import ListStorage
from funcollect.buffers.sum_tree import numbers_of
from funcollect.messages import kind_of
from funcollect.tree import as_path

__all__ = ["TensorDictPrioritizedReplayBuffer", "TensorDictReplayBuffer"]


class TensorDictReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` of TensorDicts. A sample has the key ``index``, the slots [N] int64, and the sampler's info.

    With a `PrioritizedSampler`, `add` and `extend` set priorities to the values of `priority_key`, if the data have it.
    Raises the errors of `ReplayBuffer`; ValueError if there are not as many priorities for each frame.

    Args:
        priority_key: the key of priorities; several numbers per frame are reduced to one (the sampler's `reduction`).
        options: see `ReplayBuffer`.

    >>> import funcollect as fc
    >>> from tensordict import TensorDict
    >>> sampler = fc.PrioritizedSampler(100, alpha=1.0, beta=1.0)
    >>> buffer = TensorDictReplayBuffer(storage=fc.LazyTensorStorage(100), sampler=sampler, batch_size=4)
    >>> indices = buffer.extend(TensorDict({"td_error": torch.tensor([0.0, 9.0, 0.0])}, [3]))
    >>> sample = buffer.sample()
    >>> sample["index"]
    tensor([1, 1, 1, 1])
    >>> buffer.update_tensordict_priority(sample.set("td_error", torch.ones(4)))
    """

    _labels = True

    def __init__(self, *, priority_key: Any = "td_error", **options: Any) -> None:
        super().__init__(**options)
        self.priority_key = priority_key

    @override
    def extend(self, tensordicts: Any, *, update_priority: bool | None = None) -> Tensor:
        """See `ReplayBuffer.extend`; unless `update_priority` is False, priorities are read from the data."""
        data = self.transformed(tensordicts)
        return super()._extend(data) if update_priority is False else self._extend(data)

    @override
    def _extend(self, data: Any) -> Tensor:
        if not isinstance(self.sampler, PrioritizedSampler):
            return super()._extend(data)
        batch = data
        if isinstance(data, list) and data and all(isinstance(item, TensorDictBase) for item in data):
            batch = TensorDict.maybe_dense_stack(data)
        values = batch.get(self.priority_key, None) if isinstance(batch, TensorDictBase) else None
        if values is None or not values.numel():
            return super()._extend(data)
        priority = self._reduced(values, batch.batch_size[: self.storage.ndim].numel())
        self.sampler.checked(priority.numpy(force=True))  # before any frame is stored
        with self._lock:
            slots = super()._extend(data)
            self.update_priority(slots.reshape(-1), priority)
        return slots

    def _reduced(self, priority: Tensor, count: int) -> Tensor:  # one priority per frame, [count] float64
        if priority.numel() % count:
            what = f"{self.priority_key} has shape {list(priority.shape)} for {count} frames"
            raise ValueError(f"{what}: set priority_key=")
        rows, how = priority.detach().reshape(count, -1).double(), getattr(self.sampler, "reduction", "max")
        reduced = getattr(torch, {"max": "amax", "min": "amin"}.get(how, how))(rows, 1)
        return reduced if isinstance(reduced, Tensor) else reduced.values

    @override
    def sample(self, batch_size: int | None = None, return_info: bool = False, include_info: bool | None = None) -> Any:
        """See `ReplayBuffer.sample`; with ``include_info=False``, the sample has no key ``index``."""
        batch, info, _ = self.sampled(wanted_size(batch_size, self.batch_size))
        batch = batch.exclude(*info) if include_info is False else batch
        return (batch, info) if return_info else batch

    @override
    def _finished(self, batch: Any, info: Mapping[str, Tensor]) -> Any:
        batch = batch if self.collate_fn is None else self.collate_fn(batch)
        if not isinstance(batch, TensorDictBase):
            raise TypeError(f"the sample is {kind_of(batch)}, expected a TensorDict: sample others from a ReplayBuffer")
        for name, leaf in info.items():
            batch.set(name, spread(leaf, batch))
        if "index" in info:
            note_written(batch["index"], self.written_at(info["index"]))  # it may be a copy
        return batch if self.sample_transform is None else self.sample_transform(batch)

    @override
    def update(self, index: Any, values: Mapping[Any, Any] | TensorDictBase, written: Any = None) -> int:
        """See `ReplayBuffer.update`; with a `PrioritizedSampler`, values of `priority_key` become priorities."""
        others, key = rows_of(values, np.shape(index)), as_path(self.priority_key)
        if not isinstance(self.sampler, PrioritizedSampler) or key not in others:
            return super().update(index, values, written)
        priority = self._reduced(others.pop(key), math.prod(np.shape(index)))
        self.sampler.checked(priority.numpy(force=True))  # before any value is written
        written = self.written_at(index) if written is None else written
        with self._lock:
            gone = super().update(numbers_of("index", index, "iu"), others, written)
            self.update_priority(index, priority, written)
        return gone

    @override
    def check_update(self, slots: Any, leaves: Mapping[Any, Tensor], written: Any) -> None:
        others, key = dict(leaves), as_path(self.priority_key)
        if isinstance(self.sampler, PrioritizedSampler) and key in others:
            self.sampler.checked(self._reduced(others.pop(key), len(slots)).numpy(force=True))
        super().check_update(slots, others, written)

    def update_tensordict_priority(self, data: TensorDictBase, written: Any = None) -> None:
        """Set the priorities of the frames in a sample to the values of `priority_key` in it.

        A copy of a sample (`clone`, `to` another device, ``sample[mask]``) needs `written`: see `update_priority`.
        """
        if not isinstance(self.sampler, PrioritizedSampler):
            return
        index, priority = data["index"], data[self.priority_key]
        rows = index.reshape(len(index) if index.ndim else 1, -1)
        index = rows[:, 0] if (rows == rows[:, :1]).all() else index.reshape(-1)
        self.update_priority(index, self._reduced(priority, index.numel()), written)


def spread(leaf: Tensor, batch: TensorDictBase) -> Tensor:
    """A view [*N] of a leaf [N], for a batch [*N]: a frame that is a sequence has one slot at all of its steps."""
    return leaf.view(-1, *[1] * (batch.ndim - 1)).expand(batch.shape)


class TensorDictPrioritizedReplayBuffer(TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` with a `PrioritizedSampler`, whose arguments it takes. Raises the errors of both.

    >>> import funcollect as fc
    >>> fc.TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=fc.LazyTensorStorage(100)).sampler
    PrioritizedSampler(max_capacity=100, alpha=0.6, beta=0.4)
    """

    def __init__(self, *, alpha: Any, beta: Any, eps: float = 1e-8, reduction: Any = "max", **options: Any) -> None:
        given = options.pop("storage", None)
        storage = ListStorage(1_000) if given is None else part_of("storage", given)
        sampler = PrioritizedSampler(storage.max_size, alpha, beta, eps, reduction=reduction)
        super().__init__(storage=storage, sampler=sampler, **options)
