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
from funcollect.buffers.arrays import Ints
from funcollect.buffers.trajectory_index.segments import Frames
from funcollect.trajectories.split import STEP, STEPS_AHEAD, TRAJECTORY_IDS, readable
from funcollect.tree import Path, as_path

__all__ = ["Trajectories"]

# The default keys. If there are several, the first that the batch has is used.
_IDS: tuple[Path, ...] = (TRAJECTORY_IDS, ("episode",))
_ENDS: tuple[Path, ...] = (("next", "done"),)
_STEPS: tuple[Path, ...] = (STEP,)
_AHEAD: tuple[Path, ...] = (STEPS_AHEAD,)


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

    >>> import torch, funcollect as fc
    >>> from funcollect.keys import key_from_seed
    >>> from tensordict import TensorDict
    >>> state = fc.ring.init(100, trajectories=Trajectories(traj_key="run", end_key="end"))
    >>> frames = {"run": torch.tensor([1, 1, 2, 2]), "end": torch.tensor([False, True, False, False])}
    >>> state, indices = fc.ring.extend(state, TensorDict(frames, batch_size=[4]))
    >>> slices = fc.ring.sample(state, key_from_seed(0), fc.ring.Slices(num_slices=4, slice_len=2))
    >>> bool(slices["run"].view(4, 2).diff().any())
    False
    """

    traj_key: str | Path | None = None
    end_key: str | Path | None = None

    def __post_init__(self) -> None:
        check_key("traj_key", self.traj_key)
        check_key("end_key", self.end_key)

    def frames(self, leaves: Mapping[Path, Tensor], lead: tuple[int, ...], start: int) -> Frames:
        """The frames of a batch ``[*lead]``, ordered by lane, then by time; the arrays may be views of the batch.

        They are numbered from `start` on, by time, then by lane. Raises ValueError if the batch lacks a key, if a leaf
        is not one number per frame, or if lanes have the same id.
        """
        ids = _column(leaves, lead, self.traj_key, _IDS)
        ends = _column(leaves, lead, self.end_key, _ENDS)
        ahead = _column(leaves, lead, None, _AHEAD)
        if ahead is not None and ends is not None and self.end_key is None:
            ends = ends.astype(np.bool_, copy=False) & (ahead == 1)  # the flags are those of later frames
        if ids is None and ends is None:
            raise ValueError(
                f"the batch has neither {', '.join(map(readable, _IDS))} nor next.done, which slices need to "
                f"tell trajectories apart; it has {_keys(leaves)}: name a key with traj_key= or end_key="
            )
        step = _column(leaves, lead, None, _STEPS)
        steps, count = lead[-1], math.prod(lead)
        lanes = count // steps
        if ids is not None and lanes > 1 and len(set(ids[::steps].tolist())) < lanes:
            raise ValueError(
                f"lanes of the batch {list(lead)} have the same trajectory id, as the runs of a vmap over seeds have, "
                "so slices cannot distinguish them: store each run in a separate buffer, or make the ids differ"
            )
        begins = np.zeros(count, np.bool_)
        begins[::steps] = True
        return Frames(
            number=np.arange(start, start + count).reshape(steps, lanes).T.reshape(-1),
            key=np.arange(lanes).repeat(steps) if ids is None else _as_ints(ids),
            begins=begins,
            ends=None if ends is None else ends.astype(np.bool_, copy=False),
            step=None if step is None else _as_ints(step),
        )

    def check_ids(self, leaves: Mapping[Path, Tensor]) -> None:
        """Raise ValueError if the frames have no ids: a reader cannot use lanes instead, which it does not know."""
        paths = _IDS if self.traj_key is None else (as_path(self.traj_key),)
        if leaves.keys().isdisjoint(paths):
            raise ValueError(
                f"the frames have no {' or '.join(map(readable, paths))}, which a reader needs to identify "
                f"trajectories; they have {_keys(leaves)}: name the ids with traj_key="
            )


def check_linked(data: Any) -> None:
    """Raise TypeError unless the data is a TensorDict: other data has no keys that link frames."""
    if not isinstance(data, TensorDictBase):
        raise TypeError(
            f"the data is {type(data).__name__}, expected a TensorDict with keys that identify trajectories: extend "
            "with one, or sample with a RandomSampler"
        )


def _column(
    leaves: Mapping[Path, Tensor], lead: tuple[int, ...], given: str | Path | None, usual: tuple[Path, ...]
) -> npt.NDArray[Any] | None:
    """One number per frame, ordered by lane; None if no key was given and the batch has none of the usual ones."""
    for path in usual if given is None else (as_path(given),):
        leaf = leaves.get(path)
        if isinstance(leaf, Tensor):
            if leaf.shape not in (lead, (*lead, 1)):
                dims = leaf.ndim - (leaf.shape[-1:] == (1,))
                raise ValueError(
                    f"{readable(path)} has shape {list(leaf.shape)}, expected one number per frame, {list(lead)}: give "
                    f"the storage as many dimensions as the batch has, ndim={dims}, or name another key"
                )
            return leaf.numpy(force=True).reshape(-1)
    if given is not None:
        raise ValueError(
            f"the batch has no tensor {readable(given)}, which slices need to identify trajectories; it has "
            f"{_keys(leaves)}: name one of these"
        )
    return None


def _as_ints(column: npt.NDArray[Any]) -> Ints:
    """Ids as integers; floating ones as their bits, since only equality matters."""
    if column.dtype.kind == "f":
        return column.astype(np.float64).view(np.int64)
    return column.astype(np.int64, copy=False)


def _keys(leaves: Mapping[Path, Tensor]) -> list[str]:
    """The keys of a batch, sorted, as text for messages."""
    return sorted(map(readable, leaves))
