"""Joins a run's batches into whole episodes for datasets, and makes batches of a dataset's episodes, or of arrays.

``F`` is the number of frames of several episodes, one after another, ``E`` that of these episodes, ``n`` one's length.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from funcollect.arguments import check_kind, check_positive
from funcollect.collectors.collector import CollectorBase
from funcollect.core.simulators import episode_seeds
from funcollect.envs.base import import_extra
from funcollect.keys import key_from_seed
from funcollect.messages import shown
from funcollect.protocols import is_env
from funcollect.specs import RESERVED
from funcollect.trajectories.next_observations import next_observations
from funcollect.trajectories.split import CUT, LANE, MASK, TRAJECTORY_IDS, check_single_steps, optional, require
from funcollect.trajectories.whole_trajectories import PendingTrajectories
from funcollect.tree import Path, flatten, to_batch

Array = npt.NDArray[Any]
Columns = dict[Path, Array]  # each [F, ...]

LARGEST_PART = 1 << 28  # bytes in memory
ACTION, OBSERVATION, INFO = ("action",), ("observation",), ("next", "info")
_AFTER: list[Path] = [("next", name) for name in ("reward", "terminated", "truncated", "done")]
REWARD, TERMINATED, TRUNCATED, DONE = _AFTER
# The names of arrays: those of D4RL as Minari's, and those of Minari as paths of a batch.
_D4RL = {"terminals": "terminations", "dones": "terminations", "timeouts": "truncations"}
_PATHS: dict[str, Path] = {"actions": ACTION, "rewards": REWARD, "terminations": TERMINATED, "truncations": TRUNCATED}
_PATHS |= {"infos": INFO, "observations": (), "next_observations": ("next",)}


def extra(module: str, package: str = "") -> Any:
    """Import a module of the extra ``data``; ImportError that names the extra."""
    return import_extra(module, package or module.partition(".")[0], "data")


class EpisodeRows(NamedTuple):
    """Some whole episodes of a run."""

    columns: Columns  # the leaves [F, ...]; actions of one-hot rows are integers
    lengths: Array  # [E] int64
    ends: Array  # [E] int64: one past the last row of each
    seeds: list[int | None]  # [E]: the seed of the environment's reset; None if it is unknown


def parts_of(
    batches: Iterable[TensorDictBase], env: Any, seed: int | None, frames: int, folder: FilePath | None
) -> Iterator[EpisodeRows]:
    """Yield the whole episodes of a run's batches ``[*B, T]``, joined across them, in parts, for a new `folder`.

    All parts but the last have at least so many `frames`, or `LARGEST_PART` bytes. Frames of trajectories that have not
    ended, or whose first frames are missing, are left out; ValueError if there are no others. With `...` as `env`, all
    columns stay as they are. Raises TypeError or ValueError for bad arguments, before the first part, and
    FileExistsError unless the folder is empty.
    """
    check_kind("batches", batches, Iterable, "pass a collector, or a list of batches")
    check_positive("frames_per_part", frames, 100_000)
    if env is not ... and not is_env(env):
        raise TypeError(f"env is {shown(env)}, expected an Env: pass the result of make_env")
    if getattr(getattr(env, "action_spec", None), "groups", None):
        raise ValueError(f"env is {shown(env)}, which has groups of agents, expected one agent: to_hf writes any batch")
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is there and not empty: choose another folder")
    key_from_seed(0 if seed is None else seed)
    lanes = getattr(env, "num_envs", None) or 1
    if isinstance(batches, CollectorBase):
        if seed not in (None, batches.seed):
            raise ValueError(f"seed is {seed}, and the collector's {batches.seed}, expected the same: leave it out")
        seed, run = batches.seed, getattr(batches, "run", None)
        lanes = getattr(batches, "lanes", lanes) if run is None else run.total_lanes
    seed = seed if getattr(env, "seeding", None) == "episode" else None
    return (_part(joined, env, seed, lanes) for joined in _joined(batches, frames, env))


def _joined(batches: Iterable[TensorDictBase], frames: int, env: Any) -> Iterator[TensorDictBase]:
    """Yield whole episodes, parts of the run; if it breaks off, those that have ended come before the exception."""
    held: list[TensorDictBase] = []
    count = nbytes = parts = 0  # the frames and bytes that are held; the parts so far
    ended = _ended(batches, env)
    while True:
        try:
            fresh = next(ended, None)
        except BaseException:
            if held:
                yield torch.cat(held)
            raise
        if fresh is None:
            break
        held, count = held + fresh, count + sum(map(len, fresh))
        nbytes += sum(leaf.nbytes for part in fresh for leaf in flatten(part).values())
        if count >= frames or nbytes >= LARGEST_PART:
            yield torch.cat(held)
            held, count, nbytes, parts = [], 0, 0, parts + 1
    if not held and not parts:
        raise ValueError("batches have no whole episode, expected one or more: collect more frames, or limit episodes")
    if held:
        yield torch.cat(held)


def _ended(batches: Iterable[TensorDictBase], env: Any) -> Iterator[list[TensorDictBase]]:
    """Yield the trajectories [n] that end in each batch."""
    pending: dict[int, PendingTrajectories] = {}  # by the first lane: each asynchronous worker has lanes of its own
    collector = batches if isinstance(batches, CollectorBase) and batches.trajs_per_batch is None else None
    for batch in batches:
        check_kind("batches", batch, TensorDictBase, "pass a collector, or the batches of rollouts")
        if env is not ...:
            check_single_steps(batch)
        fresh: list[TensorDictBase] = []
        for rows in [batch] if collector is None else collector._split_by_order(batch):
            source = int(require(rows, LANE, tail=()).reshape(-1)[0])
            whole, pending[source] = pending.get(source, PendingTrajectories()).add(_as_collected(rows)).take_whole()
            fresh += [next_observations(part).cpu() for part in whole]
        for part in fresh[:1]:  # the others once they are written: a check takes as long as a short episode
            _check_leaves(_leaves(part, env), env)
        yield fresh


def _as_collected(batch: TensorDictBase) -> TensorDictBase:
    """A copy, since its memory may be lent, without padding, in which `set_truncated` ended no trajectory."""
    rows = batch.clone().unlock_()
    if (cut := optional(rows, CUT, tail=())) is not None:
        for path in (TRUNCATED, DONE):
            rows[path] &= ~cut[..., None]
    mask = optional(rows, MASK, tail=())
    return rows if mask is None else rows[mask]


def _leaves(batch: TensorDictBase, env: Any) -> dict[Path, Any]:
    """The leaves that are written: all, or with an `env` all but a policy's other outputs."""
    leaves, known = flatten(batch), ("action", "collector", "next")
    kept = [path for path in leaves if env is ... or path[0] in known or ("next", *path) in leaves]
    return {path: leaves[path] for path in kept}


