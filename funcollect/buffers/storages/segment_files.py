"""Rows of frames in files that are written once: each holds a range of frames, in the order of their numbers."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcollect.buffers.storages.storage import Dumped

_CHUNK = 1 << 24  # bytes written or read at once
_PARTS = 16  # a file holds at most this part of the capacity: it can be deleted only once all its frames are gone


class Segment(NamedTuple):
    """A file with the frames ``start … stop - 1``; as a list in JSON."""

    start: int
    stop: int
    crc: int  # zlib's CRC-32 of its bytes

    @property
    def name(self) -> str:
        """The name of the file."""
        return f"rows-{self.start}.bin"


def link_segments(directory: Path, frames: range, earlier: Dumped) -> list[Segment]:
    """Link the files of an earlier dump that hold some of the `frames`."""
    found = [Segment(*each) for each in earlier.frames["segments"]]
    kept = [segment for segment in found if segment.stop > frames.start]
    for segment in kept:
        source, target = earlier.directory / segment.name, directory / segment.name
        target.unlink(missing_ok=True)  # left behind by an interrupted dump
        try:
            os.link(source, target)
        except OSError:  # another file system, or one without links
            shutil.copyfile(source, target)
    return kept


def write_segments(directory: Path, rows: Tensor, frames: range) -> list[Segment]:
    """Write `frames` of a ring of `rows` [capacity, words]; frame n is in row ``n % capacity``."""
    size = max(len(rows) // _PARTS, 1)
    parts = [range(start, min(start + size, frames.stop)) for start in range(frames.start, frames.stop, size)]
    return [_write(directory, rows, part) for part in parts]


def _write(directory: Path, rows: Tensor, frames: range) -> Segment:
    segment, crc = Segment(frames.start, frames.stop, 0), 0
    with open(directory / segment.name, "wb") as file:
        for part in _chunks(rows, frames):
            data = rows[part].numpy(force=True).data
            file.write(data)  # `tofile` would not report a full disk
            crc = zlib.crc32(data, crc)
    return segment._replace(crc=crc)


def read_segments(directory: Path, rows: Tensor, frames: range, segments: Sequence[Any]) -> None:
    """Read `frames` into a ring of `rows` [capacity, words]; ValueError if the files were damaged."""
    words = rows.shape[1]
    for segment in (Segment(*each) for each in segments):
        path, crc = directory / segment.name, 0
        skipped = range(segment.start, max(segment.start, min(frames.start, segment.stop)))
        wanted = range(skipped.stop, segment.stop)
        try:
            with open(path, "rb") as file:
                for part in _chunks(rows, skipped):
                    crc = zlib.crc32(file.read((part.stop - part.start) * words * 8), crc)
                for part in _chunks(rows, wanted):
                    data = np.fromfile(file, np.int64, (part.stop - part.start) * words)
                    crc = zlib.crc32(data.data, crc)
                    rows[part].copy_(torch.from_numpy(data).view(-1, words))
                complete = not file.read(1)
        except (OSError, RuntimeError) as error:  # RuntimeError: too short for its rows
            raise ValueError(f"{path} cannot be read ({error!r}): the dump is damaged") from error
        if crc != segment.crc or not complete:
            raise ValueError(f"{path} has other bytes than were written: the dump is damaged")


def _chunks(rows: Tensor, frames: range) -> Iterator[slice]:
    """The rows of `frames` in their order, some at a time."""
    capacity, number = len(rows), frames.start
    size = max(_CHUNK // (rows.shape[1] * 8), 1)
    while number < frames.stop:
        slot = number % capacity
        count = min(size, frames.stop - number, capacity - slot)
        yield slice(slot, slot + count)
        number += count
