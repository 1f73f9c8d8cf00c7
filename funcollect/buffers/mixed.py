"""One sample from several buffers, such as one with offline data and one that a collector fills."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import optree
import torch
from tensordict import TensorDictBase
from torch import Tensor

from funcollect.arguments import check_kind, check_number, check_optional_positive
from funcollect.buffers.editing import note_written, rows_of, written_of
from funcollect.buffers.indices import wanted_size
from funcollect.buffers.keyed_replay import TensorDictReplayBuffer, spread
from funcollect.buffers.replay import ReplayBuffer
from funcollect.buffers.samplers import PrioritizedSampler
from funcollect.buffers.storages.packed_rows import leaves_of
from funcollect.buffers.sum_tree import check_one_each, numbers_of
from funcollect.messages import shown
from funcollect.trajectories.split import readable

__all__ = ["MixedBuffers", "mix"]


def mix(
    *buffers: ReplayBuffer, fractions: Sequence[float] | None = None, batch_size: int | None = None
) -> MixedBuffers:
    """Sample from several buffers at once: the frames of the first, then those of the second, and so on.

    Samples have the keys that the frames of all buffers have; these must have the same shapes and dtypes. The buffers
    stay independent, and may be sampled by themselves, too. Raises TypeError or ValueError for bad arguments.

    Args:
        buffers: at least two.
        fractions: the share of each buffer in a sample, with the sum 1; by default equal shares.
        batch_size: the number of frames in a sample.

    >>> import funcollect as fc, torch
    >>> offline, online = (fc.ReplayBuffer(storage=fc.LazyTensorStorage(100)) for _ in range(2))
    >>> _ = offline.extend({"x": torch.zeros(50)}), online.extend({"x": torch.ones(20)})
    >>> fc.mix(offline, online, fractions=(0.25, 0.75)).sample(8)["x"]
    tensor([0., 0., 1., 1., 1., 1., 1., 1.])
    """
    check_optional_positive("batch_size", batch_size)
    for buffer in buffers:
        check_kind("buffers", buffer, ReplayBuffer, "pass for example mix(offline, online)")
    if len({*map(id, buffers)}) < max(len(buffers), 2):
        raise ValueError(f"{len(buffers)} buffers are given, expected two or more, each once: mix(offline, online)")
    shares = [1 / len(buffers)] * len(buffers) if fractions is None else fractions
    if not isinstance(shares, (list, tuple)):
        raise TypeError(f"fractions is {shown(fractions)}, expected a number for each buffer: pass (0.5, 0.5), say")
    for share in shares:
        check_number("fractions", share, most=1.0)
    if len(shares) != len(buffers) or not math.isclose(sum(shares), 1.0, rel_tol=1e-6):
        what = f"fractions is {shown(fractions)}, expected {len(buffers)} numbers with the sum 1"
        raise ValueError(f"{what}: pass one for each buffer, such as (0.5, 0.5)")
    return MixedBuffers(buffers, shares, batch_size)


class MixedBuffers:
    """Several buffers that are sampled together, see `mix`."""

    def __init__(self, buffers: Sequence[ReplayBuffer], fractions: Sequence[float], batch_size: int | None) -> None:
        self.buffers, self.fractions, self.batch_size = tuple(buffers), tuple(fractions), batch_size
        # The first of each buffer's numbers among the slots of all, and the number of all.
        self._begin = np.cumsum([0, *(buffer.storage.max_size for buffer in buffers)]).tolist()

    def __len__(self) -> int:
        return sum(map(len, self.buffers))

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """A random batch from all buffers, see `ReplayBuffer.sample`.

        ``info["index"]`` ``[N]`` numbers the slots of all buffers, in their order, for `update_priority` and `update`.
        ``info["buffer"]`` ``[N]`` int64 has the place of each frame's buffer, and ``info["priority_weight"]`` is 1 for
        frames of buffers without priorities. ValueError if a buffer is empty, or frames do not match.
        """
        ends = np.cumsum(self.fractions) * wanted_size(batch_size, self.batch_size)
        counts = np.diff(ends.round().astype(np.int64), prepend=0).tolist()
        drawn, infos, written = [], [], list[int | None]([0] * len(counts))
        try:
            for number, (buffer, count) in enumerate(zip(self.buffers, counts, strict=True)):
                if count:
                    drawn.append((buffer, *buffer.sampled(count)))
                    info = drawn[-1][2]
                    slots, written[number] = info["index"], buffer.written_at(info["index"])
                    weight = info.get("priority_weight", torch.ones(slots.shape, device=slots.device))
                    index = torch.where(slots < 0, slots, slots + self._begin[number])
                    infos.append({"index": index, "buffer": torch.full_like(slots, number), "priority_weight": weight})
            whole = _concatenated([batch for _, batch, _, _ in drawn])
        except BaseException:
            for buffer, _, _, own in drawn:
                buffer.give_back(own)
            raise
        joined = {key: torch.cat([info[key] for info in infos]) for key in infos[0]}
        note_written(joined["index"], tuple(written))
        if all(isinstance(buffer, TensorDictReplayBuffer) for buffer in self.buffers):
            whole["index"] = spread(joined["index"], whole)  # in place of each buffer's own slots
        return (whole, joined) if return_info else whole

    def written_at(self, index: Any) -> Any:
        """How many frames each buffer had been given when these slots were returned; see `ReplayBuffer.written_at`."""
        return written_of(index)

    def update_priority(self, index: Any, priority: Any, written: Any = None) -> None:
        """Set the priorities of frames in the buffers that have priorities; see `ReplayBuffer.update_priority`."""
        values, count = torch.as_tensor(priority).reshape(-1), math.prod(np.shape(index))
        check_one_each(values, count)
        each = values.expand(count) if len(values) == 1 else values
        parts = [
            (buffer, sampler, slots, each[rows.to(each.device)], then)
            for buffer, rows, slots, then in self._parts(index, written)
            if isinstance(sampler := buffer.sampler, PrioritizedSampler)
        ]
        for buffer, sampler, slots, priorities, then in parts:  # before any is set
            sampler.checked(numbers_of("priority", priorities, "fiub").astype(np.float64))
            buffer.check_index(slots, then)
        for buffer, _, slots, priorities, then in parts:
            buffer.update_priority(slots, priorities, then)

    def update_tensordict_priority(self, data: TensorDictBase, written: Any = None) -> None:
        """Set priorities from a sample of `TensorDictReplayBuffer` instances; see its method of this name."""
        written = self.written_at(data["index"]) if written is None else written
        for number, buffer in enumerate(self.buffers):
            begin, then = self._begin[number], written and written[number]
            own = (data["index"] >= begin) & (data["index"] < self._begin[number + 1])
            if isinstance(buffer, TensorDictReplayBuffer) and own.any():
                rows = data.select("index", buffer.priority_key)[own]
                buffer.update_tensordict_priority(rows.set("index", rows["index"] - begin), then)

    def update(self, index: Any, values: Mapping[Any, Any] | TensorDictBase, written: Any = None) -> int:
        """Write values back to the frames in these slots of their buffers; see `ReplayBuffer.update`."""
        leaves = rows_of(values, np.shape(index))
        parts = [
            (buffer, slots, {path: leaf[rows] for path, leaf in leaves.items()}, then)
            for buffer, rows, slots, then in self._parts(index, written)
            if len(slots)
        ]
        for buffer, *part in parts:  # before any is written
            buffer.check_update(*part)
        return sum(buffer.update(*part) for buffer, *part in parts)

    def _parts(self, index: Any, written: Any) -> Iterator[tuple[ReplayBuffer, Tensor, Any, Any]]:
        """For each buffer: its rows of `index` [N] as a mask, their slots in it, and its part of `written`."""
        written = self.written_at(index) if written is None else written
        if written is not None and (not isinstance(written, tuple) or len(written) != len(self.buffers)):
            what = f"written is {shown(written)}, expected numbers for {len(self.buffers)} buffers"
            raise ValueError(f"{what}: pass what written_at(index) of this mixture returned")
        slots = numbers_of("index", index, "iu").astype(np.int64)
        if slots.max(initial=0) >= self._begin[-1] or slots.min(initial=0) < -1:
            what = f"index holds {slots.min()} to {slots.max()}, expected slots below {self._begin[-1]}, or -1"
            raise ValueError(f"{what}: give info['index']")
        for number, buffer in enumerate(self.buffers):
            rows = (slots >= self._begin[number]) & (slots < self._begin[number + 1])
            yield buffer, torch.from_numpy(rows), slots[rows] - self._begin[number], written and written[number]

    def __iter__(self) -> Iterator[Any]:
        """Endless samples."""
        while True:
            yield self.sample()


def _concatenated(batches: list[Any]) -> Any:
    """The rows of several batches; of TensorDicts, the keys that all of them have."""
    if named := all(isinstance(batch, TensorDictBase) for batch in batches):
        keys = set.intersection(*({*batch.keys(True, True)} for batch in batches))
        batches = [batch.select(*keys) for batch in batches]
    leaves = [leaves_of(batch) for batch in batches]
    forms = [{readable(p): (tuple(x.shape[1:]), x.dtype, x.device) for p, x in each.items()} for each in leaves]
    if not forms[0] or any(form != forms[0] for form in forms):
        what = f"frames of the buffers have {forms}, expected the same keys, shapes, dtypes and devices"
        raise ValueError(f"{what}: give one of the buffers a sample_transform= that converts them")
    return torch.cat(batches) if named else optree.tree_map(lambda *leaves: torch.cat(leaves), *batches)
