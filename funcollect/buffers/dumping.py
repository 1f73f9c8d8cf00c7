"""Writes and reads dumps of a buffer: frames, trajectory index, sampler and generator.

Each dump is written to a new directory next to the previous one, and links that one's files of frames. It becomes
current when a small file that names it is renamed, so an interrupted dump leaves the previous one intact.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from funcollect.buffers import Arrays, Ints
from funcollect.buffers.ring import RingMemory
from funcollect.buffers.storages import LazyMemmapStorage, LazyTensorStorage
from funcollect.buffers.storages.storage import Dumped, ListStorage, Storage
from funcollect.buffers.uniform_samplers import Sampler
from funcollect.files import Uninterrupted, read_arrays, replacing, sync
from funcollect.messages import shown

_Generator = torch.Generator | None
_Other = tuple[RingMemory, Ints, Arrays]  # a ring of another capacity, its slots [*lanes, T], its sampler's state
_FORMAT = 4
_POINTER, _META, _ARRAYS = "current", "meta.json", "arrays.npz"
_FRAMES_AT_ONCE = 1 << 14  # that move to a buffer of another capacity
_FILE = re.compile(r"[\w-]+\.[a-z]+")  # the names of files in a dump


def _kind(memory: RingMemory, sampler: Sampler) -> dict[str, Any]:
    """The properties in which the dumped buffer and the loading one must agree, but for `max_size`."""
    storage, trajectories = memory.storage, memory.trajectories
    return {
        "format": _FORMAT,
        "storage": "list" if type(storage) is ListStorage else "rows",
        **{name: getattr(storage, name) for name in ("max_size", "ndim", "compact_obs", "frame_stack")},
        "sampler": type(sampler).__name__,
        "trajectories": None if trajectories is None else asdict(trajectories),
    }


def dump(root: Path, memory: RingMemory, sampler: Sampler, generator: _Generator, base: Path | None) -> None:
    """Write a dump of a buffer, and make it the current one of `root`. Intact frames of `root` or `base` are linked."""
    root.mkdir(parents=True, exist_ok=True)
    former = _current(root)
    fresh = root / f"v{int(former.name[1:]) + 1 if former else 0}"
    meta = _kind(memory, sampler) | {"name": secrets.token_hex(16), "written": memory.written}
    meta["lanes"], meta["by_lane"], meta["counted"] = (memory.lanes, memory.since), memory.by_lane, memory.counted
    states = {"sampler": sampler.state(), "trajectories": {} if memory.index is None else memory.index.state()}
    arrays = {f"{name}.{key}": each for name, state in states.items() for key, each in state.items()}
    if generator is not None:
        arrays["generator"] = generator.get_state().numpy()
    try:
        try:
            known = _earlier(memory, former, None if base is None else _current(base))
            _write(fresh, memory, meta, arrays, known)
        except (FileNotFoundError, ValueError):
            _write(fresh, memory, meta, arrays, None)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    written = [path for path in fresh.iterdir() if path.stat().st_nlink == 1]  # others link to files that are synced
    for path in (*written, fresh):
        sync(path)
    with replacing(root / _POINTER) as pointer:
        pointer.write_text(fresh.name)
    memory.dumped = meta["name"], memory.storage.edits
    for other in root.glob("v*"):
        if other != fresh and other.name[1:].isdigit():  # an earlier or an interrupted dump
            shutil.rmtree(other, ignore_errors=True)


def _earlier(memory: RingMemory, *directories: Path | None) -> Dumped | None:
    """The dump with the ring's first frames as they are now; None if none of the directories has it."""
    name, edits = memory.dumped
    for directory in directories if edits == memory.storage.edits else ():
        if directory is not None and name is not None and (directory / _META).exists():
            meta = _read_meta(directory)
            if (meta.get("format"), meta.get("name")) == (_FORMAT, name):
                return Dumped(directory, meta["frames"])
    return None


def _write(directory: Path, memory: RingMemory, meta: dict[str, Any], arrays: Arrays, earlier: Dumped | None) -> None:
    # An interrupted dump may have left links, and writing to a link would change the linked file.
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    frames = memory.storage.dump(directory, memory.numbers, earlier)
    (directory / _META).write_text(json.dumps(meta | {"frames": frames}, indent=1))
    np.savez(directory / _ARRAYS, allow_pickle=False, **arrays)


def _read_meta(directory: Path) -> dict[str, Any]:
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


