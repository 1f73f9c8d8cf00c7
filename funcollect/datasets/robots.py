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
from funcollect.datasets.episodes import (
    DONE,
    INFO,
    REWARD,
    TERMINATED,
    TRUNCATED,
    Array,
    Columns,
    Part,
    batches_of,
    episode_columns,
    in_single,
    parts_of,
)
from funcollect.datasets.hugging_face import from_arrow, to_arrow
from funcollect.envs.base import import_extra
from funcollect.files import replacing
from funcollect.protocols import Env
from funcollect.tree import Path

_CHUNK = 1_000  # files in a folder
_FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
_DATA, _EPISODES, _VIDEO = (
    f"data/{_FILE}.parquet",
    f"meta/episodes/{_FILE}.parquet",
    f"videos/{{video_key}}/{_FILE}.mp4",
)
_PICTURES = ("image", "video")


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
    episodes in ``meta/episodes``. Parts and the other arguments are as for `write_minari`.

    Args:
        folder: where the dataset is to be; without files so far.
        batches: of one run in order, ``[*B, T]``.
        env: the environment, for the keys of its observations; one-hot actions are written as integers.
        fps: the frames per second of timestamps and videos.
        task: the instruction in words, the same for all episodes.
        video: write pictures as MP4, without loss, by imageio (the extra ``viz``); otherwise as PNG in the table.
        seed: the run's, from which the seeds of its episodes follow; a collector's own is known.
        frames_per_part: the frames in a part, which has a few more, or fewer if they take 256 MB.

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
    parts = parts_of(batches, env, seed, frames_per_part, FilePath(folder))
    return sum(map(_Writer(FilePath(folder), env, fps, task, "video" if video else "image").add, parts))


