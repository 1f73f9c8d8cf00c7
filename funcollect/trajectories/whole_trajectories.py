"""Gathers whole trajectories from batches, in the order in which they began."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase

from funcollect.trajectories.final_observations import FinalObservations, attach, detach
from funcollect.trajectories.split import LANE, STEP, TRAJECTORY_IDS, check_batch, require
from funcollect.tree import flatten, to_batch

TrajectoryFormat = Literal["cat", "padded"]

_Table = npt.NDArray[Any]  # structured

_ORDER = ("began", "lane", "traj_id")  # `began`: the lane's step, since the first batch, of the first frame
# `row` is the frame's place in its flattened piece. `done` is 0 or 1, not bool, since Torch reads aligned columns only.
_FRAME = np.dtype([(name, np.int64) for name in (*_ORDER, "step", "done", "piece", "row")])


class _Runs:
    """The N trajectories in a table of frames: adjacent rows, at `start` [N], of `length` [N]."""

    def __init__(self, table: _Table) -> None:
        order = table[list(_ORDER)]
        begins = np.ones(len(table), bool)
        begins[1:] = order[1:] != order[:-1]
        self.start = begins.nonzero()[0]
        self.length = np.diff(self.start, append=len(table))
        first, last = table[self.start], table[self.start + self.length - 1]
        unbroken = (first["step"] == 0) & (last["step"] == self.length - 1)
        done = last["done"] > 0
        self.whole = unbroken & done
        lanes, lane = np.unique(first["lane"], return_inverse=True)
        latest = np.full(len(lanes), -1)
        np.maximum.at(latest, lane, first["began"])
        self.lost = ~unbroken | (~done & (first["began"] < latest[lane]))  # whether it can never become whole


@dataclass(frozen=True, eq=False, repr=False)
class PendingTrajectories:
    """Frames of trajectories that have not been delivered: a value, which `rollout_trajectories` takes and returns.

    Trajectories that began before the first batch, or that `reset` interrupted, are left out.

    >>> import funcollect as fc
    >>> env = fc.make_env("CartPole-v1", num_envs=2)
    >>> policy = fc.random_policy(env)
    >>> state = fc.init(env, policy, seed=0)
    >>> state, batch, pending = fc.rollout_trajectories(env, policy, state, 3)
    >>> len(batch) + len(pending) == 2 * state.steps
    True
    """

    _pieces: tuple[TensorDictBase, ...] = ()  # batches with the frames
    _table: _Table = field(default_factory=lambda: np.zeros(0, _FRAME))  # the frames in order
    _steps: Mapping[int, int] = field(default_factory=dict)  # by lane: the steps so far
    _final: FinalObservations | None = None  # of ends in compact batches

    def __len__(self) -> int:
        """The number of frames."""
        return len(self._table)

    def __repr__(self) -> str:
        return f"PendingTrajectories({len(_Runs(self._table).start)} trajectories, {len(self)} frames)"

    def add(self, batch: TensorDictBase) -> PendingTrajectories:
        """Return these frames and those of the next batch ``[*B, T]``.

        A lane that the batch lacks has left the run, and its frames are dropped. A new lane begins now.
        """
        check_batch(batch)
        batch = batch.clone(recurse=False).unlock_()
        final = detach(batch)
        counters = (require(batch, path, tail=()) for path in (LANE, TRAJECTORY_IDS, STEP))
        lane, ids, step = (counter.reshape(-1).cpu().numpy() for counter in counters)
        by_lane = np.argsort(lane, kind="stable")
        lanes, first, count = np.unique(lane[by_lane], return_index=True, return_counts=True)
        now = max(self._steps.values(), default=0)
        before = np.array([self._steps.get(each, now) for each in lanes.tolist()], np.int64)
        new = np.zeros(len(lane), _FRAME)
        new["began"][by_lane] = np.arange(len(lane)) + (before - first).repeat(count)
        new["began"] -= step
        new["lane"], new["traj_id"], new["step"] = lane, ids, step
        new["done"] = require(batch, ("next", "done"), tail=(1,)).reshape(-1).cpu().numpy()
        new["piece"], new["row"] = len(self._pieces), np.arange(len(lane))
        table = np.concatenate([self._table[np.isin(self._table["lane"], lanes)], new])
        table = table[np.lexsort([table[name] for name in ("step", *reversed(_ORDER))])]
        runs = _Runs(table)
        return replace(
            self,
            _pieces=(*self._pieces, batch),
            _table=table[~runs.lost.repeat(runs.length)],
            _steps=dict(zip(lanes.tolist(), (before + count).tolist(), strict=True)),
            _final=FinalObservations.joined([each for each in (self._final, final) if each is not None]),
        )

    def take(self, count: int) -> tuple[TensorDictBase, PendingTrajectories] | None:
        """Return the first `count` trajectories, and the rest; None if they are not whole yet.

        The frames ``[F]`` lie one trajectory after another, in the order of their first steps, then lanes.
        """
        if not self.begins_with_whole(count):
            return None
        runs = _Runs(self._table)
        taken = (np.arange(len(runs.start)) < count).repeat(runs.length)
        return self._frames(self._table[taken]), self._only(self._table[~taken])

    def begins_with_whole(self, count: int) -> bool:
        """Whether the first `count` trajectories are whole."""
        whole = _Runs(self._table).whole[:count]
        return len(whole) == count and bool(whole.all())

    @property
    def has_whole(self) -> bool:
        """Whether some trajectory is whole."""
        return bool(_Runs(self._table).whole.any())

    def take_whole(self, most: int | None = None) -> tuple[list[TensorDictBase], PendingTrajectories]:
        """Return all whole trajectories, in parts of at most `most`, even if earlier ones are not; and the rest."""
        runs = _Runs(self._table)
        number = (runs.whole.cumsum() - 1) // (most or len(self) or 1)  # of the part that a trajectory is in
        part = np.where(runs.whole, number, -1).repeat(runs.length)
        parts = [self._frames(self._table[part == each]) for each in range(part.max(initial=-1) + 1)]
        return parts, self._only(self._table[part < 0])

    def _frames(self, taken: _Table) -> TensorDictBase:
        """The frames [F] of these rows of the table."""
        places = {piece: (taken["piece"] == piece).nonzero()[0] for piece in np.unique(taken["piece"])}
        parts = [self._rows(piece, taken["row"][place]) for piece, place in places.items()]
        frames: Any = parts[0]
        if len(parts) > 1:
            frames = torch.cat(parts)[torch.from_numpy(np.concatenate([*places.values()]).argsort())]
        attach(frames.refine_names("time"), self._ends(taken))
        return frames

    def _rows(self, piece: int, rows: npt.NDArray[np.int64]) -> TensorDictBase:
        batch = self._pieces[piece]
        return batch[tuple(map(torch.from_numpy, np.unravel_index(rows, tuple(batch.batch_size))))]

    def _ends(self, table: _Table) -> FinalObservations | None:
        if self._final is None:
            return None
        ends = table[table["done"] > 0]
        ids, step = (torch.from_numpy(ends[name]).to(self._final.step.device) for name in ("traj_id", "step"))
        return self._final[self._final.find(ids, step)]

    def _only(self, table: _Table) -> PendingTrajectories:
        """These frames alone. If less than half of a batch is left, it is copied to free its memory."""
        table = table.copy()
        pieces: list[TensorDictBase] = []
        for piece in np.unique(table["piece"]):
            here = table["piece"] == piece
            rows, batch = table["row"][here], self._pieces[piece]
            if 2 * len(rows) < batch.numel():
                batch, table["row"][here] = self._rows(piece, rows), np.arange(len(rows))
            table["piece"][here] = len(pieces)
            pieces.append(batch)
        return replace(self, _pieces=tuple(pieces), _table=table, _final=self._ends(table))

    @property
    def plain(self) -> tuple[Any, ...]:
        """The value as plain data."""
        pieces = [(flatten(piece), tuple(piece.batch_size)) for piece in self._pieces]
        return pieces, self._table, dict(self._steps), self._final and self._final.plain

    @classmethod
    def from_plain(cls, data: tuple[Any, ...]) -> PendingTrajectories:
        """The inverse of `plain`."""
        pieces, table, steps, final = data
        batches = tuple(to_batch(leaves, shape) for leaves, shape in pieces)
        return cls(batches, table, steps, final and FinalObservations(*final))
