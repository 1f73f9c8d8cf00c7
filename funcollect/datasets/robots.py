"""LeRobot's datasets, version 3.0 (https://huggingface.co/docs/lerobot/lerobot-dataset-v3), in Parquet, PNG or MP4.

LeRobot's own package asks for other versions of Torch and Gymnasium, so this follows the specification.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from tensordict import TensorDict, TensorDictBase

from funcollect.arguments import check_flags, check_kind, check_positive
from funcollect.datasets import episodes
from funcollect.datasets.episodes import ACTION, DONE, INFO, OBSERVATION, REWARD, TERMINATED, TRUNCATED, Array, extra
from funcollect.datasets.hugging_face import from_arrow, to_arrow
from funcollect.envs.base import import_extra
from funcollect.files import replacing
from funcollect.plots.recording import film, unforked
from funcollect.protocols import Env
from funcollect.specs import Leaf
from funcollect.tree import Path

_CHUNK = 1_000  # files in a folder
_FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
_DATA, _EPISODES = f"data/{_FILE}.parquet", f"meta/episodes/{_FILE}.parquet"
_VIDEO = f"videos/{{video_key}}/{_FILE}.mp4"
_PICTURES = ("image", "video")
_Films = dict[str, tuple[FilePath, Any]]  # by feature, the open one: its path and its reader
_KEYS = "funcollect_keys"  # of observations in batches, by feature; other readers ignore it


def write_lerobot(
    folder: str | os.PathLike[str],
    batches: Iterable[TensorDictBase],
    *,
    env: Env,
    fps: int = 30,
    task: str = "",
    video: bool = False,
    seed: int | None = None,
    frames_per_part: int = 100_000,
) -> int:
    """Write the whole episodes of a run as a dataset of LeRobot's, version 3.0, and return their number of frames.

    Features are ``observation.state``, or for a picture (uint8 [H, W, 3]) ``observation.image``; of a dict observation
    ``observation.KEY`` and ``observation.images.KEY``; ``action``, ``next.reward``, ``next.done``, ``next.terminated``,
    ``next.truncated`` and ``next.info.KEY``. Terminal observations and seeds, which the format lacks, stand beside the
    episodes in ``meta/episodes``.

    Args:
        folder: where the dataset is to be; without files so far.
        batches: of one run in order, ``[*B, T]``.
        env: the environment, for the keys of its observations.
        fps: the frames per second of timestamps and videos.
        task: the instruction in words, the same for all episodes.
        seed: the run's, as for `write_minari`.
        frames_per_part: the frames in a part, as for `write_minari`.
        video: write pictures as MP4, without loss, by imageio (the extra ``viz``); otherwise as PNG in the table.

    Raises TypeError or ValueError for bad arguments, several players and groups of agents, FileExistsError for a folder
    with files, ImportError without pyarrow: ``pip install 'funcollect[data]'``.

    >>> import tempfile, funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with fc.SyncDataCollector(env, frames_per_batch=100, total_frames=200, seed=0) as collector:
    ...         frames = write_lerobot(folder, collector, env=env, task="balance the pole")
    ...     sum(map(len, read_lerobot(folder))) == frames
    True
    """
    check_kind("folder", folder, (str, os.PathLike), "pass a folder")
    check_positive("fps", fps, 30)
    check_kind("task", task, str, "pass a sentence")
    check_flags(video=video)
    parts = episodes.parts_of(batches, env, seed, frames_per_part, FilePath(folder))
    writer = _Writer(FilePath(folder), env, fps, task, "video" if video else "image")
    for number, part in enumerate(parts):
        writer.add(number, part)
    return int(writer.info["total_frames"])


class _Writer:
    """Writes each part as files of LeRobot's. The counts come last, since readers go by them."""

    def __init__(self, root: FilePath, env: Env, fps: int, task: str, pictures: str) -> None:
        self._root, self._env, self._task, self._pictures = root, env, task, pictures
        self._names = {leaf.path: _name(leaf, len(env.observation_leaves) == 1) for leaf in env.observation_leaves}
        if len({*self._names.values()}) < len(self._names):
            raise ValueError(f"env observes {[*self._names]}, of which features have one name: rename them")
        self.info: dict[str, Any] = {"codebase_version": "v3.0", "robot_type": None, "fps": fps, "chunks_size": _CHUNK}
        self.info |= {"total_episodes": 0, "total_frames": 0, "total_tasks": 1, "data_path": _DATA}
        self.info |= {"video_path": _VIDEO if pictures == "video" else None, "features": {}}
        self.info |= {"data_files_size_in_mb": 100, "video_files_size_in_mb": 200}
        self.info[_KEYS] = {name: path for path, name in self._names.items()}
        self._sums: dict[str, list[Any]] = {}  # by feature, see `_add`

    def add(self, number: int, part: episodes.EpisodeRows) -> None:
        """Write the part with this number."""
        leaves, lengths, ends, count, fps = part.columns, part.lengths, part.ends, int(part.ends[-1]), self.info["fps"]
        frames, earlier, features = self.info["total_frames"], self.info["total_episodes"], self.info["features"]
        columns = {name: leaves[path] for path, name in self._names.items()} | {"action": leaves[ACTION]}
        columns |= {".".join(path): leaves[path][:, 0] for path in (REWARD, DONE, TERMINATED, TRUNCATED)}
        columns |= {".".join((*INFO, *path)): each for path, each in episodes.infos_of(leaves, self._env).items()}
        step = np.arange(count) - (ends - lengths).repeat(lengths)
        columns["timestamp"], columns["frame_index"] = (step / fps).astype(np.float32), step
        columns["task_index"], columns["index"] = np.zeros_like(step), frames + np.arange(count)
        columns["episode_index"] = earlier + np.arange(len(ends)).repeat(lengths)
        for name, each in columns.items():
            features.setdefault(name, self._feature(name, each))
            _add(self._sums.setdefault(name, []), each, features[name]["dtype"] in _PICTURES)
        place = {"chunk_index": number // _CHUNK, "file_index": number % _CHUNK}
        about: dict[str, Any] = {"episode_index": earlier + np.arange(len(ends)), "length": lengths}
        about |= {"tasks": [[self._task]] * len(ends), "seed": extra("pyarrow").array(part.seeds, "int64")}
        about |= {"dataset_from_index": frames + ends - lengths, "dataset_to_index": frames + ends}
        films = [name for name in columns if features[name]["dtype"] == "video"]
        for where in ("data", "meta/episodes", *(f"videos/{name}" for name in films)):
            about |= {f"{where}/{key}": np.full(len(ends), each) for key, each in place.items()}
        for name in films:
            about[f"videos/{name}/from_timestamp"] = (ends - lengths) / fps
            about[f"videos/{name}/to_timestamp"] = ends / fps
            with film(self._root / _VIDEO.format(video_key=name, **place), fps, lossless=True) as add:
                for picture in columns.pop(name):
                    add(picture)
        for path, name in self._names.items():
            about[f"terminal/{name}"] = self._column(name, leaves["next", *path][ends - 1])
        self._table(_DATA.format(**place), {name: self._column(name, each) for name, each in columns.items()})
        self._table(_EPISODES.format(**place), about)
        self.info |= {"total_frames": frames + count, "total_episodes": earlier + len(ends)}
        self.info["splits"] = {"train": f"0:{earlier + len(ends)}"}
        if not number:
            row = extra("pandas").Index([self._task], name="task")
            extra("pandas").DataFrame({"task_index": [0]}, row).to_parquet(self._root / "meta" / "tasks.parquet")
        stats = {name: _moments(*each) for name, each in self._sums.items()}
        for name, content in (("stats", stats), ("info", self.info)):
            with replacing(self._root / "meta" / f"{name}.json") as fresh:
                fresh.write_text(json.dumps(content, indent=1))

    def _feature(self, name: str, array: Array) -> dict[str, Any]:
        """The format's description of a feature [n, ...]. Numbers have the shape [1]; arrays [1] also have a name."""
        shape = [*array.shape[1:]]
        if name.startswith("observation.image") and array.dtype == np.uint8 and shape[-1:] == [3]:
            return {"dtype": self._pictures, "shape": shape, "names": ["height", "width", "channels"]}
        return {"dtype": array.dtype.name, "shape": shape or [1], "names": ["0"] if shape == [1] else None}

    def _column(self, name: str, array: Array) -> Any:
        if self.info["features"][name]["dtype"] not in _PICTURES:
            return to_arrow(array[:, 0] if array.shape[1:] == (1,) else array)
        files = [io.BytesIO() for _ in array]
        for picture, file in zip(array, files, strict=True):
            extra("PIL.Image", "Pillow").fromarray(picture).save(file, "png")
        kind = extra("pyarrow").struct({"bytes": "binary", "path": "string"})
        return extra("pyarrow").array([{"bytes": file.getvalue(), "path": None} for file in files], kind)

    def _table(self, name: str, columns: Mapping[str, Any]) -> None:
        with replacing(self._root / name) as fresh:
            extra("pyarrow.parquet").write_table(extra("pyarrow").table(columns), fresh)


def _name(leaf: Leaf, alone: bool) -> str:
    """The name of an observation's feature."""
    picture = leaf.dtype == np.uint8 and len(leaf.shape) == 3 and leaf.shape[-1] == 3
    if alone and leaf.path == OBSERVATION:
        return "observation.image" if picture else "observation.state"
    return ".".join((*OBSERVATION, *["images"] * picture, *leaf.path))


def _path(name: str, alone: bool) -> Path:
    """The key of an observation in a dataset that does not say it."""
    _, *parts = name.split(".")
    if alone and parts in (["state"], ["image"]):
        return OBSERVATION
    return tuple(parts[1:] if parts[0] == "images" and len(parts) > 1 else parts)


def _add(sums: list[Any], array: Array, picture: bool) -> None:
    """Add an array [n, ...] to a feature's numbers of frames and rows, sums, squares, minima and maxima.

    For pictures these are of each colour, in [0, 1].
    """
    rows = (array / 255).reshape(-1, 3, 1, 1) if picture else array.reshape(len(array), *(array.shape[1:] or (1,)))
    rows = rows.astype(np.float64)
    new = [len(array), len(rows), rows.sum(0), (rows**2).sum(0), rows.min(0), rows.max(0)]
    joins = (np.add, np.add, np.add, np.add, np.minimum, np.maximum)
    sums[:] = [join(*pair) for join, *pair in zip(joins, sums, new, strict=True)] if sums else new


def _moments(count: int, rows: int, total: Array, squares: Array, low: Array, high: Array) -> dict[str, Any]:
    std = np.sqrt(np.maximum(squares / rows - (total / rows) ** 2, 0))
    moments = {"min": low, "max": high, "mean": total / rows, "std": std, "count": np.array([count])}
    return {name: each.tolist() for name, each in moments.items()}


def read_lerobot(folder: str | os.PathLike[str], *, frames_per_batch: int = 10_000) -> Iterator[TensorDict]:
    """The batches [F] of a dataset of LeRobot's, version 3.0, with the keys of a rollout, as `read_minari` has them.

    ``observation.state`` or ``observation.image`` alone is ``observation``; ``observation.KEY`` and
    ``observation.images.KEY`` are ``KEY``; ``next.KEY`` is an info. Other features, and texts, are left out. Without
    ``next.reward`` rewards are 0, without flags episodes are truncated, and the last observation is repeated as the
    terminal one unless this library has written the dataset. Videos need imageio, of the extra ``viz``.

    Raises TypeError or ValueError for bad arguments and another version of the format, FileNotFoundError without a
    dataset, ImportError without pyarrow: ``pip install 'funcollect[data]'``. `write_lerobot` has an example:

    >>> read_lerobot("nowhere")
    Traceback (most recent call last):
    FileNotFoundError: folder is 'nowhere', which lacks meta/info.json, expected a dataset of LeRobot's: check the path
    """
    check_kind("folder", folder, (str, os.PathLike), "pass a folder")
    check_positive("frames_per_batch", frames_per_batch, 10_000)
    if not (about := FilePath(folder, "meta", "info.json")).exists():
        what = f"folder is {str(folder)!r}, which lacks meta/info.json, expected a dataset of LeRobot's"
        raise FileNotFoundError(f"{what}: check the path")
    info = json.loads(about.read_text())
    if not str(version := info.get("codebase_version")).startswith("v3."):
        raise ValueError(f"folder has version {version!r} of the format, expected v3.0: convert it by LeRobot's script")
    if "action" not in info["features"]:
        what = f"folder has the features {sorted(info['features'])}, expected an action among them"
        raise ValueError(f"{what}: rename it")
    return episodes.batches_of(_episodes(FilePath(folder), info), frames_per_batch)


def _episodes(root: FilePath, info: Mapping[str, Any]) -> Iterator[episodes.Columns]:
    """Yield the episodes that the counts include; a program that was killed may have written others."""
    films: _Films = {}
    try:
        for file in sorted((root / "data").glob("*/*.parquet")):
            yield from _episodes_of(extra("pyarrow.parquet").ParquetFile(file).read(), root, info, films)
    finally:
        for _, reader in films.values():
            reader.close()


def _episodes_of(table: Any, root: FilePath, info: Mapping[str, Any], films: _Films) -> Iterator[episodes.Columns]:
    observed = {name: each["dtype"] for name, each in info["features"].items() if name.startswith("observation.")}
    numbered, begins = np.unique(table.column("episode_index").to_numpy(), return_index=True)
    stop = min(int(numbered[-1]) + 1, info["total_episodes"])
    within = [("episode_index", ">=", int(numbered[0])), ("episode_index", "<", stop)]
    about = extra("pyarrow.parquet").read_table(root / "meta" / "episodes", filters=within).sort_by("episode_index")
    numbers, terminal = _numbers(info["features"], table), _numbers(info["features"], about, "terminal/")
    for row, (begin, end) in enumerate(zip(begins[: len(about)], (*begins[1:], len(table)), strict=False)):
        rows, beside, columns = table.slice(begin, end - begin), about.slice(row, 1), {}
        for name, kind in observed.items():
            if kind == "video":
                seen = _filmed(name, beside.to_pylist()[0], root, info, films)
            else:
                seen = _from_png(rows.column(name)) if kind == "image" else numbers[name][begin:end]
            tail = terminal[name][row : row + 1] if name in terminal else seen[-1:]
            if kind in _PICTURES and f"terminal/{name}" in beside.column_names:
                tail = _from_png(beside.column(f"terminal/{name}"))
            path = tuple(info.get(_KEYS, {}).get(name, _path(name, len(observed) == 1)))
            columns[path] = np.concatenate([seen, tail])
        yield _episode(columns, {name: each[begin:end] for name, each in numbers.items()}, end - begin)


def _numbers(features: Mapping[str, Any], table: Any, prefix: str = "") -> dict[str, Array]:
    """The features of numbers, by name, from the columns with a prefix."""
    found: dict[str, Array] = {}
    for name, about in features.items():
        shape = () if about["shape"] == [1] and not about["names"] else tuple(about["shape"])
        if f"{prefix}{name}" in table.column_names and about["dtype"] not in _PICTURES:
            array = from_arrow(table.column(f"{prefix}{name}"), shape)
            found |= {} if array is None else {name: array if name == "action" else episodes.in_single(array)}
    return found


def _filmed(name: str, about: Mapping[str, Any], root: FilePath, info: Mapping[str, Any], films: _Films) -> Array:
    """An episode's pictures [n, H, W, 3], from a film that stays open in `films`."""
    place = {key: about[f"videos/{name}/{key}"] for key in ("chunk_index", "file_index")}
    path = root / info["video_path"].format(video_key=name, **place)
    if name not in films or films[name][0] != path:
        if name in films:
            films.pop(name)[1].close()
        with unforked():
            films[name] = path, import_extra("imageio.v2", "imageio[ffmpeg]", "viz").get_reader(path, "FFMPEG")
    first = round(about[f"videos/{name}/from_timestamp"] * info["fps"])
    return np.stack([films[name][1].get_data(first + step) for step in range(about["length"])])


def _from_png(column: Any) -> Array:
    files = (io.BytesIO(row["bytes"]) for row in column.to_pylist())
    return np.stack([np.asarray(extra("PIL.Image", "Pillow").open(file).convert("RGB")) for file in files])


def _episode(observed: episodes.Columns, named: Mapping[str, Array], count: int) -> episodes.Columns:
    """The columns of an episode of n frames, from observations [n + 1, ...] and features [n, ...] by name."""
    after = {(*name.split("."),): each for name, each in named.items() if name.startswith("next.")}
    done, cut = (after.pop(path, np.zeros(count, bool)) for path in (DONE, TRUNCATED))
    ended = {TERMINATED: after.pop(TERMINATED, done & ~cut), TRUNCATED: cut}
    others = {ACTION: named["action"], REWARD: after.pop(REWARD, np.zeros(count, np.float32))}
    infos = {path if path[:2] == INFO else (*INFO, *path[1:]): each for path, each in after.items()}
    return episodes.episode_columns(observed, ended, others | infos)