def _check_leaves(leaves: Mapping[Path, Any], env: Any) -> None:
    """Raise TypeError or ValueError for leaves [F, ...] that a dataset cannot hold, or that are not those of `env`."""
    if missing := [".".join(path) for path in (ACTION, *_AFTER) if env is not ... and path not in leaves]:
        raise ValueError(f"batches lack {missing}, expected those of a rollout: keep these keys")
    kind = {path: f"{getattr(leaf, 'dtype', type(leaf).__name__)} {[*leaf.shape]}" for path, leaf in leaves.items()}
    if bad := {".".join(path): kind[path] for path, leaf in leaves.items() if not _holds_numbers(leaf)}:
        raise TypeError(f"batches have {bad}, expected numbers with dtypes of NumPy: leave them out, or convert them")
    names = Counter(".".join(path) for path in leaves)
    if twice := sorted(name for name, count in names.items() if count > 1):
        raise ValueError(f"batches have several keys whose names, joined by dots, are {twice}: rename them")
    if env is ...:
        return
    spec = env.action_spec
    wanted = {leaf.path: (leaf.shape, leaf.dtype) for leaf in env.observation_leaves}
    wanted[ACTION] = spec.shape, np.dtype(np.int64 if spec.one_hot else spec.space.dtype)
    found = {path: leaves[path] for path in wanted if path in leaves}
    held = {path: (tuple(leaf.shape[1:]), leaf[:0].numpy().dtype) for path, leaf in found.items()}
    same = wanted.keys() == held.keys() and all(
        held[path][0] == shape and np.can_cast(held[path][1], dtype, "same_kind")
        for path, (shape, dtype) in wanted.items()
    )
    action, (low, high) = leaves[ACTION], spec.bounds
    if not same or (not action.is_floating_point() and ((action < low) | (action > high)).any()):
        what = f"batches have the observations and actions {_shown(held)}, and env {_shown(wanted)} ({spec.space})"
        raise ValueError(f"{what}, expected the same: pass their own env")
    if leaves[REWARD].shape[1:] != (1,):
        raise ValueError(f"rewards have the shape {[*leaves[REWARD].shape]}, expected one player's: use to_hf")


def _holds_numbers(leaf: Any) -> bool:
    plain = isinstance(leaf, Tensor) and not leaf.is_complex() and leaf.dtype != torch.bfloat16
    return plain and 0 not in leaf.shape


