"""The frames of another process's storage, as they are when looked at, and their trajectories."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from funcollect.buffers.storages.packed_rows import Layout
from funcollect.buffers.storages.rows_file import RowsFile
from funcollect.buffers.trajectory_index.segments import Frames, Runs
from funcollect.buffers.trajectory_index.trajectory_index import Trails
from funcollect.buffers.trajectory_index.trajectory_keys import Trajectories

Ints = npt.NDArray[np.int64]


class Span:
    """The frames ``oldest … written - 1`` of a file that grows; what a sampler draws from.

    Args:
        file: the storage's.
        layout: of its rows.
        trajectories: how frames are linked; None for single frames.
    """

    def __init__(self, file: RowsFile, layout: Layout, trajectories: Trajectories | None) -> None:
        self.capacity = len(file.rows)
        self.oldest = self.written = 0
        self.trails = None if trajectories is None else Trails(self.capacity)
        self._file, self._layout, self._trajectories = file, layout, trajectories

    def __len__(self) -> int:
        return max(self.written - self.oldest, 0)

    def follow(self) -> None:
        """Catch up with the writer.

        Raises:
            ValueError: for frames without the ids by which slices tell trajectories apart.
        """
        if self.trails is None or self._trajectories is None:
            self.oldest, self.written = self._file.span
            return
        while True:
            oldest, written = self._file.span
            self.trails.retire(range(self.oldest, min(oldest, self.written)))
            numbers = np.arange(max(oldest, self.written), written)
            self.oldest, self.written = oldest, max(oldest, self.written)
            if not len(numbers):
                return
            frames = self._frames(numbers, self._trajectories)
            if self._file.oldest <= numbers[0]:  # else they may have been overwritten while they were read
                self.trails.extend(Runs.of(frames))
                self.written = written
                return

    def _frames(self, numbers: Ints, trajectories: Trajectories) -> Frames:
        """New frames, trajectory after trajectory."""
        told = self._layout.numbers(self._file.rows, numbers % self.capacity)
        trajectories.check_ids(told)
        frames = trajectories.frames(told, (len(numbers),), int(numbers[0]))
        order = frames.key.argsort(kind="stable")
        number, key = numbers[order], frames.key[order]
        begins = np.append(True, key[1:] != key[:-1])
        gap = np.diff(number)
        begins[2:] |= gap[1:] != gap[:-1]  # where numbers do not rise evenly
        return Frames(
            number=number,
            key=key,
            begins=begins,
            ends=None if frames.ends is None else frames.ends[order],
            step=None if frames.step is None else frames.step[order],
        )

    def place(self, drawn: Ints) -> tuple[Ints, Ints]:
        """The slots and the numbers of frames that were drawn: slots of trails, places from the oldest on else."""
        if self.trails is None:
            numbers = self.oldest + drawn
            return numbers % self.capacity, numbers
        return drawn, self.oldest + (drawn - self.oldest) % self.capacity
