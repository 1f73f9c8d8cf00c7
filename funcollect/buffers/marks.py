"""Sets flags in samples: where slices and episodes begin, and where slices end."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.buffers import Bools, Ints
from funcollect.trajectories.split import STEP, STEPS_AHEAD, TRAJECTORY_IDS
from funcollect.tree import Path

_NO_STARTS = ("next", "collector")  # nodes with flags of later frames, or not from the environment


def with_episodes(batch: TensorDict, first: Ints | slice, mask: Bools | None) -> Ints:
    """The rows that begin a slice, or an episode: by ids and steps, or by the end flag of the row before."""
    begins = np.zeros(len(batch), np.bool_)
    begins[first] = True
    ids, steps, done = (batch.get(path, None) for path in (TRAJECTORY_IDS, STEP, ("next", "done")))
    if ids is not None:
        begins[1:] |= ids.reshape(-1).diff().numpy(force=True) != 0
    if steps is not None:  # other runs may have the same ids
        begins[1:] |= steps.reshape(-1).diff().numpy(force=True) != 1
    if ids is None and steps is None and done is not None:
        ended, ahead = done.reshape(len(batch)), batch.get(STEPS_AHEAD, None)
        if ahead is not None:  # frames of `MultiStep`, which have the flags of later ones
            ended = ended & (ahead.reshape(-1) == 1)
        begins[1:] |= ended[:-1].numpy(force=True)
    return np.flatnonzero(begins if mask is None else begins & mask)


def flags_at(batch: TensorDict, path: Path, tail: tuple[int, ...], fresh: bool = False) -> Tensor:
    """The flags ``[N, *tail]`` of a batch at a path; new ones, all False, if there are none, or if `fresh`."""
    node = batch._tensordict  # several times faster than `get` and `set`
    for part in path[:-1]:
        if part not in node:
            node[part] = TensorDict({}, batch.batch_size, batch.device)
        node = node[part]._tensordict
    flags: Tensor | None = node.get(path[-1])
    if flags is None or fresh:
        zeros = torch.from_numpy(np.zeros((*batch.batch_size, *tail), np.bool_))
        flags = node[path[-1]] = zeros if batch.device is None else zeros.to(batch.device)
    return flags


def mark(node: dict[str, Any], name: str, rows: Ints | slice) -> bool:
    """Set these rows to True in all leaves with a name, except those of next frames; return whether there are any."""
    leaf = node.get(name)
    if found := isinstance(leaf, Tensor):
        set_rows(leaf, rows)
    for key, value in node.items():
        if type(value) is TensorDict and key not in _NO_STARTS:
            found |= mark(value._tensordict, name, rows)
    return found


def set_rows(flags: Tensor, rows: Ints | slice) -> None:
    """Set these rows of flags to True."""
    if flags.is_cpu:
        flags.numpy()[rows] = True  # Torch takes twice as long
    else:
        flags[rows if isinstance(rows, slice) else torch.from_numpy(rows)] = True
