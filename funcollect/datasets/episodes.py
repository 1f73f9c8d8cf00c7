"""Whole episodes of a run's batches, which datasets are made of; and batches of a dataset's episodes, and of arrays.

``F`` is a number of frames that lie one episode after another, ``E`` the number of these episodes, ``n`` one's length.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict, TensorDictBase

from funcollect.arguments import check_kind, check_positive
from funcollect.collectors.collector import CollectorBase
from funcollect.core.simulators import episode_seeds
from funcollect.envs.base import import_extra
from funcollect.messages import shown
from funcollect.protocols import Env, is_env
from funcollect.trajectories.next_observations import next_observations
from funcollect.trajectories.split import LANE, TRAJECTORY_IDS, require
from funcollect.trajectories.whole_trajectories import PendingTrajectories
from funcollect.tree import Path, flatten, to_batch

Array = npt.NDArray[Any]
Columns = dict[Path, Array]  # each [F, ...]

LARGEST_PART = 1 << 28  # bytes in memory
REWARD, TERMINATED, TRUNCATED, DONE = (("next", name) for name in ("reward", "terminated", "truncated", "done"))
INFO = ("next", "info")
_FLAGS = [("terminated",), ("truncated",), ("done",), DONE]
_NAMES = {"terminals": "terminations", "dones": "terminations", "timeouts": "truncations"}  # D4RL's, and Minari's
_KNOWN = "observations", "next_observations", "actions", "rewards", "terminations", "truncations", "infos"


class Part(NamedTuple):
    """Some whole episodes of a run."""

    columns: Columns  # the leaves [F, ...]; actions of one-hot rows are integers
    lengths: Array  # [E] int64
    ends: Array  # [E] int64: the rows after the last ones
    seeds: list[int | None]  # [E]: what their environment was reset with; None if it is unknown


def parts_of(
    batches: Iterable[TensorDictBase], env: Env | None, seed: int | None, frames: int, folder: FilePath | None
) -> Iterator[Part]:
    """Yield the whole episodes of a run's batches ``[*B, T]``, joined across them, in parts, and make a new `folder`.

    A part has at least so many `frames`, or `LARGEST_PART` bytes, but for the last. Frames of trajectories that have
    not ended, or whose first frames are missing, are left out. Without an `env` all columns stay as they are. Raises
    TypeError or ValueError for bad arguments, before the first part, and FileExistsError unless the folder is empty.
    """
    check_kind("batches", batches, Iterable, "pass a collector, or a list of batches")
    check_positive("frames_per_part", frames, 100_000)
    if env is not None and not is_env(env):
        raise TypeError(f"env is {shown(env)}, expected an Env: pass the result of make_env")
    if getattr(getattr(env, "action_spec", None), "groups", None):
        raise ValueError(f"env is {shown(env)}, which has groups of agents, expected one agent: to_hf writes any batch")
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is there and not empty: choose another folder")
    run = _run_of(batches, env, seed)
    return (_part(joined, env, run) for joined in _joined(batches, frames))


def _run_of(batches: Any, env: Any, seed: int | None) -> tuple[int, int] | None:
    """The seed of a run and its number of lanes; None if its episodes have no seeds of their own, or it is unknown."""
    lanes = getattr(env, "num_envs", None) or 1
    if isinstance(batches, CollectorBase):
        seed, own = batches.seed if seed is None else seed, getattr(batches, "run", None)
        lanes = getattr(batches, "lanes", lanes) if own is None else sum(own.lanes)
    return None if seed is None or getattr(env, "seeding", None) != "episode" else (seed, lanes)


def _joined(batches: Iterable[TensorDictBase], frames: int) -> Iterator[TensorDictBase]:
    pending: dict[int, PendingTrajectories] = {}  # by the first lane: each asynchronous worker has lanes of its own
    held: list[TensorDictBase] = []
    for batch in batches:
        check_kind("batches", batch, TensorDictBase, "pass a collector, or the batches of rollouts")
        source = int(require(batch, LANE, tail=()).reshape(-1)[0])
        added = pending.get(source, PendingTrajectories()).add(batch.clone())  # the memory of a batch may be lent
        whole, pending[source] = added.take_whole()
        held += (next_observations(part).cpu() for part in whole)
        nbytes = sum(leaf.numel() * leaf.element_size() for part in held for leaf in flatten(part).values())
        if sum(map(len, held)) >= frames or nbytes >= LARGEST_PART:
            yield torch.cat(held)
            held = []
    if held:
        yield torch.cat(held)


def _part(frames: TensorDictBase, env: Env | None, run: tuple[int, int] | None) -> Part:
    columns = {path: leaf.detach().numpy() for path, leaf in flatten(frames).items()}
    ends = columns[DONE][:, 0].nonzero()[0] + 1
    lengths = np.diff(ends, prepend=0)
    if env is not None and env.action_spec.one_hot:
        columns["action",] = env.action_spec.from_one_hot(columns["action",], np)
    if env is not None and columns[REWARD].shape[1:] != (1,):
        raise ValueError(f"rewards have the shape {list(columns[REWARD].shape)}, expected one player's: use to_hf")
    seeds: list[int | None] = [None] * len(ends)
    if run is not None:
        lane, ids = (columns[path][ends - 1] for path in (LANE, TRAJECTORY_IDS))
        seed, lanes = run
        episode, rest = np.divmod(ids - ((lane // lanes) << 40) - lane % lanes, lanes)
        if (episode < 0).any() or rest.any():
            what = f"batches have lanes up to {lane.max()}, but seed is of a run with {lanes}"
            raise ValueError(f"{what}: pass the collector itself as batches, or leave out seed")
        seeds = episode_seeds(seed, lane, episode)
    return Part(columns, lengths, ends, seeds)


def batches_of(episodes: Iterable[Columns], frames: int) -> Iterator[TensorDict]:
    """Yield episodes, one after another, as batches [F] of at least so many `frames`, but for the last one."""
    held: list[Columns] = []
    first = 0

    def batch() -> TensorDict:
        missing = {".".join(path) for each in held for path in each.keys() ^ held[0].keys()}
        if missing:
            raise ValueError(f"some episodes have no {sorted(missing)}, expected the same arrays in all")
        return _batch({path: np.concatenate([each[path] for each in held]) for path in held[0]}, first)

    for episode in episodes:
        held.append(episode)
        if sum(len(each[REWARD]) for each in held) >= frames:
            yield batch()
            held, first = [], first + len(held)
    if held:
        yield batch()


def episode_columns(observed: Columns, ended: Mapping[Path, Any], others: Columns) -> Columns:
    """The columns of an episode of n frames, from observations [n + 1, ...], flags by path, and all `others` [n, ...].

    Its last frame, and no other one, is terminated or truncated.
    """
    count = len(others[REWARD])
    columns = {path: each if path == ("action",) else in_single(each) for path, each in others.items()}
    columns |= {TERMINATED: np.zeros(count, bool), TRUNCATED: np.zeros(count, bool)}
    for path, flags in ended.items():
        columns[path][-1:] = np.asarray(flags, bool).reshape(-1)[-1:]
    columns[TRUNCATED][-1:] |= ~columns[TERMINATED][-1:]
    for path, rows in observed.items():
        columns[path], columns["next", *path] = rows[:-1], rows[1:]
    return columns


def in_single(array: Any) -> Array:
    """An array, float32 if it is of another floating dtype, as batches have them."""
    array = np.asarray(array)
    return array.astype(np.float32) if array.dtype.kind == "f" else array


def _batch(columns: Columns, first: int) -> TensorDict:
    """A batch [F] of columns with rewards and two flags [F], whose episodes are numbered from `first` on."""
    columns |= {path: columns[path].reshape(-1, 1) for path in (REWARD, TERMINATED, TRUNCATED)}
    columns |= {path: np.zeros_like(columns[TERMINATED]) for path in _FLAGS}
    columns[DONE] = columns[TERMINATED] | columns[TRUNCATED]
    ends = columns[DONE][:, 0].nonzero()[0] + 1
    lengths, frames = np.diff(ends, prepend=0), np.arange(len(columns[DONE]))
    columns["collector", "traj_ids"] = first + np.arange(len(ends)).repeat(lengths)
    columns["collector", "step"] = frames - (ends - lengths).repeat(lengths)
    columns |= {("collector", name): np.zeros_like(frames) for name in ("lane", "policy_version")}
    return to_batch(
        {path: torch.from_numpy(np.require(each, requirements="CW")) for path, each in columns.items()}, (len(frames),)
    )


def from_arrays(arrays: Mapping[str, Any] | str | os.PathLike[str]) -> TensorDict:
    """A batch [F] of arrays [N, ...] by Minari's or D4RL's names: a dict, an open HDF5 file, or the path of one.

    These are ``observations`` (or several by key), ``actions``, ``rewards``, ``terminations`` or ``terminals``, and
    optionally ``truncations`` or ``timeouts``, ``next_observations`` and ``infos``; others are left out. Without
    ``next_observations`` those are the following rows, and the last frame of a truncated episode, which has none, is
    left out, as in D4RL's own function. The batch has the keys of a rollout, floating arrays as float32.

    Raises TypeError for something else, FileNotFoundError without such a file, ValueError for missing or unequal arrays,
    ImportError for a path without h5py: ``pip install 'funcollect[data]'``.

    >>> import numpy as np
    >>> flags = {"terminals": [False, True, False], "timeouts": [False, False, True]}
    >>> rows = {"observations": np.zeros((3, 4)), "actions": np.zeros((3, 2)), "rewards": np.ones(3), **flags}
    >>> from_arrays(rows | {"next_observations": np.ones((3, 4))})["collector", "traj_ids"]
    tensor([0, 0, 1])
    """
    check_kind("arrays", arrays, (Mapping, str, os.PathLike), "pass a dict of arrays, or the path of an HDF5 file")
    if not isinstance(arrays, Mapping):
        if not FilePath(arrays).is_file():
            raise FileNotFoundError(
                f"arrays is {str(arrays)!r}, where no file is, expected an HDF5 file: check the path"
            )
        with import_extra("h5py", "h5py", "data").File(arrays, "r") as file:
            return from_arrays(file)
    named = _named(arrays)
    columns = {path[1:] or ("observation",): each for path, each in named.items() if path[0] == "observations"}
    observed = [*columns]
    own = {"actions": ("action",), "rewards": REWARD, "terminations": TERMINATED, "truncations": TRUNCATED}
    columns |= {own[path[0]]: each for path, each in named.items() if path[0] in own}
    if not observed or any(path not in columns for path in (("action",), REWARD, TERMINATED)):
        known = "observations, actions, rewards and terminations (or terminals)"
        raise ValueError(f"arrays has {sorted(arrays)}, expected {known}: rename them")
    columns |= {(*INFO, *path[1:]): each for path, each in named.items() if path[0] == "infos"}
    rest = {path[1:] or ("observation",): each for path, each in named.items() if path[0] == "next_observations"}
    columns |= {("next", *path): each for path, each in rest.items()}
    sizes = {".".join(path): len(each) for path, each in columns.items()}
    if len({*sizes.values()}) > 1 or not sizes["next.reward"]:
        raise ValueError(f"arrays have the lengths {sizes}, expected one length, of at least 1: cut them")
    ended = columns[TERMINATED].astype(bool).reshape(-1)
    cut = columns.get(TRUNCATED, np.zeros_like(ended)).astype(bool).reshape(-1)
    cut[-1] |= not ended[-1]
    columns |= {TERMINATED: ended, TRUNCATED: cut}
    if not rest:
        lost = cut & ~ended
        columns[TRUNCATED] = cut | (np.append(lost[1:], False) & ~ended)  # the frames before those that are left out
        columns |= {("next", *path): np.concatenate([columns[path][1:], columns[path][-1:]]) for path in observed}
        columns = {path: each[~lost] for path, each in columns.items()}
    return _batch(columns, 0)


def _named(arrays: Mapping[str, Any], prefix: Path = ()) -> Columns:
    """The numbers in nested mappings by path, under Minari's names; names may hold slashes, as in HDF5."""
    found: Columns = {}
    for name, each in arrays.items():
        path = (*prefix, *name.split("/"))
        path = (_NAMES.get(path[0], path[0]), *path[1:])
        if path[0] in _KNOWN:
            found |= _named(each, path) if isinstance(each, Mapping) else {path: in_single(each)}
    return {path: each for path, each in found.items() if each.dtype.kind in "biuf"}
