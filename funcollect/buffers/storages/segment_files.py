"""Rows of frames in files that are written once: each holds a range of frames, in the order of their numbers.

If the frames have stacks, a file also holds the planes of its stacks, so it can be read without the others.
"""

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

from funcollect.buffers.arrays import Ints
from funcollect.buffers.storages.plane_records import PlaneRecords
from funcollect.buffers.storages.storage import Dumped

_CHUNK = 1 << 20  # bytes written or read at once: they stay in a processor's cache for their checksum
_PARTS = 16  # a file holds at most this part of the capacity: it can be deleted only once all its frames are gone


class Segment(NamedTuple):
    """A file with the frames ``start … stop - 1``; as a list in JSON."""

    start: int
    stop: int
    crc: int  # zlib's CRC-32 of its bytes
    planes: Sequence[int] = ()  # the number of `PlaneRecords` after the rows, by pool

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


def write_segments(directory: Path, rows: Tensor, frames: range, planes: PlaneRecords | None) -> list[Segment]:
    """Write `frames` of a ring of `rows` [capacity, words]; frame n is in row ``n % capacity``."""
    size = max(len(rows) // _PARTS, 1)
    parts = [range(start, min(start + size, frames.stop)) for start in range(frames.start, frames.stop, size)]
    return [_write(directory, rows, part, planes) for part in parts]


def _write(directory: Path, rows: Tensor, frames: range, planes: PlaneRecords | None) -> Segment:
    used = [] if planes is None else planes.used(_slots(rows, frames))
    segment, crc = Segment(frames.start, frames.stop, 0, [len(numbers) for numbers in used]), 0
    with open(directory / segment.name, "wb") as file:
        for data in _blocks(rows, frames, planes, used):
            file.write(data.data)  # `tofile` would not report a full disk
            crc = zlib.crc32(data.data, crc)
    return segment._replace(crc=crc)


def _blocks(rows: Tensor, frames: range, planes: PlaneRecords | None, used: Sequence[Ints]) -> Iterator[Ints]:
    """The rows of `frames`, then the records of the planes that they use, some at a time."""
    for part in _chunks(rows, frames):
        yield rows[part].numpy(force=True)
    if planes is not None:
        for pool, numbers in enumerate(used):
            for count, start in _parts(len(numbers), planes.words[pool]):
                yield planes.read(pool, numbers[start : start + count])


def read_segments(
    directory: Path, rows: Tensor, frames: range, segments: Sequence[Any], planes: PlaneRecords | None
) -> None:
    """Read `frames` into a ring of `rows` [capacity, words]; ValueError if the files were damaged."""
    for segment in (Segment(*each) for each in segments):
        wanted = range(max(segment.start, min(frames.start, segment.stop)), segment.stop)
        records = _read(directory, rows, segment, wanted, planes)
        if planes is not None:
            planes.load(_slots(rows, wanted), records)
        for _ in records:  # without planes there are none, but the rows are read
            pass


def _read(
    directory: Path, rows: Tensor, segment: Segment, wanted: range, planes: PlaneRecords | None
) -> Iterator[tuple[int, Ints]]:
    """Read the `wanted` rows of a segment; then yield its records of planes, each with the index of its pool."""
    path, words, crc = directory / segment.name, rows.shape[1], 0
    try:
        with open(path, "rb") as file:
            for part in _chunks(rows, range(segment.start, wanted.start)):
                crc = zlib.crc32(file.read((part.stop - part.start) * words * 8), crc)
            for part in _chunks(rows, wanted):
                data = np.fromfile(file, np.int64, (part.stop - part.start) * words)
                crc = zlib.crc32(data.data, crc)
                rows[part].copy_(torch.from_numpy(data).view(-1, words))
            record_words = [] if planes is None else planes.words
            for pool, (number, words) in enumerate(zip(segment.planes, record_words, strict=True)):
                for count, _ in _parts(number, words):
                    data = np.fromfile(file, np.int64, count * words)
                    crc = zlib.crc32(data.data, crc)
                    yield pool, data.reshape(count, words)
            complete = not file.read(1)
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError or ValueError: too short for its rows
        raise ValueError(f"{path} cannot be read ({error!r}): the dump is damaged") from error
    if crc != segment.crc or not complete:
        raise ValueError(f"{path} has other bytes than were written: the dump is damaged")


def _parts(number: int, words: int) -> Iterator[tuple[int, int]]:
    """Counts and starts of parts of `number` rows, each small enough to be read or written at once."""
    size = max(_CHUNK // (words * 8), 1)
    for start in range(0, number, size):
        yield min(size, number - start), start


def _slots(rows: Tensor, frames: range) -> Ints:
    """The rows in which `frames` are."""
    return np.arange(frames.start, frames.stop) % len(rows)


def _chunks(rows: Tensor, frames: range) -> Iterator[slice]:
    """The rows of `frames` in their order, some at a time."""
    capacity, number = len(rows), frames.start
    size = max(_CHUNK // (rows.shape[1] * 8), 1)
    while number < frames.stop:
        slot = number % capacity
        count = min(size, frames.stop - number, capacity - slot)
        yield slice(slot, slot + count)
        number += count
