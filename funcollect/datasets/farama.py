"""Minari's datasets, by Farama's library: written in parts while a run goes on, and read as batches."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from gymnasium import spaces
from tensordict import TensorDictBase

from funcollect.arguments import check_kind, check_positive
from funcollect.buffers.replay import ReplayBuffer
from funcollect.datasets.episodes import (
    INFO,
    REWARD,
    TERMINATED,
    TRUNCATED,
    Columns,
    Part,
    batches_of,
    episode_columns,
    parts_of,
)
from funcollect.envs.base import import_extra
from funcollect.envs.host.plain_spaces import plain_actions, plain_observations
from funcollect.files import replacing
from funcollect.protocols import Env
from funcollect.specs import Leaf, Space, assemble, disassemble, observation_leaves
from funcollect.tree import flatten

_MAIN, _META = "main_data.hdf5", "metadata.json"  # Minari's names
_ID = re.compile(r"([\w-]+/)*[\w:.-]+-v\d+")
_AT_ONCE = 64  # episodes read by one call


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
    have the dtype of the batches; infos have zeros for the reset, which batches lack; one-hot actions are written as
    integers, and other outputs of the policy not at all. Once a part is full, it is a file beside the main one, which
    links it: memory does not grow with the run, and what is linked can be read even if the program is killed later.

    Args:
        path_or_id: a folder, for ``minari.MinariDataset(folder)``; or an id of Minari's, such as
            ``"cartpole/mine-v0"``, for ``minari.load_dataset(id)``. A string that can be an id is one.
        batches: of one run in order, ``[*B, T]``, also compact: a collector, a list, a generator.
        env: the environment, for its spaces and, if Gymnasium made it, its spec.
        seed: the run's, from which the seeds of its episodes follow; a collector's own is known.
        metadata: entries of Minari's, such as ``{"author": "…", "algorithm_name": "PPO"}``.
        frames_per_part: the frames in a part, which has a few more, or fewer if they take 256 MB.

    Raises TypeError or ValueError for bad arguments, several players and groups of agents, FileExistsError for a folder
    with files, ImportError without minari: ``pip install 'funcollect[data]'``.

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
    parts = parts_of(batches, env, seed, frames_per_part, folder)
    authors = {key: [each] for key, each in (metadata or {}).items() if key.startswith("author") and type(each) is str}
    writer = _Writer(folder, env, {"dataset_id": name, **(metadata or {}), **authors})
    return sum(map(writer.add, parts))


def _place(path_or_id: Any) -> tuple[FilePath, str]:
    """The folder of a dataset's data, and its id."""
    check_kind("path_or_id", path_or_id, (str, os.PathLike), "pass a folder, or an id of Minari's")
    minari = import_extra("minari", "minari", "data")
    if isinstance(path_or_id, str) and _ID.fullmatch(path_or_id):
        return FilePath(minari.storage.get_dataset_path(path_or_id), "data"), path_or_id
    name = re.sub(r"[^\w-]+", "-", FilePath(path_or_id).resolve().name).strip("-") or "dataset"
    return FilePath(path_or_id), name if re.search(r"-v\d+$", name) else f"{name}-v0"


class _Writer:
    """Writes parts by Minari, each in a folder of its own, and links their episodes in the main file."""

    def __init__(self, folder: FilePath, env: Env, about: Mapping[str, Any]) -> None:
        self._folder, self._env, self._about = folder, env, about
        self._parts, self._episodes, self._frames = 0, 0, 0
        floating = {leaf.dtype for leaf in env.observation_leaves if leaf.dtype.kind == "f"} or {np.dtype(np.float32)}
        self._space = _recorded(env.observation_space, *floating)
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, part: Part) -> int:
        """Write a part, and only then let the main file and the counts show it; return its number of frames."""
        from minari.dataset.minari_storage import MinariStorage

        h5py, name, fresh = import_extra("h5py", "h5py", "data"), f"part-{self._parts:05}", self._folder / ".part"
        fresh.mkdir()
        own = {"observation_space": self._space, "action_space": self._env.action_spec.space}
        storage = MinariStorage.new(fresh, **own, env_spec=getattr(self._env, "spec", None), jpeg_encoding=False)
        storage.update_episodes(_buffers(part, self._env))
        about = json.loads((fresh / _META).read_text())
        fresh.rename(self._folder / name)
        with replacing(self._folder / _MAIN) as copy:
            if self._parts:
                shutil.copyfile(self._folder / _MAIN, copy)
            with h5py.File(copy, "a", track_order=True) as file:
                for number in range(len(part.ends)):
                    link = h5py.ExternalLink(f"{name}/{_MAIN}", f"/episode_{number}")
                    file[f"episode_{self._episodes + number}"] = link
        self._parts, self._episodes = self._parts + 1, self._episodes + len(part.ends)
        self._frames += int(part.ends[-1])
        about |= {"minari_version": import_extra("minari", "minari", "data").__version__, **self._about}
        about |= {"total_episodes": self._episodes, "total_steps": self._frames}
        with replacing(self._folder / _META) as file:
            file.write_text(json.dumps(about))
        return int(part.ends[-1])


