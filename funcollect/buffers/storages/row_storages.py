"""Storages of frames as packed rows, in memory or in a memory-mapped file that other processes can read.

The file begins with a header, which describes the rows in JSON. Two of its words give the range of complete frames:
frames leave it before their rows are overwritten, and enter it once they are complete.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from typing_extensions import override

from funcollect.arguments import check_flags, check_kind, check_positive, checked_device
from funcollect.buffers import Bools, Ints
from funcollect.buffers.keywords import takes_foreign
from funcollect.buffers.storages.packed_rows import RowLayout, ViewedRows, form_of, gather, lead_of, leaves_of
from funcollect.buffers.storages.shared_leaves import PLANES, RowsInFile, SharedLeaves, dump_rows, load_rows, room_for
from funcollect.buffers.storages.storage import Dumped, Incoming, Storage, check_size
from funcollect.interop.memory import memory_for
from funcollect.messages import clipped
from funcollect.trajectories.split import readable
from funcollect.tree import Path as KeyPath

_NAME, _FRESH = "rows.bin", "new-rows"  # of the file, and of a directory for files until they are complete
_MAGIC = int.from_bytes(b"funcoll2", "little")
_WORD, _PAGE = 8, 4096  # bytes
_OLDEST, _WRITTEN = 8, 9  # the words of the header that change
_JSON = 16  # the word at which the JSON begins
# Of the newest batch: its form, the batch dimensions, the paths of the leaves, and the layout that it matches.
_NONE_ADMITTED: tuple[Any, tuple[int, ...], list[KeyPath], RowLayout | None] = None, (), [], None


class LazyTensorStorage(Storage):
    """Frames as packed rows in memory. The first batch fixes keys, shapes and dtypes, and memory is allocated then.

    Samples are the same with and without `compact_obs` and `frame_stack`. The parts that these store once are in memory
    that has room for one part per frame at first, and grows if frames share less.

    Args:
        max_size: the capacity in frames.
        ndim: the number of batch dimensions, time last.
        device: the device of rows and samples; by default the CPU, which `compact_obs` and `frame_stack` need.
        compact_obs: store equal observations and next observations of at least 64 bytes once.
        frame_stack: the number of stacked frames in an observation, its first dimension. Each distinct frame is then
            stored once, for observations and next observations.

    Raises TypeError or ValueError for an argument out of range; at the first batch MemoryError, if there is no memory
    for `max_size` frames like its own.

    >>> import torch
    >>> from funcollect import LazyTensorStorage, ReplayBuffer
    >>> stacks = torch.rand(101, 84, 84).unfold(0, 2, 1).movedim(-1, 1)  # [100, 2, 84, 84]
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(100, frame_stack=2))
    >>> indices = buffer.extend({"pixels": stacks})
    >>> torch.equal(buffer[:]["pixels"], stacks)
    True
    """

    @takes_foreign("storage")
    def __init__(
        self,
        max_size: int,
        *,
        ndim: int = 1,
        device: torch.device | str | None = None,
        compact_obs: bool = False,
        frame_stack: int | None = None,
    ) -> None:
        check_size(max_size)
        check_flags(compact_obs=compact_obs)
        if frame_stack is not None:
            check_positive("frame_stack", frame_stack, example=4)
        for name, given in {"compact_obs": compact_obs, "frame_stack": frame_stack}.items():
            if given and torch.device(device or "cpu").type != "cpu":
                raise ValueError(f"{name} is for storages on the host, device is {device}: leave one of them out")
        check_positive("ndim", ndim)
        self.max_size, self.ndim = int(max_size), int(ndim)
        self.device = checked_device(device) or torch.device("cpu")
        self.compact_obs, self.frame_stack = compact_obs, frame_stack
        self._held: tuple[ViewedRows, SharedLeaves] | None = None
        self._admitted = _NONE_ADMITTED

    @override
    def recognized(self, data: Any) -> Incoming | None:
        (form, lead, paths, layout), leaves = self._admitted, list[Tensor]()
        if type(data) is not TensorDict or form_of(data, leaves) != form:
            return None
        return Incoming(lead, dict(zip(paths, leaves, strict=True)), layout)

    @override
    def admit(self, data: Any) -> Incoming:
        try:
            leaves = leaves_of(data)
        except RuntimeError as error:  # of tensordict
            what = f"the batch is a lazy stack of different shapes ({clipped(str(error))})"
            raise ValueError(f"{what}, expected one shape for each key: store it in a ListStorage") from error
        lead = lead_of(data, leaves, self.ndim)
        if self._held is None:
            layout = RowLayout.of(data, self.ndim, self.compact_obs, self.frame_stack)
        else:
            (layout := self._held[0].layout).check(leaves, self.ndim)
        self._admitted = form_of(data, []) if type(data) is TensorDict else None, lead, [*leaves], layout
        return Incoming(lead, leaves, layout)

    @override
    def write(self, batch: Incoming, start: int) -> None:
        if self._held is None:
            self._held = self._allocate(batch.content)
        rows, shared = self._held
        count = math.prod(batch.lead)
        first = max(count - self.max_size, 0)  # earlier frames would be overwritten by later ones of the same batch
        leaves = shared.add(batch.leaves, self.ndim, first) if shared.pools else batch.leaves
        oldest = max(start + count - self.max_size, 0)
        self._announce(oldest, start)
        while first < count:
            slot = (start + first) % self.max_size
            fitting = min(count - first, self.max_size - slot)
            if shared.pools:
                shared.release(rows.tensor[slot : slot + fitting])
            rows.write(slot, fitting, leaves, self.ndim, first)
            first += fitting
        self._announce(oldest, start + count)
        self.end = start + count

    @override
    def overwrite(self, slots: Ints, data: Any) -> None:
        rows, shared = self._open(to_write=True)
        if shared.pools:
            raise ValueError("frames share memory (compact_obs, frame_stack) and cannot be overwritten: extend instead")
        own, given = {leaf.path: leaf.shape for leaf in rows.layout.columns}, leaves_of(data)
        try:
            leaves = {path: leaf.expand((*slots.shape, *own.get(path, leaf.shape))) for path, leaf in given.items()}
        except RuntimeError as error:
            shapes = {readable(path): list(leaf.shape) for path, leaf in given.items()}
            what = f"the data has shapes {shapes}, expected {list(slots.shape)} frames, or ones that broadcast to them"
            raise ValueError(f"{what}: give one frame for each slot, like those of the first batch") from error
        rows.layout.check(leaves, slots.ndim)
        rows.amend(slots.reshape(-1), {path: leaf.reshape(-1, *own[path]) for path, leaf in leaves.items()})

    @override
    def amend(self, slots: Ints, leaves: Mapping[KeyPath, Tensor]) -> None:
        rows, _ = self._open(to_write=True)
        rows.layout.check_some(leaves)
        rows.amend(slots, leaves)

    @override
    def numbers(self, slots: Ints) -> Mapping[KeyPath, Tensor]:
        rows, _ = self._open()
        if rows.tensor.is_cpu:
            return rows.layout.numbers(rows.tensor.numpy(), slots)
        found = {path: leaf.cpu() for path, leaf in leaves_of(self.read(slots)).items()}
        return {path: leaf.reshape(-1) for path, leaf in found.items() if leaf.numel() == len(slots)}

    def _announce(self, oldest: int, written: int) -> None:
        """Publish that only the frames ``oldest … written - 1`` are complete; called before and after each write."""

    def _allocate(self, layout: RowLayout, dumped: Dumped | None = None) -> tuple[ViewedRows, SharedLeaves]:
        """Memory for rows and planes; with the frames of a dump, which replace existing files once they are read."""
        with memory_for(lambda: f"a storage of {self.max_size:,} frames of {layout.nbytes:,} bytes"):
            if layout.planes:  # all plane numbers are 0; NumPy's zeros take memory as they are written, unlike Torch's
                rows = torch.from_numpy(np.zeros((self.max_size, layout.words), np.int64))
            else:
                rows = torch.empty(self.max_size, layout.words, dtype=torch.int64, device=self.device)
        shared = SharedLeaves(layout, max_size=self.max_size)
        if dumped is not None:
            load_rows(dumped, rows, shared)
        return ViewedRows(layout, rows), shared

    def _open(self, to_write: bool = False) -> tuple[ViewedRows, SharedLeaves]:
        if self._held is None:
            raise ValueError("the storage has no frames yet: extend it first")
        if to_write and self.scratch_dir is not None:
            what = f"other processes may read the frames in {self.scratch_dir}, so none can be overwritten"
            raise ValueError(f"{what}: extend instead, or leave scratch_dir out")
        return self._held

    @override
    def read(self, slots: Ints, mask: Bools | None = None) -> Any:
        rows, shared = self._open()
        if rows.tensor.is_cpu:
            records = gather(rows.records, slots, mask)
            if self.device.type == "cpu":
                return (shared if shared.pools else rows.layout).unpack(records)
            words = torch.from_numpy(records.view(np.int64).reshape(len(slots), -1))
            return rows.layout.unpack(words.pin_memory().to(self.device, non_blocking=True))
        # If priorities are on the device, so are the slots.
        gathered = rows.tensor.index_select(0, torch.as_tensor(slots, device=self.device))
        if mask is not None:
            gathered[torch.from_numpy(~mask).to(self.device)] = 0
        return rows.layout.unpack(gathered)

    @override
    def copy(self) -> LazyTensorStorage:
        twin = LazyTensorStorage(self.max_size, ndim=self.ndim, device=self.device)
        twin.compact_obs, twin.frame_stack, twin.end = self.compact_obs, self.frame_stack, self.end
        twin.edits, twin.linked, twin._held = self.edits, self.linked, copy.deepcopy(self._held)
        return twin

    @override
    def dump(self, directory: Path, frames: range, earlier: Dumped | None = None) -> Any:
        if self._held is None:
            return None
        rows, shared = self._held
        return {**rows.layout.to_json(), "segments": dump_rows(directory, rows.tensor, shared, frames, earlier)}

    @override
    def load(self, frames: range, dumped: Dumped, allow_pickle: bool) -> None:
        if dumped.frames is not None:
            self._held, self._admitted = self._allocate(RowLayout.from_json(dumped.frames), dumped), _NONE_ADMITTED
        self.end = len(frames)
        self._announce(frames.start, frames.stop)

    @property
    def nbytes(self) -> int:
        """The number of bytes allocated for frames."""
        return sum(part.nbytes for part in self._held or ())

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_size={self.max_size}, ndim={self.ndim}, device={self.device})"


class LazyMemmapStorage(LazyTensorStorage):
    """A `LazyTensorStorage` in a file: it can be larger than memory, and other processes can read it (`ReplayReader`).

    Args:
        max_size, ndim, compact_obs, frame_stack: see `LazyTensorStorage`. Parts stored once are in further files.
        scratch_dir: the directory of the file, which is kept. By default a temporary file without a name, which ends
            with the storage or with the process, even if that is killed.
        device: the device of samples; by default the CPU.
        existsok: overwrite the file of an earlier storage.

    Raises:
        OSError: at the first batch, if the disk has no room for `max_size` frames. Later only with `compact_obs` or
            `frame_stack`, if frames share so little that a file has to grow; no frame is lost then.
        FileExistsError: at the first batch, if the directory already has a storage.

    >>> import funcollect as fc, torch
    >>> buffer = fc.ReplayBuffer(storage=fc.LazyMemmapStorage(100), batch_size=4)
    >>> indices = buffer.extend({"x": torch.arange(10)})
    >>> buffer.sample()["x"].shape
    torch.Size([4])
    """

    @takes_foreign("storage")
    def __init__(
        self,
        max_size: int,
        *,
        scratch_dir: str | os.PathLike[str] | None = None,
        ndim: int = 1,
        device: torch.device | str | None = None,
        compact_obs: bool = False,
        frame_stack: int | None = None,
        existsok: bool = False,
    ) -> None:
        super().__init__(max_size, ndim=ndim, device=device, compact_obs=compact_obs, frame_stack=frame_stack)
        check_flags(existsok=existsok)
        check_kind("scratch_dir", scratch_dir, (str, os.PathLike, type(None)), "pass a directory, or None")
        self.scratch_dir = None if scratch_dir is None else Path(scratch_dir)
        self._existsok = existsok
        self._file: RowsFile | None = None
        self._base = 0  # added to numbers for readers, for whom they only increase, also after `empty`

    @override
    def _allocate(self, layout: RowLayout, dumped: Dumped | None = None) -> tuple[ViewedRows, SharedLeaves]:
        nbytes = layout.nbytes + sum(size * dtype.itemsize for _, size, dtype in layout.kinds())
        wanted = f"{self.max_size} frames of {nbytes} bytes, {self.max_size * nbytes} in all"
        with contextlib.ExitStack() as stack:
            directory = self.scratch_dir
            if directory is None:  # open files stay usable after they are deleted
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="funcollect-")))
            path, fresh = directory / _NAME, directory / _FRESH
            if path.exists() and dumped is None and not self._existsok:
                raise FileExistsError(f"{path} exists: give another scratch_dir, or existsok=True to write over it")
            shutil.rmtree(fresh, ignore_errors=True)  # of a process that was killed
            stack.callback(shutil.rmtree, fresh, ignore_errors=True)
            fresh.mkdir(parents=True)
            with room_for(f"{directory} has no room for {wanted}"):
                saved = layout.to_json() if layout.structure is None else {}
                names = [PLANES.format(secrets.token_hex(8)) for _ in layout.kinds()]
                shared = SharedLeaves(layout, [fresh / name for name in names], self.max_size)
                file = RowsFile(fresh, {**saved, "max_size": self.max_size, "files": names}, layout.words)
            rows = torch.from_numpy(file.rows)
            if dumped is not None:
                load_rows(dumped, rows, shared)
            former = [*directory.glob(PLANES.format("*"))]
            # An old file is replaced, not truncated: a process that has mapped it would be killed.
            for each in sorted(fresh.iterdir()):  # the rows last, whose header names the others
                each.replace(directory / each.name)
            for each in former:
                each.unlink(missing_ok=True)
        self._file, self._base = file, 0
        return ViewedRows(layout, rows), shared

    @override
    def _announce(self, oldest: int, written: int) -> None:
        if self._file is not None:
            self._file.words[_OLDEST] = self._base + oldest  # first, since frames are withdrawn before they change
            self._file.words[_WRITTEN] = self._base + written

    @override
    def empty(self) -> None:
        super().empty()
        if self._file is not None:
            self._base = -(-self._file.span[1] // self.max_size) * self.max_size
            self._announce(0, 0)


class RowsFile:
    """The memory-mapped file in the directory of a `LazyMemmapStorage`: header and rows. With a `header`, a new one."""

    def __init__(self, directory: Path, header: dict[str, Any] | None = None, words: int = 0) -> None:
        path = directory / _NAME
        if header is None and not path.exists():
            what = f"{directory} has no frames of a storage"
            raise FileNotFoundError(f"{what}: give its scratch_dir, after the first extend")
        file = RowsInFile(path, 1, reading=header is None)
        if header is not None:
            text = np.frombuffer(json.dumps(header).encode(), np.uint8)
            offset = -(-(_JSON * _WORD + len(text)) // _PAGE) * _PAGE // _WORD  # words before the first row
            file.grow(offset + header["max_size"] * words)
            file.rows[:3, 0] = _MAGIC, offset, len(text)
            file.rows[_JSON:, 0].view(np.uint8)[: len(text)] = text
        self.words = file.rows[:, 0]
        if self.words[0] != _MAGIC:
            raise ValueError(f"{path} was not written by a LazyMemmapStorage: give the scratch_dir of one")
        self.header: dict[str, Any] = json.loads(self.words[_JSON:].view(np.uint8)[: self.words[2]].tobytes())
        self.rows = self.words[self.words[1] :].reshape(self.header["max_size"], -1)  # [capacity, words] int64

    @property
    def oldest(self) -> int:
        """The number of the oldest complete frame."""
        return int(self.words[_OLDEST])

    @property
    def span(self) -> tuple[int, int]:
        """The number of the oldest complete frame, and one past the number of the newest."""
        while True:
            written, oldest = int(self.words[_WRITTEN]), self.oldest
            if written == self.words[_WRITTEN]:  # otherwise the range may have moved in between
                return oldest, written
