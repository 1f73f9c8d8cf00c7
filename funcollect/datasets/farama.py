"""Minari's datasets: writes them in parts while a run goes on, and reads them as batches."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from operator import itemgetter
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import optree
from tensordict import TensorDictBase

from funcollect.arguments import check_keys, check_kind, check_positive
from funcollect.buffers.replay import ReplayBuffer
from funcollect.datasets import episodes
from funcollect.datasets.episodes import ACTION, INFO, REWARD, TERMINATED, TRUNCATED, Columns, extra
from funcollect.envs.gymnasium_envs.lanes import own_spaces
from funcollect.envs.plain_spaces import STRUCTURED, batch_structure, in_structure, plain_actions, plain_observations
from funcollect.files import replacing
from funcollect.messages import shown
from funcollect.protocols import Env
from funcollect.specs import Leaf, Space, assemble, disassemble, observation_leaves
from funcollect.tree import flatten

_MAIN, _META = "main_data.hdf5", "metadata.json"  # Minari's names
_ID = re.compile(r"([\w-][\w/-]*[\w-]/)?[\w-]+-v\d+")
_AT_ONCE = 64  # episodes read by one call
_OWN = {"action_space", "data_format", "dataset_id", "dataset_size", "env_spec", "minari_version", "observation_space"}
_OWN |= {"total_episodes", "total_steps"}  # entries of the metadata
_ORDER = "funcollect_order"  # an entry: the places of an action's parts in batches, since Minari sorts keys


def write_minari(
    path_or_id: str | os.PathLike[str],
    batches: Iterable[TensorDictBase],
    *,
    env: Env,
    seed: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    frames_per_part: int = 100_000,
) -> int:
    """Write the whole episodes of a run as a dataset of Minari's, and return their number of frames.

    Episodes are joined across batches; those that have not ended are left out. Observations, terminal ones included,
    get the dtypes of the space; infos have zeros for the reset, which batches lack; one-hot actions become integers,
    those of a Dict or a Tuple have its parts, and other outputs of the policy are left out. Once a part is full, it
    becomes a file, which the main file links: memory does not grow with the run, and linked parts can be read even if
    the program is killed later. If `batches` raises, the episodes that have ended by then are written first.

    Args:
        path_or_id: a folder, for ``minari.MinariDataset(folder)``; or an id of Minari's, such as
            ``"cartpole/mine-v0"``, for ``minari.load_dataset(id)``. A string that can be an id is one.
        batches: of one run in order, ``[*B, T]``, also compact: a collector, a list, a generator.
        env: the environment, for its spaces and, if Gymnasium made it, its spec.
        seed: the run's, from which the seeds of its episodes follow; a collector's own is known. Not for batches that
            were read from a dataset, which do not say whose they are.
        metadata: entries of Minari's, such as ``{"author": "…", "algorithm_name": "PPO"}``.
        frames_per_part: the frames in a part, which has a few more, or fewer if they take 256 MB.

    Raises TypeError or ValueError for bad arguments, batches of another environment than `env`, several players and
    groups of agents, FileExistsError for a folder with files, ImportError without minari (the extra ``data``).

    >>> import tempfile, funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with fc.SyncDataCollector(env, frames_per_batch=100, total_frames=200, seed=0) as collector:
    ...         frames = write_minari(f"{folder}/dataset", collector, env=env)
    ...     sum(map(len, read_minari(f"{folder}/dataset"))) == frames
    True
    """
    check_kind("metadata", metadata, (Mapping, type(None)), "pass a dict of entries, or leave it out")
    folder, name = _place(path_or_id)
    _check_metadata(metadata or {})
    parts = episodes.parts_of(batches, env, seed, frames_per_part, folder)
    about = {"dataset_id": name, "minari_version": extra("minari").__version__, **(metadata or {})}
    about |= {key: [each] for key, each in about.items() if key.startswith("author") and isinstance(each, str)}
    about |= {"total_episodes": 0, "total_steps": 0}
    if isinstance(acting := _acting(env), STRUCTURED):
        about[_ORDER] = in_structure(acting, iter(range(len(disassemble(acting, acting)))))
    if slashed := [leaf.name for leaf in env.observation_leaves if "/" in leaf.name]:
        raise ValueError(f"env observes {slashed}, expected keys without slashes, which HDF5 nests: rename them")
    for number, part in enumerate(parts):
        _write(folder, f"part-{number:05}", part, env, about)
    return int(about["total_steps"])


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    """Raise ValueError for entries that Minari writes itself, TypeError for those that JSON does not hold."""
    if own := sorted(metadata.keys() & _OWN):
        raise ValueError(f"metadata has {own}, which the dataset determines, expected other entries: leave these out")
    try:
        json.dumps({**metadata})
    except (TypeError, ValueError) as error:
        what = f"metadata is {shown(metadata)}, expected what JSON holds ({error})"
        raise TypeError(f"{what}: pass texts and numbers") from error


def _acting(env: Env) -> Space:
    """The space of the actions that are written: the environment's own Dict or Tuple, or that of batches."""
    own = own_spaces(env)[1]
    return own if isinstance(own, STRUCTURED) else env.action_spec.space