def _shown(kinds: Mapping[Path, tuple[Any, Any]]) -> dict[str, str]:
    return {".".join(path): f"{dtype} {[*shape]}" for path, (shape, dtype) in kinds.items()}


def infos_of(columns: Columns, env: Any) -> Columns:
    """The infos, by their paths under ``("next", "info")``, which an observation of that name is not."""
    observed = {("next", *leaf.path) for leaf in env.observation_leaves}
    return {path[2:]: each for path, each in columns.items() if path[:2] == INFO and path not in observed}


def _part(frames: TensorDictBase, env: Any, seed: int | None, lanes: int) -> EpisodeRows:
    _check_leaves(leaves := _leaves(frames, env), env)
    columns = {path: leaf.detach().numpy() for path, leaf in leaves.items()}
    ends = columns[DONE][:, 0].nonzero()[0] + 1
    part = EpisodeRows(columns, np.diff(ends, prepend=0), ends, [None] * len(ends))
    if env is not ... and env.action_spec.one_hot:
        columns[ACTION] = env.action_spec.from_one_hot(columns[ACTION], np)
    if seed is None:
        return part
    lane, ids = (columns[path][ends - 1] for path in (LANE, TRAJECTORY_IDS))
    episode, rest = np.divmod(ids - ((lane // lanes) << 40) - lane % lanes, lanes)
    if (episode < 0).any() or rest.any():
        what = f"batches have lanes up to {lane.max()}, but seed is of a run with {lanes}"
        raise ValueError(f"{what}: pass the collector itself as batches, or leave out seed")
    return part._replace(seeds=episode_seeds(seed, lane, episode))


def batches_of(episodes: Iterable[Columns], frames: int) -> Iterator[TensorDict]:
    """Yield batches [F] of whole episodes. All but the last have at least so many `frames`."""
    held: list[Columns] = []
    first = count = 0
    for episode in episodes:
        held.append(episode)
        count += len(episode[REWARD])
        if missing := sorted(".".join(path) for path in episode.keys() ^ held[0].keys()):
            raise ValueError(f"some episodes lack {missing}, expected the same arrays in all of them")
        if count >= frames:
            yield _batch({path: np.concatenate([each[path] for each in held]) for path in episode}, first)
            first, count, held = first + len(held), 0, []
    if held:
        yield _batch({path: np.concatenate([each[path] for each in held]) for path in held[0]}, first)


def episode_columns(observed: Columns, ended: Mapping[Path, Any], others: Columns) -> Columns:
    """The columns of an episode, from observations [n + 1, ...], flags by path, and other arrays [n, ...].

    Its last frame, and no other one, is terminated or truncated.
    """
    columns = {path: each if path == ACTION else in_single(each) for path, each in others.items()}
    for path in (TERMINATED, TRUNCATED):
        columns[path] = np.zeros(len(columns[REWARD]), bool)
        columns[path][-1:] = np.asarray(ended[path], bool).reshape(-1)[-1:]
    columns[TRUNCATED][-1:] |= ~columns[TERMINATED][-1:]
    for path, rows in observed.items():
        columns[path], columns["next", *path] = rows[:-1], rows[1:]
    return columns


def in_single(array: Any) -> Array:
    """An array; floating ones as float32, as in batches."""
    values: Array = np.asarray(array.detach().cpu() if isinstance(array, Tensor) else array)
    return values.astype(np.float32) if values.dtype.kind == "f" else values


def _batch(columns: Columns, first: int) -> TensorDict:
    """A batch [F] of columns, with rewards and two flags, whose episodes are numbered from `first` on."""
    columns |= {path: columns[path].reshape(-1, 1) for path in (REWARD, TERMINATED, TRUNCATED)}
    columns[DONE] = columns[TERMINATED] | columns[TRUNCATED]
    columns |= {path[1:]: np.zeros_like(columns[DONE]) for path in _AFTER[1:]}
    ends = columns[DONE][:, 0].nonzero()[0] + 1
    lengths, frames = np.diff(ends, prepend=0), np.arange(len(columns[DONE]))
    columns[TRAJECTORY_IDS] = first + np.arange(len(ends)).repeat(lengths)
    columns["collector", "step"] = frames - (ends - lengths).repeat(lengths)
    columns[LANE], columns["collector", "policy_version"] = np.zeros_like(frames), np.zeros_like(frames)
    leaves = {path: torch.from_numpy(np.require(each, requirements=["C", "W"])) for path, each in columns.items()}
    return to_batch(leaves, (len(frames),))


def from_arrays(arrays: Mapping[str, Any] | str | os.PathLike[str]) -> TensorDict:
    """A batch [F] of arrays [N, ...] by Minari's or D4RL's names: a dict, an open HDF5 file, or the path of one.

    These are ``observations`` (or several by key), ``actions``, ``rewards``, ``terminations`` or ``terminals``, and
    optionally ``truncations`` or ``timeouts``, ``next_observations`` and ``infos``; others are left out. Without
    ``next_observations`` those are the following rows (of the last row itself), and the last frame of a truncated
    episode, which has none, is left out, as D4RL does. The batch has the keys of a rollout; floating arrays are
    float32. Raises TypeError for something else, FileNotFoundError without a file, ValueError for missing or unequal
    arrays, ImportError if h5py is needed and missing.

    >>> import numpy as np
    >>> flags = {"terminals": [False, True, False], "timeouts": [False, False, True]}
    >>> rows = {"observations": np.zeros((3, 4)), "actions": np.zeros((3, 2)), "rewards": np.ones(3), **flags}
    >>> from_arrays(rows | {"next_observations": np.ones((3, 4))})["collector", "traj_ids"]
    tensor([0, 0, 1])
    """
    check_kind("arrays", arrays, (Mapping, str, os.PathLike), "pass a dict of arrays, or the path of an HDF5 file")
    if not isinstance(arrays, Mapping):
        if not FilePath(arrays).is_file():
            raise FileNotFoundError(f"arrays is {str(arrays)!r}, where no file is, expected HDF5: check the path")
        with extra("h5py").File(arrays, "r") as file:
            return from_arrays(file)
    columns = _named(arrays)
    observed = [path for path in columns if path[0] != "next" and path != ACTION]
    if not observed or not {ACTION, REWARD, TERMINATED} <= columns.keys():
        known = "observations, actions, rewards and terminations (or terminals)"
        raise ValueError(f"arrays has {sorted(arrays)}, expected {known}: rename them")
    sizes = {".".join(path): len(each) for path, each in columns.items()}
    if len({*sizes.values()}) > 1 or not sizes["next.reward"]:
        raise ValueError(f"arrays have the lengths {sizes}, expected one length, of at least 1: cut them")
    numbers = {path: columns[path] for path in _AFTER[:3] if path in columns}
    if wide := {".".join(path): each.shape for path, each in numbers.items() if each.size > len(each)}:
        raise ValueError(f"arrays have the shapes {wide}, expected one number for each frame: take one agent's")
    ended = columns[TERMINATED].astype(bool).reshape(-1)
    cut = columns.get(TRUNCATED, np.zeros_like(ended)).astype(bool).reshape(-1)
    cut[-1] |= not ended[-1]
    columns |= {TERMINATED: ended, TRUNCATED: cut}
    following = {path for path in columns if path[0] == "next" and path[1:] in observed}
    if following and len(following) < len(observed):
        lacking = sorted(".".join(path) for path in observed if ("next", *path) not in following)
        raise ValueError(f"next_observations lack {lacking}, expected all keys of observations, or none: add them")
    if not following:
        lost = cut & ~ended
        columns[TRUNCATED] = cut | (np.append(lost[1:], False) & ~ended)  # also where the next frame is left out
        columns |= {("next", *path): np.append(columns[path][1:], columns[path][-1:], 0) for path in observed}
        columns = {path: each[~lost] for path, each in columns.items()}
        if lost.all():
            what = "arrays have only frames that end truncated episodes, whose next observations are not there"
            raise ValueError(f"{what}: add next_observations")
    return _batch(columns, 0)


def _named(arrays: Mapping[str, Any], prefix: Path = ()) -> Columns:
    """The arrays of numbers in nested mappings, by the paths of a batch; names may have slashes, as in HDF5."""
    found: Columns = {}
    for name, each in arrays.items():
        kind, *rest = *prefix, *name.split("/")
        if isinstance(each, Mapping):
            found |= _named(each, (kind, *rest))
        elif (home := _PATHS.get(_D4RL.get(kind, kind))) is not None and (
            array := in_single(each)
        ).dtype.kind in "biuf":
            if rest and home in ((), ("next",)) and rest[0] in RESERVED:
                raise ValueError(f"the observation key {rest[0]!r} collides with a key of the batch: rename it")
            path = (*home, *rest) if rest or home not in ((), ("next",)) else (*home, *OBSERVATION)
            if path in found:
                raise ValueError(f"arrays has {name!r} beside another name of the same array: leave one out")
            found[path] = array
    return found
