"""The only next observations that a compact batch (``compact_obs=True``) has, stored beside its frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from tensordict import TensorDictBase, is_non_tensor
from torch import Tensor
from typing_extensions import override

from funcollect.specs import FINAL
from funcollect.tree import Path


@dataclass(frozen=True, eq=False, repr=False)
class FinalObservations:
    """The next observations of N frames, each the last of its trajectory in a batch."""

    traj_ids: Tensor  # [N] int64
    step: Tensor  # [N] int64: in the trajectory
    leaves: Mapping[Path, Tensor]  # each [N, ...]

    @classmethod
    def joined(cls, parts: Sequence[FinalObservations]) -> FinalObservations | None:
        """The final observations of several batches; None if there are no `parts`."""
        if len(parts) < 2:
            return parts[0] if parts else None
        ids, step = torch.cat([each.traj_ids for each in parts]), torch.cat([each.step for each in parts])
        return cls(ids, step, {path: torch.cat([each.leaves[path] for each in parts]) for path in parts[0].leaves})

    @property
    def plain(self) -> tuple[Tensor, Tensor, Mapping[Path, Tensor]]:
        """The arguments that make an equal object."""
        return self.traj_ids, self.step, self.leaves

    def __getitem__(self, rows: Tensor) -> FinalObservations:
        """The final observations of some frames: indices, or a mask [N]."""
        leaves = {path: leaf[rows] for path, leaf in self.leaves.items()}
        return FinalObservations(self.traj_ids[rows], self.step[rows], leaves)

    def find(self, traj_ids: Tensor, step: Tensor) -> Tensor:
        """The rows of M frames, [M] int64; -1 for frames that are not there.

        ValueError if frames with equal trajectory and step differ, as those of two runs do.
        """
        frames = torch.stack([torch.cat([self.traj_ids, traj_ids]), torch.cat([self.step, step])], 1)
        distinct, number = torch.unique(frames, dim=0, return_inverse=True)
        count = len(self.step)
        row = torch.full((len(distinct),), -1, device=number.device)
        row[number[:count]] = torch.arange(count, device=number.device)
        last = row[number[:count]]  # of each frame's duplicates
        pairs = ((leaf, leaf[last.to(leaf.device)]) for leaf in self.leaves.values())
        if not all(torch.equal(*(leaf.reshape(-1).view(torch.uint8) for leaf in pair)) for pair in pairs):  # as bits
            mend = "call next_observations for each run before that"
            raise ValueError(f"the batch joins several runs with equal trajectory ids: {mend}")
        return row[number[count:]]

    @override
    def __repr__(self) -> str:
        return f"FinalObservations of {len(self.step)} frames"


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
    parts = optree.tree_leaves(node.tolist() if is_non_tensor(node) else node)  # joined batches have lists
    return FinalObservations.joined([*{id(part): part for part in parts}.values()])
