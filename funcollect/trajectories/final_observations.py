"""Next observations beside the frames of a batch that leaves out all others (``compact_obs=True``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase, is_non_tensor
from torch import Tensor
from typing_extensions import override

from funcollect.specs import FINAL
from funcollect.tree import Path


@dataclass(frozen=True, eq=False, repr=False)
class FinalObservations:
    """The next observations of N frames, each the last of its trajectory in a batch.

    Attributes:
        traj_ids: the trajectory of each frame, [N] int64.
        step: its step there, [N] int64.
        leaves: the next observations by path, each [N, ...].
    """

    traj_ids: Tensor
    step: Tensor
    leaves: Mapping[Path, Tensor]

    @classmethod
    def joined(cls, parts: Sequence[FinalObservations]) -> FinalObservations:
        """Those of several batches, at least one."""
        if len(parts) == 1:
            return parts[0]
        ids, step = torch.cat([each.traj_ids for each in parts]), torch.cat([each.step for each in parts])
        return cls(ids, step, {path: torch.cat([each.leaves[path] for each in parts]) for path in parts[0].leaves})

    @property
    def plain(self) -> tuple[Tensor, Tensor, Mapping[Path, Tensor]]:
        """The arguments that make it again."""
        return self.traj_ids, self.step, self.leaves

    def __getitem__(self, rows: Tensor) -> FinalObservations:
        """Those of some of the frames: indices, or a mask [N]."""
        return FinalObservations(
            self.traj_ids[rows], self.step[rows], {path: leaf[rows] for path, leaf in self.leaves.items()}
        )

    def find(self, traj_ids: Tensor, step: Tensor) -> Tensor:
        """The rows of M frames, [M] int64; -1 for those that are not there.

        Raises:
            ValueError: if two frames with the same trajectory and step are not the same, as those of two runs.
        """
        frames = torch.stack([torch.cat([self.traj_ids, traj_ids]), torch.cat([self.step, step])], 1)
        distinct, number = torch.unique(frames, dim=0, return_inverse=True)
        count = len(self.step)
        row = torch.full((len(distinct),), -1, device=number.device)
        row[number[:count]] = torch.arange(count, device=number.device)
        again = row[number[:count]]
        if not all(_same(leaf, leaf[again.to(leaf.device)]) for leaf in self.leaves.values()):
            raise ValueError(
                "the batch joins several runs with equal trajectory ids: call next_observations for "
                "each run before that"
            )
        return row[number[count:]]

    @override
    def __repr__(self) -> str:
        return f"FinalObservations of {len(self.step)} frames"


def _same(one: Tensor, two: Tensor) -> bool:
    """Whether tensors have the same bits."""
    return torch.equal(one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8))


def is_compact(batch: Any) -> bool:
    """Whether a batch has final observations, and lacks the other next observations."""
    return isinstance(batch, TensorDictBase) and batch.get(FINAL, None) is not None


def attach(batch: TensorDictBase, final: FinalObservations | None) -> None:
    """Add final observations to an unlocked batch, if there are any."""
    if final is not None:
        batch.set_non_tensor(FINAL, final)


def detach(batch: TensorDictBase) -> FinalObservations | None:
    """Remove the final observations from an unlocked batch, and return them; None if the batch is not compact."""
    node = batch.get(FINAL, None)
    if node is None:
        return None
    batch.del_(FINAL)
    found = {id(each): each for each in _objects(node.tolist() if is_non_tensor(node) else node)}
    return FinalObservations.joined([*found.values()])


def _objects(node: Any) -> Iterator[FinalObservations]:
    """The objects in a node of a TensorDict: one, or nested lists of them for batches that were joined."""
    if isinstance(node, FinalObservations):
        yield node
    else:
        for each in node:
            yield from _objects(each)
