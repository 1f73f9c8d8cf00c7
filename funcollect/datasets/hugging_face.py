"""Writes and reads tables of Hugging Face's library ``datasets``, a row for each frame; and columns of Arrow."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from funcollect.arguments import check_kind, check_positive
from funcollect.datasets.episodes import DONE, REWARD, TERMINATED, TRUNCATED, Array, extra, parts_of
from funcollect.tree import to_batch

_NUMBERS = {REWARD, DONE, TERMINATED, TRUNCATED, DONE[1:], TERMINATED[1:], TRUNCATED[1:]}


def to_hf(
    batches: Iterable[TensorDictBase], folder: str | os.PathLike[str] | None = None, *, frames_per_part: int = 100_000
) -> Any:
    """The whole episodes of a run as a ``datasets.Dataset``: a row for each frame, a column for each leaf of a batch.

    Columns have the names of leaves, joined by dots: ``observation``, ``next.reward``, ``action_log_prob``. Nothing is
    lost: `from_hf` returns the same frames, though a dot within a key leads into a nested one there. Rewards of one
    player and flags are numbers, other leaves nested lists of fixed sizes. Episodes are joined across batches; those
    that have not ended are left out. With a `folder`, an empty one, a part of `frames_per_part` frames, or a few more,
    is saved there once it is full, and the dataset shows these files; otherwise it is in memory.

    Raises TypeError or ValueError for bad arguments and without any whole episode, FileExistsError for a folder with
    files, ImportError without ``datasets``: ``pip install 'funcollect[data]'``.

    >>> import funcollect as fc
    >>> with fc.SyncDataCollector("CartPole-v1", frames_per_batch=100, total_frames=200, seed=0) as collector:
    ...     dataset = to_hf(collector)
    >>> len(dataset[0]["observation"]), next(from_hf(dataset))["next", "reward"].shape[1:]
    (4, torch.Size([1]))
    """
    check_kind("folder", folder, (str, os.PathLike, type(None)), "pass a folder, or leave it out")
    root, library, tables = None if folder is None else FilePath(folder), extra("datasets"), []
    for number, part in enumerate(parts_of(batches, ..., None, frames_per_part, root)):
        single = {path for path in _NUMBERS & part.columns.keys() if part.columns[path].shape[1:] == (1,)}
        flat = {path: each[:, 0] if path in single else each for path, each in part.columns.items()}
        rows = extra("pyarrow").table({".".join(path): to_arrow(each) for path, each in flat.items()})
        tables.append(library.Dataset(rows))
        if root is not None:
            tables.pop().save_to_disk(root / ".part")
            tables.append(library.load_from_disk((root / ".part").rename(root / f"part-{number:05}")))
    return library.concatenate_datasets(tables)


def from_hf(dataset: Any, *, frames_per_batch: int = 10_000) -> Iterator[TensorDict]:
    """Batches [F] of a ``datasets.Dataset`` with columns as `to_hf` writes them, or of the folder with such parts.

    They have `frames_per_batch` frames, the last one fewer, and may end within episodes, as those of a rollout. Other
    columns than numbers and lists of fixed sizes are left out. Raises TypeError for something else, ValueError without
    the columns of a batch, FileNotFoundError without parts, ImportError without ``datasets``. `to_hf` has an example:

    >>> from_hf("nowhere")
    Traceback (most recent call last):
    FileNotFoundError: dataset is 'nowhere', where no parts are, expected a folder of to_hf: check the path
    """
    check_positive("frames_per_batch", frames_per_batch, 10_000)
    library = extra("datasets")
    if isinstance(dataset, (str, os.PathLike)):
        if not (parts := sorted(FilePath(dataset).glob("part-*"))):
            what = f"dataset is {str(dataset)!r}, where no parts are, expected a folder of to_hf"
            raise FileNotFoundError(f"{what}: check the path")
        dataset = library.concatenate_datasets([library.load_from_disk(part) for part in parts])
    check_kind("dataset", dataset, library.Dataset, "pass a datasets.Dataset, or a folder of to_hf")
    names = {".".join(path) for path in (DONE, TERMINATED, TRUNCATED)}  # the others may be of groups of agents
    if missing := sorted(names - {*dataset.column_names}):
        raise ValueError(f"dataset lacks the columns {missing}, it has {dataset.column_names}: rename them")
    rows = dataset.with_format("arrow")
    return (_batch(rows[start : start + frames_per_batch]) for start in range(0, len(dataset), frames_per_batch))


def _batch(table: Any) -> TensorDict:
    arrays = {(*name.split("."),): from_arrow(table.column(name)) for name in table.column_names}
    leaves = {path: each for path, each in arrays.items() if each is not None}
    leaves |= {path: leaves[path][:, None] for path in _NUMBERS & leaves.keys() if leaves[path].ndim == 1}
    return to_batch({path: torch.from_numpy(each) for path, each in leaves.items()}, (table.num_rows,))


def to_arrow(array: Array) -> Any:
    """An array [n, ...] as an Arrow array of numbers, or of nested lists of fixed sizes."""
    column = extra("pyarrow").array(array.reshape(-1))
    for size in reversed(array.shape[1:]):
        column = extra("pyarrow").FixedSizeListArray.from_arrays(column, size)
    return column


def from_arrow(column: Any, shape: tuple[int, ...] | None = None) -> Array | None:
    """An array [n, *shape] from a chunked column of numbers or nested lists; None for other columns.

    Without a `shape`, lists have the sizes of their types.
    """
    types, sizes = extra("pyarrow").types, []
    values = column.cast(column.type.storage_type) if hasattr(column.type, "storage_type") else column
    while types.is_fixed_size_list(values.type) or (shape is not None and types.is_list(values.type)):
        sizes.append(getattr(values.type, "list_size", 0))
        values = extra("pyarrow.compute").list_flatten(values)
    if not types.is_boolean(values.type) and not types.is_integer(values.type) and not types.is_floating(values.type):
        return None
    array: Array = values.to_numpy().reshape(len(column), *(sizes if shape is None else shape))
    return np.require(array, requirements="W")
