"""Writes and reads dumps of a buffer: frames, trajectory index, sampler and generator."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from funcollect.buffers import files
from funcollect.buffers.ring import RingMemory
from funcollect.buffers.samplers.uniform import Sampler

_FORMAT = 2


def dump(
    directory: str | os.PathLike[str], memory: RingMemory, sampler: Sampler, generator: torch.Generator | None
) -> None:
    """Write all state that determines the next samples."""

    def fill(fresh: Path) -> None:
        arrays = files.under("sampler", sampler.state())
        if memory.index is not None:
            arrays |= files.under("trajectories", memory.index.state())
        if generator is not None:
            arrays["generator"] = generator.get_state().numpy()
        frames = memory.storage.dump(fresh, len(memory))
        files.put(fresh, {**_kind(memory, sampler), "written": memory.written, "frames": frames}, arrays)

    files.write(directory, fill)


def load(
    directory: str | os.PathLike[str],
    memory: RingMemory,
    sampler: Sampler,
    generator: torch.Generator | None,
    allow_pickle: bool,
) -> None:
    """Read a dump into the parts of a buffer that was built with the same arguments.

    Raises:
        FileNotFoundError: if there is no complete dump.
        ValueError: if the dumped buffer was built with other arguments.
    """
    found = files.current(directory)
    meta, arrays = files.get(found)
    for name, mine in _kind(memory, sampler).items():
        if meta[name] != mine:
            raise ValueError(
                f"{name} of the dump is {meta[name]}, of this buffer {mine}: build the buffer like the one that was "
                "dumped before loading"
            )
    memory.storage.load(found, min(meta["written"], memory.capacity), meta["frames"], allow_pickle)
    memory.written = meta["written"]
    memory.storage.announce(memory.written - len(memory), memory.written)
    if memory.index is not None:
        memory.index.load(files.of("trajectories", arrays))
    sampler.load(files.of("sampler", arrays))
    if generator is not None and "generator" in arrays:
        generator.set_state(torch.from_numpy(np.array(arrays["generator"])))


def _kind(memory: RingMemory, sampler: Sampler) -> dict[str, Any]:
    """The properties in which the dumped buffer and the loading one must agree, as JSON."""
    linked = memory.trajectories
    keys = None if linked is None else {name: _as_json(key) for name, key in asdict(linked).items()}
    storage = "list" if type(memory.storage).__name__ == "ListStorage" else "rows"
    return {
        "format": _FORMAT,
        "storage": storage,
        "max_size": memory.capacity,
        "ndim": memory.storage.ndim,
        "compact_obs": memory.storage.compact_obs,
        "sampler": type(sampler).__name__,
        "trajectories": keys,
    }


def _as_json(key: Any) -> Any:
    return list(key) if isinstance(key, tuple) else key
