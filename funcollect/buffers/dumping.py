"""Writes and reads dumps of a buffer: frames, trajectory index, sampler and generator.

Each dump is written to a new directory, next to the previous one. It becomes current when a small file that
names it is renamed, so an interrupted dump leaves the previous one intact. The files contain no code.

Rows of frames are written in the order of the frames, in files that are never changed. A dump links those of an earlier
one, so that it writes only the frames that are new.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from funcollect.buffers.ring import RingMemory
from funcollect.buffers.samplers.uniform import Sampler
from funcollect.buffers.storages.storage import Dumped
from funcollect.buffers.trajectory_index.trajectory_index import TrajectoryIndex
from funcollect.files import read_arrays, sync
from funcollect.messages import shown

_FORMAT = 3
_POINTER, _META, _ARRAYS = "current", "meta.json", "arrays.npz"


def dump(
    root: Path, memory: RingMemory, sampler: Sampler, generator: torch.Generator | None, base: Path | None = None
) -> None:
    """Write all state that determines the next samples, and make this dump the current one of the directory `root`.

    Frames that the dump in `root`, or the one in `base`, has already are linked. If that dump is damaged, or a file of
    it is gone, all frames are written.
    """
    root.mkdir(parents=True, exist_ok=True)
    former = _current(root)
    fresh = root / f"v{int(former.name[1:]) + 1 if former else 0}"
    name = secrets.token_hex(16)
    try:
        try:
            known = _earlier(memory, (former, None if base is None else _current(base)))
            _write_files(_emptied(fresh), memory, sampler, generator, name, known)
        except (FileNotFoundError, ValueError):
            _write_files(_emptied(fresh), memory, sampler, generator, name, None)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    written = [path for path in fresh.iterdir() if path.stat().st_nlink == 1]  # others are links to synced files
    for path in (*written, fresh):
        sync(path)
    pointer = root / f"{_POINTER}.new"
    pointer.write_text(fresh.name)
    sync(pointer)
    pointer.replace(root / _POINTER)
    sync(root)
    memory.dumped = name
    for other in root.glob("v*"):
        if other != fresh and other.name[1:].isdigit():  # an earlier dump, or what an interrupted one left behind
            shutil.rmtree(other, ignore_errors=True)


def _emptied(directory: Path) -> Path:
    """The directory, emptied. An interrupted dump may have left links, and writing to one changes the linked file."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    return directory


def _earlier(memory: RingMemory, directories: Iterable[Path | None]) -> Dumped | None:
    """The dump that holds the ring's first frames: its last one, or the one that it was loaded from."""
    for directory in directories:
        if directory is None or memory.dumped is None or not (directory / _META).exists():
            continue
        meta = _read_meta(directory)
        if (meta.get("format"), meta.get("name")) == (_FORMAT, memory.dumped):
            return Dumped(directory, meta["frames"])
    return None


def _write_files(
    directory: Path,
    memory: RingMemory,
    sampler: Sampler,
    generator: torch.Generator | None,
    name: str,
    earlier: Dumped | None,
) -> None:
    """Write the files of one dump: frames, a JSON description, and the arrays of sampler, index and generator."""
    arrays = {
        f"{name}.{key}": array for name, part in _parts(memory, sampler).items() for key, array in part.state().items()
    }
    if generator is not None:
        arrays["generator"] = generator.get_state().numpy()
    frames = memory.storage.dump(directory, range(memory.written - len(memory), memory.written), earlier)
    meta = {
        **_kind(memory, sampler),
        "name": name,
        "written": memory.written,
        "lanes": [memory.lanes, memory.since],
        "frames": frames,
    }
    (directory / _META).write_text(json.dumps(meta, indent=1))
    np.savez(directory / _ARRAYS, allow_pickle=False, **arrays)


def _read_meta(directory: Path) -> dict[str, Any]:
    """The JSON description of a dump; ValueError if it is damaged."""
    try:
        return dict(json.loads((directory / _META).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{directory / _META} cannot be read ({error!r}): the dump is damaged") from error


def _current(root: Path) -> Path | None:
    """The directory of the current dump; None before the first complete one."""
    pointer = root / _POINTER
    if not pointer.exists():
        return None
    name = pointer.read_bytes().decode(errors="replace")
    if not re.fullmatch(r"v\d+", name):
        raise ValueError(f"{pointer} holds {shown(name)}, expected the name of a directory: the dump is damaged")
    return root / name


def load(
    root: Path, memory: RingMemory, sampler: Sampler, generator: torch.Generator | None, allow_pickle: bool
) -> None:
    """Read the current dump into the parts of a buffer that was built with the same arguments."""
    if (found := _current(root)) is None:
        raise FileNotFoundError(f"{root} has no complete dump of a buffer: pass the directory given to dumps")
    meta = _read_meta(found)
    if meta.get("format") != _FORMAT:
        raise ValueError(
            f"{root} has format {meta.get('format')}, this version of funcollect reads format {_FORMAT}: load it with "
            "the version that wrote it"
        )
    for name, mine in json.loads(json.dumps(_kind(memory, sampler))).items():  # JSON has lists for tuples
        if meta.get(name) != mine:
            raise ValueError(
                f"{name} of the dump is {meta.get(name)}, of this buffer {mine}: build the buffer like the one that "
                "was dumped before loading"
            )
    try:
        memory.written, memory.dumped = meta["written"], meta["name"]
        lanes, memory.since = meta["lanes"]
        memory.lanes = None if lanes is None else tuple(lanes)
        arrays = read_arrays(found / _ARRAYS)
        frames = range(memory.written - len(memory), memory.written)
        memory.storage.load(frames, Dumped(found, meta["frames"]), allow_pickle)
        memory.storage.announce(frames.start, frames.stop)
        for name, part in _parts(memory, sampler).items():
            prefix = f"{name}."
            part.load({key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)})
        if generator is not None and "generator" in arrays:
            generator.set_state(torch.from_numpy(arrays["generator"]))
    except (OSError, EOFError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"{found} cannot be read ({error!r}): the dump is damaged, or too large for this machine"
        ) from error


def _parts(memory: RingMemory, sampler: Sampler) -> dict[str, Sampler | TrajectoryIndex]:
    """The parts of a buffer whose state is a dict of arrays; the name of a part is the prefix of its arrays."""
    return {"sampler": sampler} if memory.index is None else {"sampler": sampler, "trajectories": memory.index}


def _kind(memory: RingMemory, sampler: Sampler) -> dict[str, Any]:
    """The properties in which the dumped buffer and the loading one must agree."""
    return {
        "format": _FORMAT,
        "storage": "list" if type(memory.storage).__name__ == "ListStorage" else "rows",
        "max_size": memory.capacity,
        "ndim": memory.storage.ndim,
        "compact_obs": memory.storage.compact_obs,
        "frame_stack": memory.storage.frame_stack,
        "sampler": type(sampler).__name__,
        "trajectories": None if memory.trajectories is None else asdict(memory.trajectories),
    }