def _place(path_or_id: Any) -> tuple[FilePath, str]:
    """The folder of a dataset's data, and its id."""
    check_kind("path_or_id", path_or_id, (str, os.PathLike), "pass a folder, or an id of Minari's")
    if isinstance(path_or_id, str) and _ID.fullmatch(path_or_id):
        return FilePath(extra("minari").storage.get_dataset_path(path_or_id), "data"), path_or_id
    folder = FilePath(path_or_id).resolve()  # Minari joins a relative path twice
    name = re.sub(r"[^\w-]+", "-", folder.name).strip("-") or "dataset"
    return folder, name if re.search(r"-v\d+$", name) else f"{name}-v0"


def _write(folder: FilePath, name: str, part: episodes.EpisodeRows, env: Env, about: dict[str, Any]) -> None:
    """Let Minari write a part to a folder of its own, and only then link it in the main file and count it."""
    storages, h5py, fresh = extra("minari.dataset.minari_storage"), extra("h5py"), folder / ".part"
    fresh.mkdir(parents=True)
    acting = _acting(env)
    spaces = (env.observation_space, acting, getattr(env, "spec", None))
    storages.MinariStorage.new(fresh, *spaces, jpeg_encoding=False).update_episodes(_buffers(part, env, acting))
    written = json.loads((fresh / _META).read_text())
    with h5py.File(fresh / _MAIN, "a") as file:
        for number in range(len(part.ends)):
            file[f"episode_{number}"].attrs["id"] = about["total_episodes"] + number
    fresh.rename(folder / name)
    with replacing(folder / _MAIN) as copy:
        if (folder / _MAIN).exists():
            shutil.copyfile(folder / _MAIN, copy)
        with h5py.File(copy, "a", track_order=True) as file:
            for number in range(len(part.ends)):
                link = h5py.ExternalLink(f"{name}/{_MAIN}", f"/episode_{number}")
                file[f"episode_{about['total_episodes'] + number}"] = link
    about["total_episodes"] += len(part.ends)
    about["total_steps"] += int(part.ends[-1])
    about["dataset_size"] = about.get("dataset_size", 0) + written["dataset_size"]
    with replacing(folder / _META) as copy:
        copy.write_text(json.dumps(written | about))


def _buffers(part: episodes.EpisodeRows, env: Env, acting: Space) -> Iterator[Any]:
    """Yield the episodes of a part as buffers of Minari's, with observations and infos [n + 1, ...]."""
    columns, ends, starts, space = part.columns, part.ends, part.ends - part.lengths, env.observation_space
    observed: Columns = {}
    for leaf, child in zip(env.observation_leaves, disassemble(space, space), strict=True):
        rows = columns[leaf.path].astype(child.dtype)
        observed[leaf.path] = np.insert(rows, ends, columns["next", *leaf.path][ends - 1], axis=0)
    found = {".".join(path): each for path, each in episodes.infos_of(columns, env).items()}
    infos = {name: np.insert(each, starts, 0, axis=0) for name, each in found.items()}
    numbers = {"rewards": REWARD, "terminations": TERMINATED, "truncations": TRUNCATED}
    flat = {name: columns[path][:, 0] for name, path in numbers.items()}
    actions: Any = columns[ACTION]
    if isinstance(acting, STRUCTURED):
        actions = batch_structure(acting, np.asarray)(actions)
    for number, (start, end, seed) in enumerate(zip(starts, ends, part.seeds, strict=True)):
        wide = slice(start + number, end + number + 1)
        yield extra("minari.data_collector.episode_buffer").EpisodeBuffer(
            seed=seed,
            observations=assemble(space, {path: each[wide] for path, each in observed.items()}),
            infos={name: each[wide] for name, each in infos.items()} or None,
            actions=optree.tree_map(itemgetter(slice(start, end)), actions),
            **{name: each[start:end] for name, each in flat.items()},
        )


