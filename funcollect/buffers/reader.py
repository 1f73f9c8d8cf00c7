"""`ReplayReader`: samples from a buffer that another process fills."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from funcollect.arguments import check_function, check_kind, check_optional_positive
from funcollect.buffers.indices import from_generator, wanted_size
from funcollect.buffers.samplers import RandomSampler, SliceSampler
from funcollect.buffers.storages.packed_rows import RowLayout, gather
from funcollect.buffers.storages.row_storages import RowsFile
from funcollect.buffers.storages.shared_leaves import SharedLeaves
from funcollect.buffers.trajectory_index import Trajectories, TrajectoryIndex
from funcollect.messages import shown

__all__ = ["ReplayReader"]


class ReplayReader:
    """Samples from the `LazyMemmapStorage` of another process, while that process writes or after it was killed.

    A sample never contains part of a frame: if frames were overwritten while they were read, it is drawn again. Each
    sample is drawn from the frames that are stored at that moment. Slices follow trajectories by the frames' ids, which
    have to be unique across lanes. Readers disturb neither each other nor the writer.

    Args:
        directory: the storage's `scratch_dir`. After a restart, or `loads`, the writer begins a new file: then build
            a new reader.
        sampler: a `RandomSampler`, the default, or a `SliceSampler` over trajectories.
        batch_size: the number of frames in a sample.
        generator: the source of randomness; by default Torch's global generator.
        sample_transform: applied to samples.

    Raises FileNotFoundError before the writer's first `extend`; TypeError or ValueError for another sampler, and for
    frames that are not TensorDicts.

    >>> import funcollect as fc, tempfile, torch
    >>> from tensordict import TensorDict
    >>> buffer = fc.ReplayBuffer(storage=fc.LazyMemmapStorage(100, scratch_dir=tempfile.mkdtemp()))
    >>> _ = buffer.extend(TensorDict({"reward": torch.ones(10)}, [10]))
    >>> reader = fc.ReplayReader(buffer.storage.scratch_dir, batch_size=4)  # in any process
    >>> len(reader), reader.sample()["reward"]
    (10, tensor([1., 1., 1., 1.]))
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        sampler: RandomSampler | None = None,
        batch_size: int | None = None,
        generator: torch.Generator | None = None,
        sample_transform: Callable[[Any], Any] | None = None,
    ) -> None:
        check_kind("directory", directory, (str, os.PathLike), "pass the storage's scratch_dir")
        if sample_transform is not None:
            check_function("sample_transform", sample_transform, "a function of a batch", 1)
        self.sample_transform = sample_transform
        check_optional_positive("batch_size", batch_size)
        self._random_source = from_generator(generator)
        self.sampler = RandomSampler() if sampler is None else sampler
        check_readable(self.sampler)
        self.directory, self.batch_size = Path(directory), batch_size
        self._file = RowsFile(self.directory)
        if "batch" not in (header := self._file.header):
            what = "the storage holds trees, whose structure is not in its file"
            raise TypeError(f"{what}: store TensorDicts for readers")
        layout = RowLayout.from_json(header)
        shared = SharedLeaves(layout, [self.directory / name for name in header["files"]])
        self._records, self._unpack = layout.records(self._file.rows), shared.unpack
        self._view = FileView(self._file, layout, self.sampler.trajectories)

    def __len__(self) -> int:
        oldest, written = self._file.span
        return max(written - oldest, 0)

    def sample(self, batch_size: int | None = None) -> Any:
        """A random batch of frames, copied; see `ReplayBuffer.sample`."""
        size, view = wanted_size(batch_size, self.batch_size), self._view
        while True:
            view.follow()
            drawn = self.sampler.draw(view, size, self._random_source)
            distance = drawn.slots if view.index is None else (drawn.slots - view.oldest) % view.capacity
            numbers = view.oldest + distance  # of the frames; without an index, distances from the oldest were drawn
            drawn.slots = numbers % view.capacity
            batch = self._unpack(gather(self._records, drawn.slots, drawn.mask))
            if (numbers >= self._file.oldest).all():  # else some may have been overwritten while they were read
                batch = drawn.finish(batch)
                return batch if self.sample_transform is None else self.sample_transform(batch)

    def __iter__(self) -> Iterator[Any]:
        """Endless samples."""
        while True:
            yield self.sample()

    def __reduce__(self) -> Any:
        transform = self.sample_transform
        made = partial(ReplayReader, sampler=self.sampler, batch_size=self.batch_size, sample_transform=transform)
        return made, (self.directory,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.directory}, {self.sampler}, {len(self)} frames)"


def check_readable(sampler: Any) -> None:
    """Raise TypeError unless a reader can use this sampler."""
    sliced = type(sampler) is SliceSampler and sampler.over == "trajectories" and sampler.returns is None
    if not sliced and type(sampler) is not RandomSampler:
        wanted = "a RandomSampler, or a SliceSampler over trajectories without n_steps: others have to see each extend"
        raise TypeError(f"the reader's sampler is {shown(sampler)}, expected {wanted}")


class FileView:
    """The frames ``oldest … written - 1`` of a growing file, from which a sampler draws; slices with `trajectories`."""

    def __init__(self, file: RowsFile, layout: RowLayout, trajectories: Trajectories | None) -> None:
        self.capacity = len(file.rows)
        self.oldest = self.written = 0
        self.index = None if trajectories is None else TrajectoryIndex(self.capacity)
        self._file, self._layout, self._trajectories = file, layout, trajectories

    def __len__(self) -> int:
        return max(self.written - self.oldest, 0)

    def follow(self) -> None:
        """Add the frames written since the last call to the index; ValueError if they have no trajectory ids."""
        oldest, written = self._file.span
        while self.index is not None and self._trajectories is not None:
            self.index.retire(range(self.oldest, min(oldest, self.written)))
            numbers = np.arange(max(oldest, self.written), written)
            self.oldest, self.written = oldest, max(oldest, self.written)
            if not len(numbers):
                return
            columns = self._layout.numbers(self._file.rows, numbers % self.capacity)
            segments = self._trajectories.segments(columns, (len(numbers),), int(numbers[0]), by_lane=False)
            if self._file.oldest <= numbers[0]:  # else they may have been overwritten while they were read
                self.index.extend(segments)
                break
            oldest, written = self._file.span
        self.oldest, self.written = oldest, written
