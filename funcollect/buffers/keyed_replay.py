"""Buffers of TensorDicts: TorchRL's, with slots and priorities as keys, and samples with goals in hindsight."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import override

from funcollect.arguments import check_choice, check_function, check_kind, check_positive
from funcollect.buffers import Ints, part_of
from funcollect.buffers.editing import note_written, rows_of
from funcollect.buffers.indices import BufferView, RandomSource, SampleIndices, trajectory_index_of, wanted_size
from funcollect.buffers.replay import ReplayBuffer
from funcollect.buffers.samplers import PrioritizedSampler, SliceSampler
from funcollect.buffers.storages import ListStorage
from funcollect.buffers.sum_tree import numbers_of
from funcollect.messages import kind_of, shown
from funcollect.trajectories.split import assign, check_single_steps, readable
from funcollect.tree import as_path, key_of

__all__ = ["TensorDictPrioritizedReplayBuffer", "TensorDictReplayBuffer", "hindsight"]

_ACHIEVED, _GOAL = "achieved_goal", "desired_goal"  # the names in Gymnasium's environments with goals
Reward = Callable[[Tensor, Tensor, TensorDictBase], Any]


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


def hindsight(
    buffer: ReplayBuffer, *, k: int = 4, strategy: Literal["future", "final", "episode"] = "future", reward: Reward
) -> ReplayBuffer:
    """Let samples of a buffer have goals that were achieved later (Andrychowicz et al., 2017); returns the buffer.

    Of the frames in a sample, ``k / (k + 1)`` get a goal drawn from the ``("next", "achieved_goal")`` that the buffer
    has of their trajectory. It replaces ``desired_goal`` and ``("next", "desired_goal")``, and ``("next", "reward")``
    is computed again. The flags, and what is stored, stay as they are. A second call replaces the first.

    Args:
        buffer: of single frames with these keys, filled or not; it follows trajectories by their ids from then on.
        k: the number of frames with new goals for each one with its own.
        strategy: draw from the frame itself and those after it (``"future"``), from all frames of its trajectory
            (``"episode"``), or take the last one (``"final"``); of a trajectory that goes on, the newest so far.
        reward: a function of achieved goals ``[M, *G]``, new goals ``[M, *G]`` and the frames ``[M]`` with these, which
            returns M rewards, such as ``env.unwrapped.compute_reward``.

    Raises TypeError or ValueError for bad arguments, samplers of slices and n-step returns, and frames without ids.

    >>> import funcollect as fc, torch
    >>> from tensordict import TensorDict
    >>> goal, achieved = torch.full((6, 1), 9.0), torch.arange(6.0)[:, None]
    >>> frames = TensorDict({"episode": torch.zeros(6), "achieved_goal": achieved, "desired_goal": goal}, [6])
    >>> frames["next"] = TensorDict({"achieved_goal": achieved + 1, "desired_goal": goal, "reward": goal * 0}, [6])
    >>> buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(100), batch_size=32)
    >>> buffer = hindsight(buffer, strategy="final", reward=lambda achieved, desired, frames: achieved == desired)
    >>> indices = buffer.extend(frames)
    >>> buffer.sample()["desired_goal"].unique()
    tensor([6., 9.])
    """
    check_kind("buffer", buffer, ReplayBuffer, "pass the ReplayBuffer that collectors fill")
    check_positive("k", k, 4)
    check_choice("strategy", strategy, ("future", "final", "episode"))
    check_function("reward", reward, "a function of achieved goals, new goals and frames", 3)
    if isinstance(buffer.sampler, SliceSampler) or getattr(buffer.sampler, "returns", None) is not None:
        what = f"buffer has the sampler {buffer.sampler}, expected one of single frames with their own rewards"
        raise ValueError(f"{what}: build it with a RandomSampler or a PrioritizedSampler, without n_steps")

    def relabel(memory: BufferView, drawn: SampleIndices, random_source: RandomSource) -> SampleIndices:
        index, own = trajectory_index_of(memory), torch.as_tensor(drawn.slots).numpy(force=True)
        rows = np.flatnonzero(random_source.uniform(len(own)) * (k + 1) < k)
        trajectory, position = index.places(own[rows])
        first, stop = index.first.take(trajectory), index.stop.take(trajectory)
        begin = {"future": position, "final": stop - 1, "episode": first}[strategy]
        goal = begin + (random_source.uniform(len(rows)) * (stop - begin)).astype(np.int64)
        slots, taken = np.concatenate([own, index.get(trajectory, goal)]), own if drawn.taken is None else drawn.taken
        made = partial(_with_goals, drawn, rows, reward)
        return SampleIndices(slots=slots, taken=taken, written=drawn.written, info=drawn.info, of=drawn, made=made)

    buffer.relabel_by(relabel)
    return buffer


def _with_goals(drawn: SampleIndices, which: Ints, reward: Reward, batch: Any) -> Any:
    """A sample of the `batch` of its frames, then M others, whose achieved goals become those of its rows `which`."""
    if not isinstance(batch, TensorDictBase):
        raise TypeError(f"the frames are {kind_of(batch)}, which have no goals: store TensorDicts")
    check_single_steps(batch)
    held, needed = batch.keys(True, True), [(_GOAL,), ("next", _GOAL), ("next", _ACHIEVED), ("next", "reward")]
    if missing := [readable(path) for path in needed if key_of(path) not in held]:
        what = f"the frames have no {missing}, they have {sorted(map(str, held))}"
        raise ValueError(f"{what}: collect from an environment whose observations are dicts with goals")
    rows, count = torch.from_numpy(which).to(batch.device), len(drawn.slots)
    frames, goals = drawn.finish(batch[:count]), batch["next", _ACHIEVED][count:]
    for goal in (frames[_GOAL], frames["next", _GOAL]):
        assign(goal, rows, goals.to(goal.dtype))
    changed, rewards = frames[rows], frames["next", "reward"]
    answer = reward(changed["next", _ACHIEVED], changed[_GOAL], changed)
    try:
        new = torch.as_tensor(answer)
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"reward returned {shown(answer)}, expected {len(rows)} numbers"
        raise TypeError(f"{what}: return an array") from error
    if new.numel() != len(rows) * rewards[:1].numel():
        raise ValueError(f"reward returned shape {list(new.shape)} for {len(rows)} frames: return one for each")
    rewards[rows] = new.to(rewards).reshape(len(rows), *rewards.shape[1:])
    return frames