def read_minari(
    path_or_id: str | os.PathLike[str],
    *,
    frames_per_batch: int = 10_000,
    drop: Sequence[str] = (),
    buffer: ReplayBuffer | None = None,
) -> Any:
    """The batches [F] of a dataset of Minari's, with the keys of a rollout: an iterator, or the `buffer` with them.

    A batch has whole episodes, one after another: `frames_per_batch` frames, or a few more. Trajectory ids number the
    episodes; one that is broken off is truncated. Floating observations are float32, infos that are numbers are kept.

    Args:
        path_or_id: a folder, or the id of a dataset that has been downloaded or written here.
        frames_per_batch: the frames in a batch.
        drop: keys of a dict observation to leave out, such as texts; dots lead into nested ones.
        buffer: a `ReplayBuffer` of any capacity, which is extended by all batches and returned.

    Raises TypeError or ValueError for bad arguments, spaces without arrays, and infos that some episodes lack,
    FileNotFoundError without a dataset, ImportError without minari: ``pip install 'funcollect[data]'``.

    >>> read_minari("nobody/nothing-v0")
    Traceback (most recent call last):
    FileNotFoundError: path_or_id is 'nobody/nothing-v0', where no dataset of Minari's is: write or download it
    """
    check_positive("frames_per_batch", frames_per_batch, 10_000)
    check_keys("drop", drop, "mission")
    check_kind("buffer", buffer, (ReplayBuffer, type(None)), "pass a ReplayBuffer, or leave it out")
    folder = _place(path_or_id)[0]
    folder = folder / "data" if (folder / "data" / _META).exists() else folder
    if not (folder / _META).exists():
        what = f"path_or_id is {str(path_or_id)!r}, where no dataset of Minari's is"
        raise FileNotFoundError(f"{what}: write or download it")
    dataset = extra("minari").MinariDataset(folder)
    space = plain_observations(dataset.observation_space, drop, None)
    batches = episodes.batches_of(_episodes(dataset, space, observation_leaves(space)), frames_per_batch)
    if buffer is None:
        return batches
    for batch in batches:
        buffer.extend(batch)
    return buffer


def _episodes(dataset: Any, space: Space, leaves: Sequence[Leaf]) -> Iterator[Columns]:
    count, acting, plain = dataset.total_episodes, dataset.action_space, plain_actions(dataset.action_space)
    places = dataset.storage.metadata.get(_ORDER, in_structure(acting, repeat(0)))
    order = np.argsort(disassemble(acting, places), kind="stable")
    for start in range(0, count, _AT_ONCE):
        for episode in dataset.storage.get_episodes(range(start, min(start + _AT_ONCE, count))):
            rewards = episode["rewards"].reshape(-1)
            rows = zip(leaves, disassemble(space, episode["observations"]), strict=True)
            observed = {leaf.path: np.asarray(each, leaf.dtype).reshape(-1, *leaf.shape) for leaf, each in rows}
            acted = [np.asarray(each).reshape(len(rewards), -1) for each in disassemble(acting, episode["actions"])]
            action = np.concatenate([acted[place] for place in order], 1).astype(plain.dtype)
            action = action.reshape(-1, *(plain.shape or ()))
            named = {".".join(path): each for path, each in flatten(episode["infos"] or {}).items()}
            infos = {(*name.split("."),): np.asarray(each) for name, each in named.items()}
            known = {(*INFO, *path): each[-len(rewards) :] for path, each in infos.items() if each.dtype.kind in "biuf"}
            ended = {TERMINATED: episode["terminations"], TRUNCATED: episode["truncations"]}
            yield episodes.episode_columns(observed, ended, {ACTION: action, REWARD: rewards, **known})
