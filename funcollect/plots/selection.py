"""Selects one trajectory of a batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from funcollect.trajectories.next_observations import next_observations
from funcollect.trajectories.split import MASK, TRAJECTORY_IDS, check_batch, ends_of, require
from funcollect.tree import Path, flatten

# The keys under "next" that are not observations.
_FIELDS = frozenset({"reward", "done", "terminated", "truncated", "info"})


class Trajectory(NamedTuple):
    """The frames of one trajectory in a batch, in order, on the CPU."""

    traj_id: int
    frames: TensorDictBase  # [T]

    @property
    def observations(self) -> dict[Path, Tensor]:
        """Each observation leaf, [T + 1, ...], the last observation of the trajectory included."""
        after = flatten(self.frames["next"])
        roots = flatten(self.frames.exclude("next"))
        paths = [path for path in after if path[0] not in _FIELDS and path in roots]
        return {path: torch.cat([roots[path], after[path][-1:]]) for path in paths}

    @property
    def first_step(self) -> int:
        """The index of the first frame in its trajectory; 0 if the batch has no step counter."""
        step = self.frames.get(("collector", "step"), None)
        return 0 if step is None else int(step[0])

    @property
    def ending(self) -> str:
        """How the trajectory ended, in words."""
        flags = {name: self.frames.get(("next", name), None) for name in ("terminated", "truncated")}
        ended = [name for name, flag in flags.items() if flag is not None and bool(flag[-1].any())]
        return " and ".join(ended) or "goes on"


def pick(batch: TensorDictBase, traj_id: int | None) -> Trajectory:
    """Select one trajectory of a batch, which may be split; `episode` documents the arguments and errors."""
    check_batch(batch)
    batch = next_observations(batch)
    ids = require(batch, TRAJECTORY_IDS, tail=())
    real = _real(batch)
    if not real.any():
        raise ValueError(f"the batch {list(batch.batch_size)} has no frames, expected one trajectory or more")
    if traj_id is None:
        traj_id = _longest(batch, ids, real)
    chosen = (ids == traj_id) & real
    if not chosen.any():
        present = torch.unique(ids[real]).tolist()
        raise ValueError(
            f"the batch has no trajectory {traj_id}, expected one of {present[:10]} ({len(present)} in all)"
        )
    frames = batch[chosen.nonzero(as_tuple=True)].cpu()
    step = frames.get(("collector", "step"), None)
    return Trajectory(int(traj_id), frames if step is None else frames[step.argsort(stable=True)])


def _real(batch: TensorDictBase) -> Tensor:
    """The frames that are neither padding nor repeat the end of a lane that stays finished: [*B, T] bool."""
    mask, stays = batch.get(MASK, None), batch.get("done", None)
    real = torch.ones(batch.batch_size, dtype=torch.bool, device=batch.device) if mask is None else mask
    return real if stays is None else real & ~stays[..., 0]


def _longest(batch: TensorDictBase, ids: Tensor, real: Tensor) -> int:
    """The id of the longest trajectory, among the whole ones (from step 0 to done) if there are any."""
    present, place, counts = torch.unique(ids[real], return_inverse=True, return_counts=True)
    begins, ends = torch.zeros_like(present), torch.zeros_like(present)
    if (step := batch.get(("collector", "step"), None)) is not None:
        begins.index_add_(0, place, (step[real] == 0).to(present.dtype))
    if batch.get(("next", "done"), None) is not None:
        ends.index_add_(0, place, ends_of(batch)[real].to(present.dtype))
    whole = (begins > 0) & (ends > 0)
    return int(present[(counts + whole * ids.numel()).argmax()])