def _recorded(space: Space, floating: np.dtype[Any]) -> Space:
    """The space with boxes of the dtype that batches have."""
    match space:
        case spaces.Dict():
            return spaces.Dict({name: _recorded(child, floating) for name, child in space.spaces.items()})
        case spaces.Tuple():
            return spaces.Tuple([_recorded(child, floating) for child in space.spaces])
        case spaces.Box() if np.dtype(space.dtype).kind == "f" and space.dtype != floating:
            with np.errstate(over="ignore"):
                return spaces.Box(space.low.astype(floating), space.high.astype(floating), dtype=floating.type)  # type: ignore[arg-type]
    return space


def _buffers(part: Part, env: Env) -> Iterator[Any]:
    """The episodes of a part as Minari takes them."""
    from minari.data_collector.episode_buffer import EpisodeBuffer

    columns, ends, starts = part.columns, part.ends, part.ends - part.lengths
    paths = [leaf.path for leaf in env.observation_leaves]
    observed = {path: np.insert(columns[path], ends, columns["next", *path][ends - 1], axis=0) for path in paths}
    infos = {path[2:]: np.insert(each, starts, 0, axis=0) for path, each in columns.items() if path[:2] == INFO}
    flat = [columns[path][:, 0] for path in (REWARD, TERMINATED, TRUNCATED)]
    for number, (start, end, seed) in enumerate(zip(starts, ends, part.seeds, strict=True)):
        wide = slice(start + number, end + number + 1)
        rewards, terminations, truncations = (each[start:end] for each in flat)
        yield EpisodeBuffer(
            seed=seed,
            observations=assemble(env.observation_space, {path: each[wide] for path, each in observed.items()}),
            actions=columns["action",][start:end],
            rewards=rewards,
            terminations=terminations,
            truncations=truncations,
            infos={".".join(path): each[wide] for path, each in infos.items()} or None,
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
    episodes; one that is broken off is truncated. Floating arrays are float32, infos that are numbers are kept.

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
    check_kind("buffer", buffer, (ReplayBuffer, type(None)), "pass a ReplayBuffer, or leave it out")
    folder = _place(path_or_id)[0]
    folder = folder / "data" if (folder / "data" / _META).exists() else folder
    if not (folder / _META).exists():
        raise FileNotFoundError(
            f"path_or_id is {str(path_or_id)!r}, where no dataset of Minari's is: write or download it"
        )
    dataset = import_extra("minari", "minari", "data").MinariDataset(folder)
    space = plain_observations(dataset.observation_space, drop, None)
    batches = batches_of(_episodes(dataset, space, observation_leaves(space)), frames_per_batch)
    for batch in batches if buffer is not None else ():
        buffer.extend(batch)
    return batches if buffer is None else buffer


def _episodes(dataset: Any, space: Space, leaves: Sequence[Leaf]) -> Iterator[Columns]:
    count, whole = int(dataset.total_episodes), dataset.action_space
    plain = plain_actions(whole)
    for start in range(0, count, _AT_ONCE):
        for episode in dataset.storage.get_episodes(range(start, min(start + _AT_ONCE, count))):
            rewards = np.asarray(episode["rewards"]).reshape(-1)
            rows = zip(leaves, disassemble(space, episode["observations"]), strict=True)
            observed = {leaf.path: np.asarray(each, leaf.dtype).reshape(-1, *leaf.shape) for leaf, each in rows}
            acted = [np.asarray(each).reshape(len(rewards), -1) for each in disassemble(whole, episode["actions"])]
            action = np.concatenate(acted, 1).reshape(-1, *(plain.shape or ())).astype(plain.dtype)
            infos = {path: np.asarray(each) for path, each in flatten(episode.get("infos") or {}).items()}
            known = {(*INFO, *path): each[-len(rewards) :] for path, each in infos.items() if each.dtype.kind in "biuf"}
            ended = {TERMINATED: episode["terminations"], TRUNCATED: episode["truncations"]}
            yield episode_columns(observed, ended, {("action",): action, REWARD: rewards, **known})