def load(root: Path, memory: RingMemory, sampler: Sampler, generator: _Generator, allow_pickle: bool) -> _Other | None:
    """Read the current dump into the parts of a buffer that was built with the same arguments.

    If its capacity is another one, return what there is for `move`.
    """
    if (found := _current(root)) is None:
        raise FileNotFoundError(f"{root} has no complete dump of a buffer: pass the directory given to dumps")
    meta = _read_meta(found)
    _check_kind(root, meta, _kind(memory, sampler))
    drawn, before = sampler.state(), None if generator is None else generator.get_state()
    same = meta["max_size"] == memory.capacity
    try:
        arrays = read_arrays(found / _ARRAYS)
        if generator is not None and "generator" in arrays:
            generator.set_state(torch.from_numpy(arrays["generator"]))
        if same:
            sampler.load(_part("sampler", arrays))
        former = memory if same else RingMemory(_like(memory.storage, meta["max_size"]), memory.trajectories)
        _read(found, meta, arrays, former, allow_pickle)
        if same:
            return None
        slots = np.arange(former.numbers.start, former.written) % former.capacity
        # If batches had different lanes, `held` raises ValueError.
        return former, slots if former.storage.ndim == 1 else former.held(...), _part("sampler", arrays)
    except BaseException as error:
        sampler.load(drawn)
        if generator is not None and before is not None:
            generator.set_state(before)
        if not isinstance(error, (OSError, EOFError, LookupError, TypeError, AttributeError, RuntimeError)):
            raise
        raise ValueError(f"{found} cannot be read ({error!r}): the dump is damaged, or too large here") from error


def _check_kind(root: Path, meta: Mapping[str, Any], kind: Mapping[str, Any]) -> None:
    if (theirs := meta.get("format")) != _FORMAT:
        raise ValueError(f"{root} has format {theirs}, expected {_FORMAT}: load it with the version that wrote it")
    for name, ours in json.loads(json.dumps(kind)).items():  # JSON has lists for tuples
        if meta.get(name) != ours and name != "max_size":
            raise ValueError(f"{name} of the dump is {meta.get(name)}, of this buffer {ours}: build the buffer like it")


def _part(name: str, arrays: Arrays) -> Arrays:
    """The state of a part of a buffer, whose name precedes those of its arrays."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}


def _read(found: Path, meta: Mapping[str, Any], arrays: Arrays, memory: RingMemory, allow_pickle: bool) -> None:
    memory.written, memory.dumped = meta["written"], (meta["name"], memory.storage.edits)
    (lanes, memory.since), memory.by_lane = meta["lanes"], meta.get("by_lane", False)
    memory.counted = meta.get("counted", 0)
    memory.lanes = None if lanes is None else tuple(lanes)
    if memory.index is not None:
        memory.index.load(_part("trajectories", arrays))
    memory.storage.load(memory.numbers, Dumped(found, meta["frames"]), allow_pickle)  # last: it replaces what is there


def _like(storage: Storage, capacity: int) -> Storage:
    """An empty storage of the same kind on the host, for so many frames."""
    if isinstance(storage, ListStorage):
        return ListStorage(capacity)
    kind = LazyMemmapStorage if isinstance(storage, LazyMemmapStorage) else LazyTensorStorage
    options: dict[str, Any] = {"compact_obs": storage.compact_obs, "frame_stack": storage.frame_stack}
    return kind(capacity, ndim=storage.ndim, **options)


def move(other: _Other, memory: RingMemory, sampler: Sampler) -> None:
    """Extend an empty buffer by the newest frames that fit; if it is interrupted, it has some of them."""
    former, slots, state = other
    memory.by_lane, listed = former.by_lane, isinstance(memory.storage, ListStorage)
    width = max(math.prod(slots.shape[:-1]), 1)
    slots = slots[..., -max(memory.capacity // width, 1) :]
    steps = max(_FRAMES_AT_ONCE // width, 1)
    for start in range(0, slots.shape[-1], steps):
        some = slots[..., start : start + steps]
        frames = [former.storage.at(slot) for slot in some] if listed else former.storage.at(some)
        with Uninterrupted():
            sampler.extended(memory, memory.extend(frames))
    memory.counted = former.counted + former.written - memory.written
    source = np.moveaxis(slots, -1, 0).reshape(-1)[-len(memory) :]
    if len(source):
        sampler.load_moved(memory, state, source, np.array(memory.numbers) % memory.capacity)


def write_files(root: Path, files: Any) -> None:
    """Write a dump from the files of another by name, bytes [N] uint8; TypeError for anything else."""
    (root / "v0").mkdir()
    for name, content in (files if isinstance(files, Mapping) else {"": files}).items():
        if not isinstance(content, torch.Tensor) or content.dtype != torch.uint8 or not _FILE.fullmatch(str(name)):
            raise TypeError(f"state_dict has {shown(content)} at {name!r}, expected what state_dict returned")
        content.numpy(force=True).tofile(root / "v0" / str(name))
    (root / _POINTER).write_text("v0")
