"""Splits a batch into trajectories, one padded row for each; and checks batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection
from torch import Tensor

from funcollect.arguments import check_key
from funcollect.interop.jax_setup import import_jax
from funcollect.trajectories.final_observations import attach, detach
from funcollect.tree import Path, as_path, time_last

MASK = ("collector", "mask")
IS_FIRST = ("collector", "is_first")  # True where a slice of a buffer begins
TRAJECTORY_IDS = ("collector", "traj_ids")
STEP = ("collector", "step")
LANE = ("collector", "lane")
VERSION = ("collector", "policy_version")
STEPS_AHEAD, ORIGINAL_REWARD = ("steps_to_next_obs",), ("original_reward",)  # of `MultiStep`
CUT = ("collector", "cut")  # True where `set_truncated=True` truncated a trajectory that continues

# Torch has no indexed assignment of wide unsigned integers, so it is done as signed integers of the same width.
ASSIGNABLE = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}

_MEND = "pass the whole batch, unshuffled, with time as the last batch dimension"
_Nested = dict[str, "Tensor | _Nested"]


def split_trajectories(
    batch: TensorDictBase,
    *,
    prefix: str | Path | None = None,
    trajectory_key: str | Path | None = None,
    done_key: str | Path = "done",
    as_nested: bool | torch.layout = False,
) -> TensorDict:
    """Split a batch into its trajectories, one row each, padded with zeros at the end.

    A trajectory consists of successive frames of a row with equal ids. It also ends after a frame with ``next.done``,
    unless the following frame has ``done`` at its root. Then the lane was not reset, and its repeated frames stay with
    the trajectory. The last trajectory of a row is kept even if it has not ended. Each slice of a buffer's sample is a
    trajectory of its own, and padding, whose mask is False, is left out. TorchRL's function merges equal ids of
    adjacent rows, and accepts at most two batch dimensions.

    Args:
        batch: ``[*B, T]``, time last, with leaves ``[*B, T, ...]`` on any device. Slices of a buffer may be flat, [N].
        prefix: the key under which ``traj_ids`` is read and ``mask`` is written; by default ``"collector"``, where
            `gae` and `MultiStep` expect the mask.
        trajectory_key: the key of the ids ``[*B, T]``, integers; by default ``(prefix, "traj_ids")``. If the batch has
            no default ids, trajectories end where ``("next", done_key)`` is set, and their numbers become the ids.
        done_key: the key, under ``next``, of the flags ``[*B, T, 1]`` that mark the ends of trajectories.
        as_nested: return leaves as nested tensors of N trajectories, without padding and mask: True for the strided
            layout, or a layout such as ``torch.jagged``.

    Returns ``[N, Tmax]``: the N trajectories, ordered by row, then by time, in memory of their own. Leaves are
    ``[N, Tmax, ...]`` and keep their dtypes. ``("collector", "mask")`` ``[N, Tmax]`` bool is False for padding.

    Raises:
        TypeError: if the batch is not a TensorDict, leaves are not tensors, or ids are not integers.
        ValueError: if it has no batch dimensions, frames out of order, neither ids nor end flags, or no frames to nest.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> ids = torch.tensor([[0, 0, 2], [1, 1, 1]])
    >>> batch = TensorDict({"action": torch.tensor([[1, 2, 3], [4, 5, 6]]), "collector": {"traj_ids": ids}}, [2, 3])
    >>> split_trajectories(batch)["action"].tolist()
    [[1, 2, 0], [3, 0, 0], [4, 5, 6]]
    """
    check_order(batch)
    check_key("prefix", prefix)
    check_key("trajectory_key", trajectory_key)
    check_key("done_key", done_key, required=True)
    home = ("collector",) if prefix is None else as_path(prefix)
    mask_key, done_path = (*home, MASK[-1]), ("next", *as_path(done_key))
    ids_key = (*home, TRAJECTORY_IDS[-1]) if trajectory_key is None else as_path(trajectory_key)
    if not isinstance(as_nested, (bool, torch.layout)):
        raise TypeError(f"as_nested is {as_nested!r}, expected a bool or a torch.layout: pass True for nested tensors")
    batch = batch.clone(recurse=False).unlock_()
    final = detach(batch)
    by_ends = not trajectory_key and batch.get(ids_key, None) is None and batch.get(done_path, None) is not None
    begins, held = _begins(batch, None if by_ends else ids_key, done_path), None
    for key in (mask_key, MASK):
        if held is None and (held := optional(batch, key, tail=())) is not None:
            held = held.bool()
            begins[..., 1:] |= ~held[..., :-1]
            batch = batch.exclude(key)
    layout = _PaddedLayout(begins, held)
    if as_nested and not layout.shape[0]:
        raise ValueError("the batch has no frames, expected at least one: nested tensors cannot be empty")
    place = partial(layout.nest, kind=torch.strided if as_nested is True else as_nested) if as_nested else layout.place
    shape = (layout.shape[0], -1) if as_nested and layout.ragged else layout.shape
    ragged = as_nested is torch.jagged
    result = TensorDict(_map_leaves(place, batch, ()), shape[:1] if ragged else shape, batch.device)
    if not ragged:
        result.names = time_last(2)
    if by_ends:
        result.set(ids_key, place(layout.row))
    if not as_nested:
        result.set(mask_key, place(torch.ones_like(begins)))
    attach(result, final)
    return result


class _PaddedLayout:
    """Moves the frames that are `held` [*B, T] to a table of one trajectory per row, from `begins` [*B, T] on."""

    def __init__(self, begins: Tensor, held: Tensor | None) -> None:
        self.dims, self.held = begins.ndim, held
        begins = begins if held is None else begins & held
        self.row = (begins.reshape(-1).cumsum(0) - 1).view(begins.shape)  # [*B, T] int64
        flat, self.run = self._held_frames(begins).reshape(-1), self._held_frames(self.row)
        run, frame = self.run.reshape(-1), torch.arange(flat.numel(), device=flat.device)
        position = frame - frame[flat][run]
        self.position = position.view(self.run.shape)  # int64: the column of each frame that is held
        self.shape = (int(run[-1]) + 1, int(position.max()) + 1) if flat.numel() else (0, 0)  # N, Tmax
        self.ragged = flat.numel() < self.shape[0] * self.shape[1]  # whether the trajectories differ in length

    def _held_frames(self, leaf: Tensor) -> Tensor:
        """The frames of a leaf ``[*B, T, ...]`` that are held: the leaf itself if all are, else [N, ...]."""
        return leaf if self.held is None else leaf[self.held]

    def place(self, leaf: Tensor) -> Tensor:
        """A leaf ``[*B, T, ...]`` as a table ``[N, Tmax, ...]``."""
        table = torch.zeros(self.shape + leaf.shape[self.dims :], dtype=leaf.dtype, device=leaf.device)
        assign(table, (self.run, self.position), self._held_frames(leaf))
        return table

    def nest(self, leaf: Tensor, kind: torch.layout) -> Tensor:
        """A leaf ``[*B, T, ...]`` as a nested tensor of N trajectories ``[length, ...]``."""
        rows = self._held_frames(leaf).reshape(-1, *leaf.shape[self.dims :]).clone()
        if kind == torch.jagged:
            return torch.nested.nested_tensor_from_jagged(rows, self._offsets)
        return torch.nested.as_nested_tensor([*rows.tensor_split(self._offsets[1:-1].cpu())], layout=kind)

    @cached_property
    def _offsets(self) -> Tensor:  # of each trajectory's first frame, and the number of frames: [N + 1] int64
        lengths = torch.bincount(self.run.reshape(-1))
        return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def assign(leaf: Tensor, index: Any, values: Tensor) -> None:
    """Set ``leaf[index]``, also of dtypes that Torch cannot assign to by index."""
    if (signed := ASSIGNABLE.get(leaf.dtype)) is not None:  # views of floating leaves would stop gradients
        leaf, values = leaf.view(signed), values.view(signed)
    leaf[index] = values


def taken_along(leaf: Tensor, index: Tensor, dim: int) -> Tensor:
    """`torch.take_along_dim` along a dimension, also for such dtypes; `index` is ``[*B, T]``."""
    index = index.reshape(*index.shape, *[1] * (leaf.ndim - index.ndim))
    signed = ASSIGNABLE.get(leaf.dtype)
    if signed is None:
        return torch.take_along_dim(leaf, index, dim)
    return torch.take_along_dim(leaf.view(signed), index, dim).view(leaf.dtype)


def _begins(batch: TensorDictBase, ids_key: Path | None, done_path: Path) -> Tensor:
    """Whether each frame is the first of its trajectory: ``[*B, T]`` bool."""
    ids = None if ids_key is None else require(batch, ids_key, tail=())
    if ids is not None and (ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex()):
        raise TypeError(f"{readable(ids_key or '')} is {ids.dtype}, expected integers: one id per trajectory")
    device = (batch.get(done_path) if ids is None else ids).device
    begins = torch.zeros(batch.batch_size, dtype=torch.bool, device=device)
    begins[..., :1] = True
    if batch.get(done_path, None) is not None:
        begins[..., 1:] = ends_of(batch, done_path)[..., :-1]
        if (finished := optional(batch, done_path[1:], tail=(1,))) is not None:
            begins[..., 1:] &= ~finished[..., 1:, 0]
    if ids is not None:
        begins[..., 1:] |= (ids[..., 1:] != ids[..., :-1]) | steps_back(batch)
    starts = optional(batch, IS_FIRST, tail=())
    return begins if starts is None else begins | starts


def ends_of(batch: TensorDictBase, done_path: Path = ("next", "done")) -> Tensor:
    """Whether each frame is the last of its episode: ``[*B, T]`` bool. `MultiStep` takes ``next`` from later frames."""
    ends = require(batch, done_path, tail=(1,))[..., 0].bool()
    ahead = optional(batch, STEPS_AHEAD, tail=(1,))
    return ends if ahead is None else ends & (ahead[..., 0] == 1)


def check_single_steps(batch: Mapping[str, object] | TensorDictBase) -> None:
    """Raise ValueError if `MultiStep` has summed the rewards of a batch, a TensorDict or a dict."""
    if batch.get(STEPS_AHEAD[0], None) is not None:
        what = "the batch has sums of several rewards, and their number as steps_to_next_obs, expected single rewards"
        mend = "take the batch before MultiStep changes it, and use either MultiStep or MultiStepSampler"
        raise ValueError(f"{what}: {mend}")


def _counters(batch: TensorDictBase, *keys: Path) -> list[Tensor | None]:
    """The leaves under these keys; None for a leaf that is missing, or does not have one number per frame."""
    leaves = [batch.get(key, None) for key in keys]
    return [leaf if isinstance(leaf, Tensor) and leaf.shape == batch.batch_size else None for leaf in leaves]


def steps_back(batch: TensorDictBase) -> Tensor:
    """Whether the step counter fails to increase to the next frame, as between joined runs: ``[*B, T - 1]`` bool."""
    (step,) = _counters(batch, STEP)
    if step is None:
        return torch.zeros((), dtype=torch.bool)
    back = step[..., 1:] <= step[..., :-1]
    finished = optional(batch, "done", tail=(1,))  # the counter of a finished lane does not increase
    return back if finished is None else back & ~finished[..., 1:, 0]


def breaks(batch: TensorDictBase) -> Tensor:
    """Whether the next frame begins a slice of a buffer, or another of several joined runs: ``[*B, T - 1]`` bool."""
    back, starts = steps_back(batch), optional(batch, IS_FIRST, tail=())
    return back if starts is None else back | starts[..., 1:]


def check_order(batch: TensorDictBase) -> None:
    """Raise unless this is a batch, and the frames of each row follow each other, as far as their keys show.

    In a row, a trajectory goes on with its next step. Another lane follows only after an end, except in a single row.
    """
    check_batch(batch)
    ids, step, lane = _counters(batch, TRAJECTORY_IDS, STEP, LANE)
    if ids is None or step is None:
        return
    wrong = (ids[..., 1:] == ids[..., :-1]) & (step[..., 1:] > step[..., :-1] + 1)
    if lane is not None and batch.shape[:-1].numel() > 1:
        wrong |= lane[..., 1:] != lane[..., :-1]
    if batch.get(("next", "done"), None) is not None:
        wrong &= ~ends_of(batch)[..., :-1]
    if (mask := optional(batch, MASK, tail=())) is not None:
        wrong &= mask[..., 1:] & mask[..., :-1]
    if wrong.any():
        *row, time = wrong.nonzero()[0].tolist()
        before, after = (f"step {step[(*row, at)]} of trajectory {ids[(*row, at)]}" for at in (time, time + 1))
        what = f"in row {row} of the batch {list(batch.shape)}, {before} is followed by {after}, expected its next step"
        raise ValueError(f"{what}: {_MEND}; the lanes of several workers, with cat_results='stack' or 0")
    check_followed(batch)


def check_followed(batch: TensorDictBase) -> None:
    """Raise ValueError if the batch has the next steps of most frames, but not directly after them."""
    ids, step = _counters(batch, TRAJECTORY_IDS, STEP)
    # Rows of a single frame may be samples of a buffer, which do not follow each other.
    if batch.shape[-1] < 2 or ids is None or step is None:
        return
    goes_on = torch.ones_like(ids, dtype=torch.bool)
    if batch.get(("next", "done"), None) is not None:
        goes_on &= ~ends_of(batch)
    if (finished := optional(batch, "done", tail=(1,))) is not None:
        goes_on &= ~finished[..., 0].bool()
    if (mask := optional(batch, MASK, tail=())) is not None:
        goes_on &= mask
    in_place = int(((ids[..., 1:] == ids[..., :-1]) & (step[..., 1:] == step[..., :-1] + 1) & goes_on[..., :-1]).sum())
    if 2 * in_place >= (count := int(goes_on.sum())):
        return
    number = torch.unique(ids, return_inverse=True)[1] * (int(step.max()) + 2) + step
    elsewhere = int(torch.isin(number[goes_on] + 1, number).sum()) - in_place
    if 2 * elsewhere >= count and elsewhere > in_place:
        what = f"{elsewhere} of {count} frames are followed by another one than their next step"
        raise ValueError(f"in the batch {list(batch.shape)}, {what}, which is elsewhere in the batch: {_MEND}")


def check_time_first(lane: Any) -> None:
    """Raise ValueError if the lanes of a dict of JAX arrays, [*B, T, P] or [T], change with time. Traced ones pass."""
    if lane is None or isinstance(lane, import_jax().core.Tracer):
        return
    lanes = np.asarray(lane)
    if (np.diff(lanes, axis=max(lanes.ndim - 2, 0)) != 0).any():
        what = f"the lane changes along the time dimension of the arrays {list(lanes.shape)}, expected time first"
        raise ValueError(f"{what}: pass [T, P], as funcollect.traced.rollout returns them")


def _map_leaves(function: Callable[[Tensor], Tensor], node: TensorDictBase, path: Path) -> _Nested:
    """Apply `function` to the leaves of a TensorDict, which may be a lazy stack, and return a nested dict."""
    mapped: _Nested = {}
    for name in node.keys():  # noqa: SIM118
        value, here = node.get(name), (*path, name)
        if is_non_tensor(value) or not (is_tensor_collection(value) or isinstance(value, Tensor)):
            what = f"{readable(here)} is {type(value).__name__}, expected a tensor"
            raise TypeError(f"{what}: only tensors have a padding; leave it out with batch.exclude({here!r})")
        mapped[name] = _map_leaves(function, value, here) if is_tensor_collection(value) else function(value)
    return mapped


def check_batch(batch: TensorDictBase) -> None:
    """Raise TypeError unless a batch is a TensorDict, and ValueError unless it has batch dimensions."""
    if not isinstance(batch, TensorDictBase):
        raise TypeError(f"the batch is {type(batch).__name__}, expected a TensorDict: pass the batch of a rollout")
    if batch.batch_dims == 0:
        raise ValueError("the batch has no batch dimensions, expected [*B, T], time last: set its batch_size")


def require(batch: TensorDictBase, key: str | Path, *, tail: tuple[int, ...] | None) -> Tensor:
    """The leaf under a key; ValueError unless it is ``[*B, T, *tail]`` or, if `tail` is None, ``[*B, T, n]``."""
    leaf = batch.get(key, None)
    if not isinstance(leaf, Tensor):
        present = sorted(readable(path) for path in batch.keys(include_nested=True, leaves_only=True))
        raise ValueError(f"the batch has no tensor {readable(key)}, which is needed here; it has {present}")
    expected = [*batch.batch_size, *(leaf.shape[-1:] if tail is None else tail)]
    if list(leaf.shape) != expected:
        wanted = [*batch.batch_size, "n"] if tail is None else expected
        what = f"{readable(key)} has shape {list(leaf.shape)}, the batch wants [{', '.join(map(str, wanted))}]"
        raise ValueError(f"{what}: time is the last batch dimension")
    return leaf


def optional(batch: TensorDictBase, key: str | Path, *, tail: tuple[int, ...] | None) -> Tensor | None:
    """`require`, but None if the batch has no such key."""
    return None if batch.get(key, None) is None else require(batch, key, tail=tail)


def readable(key: str | Path) -> str:
    """A key for messages: its parts, joined by dots."""
    return key if isinstance(key, str) else ".".join(key)