class _Writer:
    """Writes each part as files of LeRobot's, and the counts, by which readers go, last."""

    def __init__(self, root: FilePath, env: Env, fps: int, task: str, pictures: str) -> None:
        self._root, self._fps, self._task, self._pictures = root, fps, task, pictures
        self._parquet, self._pandas = (import_extra(name, name, "data") for name in ("pyarrow.parquet", "pandas"))
        self._arrow = import_extra("pyarrow", "pyarrow", "data")
        self._names = {leaf.path: _name(leaf.path, leaf.shape, leaf.dtype) for leaf in env.observation_leaves}
        self._frames, self._episodes, self._files = 0, 0, 0
        self._features: dict[str, dict[str, Any]] = {}
        self._sums: dict[str, list[Any]] = {}

    def add(self, part: Part) -> int:
        """Write a part; return its number of frames."""
        leaves, lengths, ends, count = part.columns, part.lengths, part.ends, int(part.ends[-1])
        columns = {name: leaves[path] for path, name in self._names.items()} | {"action": leaves["action",]}
        columns |= {".".join(path): leaves[path][:, 0] for path in (REWARD, DONE, TERMINATED, TRUNCATED)}
        columns |= {".".join(path): each for path, each in leaves.items() if path[:2] == INFO}
        step, episode = np.arange(count) - (ends - lengths).repeat(lengths), np.arange(len(ends)).repeat(lengths)
        columns |= {"timestamp": (step / self._fps).astype(np.float32), "frame_index": step}
        columns |= {"episode_index": self._episodes + episode, "index": self._frames + np.arange(count)}
        columns["task_index"] = np.zeros_like(step)
        self._features = self._features or {name: self._feature(name, each) for name, each in columns.items()}
        for name, each in columns.items():
            _add(self._sums.setdefault(name, []), each, self._kind(name) in _PICTURES)
        place = {"chunk_index": self._files // _CHUNK, "file_index": self._files % _CHUNK}
        films = [name for name in columns if self._kind(name) == "video"]
        for name in films:
            self._film(_VIDEO.format(video_key=name, **place), columns.pop(name))
        self._write(_DATA.format(**place), {name: self._column(name, each) for name, each in columns.items()})
        about: dict[str, Any] = {"episode_index": self._episodes + np.arange(len(ends)), "length": lengths}
        about |= {"tasks": [[self._task]] * len(ends), "seed": self._arrow.array(part.seeds, self._arrow.int64())}
        about |= {"dataset_from_index": self._frames + ends - lengths, "dataset_to_index": self._frames + ends}
        for where in ("data", "meta/episodes", *(f"videos/{name}" for name in films)):
            about |= {f"{where}/{key}": np.full(len(ends), number) for key, number in place.items()}
            if where.startswith("videos/"):
                times = {"from": (ends - lengths) / self._fps, "to": ends / self._fps}
                about |= {f"{where}/{key}_timestamp": each for key, each in times.items()}
        for path, name in self._names.items():
            about[f"terminal/{name}"] = self._column(name, leaves["next", *path][ends - 1])
        self._write(_EPISODES.format(**place), about)
        self._frames, self._episodes, self._files = self._frames + count, self._episodes + len(ends), self._files + 1
        self._describe()
        return count

    def _kind(self, name: str) -> str:
        return str(self._features[name]["dtype"])

    def _feature(self, name: str, array: Array) -> dict[str, Any]:
        """A feature [n, ...] as the format describes it; a number has the shape [1], an array of one also a name."""
        shape = [*array.shape[1:]]
        if name.startswith("observation.image") and array.dtype == np.uint8 and shape[-1:] == [3]:
            return {"dtype": self._pictures, "shape": shape, "names": ["height", "width", "channels"]}
        return {"dtype": array.dtype.name, "shape": shape or [1], "names": ["0"] if shape == [1] else None}

    def _column(self, name: str, array: Array) -> Any:
        if self._kind(name) not in _PICTURES:
            return to_arrow(array[:, 0] if array.shape[1:] == (1,) else array)
        rows = []
        for picture in array:
            import_extra("PIL.Image", "Pillow", "data").fromarray(picture).save(file := io.BytesIO(), "png")
            rows.append({"bytes": file.getvalue(), "path": None})
        return self._arrow.array(
            rows, self._arrow.struct({"bytes": self._arrow.binary(), "path": self._arrow.string()})
        )

    def _film(self, name: str, pictures: Array) -> None:
        from funcollect.plots.recording import film

        with film(self._root / name, self._fps, lossless=True) as add:
            for picture in pictures:
                add(picture)

    def _write(self, name: str, columns: Mapping[str, Any]) -> None:
        with replacing(self._root / name) as fresh:
            self._parquet.write_table(self._arrow.table(columns), fresh)

    def _describe(self) -> None:
        """Write the files that are about all parts."""
        if self._files == 1:
            tasks = self._pandas.DataFrame({"task_index": [0]}, index=self._pandas.Index([self._task], name="task"))
            tasks.to_parquet(self._root / "meta" / "tasks.parquet")
        info = {"codebase_version": "v3.0", "robot_type": None, "total_episodes": self._episodes, "total_tasks": 1}
        info |= {"total_frames": self._frames, "chunks_size": _CHUNK, "fps": self._fps, "data_path": _DATA}
        info |= {"data_files_size_in_mb": 100, "video_files_size_in_mb": 200, "features": self._features}
        info |= {"video_path": _VIDEO if self._pictures == "video" else None}
        info |= {"splits": {"train": f"0:{self._episodes}"}}
        stats = {name: _moments(*each) for name, each in self._sums.items()}
        for name, content in (("stats", stats), ("info", info)):
            with replacing(self._root / "meta" / f"{name}.json") as fresh:
                fresh.write_text(json.dumps(content, indent=1))


def _name(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> str:
    """The name of an observation's feature; `_path` is the inverse."""
    picture = dtype == np.uint8 and len(shape) == 3 and shape[-1] == 3
    if path == ("observation",):
        return "observation.image" if picture else "observation.state"
    return ".".join(("observation", *["images"] * picture, *path))


def _path(name: str, alone: bool) -> Path:
    parts = name.split(".")[1:]
    if alone and parts in (["state"], ["image"]):
        return ("observation",)
    return (*parts[parts[0] == "images" and len(parts) > 1 :],)


def _add(sums: list[Any], array: Array, picture: bool) -> None:
    """Add an array [n, ...] to a feature's number of frames and of rows, sums, squares, minima and maxima.

    Those of pictures are of each colour, in [0, 1].
    """
    rows = array / 255 if picture else array.astype(np.float64)
    rows = rows.reshape(-1, 3, 1, 1) if picture else rows.reshape(len(rows), *(rows.shape[1:] or (1,)))
    new = [len(array), len(rows), rows.sum(0), (rows**2).sum(0), rows.min(0), rows.max(0)]
    joins = (np.add, np.add, np.add, np.add, np.minimum, np.maximum)
    sums[:] = [join(*pair) for join, *pair in zip(joins, sums, new, strict=True)] if sums else new


def _moments(count: int, rows: int, total: Array, squares: Array, low: Array, high: Array) -> dict[str, Any]:
    mean = total / rows
    std = np.sqrt(np.maximum(squares / rows - mean**2, 0))
    made = {"min": low, "max": high, "mean": mean, "std": std, "count": np.array([count])}
    return {name: each.tolist() for name, each in made.items()}


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
    return batches_of(_Reader(FilePath(folder), info).all_episodes(), frames_per_batch)


class _Reader:
    """Reads the files of a dataset in order."""

    def __init__(self, root: FilePath, info: Mapping[str, Any]) -> None:
        self._root, self._info, self._features = root, info, info["features"]
        observed = [name for name in self._features if name.startswith("observation.")]
        self._observed = {name: _path(name, len(observed) == 1) for name in observed}
        self._parquet = import_extra("pyarrow.parquet", "pyarrow", "data")
        self._films: dict[str, tuple[FilePath, Any]] = {}  # by feature: the one that is read

    def all_episodes(self) -> Iterator[Columns]:
        """Yield the episodes in order, and close the films after that."""
        try:
            yield from self._episodes()
        finally:
            self._close(*self._features)

    def _episodes(self) -> Iterator[Columns]:
        """Yield the episodes that the counts include; a program that was killed may have written others."""
        known, end = self._info["total_episodes"], 0
        for file in sorted((self._root / "data").glob("*/*.parquet")):
            table = self._parquet.ParquetFile(file).read()
            which, begins = np.unique(table.column("episode_index").to_numpy(), return_index=True)
            within = [("episode_index", ">=", int(which[0])), ("episode_index", "<=", min(int(which[-1]), known - 1))]
            about = self._parquet.read_table(self._root / "meta" / "episodes", filters=within)
            about = about.sort_by("episode_index") if which[0] < known else about.slice(0, 0)
            columns, last = self._numbers(table, ""), self._numbers(about, "terminal/")
            for row, begin in enumerate(begins[: len(about)].tolist()):
                end = int(begins[row + 1]) if row + 1 < len(begins) else len(table)
                one = {name: each[begin:end] for name, each in columns.items()}
                frames, beside, observed = table.slice(begin, end - begin), about.slice(row, 1), {}
                for name, path in self._observed.items():
                    seen = one[name] if name in one else self._pictures(name, frames, beside)
                    tail = last[name][row : row + 1] if name in last else seen[-1:]
                    if f"terminal/{name}" in beside.column_names and name not in last:
                        tail = _from_png(beside.column(f"terminal/{name}"))
                    observed[path] = np.concatenate([seen, tail])
                yield _episode(observed, one, end - begin)

    def _numbers(self, table: Any, prefix: str) -> dict[str, Array]:
        """The features that are numbers, by name, of columns with a prefix."""
        found = {}
        for name, about in self._features.items():
            if f"{prefix}{name}" in table.column_names and about["dtype"] not in _PICTURES:
                shape = () if about["shape"] == [1] and not about["names"] else tuple(about["shape"])
                if (array := from_arrow(table.column(f"{prefix}{name}"), shape)) is not None:
                    found[name] = array if name == "action" else in_single(array)
        return found

    def _pictures(self, name: str, frames: Any, about: Any) -> Array:
        """An episode's pictures [n, H, W, 3], from its rows of the table, or its part of a film."""
        if self._features[name]["dtype"] == "image":
            return _from_png(frames.column(name))
        where = f"videos/{name}/"
        mine = {key.removeprefix(where): each[0] for key, each in about.to_pydict().items() if key.startswith(where)}
        path, first = self._root / self._info["video_path"].format(video_key=name, **mine), mine["from_timestamp"]
        if name not in self._films or self._films[name][0] != path:
            from funcollect.plots.recording import unforked

            self._close(name)
            with unforked():
                self._films[name] = path, import_extra("imageio.v2", "imageio[ffmpeg]", "viz").get_reader(path, "FFMPEG")
        start = round(first * self._info["fps"])
        return np.stack([self._films[name][1].get_data(start + step) for step in range(len(frames))])

    def _close(self, *names: str) -> None:
        for name in names:
            if name in self._films:
                self._films.pop(name)[1].close()


def _from_png(column: Any) -> Array:
    images = import_extra("PIL.Image", "Pillow", "data")
    rows = (io.BytesIO(row["bytes"]) for row in column.to_pylist())
    return np.stack([np.asarray(images.open(row).convert("RGB")) for row in rows])


def _episode(observed: Columns, named: Mapping[str, Array], count: int) -> Columns:
    """The columns of an episode of n frames, from observations [n + 1, ...] and features [n, ...] by name."""
    after = {(*name.split("."),): each for name, each in named.items() if name.startswith("next.")}
    none = np.zeros(count, bool)
    done, cut = (after.pop(path, none) for path in (DONE, TRUNCATED))
    ended = {TERMINATED: after.pop(TERMINATED, done & ~cut), TRUNCATED: cut}
    others = {("action",): named["action"], REWARD: after.pop(REWARD, np.zeros(count, np.float32))}
    infos = {path if path[:2] == INFO else (*INFO, *path[1:]): each for path, each in after.items()}
    return episode_columns(observed, ended, others | infos)
