"""Restores the next observations that collectors leave out (``compact_obs=True``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor

from funcollect.specs import PRESENT
from funcollect.trajectories.final_observations import FinalObservations, detach, is_compact
from funcollect.trajectories.split import MASK, STEP, TRAJECTORY_IDS, assign, check_batch, optional, require
from funcollect.tree import Path


def compact(batch: TensorDictBase, paths: Sequence[Path]) -> FinalObservations:
    """Remove the next observations from an unlocked batch; return those that no following frame observes."""
    alone = ~_followed(batch) | _before_agents_leave(batch, paths)
    leaves = {path: batch.pop(("next", *path))[alone] for path in paths}
    return FinalObservations(batch[TRAJECTORY_IDS][alone], batch[STEP][alone], leaves)


def next_observations(batch: TensorDictBase) -> TensorDictBase:
    """Return a batch with the next observations that a collector has left out (``compact_obs=True``).

    They are copies of the observations of the following frames. For the last frame of each trajectory in the batch, the
    collector has recorded them, as ``("collector", "final_observations")``. So the result has, bit for bit, what the
    collector delivers with ``compact_obs=False``, and the other leaves of `batch`; it is `batch` itself if nothing was
    left out. Lanes and whole trajectories may be selected, split and joined before; frames must not be shuffled, or cut
    along time: ValueError if the batch ``[*B, T]`` lacks the frame that follows one of its frames. Raises TypeError if
    it is no TensorDict.

    >>> import funcollect as fc
    >>> with fc.SyncDataCollector("CartPole-v1", frames_per_batch=50, compact_obs=True, seed=0) as collector:
    ...     batch = next(collector)
    >>> ("next", "observation") in batch.keys(True), next_observations(batch)["next", "observation"].shape
    (False, torch.Size([50, 4]))
    """
    check_batch(batch)
    if not is_compact(batch):
        return batch
    result = batch.clone(recurse=False).unlock_()
    final = detach(result)
    assert final is not None
    alone, mask = ~_followed(batch), batch.get(MASK, None)
    alone = alone if mask is None else alone & mask
    sought = alone | _before_agents_leave(batch, final.leaves)
    ids, step = (batch[key][sought] for key in (TRAJECTORY_IDS, STEP))
    row = final.find(ids.to(final.step.device), step.to(final.step.device))
    if bool((lacks := (row < 0) & alone[sought].to(row.device)).any()):
        first = int(lacks.nonzero()[0])
        what = f"the batch lacks the frame after step {step[first]} of trajectory {ids[first]}"
        mend = "call next_observations before frames are shuffled or cut along time"
        raise ValueError(f"{what}, which has its next observation: {mend}")
    found = torch.zeros_like(sought).masked_scatter_(sought, (row >= 0).to(sought.device))
    for path, leaf in final.leaves.items():
        following = batch[path].roll(-1, batch.batch_dims - 1)
        assign(following, found, leaf[row[row >= 0]].to(following.device))
        if mask is not None:
            assign(following, ~mask, leaf.new_zeros((), device=following.device))
        result.set(("next", *path), following)
    for *group, name in final.leaves:  # of agents, whose `done` goes by what they observe
        node = result["next", *group]
        if name == "truncated" and batch.get((*group, "done"), None) is not None and node.get("done", None) is None:
            node.set("done", node["terminated"] | node["truncated"])
    return result


def _before_agents_leave(batch: TensorDictBase, paths: Iterable[Path]) -> Tensor:
    """Where an agent of a group is there for the last time: its next observation is not that of the next frame, 0."""
    leave = torch.zeros_like(batch[STEP], dtype=torch.bool)
    for path in paths:
        if path[1:] == (PRESENT,) and batch[path].dtype == torch.bool and batch[path].ndim == batch.batch_dims + 1:
            there = batch[path]
            leave[..., :-1] |= (there[..., :-1, :] & ~there[..., 1:, :]).any(-1)
    return leave


def _followed(batch: TensorDictBase) -> Tensor:
    """Whether each frame is followed, in its row, by the next one of its trajectory: ``[*B, T]`` bool."""
    ids, step = (require(batch, key, tail=()) for key in (TRAJECTORY_IDS, STEP))
    forward = step[..., 1:] == step[..., :-1] + 1
    if (finished := optional(batch, "done", tail=(1,))) is not None:  # a finished lane repeats its last frame
        forward = forward | finished[..., 1:, 0]
    followed = torch.zeros_like(ids, dtype=torch.bool)
    followed[..., :-1] = (ids[..., 1:] == ids[..., :-1]) & forward
    return followed
