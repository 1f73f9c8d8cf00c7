"""What tells the trajectories of a batch apart, and which frame follows which."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tensordict import TensorDictBase
from torch import Tensor

from funcollect.arguments import check_key
from funcollect.buffers.trajectory_index.segments import Frames
from funcollect.trajectories.split import TRAJECTORY_IDS
from funcollect.tree import Path

__all__ = ["Trajectories"]

_IDS: tuple[str | Path, ...] = (TRAJECTORY_IDS, "episode")
_ENDS: tuple[str | Path, ...] = (("next", "done"),)
_STEPS: tuple[str | Path, ...] = (("collector", "step"),)


@dataclass(frozen=True, kw_only=True)
class Trajectories:
    """The keys by which frames are linked to trajectories.

    Within a lane, and from batch to batch, frames of one id follow each other. A trajectory ends with a frame whose end
    flag is True, and where ``collector.step``, if a batch has it, does not rise by one. Without ids, lane ``i`` of a
    batch goes on in lane ``i`` of the next batch.

    Attributes:
        traj_key: where the ids are, one number per frame: ``("collector", "traj_ids")``, else ``"episode"``, unless
            given; lanes and end flags alone where a batch has neither.
        end_key: where the end flags are: ``("next", "done")`` unless given.
    """

    traj_key: str | Path | None = None
    end_key: str | Path | None = None

    def __post_init__(self) -> None:
        check_key("traj_key", self.traj_key)
        check_key("end_key", self.end_key)

    def frames(self, leaves: Mapping[Path, Tensor], lead: tuple[int, ...], start: int) -> Frames:
        """The frames of a batch, lane after lane; they may be views of it.

        Args:
            leaves: the batch's.
            lead: its leading dimensions ``[*B, T]``.
            start: the number of its first frame; frames count in the order of time, then of lanes.

        Raises:
            ValueError: for a batch that lacks a key, or has more or less than one number per frame under it, or lanes
                with the same id.
        """
        ids = _column(leaves, lead, self.traj_key, _IDS)
        ends = _column(leaves, lead, self.end_key, _ENDS)
        if ids is None and ends is None:
            raise ValueError(
                f"the batch has neither {_readable(_IDS[0])}, {_IDS[1]} nor next.done, by which slices tell "
                f"trajectories apart; it has {_keys(leaves)}: name a key with traj_key= or end_key="
            )
        step = _column(leaves, lead, None, _STEPS)
        steps, count = lead[-1], math.prod(lead)
        lanes = count // steps
        if ids is not None and lanes > 1:
            _check_apart(ids[::steps], lead)
        begins = np.zeros(count, np.bool_)
        begins[::steps] = True
        return Frames(
            number=np.arange(start, start + count).reshape(steps, lanes).T.reshape(-1),
            key=np.arange(lanes).repeat(steps) if ids is None else _whole(ids),
            begins=begins,
            ends=None if ends is None else ends.astype(np.bool_, copy=False),
            step=None if step is None else _whole(step),
        )

    def check_ids(self, leaves: Mapping[Path, Tensor]) -> None:
        """Raise ValueError for frames without ids, whose lanes are not told.

        Args:
            leaves: the frames'.
        """
        keys = _IDS if self.traj_key is None else (self.traj_key,)
        if all(_path(key) not in leaves for key in keys):
            raise ValueError(
                f"the frames have no {' or '.join(map(_readable, keys))}, by which a reader tells trajectories apart; "
                f"they have {_keys(leaves)}: name the ids with traj_key="
            )


def _check_apart(ids: npt.NDArray[Any], lead: tuple[int, ...]) -> None:
    """Raise ValueError for lanes that begin an extend in a trajectory of the same id."""
    if len(set(ids.tolist())) < len(ids):
        raise ValueError(
            f"lanes of the batch {list(lead)} are in trajectories of the same id, by which slices tell them apart, as "
            "those of a vmap over seeds are: store each run in a buffer of its own, or make the ids differ"
        )


def check_linked(data: Any) -> None:
    """Raise TypeError for a batch in which trajectories cannot be told apart."""
    if not isinstance(data, TensorDictBase):
        raise TypeError(
            f"the data is {type(data).__name__}, expected a TensorDict, in which trajectories can be told apart: "
            "extend with one, or sample with a RandomSampler"
        )


def _column(
    leaves: Mapping[Path, Tensor], lead: tuple[int, ...], given: str | Path | None, usual: tuple[str | Path, ...]
) -> npt.NDArray[Any] | None:
    """One number per frame, lane after lane; None where no key was given and none of the usual ones is there."""
    for key in usual if given is None else (given,):
        leaf = leaves.get(_path(key))
        if isinstance(leaf, Tensor):
            if leaf.shape not in (lead, (*lead, 1)):
                dims = leaf.ndim - (leaf.shape[-1:] == (1,))
                raise ValueError(
                    f"{_readable(key)} has shape {list(leaf.shape)}, expected one number per frame, {list(lead)}: give "
                    f"the storage as many dimensions as the batch has, ndim={dims}, or name another key"
                )
            return leaf.numpy(force=True).reshape(-1)
    if given is not None:
        raise ValueError(
            f"the batch has no tensor {_readable(given)}, by which slices tell trajectories apart; it has "
            f"{_keys(leaves)}: name one of these"
        )
    return None


def _path(key: str | Path) -> Path:
    return (key,) if isinstance(key, str) else key


def _whole(column: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Ids as integers; floating ones by their bits, which are equal where they are."""
    if column.dtype.kind == "f":
        return column.astype(np.float64).view(np.int64)
    return column.astype(np.int64, copy=False)


def _readable(key: str | Path) -> str:
    return key if isinstance(key, str) else ".".join(key)


def _keys(leaves: Mapping[Path, Tensor]) -> list[str]:
    return sorted(map(_readable, leaves))
