"""The keys of a batch that link its frames to trajectories."""

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
    """The keys that link frames to trajectories.

    Successive frames of a lane with the same id belong to one trajectory, also across batches. A trajectory ends with a
    frame whose end flag is True, and where ``collector.step``, if the batch has it, does not increase by one. Without
    ids, lane ``i`` of a batch continues in lane ``i`` of the next batch.

    Attributes:
        traj_key: the key of the ids, one number per frame. By default ``("collector", "traj_ids")`` or, if there is
            none, ``"episode"``. If a batch has neither, lanes and end flags determine the trajectories.
        end_key: the key of the end flags; by default ``("next", "done")``.
    """

    traj_key: str | Path | None = None
    end_key: str | Path | None = None

    def __post_init__(self) -> None:
        check_key("traj_key", self.traj_key)
        check_key("end_key", self.end_key)

    def frames(self, leaves: Mapping[Path, Tensor], lead: tuple[int, ...], start: int) -> Frames:
        """The frames of a batch, ordered by lane, then by time; the arrays may be views of the batch.

        Args:
            leaves: the leaves of the batch.
            lead: its batch dimensions ``[*B, T]``.
            start: the number of its first frame; numbers increase by time, then by lane.

        Raises:
            ValueError: if the batch lacks a key, a leaf is not one number per frame, or lanes have the same id.
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
        """Raise ValueError if the frames have no ids; a reader does not know their lanes.

        Args:
            leaves: the leaves of the frames.
        """
        keys = _IDS if self.traj_key is None else (self.traj_key,)
        if all(_path(key) not in leaves for key in keys):
            raise ValueError(
                f"the frames have no {' or '.join(map(_readable, keys))}, by which a reader tells trajectories apart; "
                f"they have {_keys(leaves)}: name the ids with traj_key="
            )


def _check_apart(ids: npt.NDArray[Any], lead: tuple[int, ...]) -> None:
    """Raise ValueError if several lanes begin an extend with the same id."""
    if len(set(ids.tolist())) < len(ids):
        raise ValueError(
            f"lanes of the batch {list(lead)} are in trajectories of the same id, by which slices tell them apart, as "
            "those of a vmap over seeds are: store each run in a buffer of its own, or make the ids differ"
        )


def check_linked(data: Any) -> None:
    """Raise TypeError if the data are not a TensorDict, the only form with keys for trajectories."""
    if not isinstance(data, TensorDictBase):
        raise TypeError(
            f"the data is {type(data).__name__}, expected a TensorDict, in which trajectories can be told apart: "
            "extend with one, or sample with a RandomSampler"
        )


def _column(
    leaves: Mapping[Path, Tensor], lead: tuple[int, ...], given: str | Path | None, usual: tuple[str | Path, ...]
) -> npt.NDArray[Any] | None:
    """One number per frame, ordered by lane; None if no key was given and the batch has none of the usual ones."""
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
    """Ids as integers; floating ones as their bits, since only equality matters."""
    if column.dtype.kind == "f":
        return column.astype(np.float64).view(np.int64)
    return column.astype(np.int64, copy=False)


def _readable(key: str | Path) -> str:
    return key if isinstance(key, str) else ".".join(key)


def _keys(leaves: Mapping[Path, Tensor]) -> list[str]:
    return sorted(map(_readable, leaves))
