"""What tells the trajectories of a batch apart, and which frame follows which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tensordict import TensorDictBase
from torch import Tensor

from funcollect.buffers.trails import Frames
from funcollect.trajectories.split import TRAJECTORY_IDS
from funcollect.tree import Path

__all__ = ["Trajectories"]

_IDS: tuple[str | Path, ...] = (TRAJECTORY_IDS, "episode")
_STEP = ("collector", "step")


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

    def frames(self, data: Any, lead: tuple[int, ...], numbers: npt.NDArray[np.int64], skipped: int) -> Frames:
        """The frames of a batch, but for the first `skipped`, lane after lane.

        Args:
            data: the batch.
            lead: its leading dimensions ``[*B, T]``.
            numbers: of all its frames, in the order of time, then of lanes.
            skipped: how many of these the ring will not hold.

        Raises:
            TypeError: for something other than a TensorDict.
            ValueError: for a batch that lacks a key, or has more or less than one number per frame under it.
        """
        if not isinstance(data, TensorDictBase):
            raise TypeError(
                f"the data is {type(data).__name__}, expected a TensorDict, in which trajectories can be told apart: "
                "extend with one, or sample with a RandomSampler"
            )
        ids = _column(data, lead, self.traj_key, _IDS)
        ends = _column(data, lead, self.end_key, (("next", "done"),))
        if ids is None and ends is None:
            raise ValueError(
                f"the batch has neither {_readable(_IDS[0])}, {_IDS[1]} nor next.done, by which slices tell "
                f"trajectories apart; it has {_keys(data)}: name a key with traj_key= or end_key="
            )
        steps = lead[-1]
        lanes = len(numbers) // steps
        number = np.ascontiguousarray(numbers.reshape(steps, lanes).T).reshape(-1)
        lane = np.arange(lanes).repeat(steps)
        step = _column(data, lead, None, (_STEP,))
        held = number >= numbers[skipped] if skipped else slice(None)
        lane = lane[held]
        begins = np.ones(len(lane), np.bool_)
        begins[1:] = lane[1:] != lane[:-1]
        return Frames(
            number=number[held],
            key=lane if ids is None else _whole(ids)[held],
            begins=begins,
            ends=None if ends is None else ends.astype(np.bool_, copy=False)[held],
            step=None if step is None else _whole(step)[held],
        )

    def check_ids(self, data: TensorDictBase) -> None:
        """Raise ValueError for frames without ids, whose lanes are not told.

        Args:
            data: the batch.
        """
        keys = _IDS if self.traj_key is None else (self.traj_key,)
        if all(data.get(key, None) is None for key in keys):
            raise ValueError(
                f"the frames have no {' or '.join(map(_readable, keys))}, by which a reader tells trajectories apart; "
                f"they have {_keys(data)}: name the ids with traj_key="
            )


def _column(
    data: TensorDictBase, lead: tuple[int, ...], given: str | Path | None, usual: tuple[str | Path, ...]
) -> npt.NDArray[Any] | None:
    """One number per frame, lane after lane; None where no key was given and none of the usual ones is there."""
    keys = usual if given is None else (given,)
    for key in keys:
        leaf = data.get(key, None)
        if isinstance(leaf, Tensor):
            if tuple(leaf.shape) not in (lead, (*lead, 1)):
                raise ValueError(
                    f"{_readable(key)} has shape {list(leaf.shape)}, expected one number per frame, {list(lead)}: give "
                    f"the storage as many dimensions as the batch has, ndim={data.batch_dims}, or name another key"
                )
            return leaf.numpy(force=True).reshape(-1)
    if given is not None:
        raise ValueError(
            f"the batch has no tensor {_readable(given)}, by which slices tell trajectories apart; it has "
            f"{_keys(data)}: name one of these"
        )
    return None


def _whole(column: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Ids as integers; floating ones by their bits, which are equal where they are."""
    if column.dtype.kind == "f":
        return column.astype(np.float64).view(np.int64)
    return column.astype(np.int64, copy=False)


def _readable(key: str | Path) -> str:
    return key if isinstance(key, str) else ".".join(key)


def _keys(data: TensorDictBase) -> list[str]:
    return sorted(_readable(key) for key in data.keys(include_nested=True, leaves_only=True))
