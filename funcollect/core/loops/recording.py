"""What the loop over simulators records: the columns of a rollout, written step by step."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from torch import Tensor

from funcollect.core.batch import OUTCOME_KEYS
from funcollect.core.loops.delivery import TrajectoryLimit
from funcollect.envs.host.host_env import NOT_RECORDED, bad_info, bad_outcome
from funcollect.protocols import Column, Outcome
from funcollect.trajectories.final_observations import FinalObservations
from funcollect.trajectories.split import STEP, TRAJECTORY_IDS
from funcollect.tree import Path

Array = npt.NDArray[Any]


class Recording:
    """The columns of a rollout, written step by step.

    Attributes:
        roots, nexts: pairs of a column [T, P, ...] and the row [P, ...] that goes into it, before and after each step.
        reward: [T, P] float32.
        info: the values of each info key, [P, ...] for each step.
        final: if there are no `nexts`, those that no root has: the step, the lanes, and a row of each for each path.
    """

    def __init__(self, rows: Mapping[Path, Array], columns: Mapping[Path, Tensor], info_keys: Sequence[str]) -> None:
        self.roots = [(columns[path].numpy(), row) for path, row in rows.items()]
        self._compact = ("next", *next(iter(rows))) not in columns
        self.nexts = [] if self._compact else [(columns["next", *path].numpy(), row) for path, row in rows.items()]
        self.final: list[tuple[int, Array, list[Array]]] = []
        self.reward, self._terminated, self._truncated = (columns[path].numpy() for path in OUTCOME_KEYS)
        self._lanes = range(self.reward.shape[1])
        self.info: dict[str, list[Any]] = {key: [] for key in info_keys}

    def _keep(self, t: int, lanes: Any, rows: Sequence[Array]) -> None:
        """Keep the next observations of step `t` in these lanes of `rows`."""
        self.final.append((t, np.asarray(lanes, np.int64), [row[lanes] for row in rows]))

    def finish(self) -> None:
        """Keep the next observations of the last step."""
        if self._compact:
            lanes = (~(self._terminated[-1] | self._truncated[-1])).nonzero()[0]
            self._keep(len(self.reward) - 1, lanes, [row for _, row in self.roots])

    def inform(self, info: Sequence[Column]) -> None:
        """Record copies of a step's infos: an environment may write the next ones into the same arrays."""
        for (key, values), value in zip(self.info.items(), info, strict=True):
            try:
                values.append(np.array(value))
            except (TypeError, ValueError) as error:
                raise bad_info(key, value, error) from error

    def end(self, t: int, outcome: Outcome, limit: TrajectoryLimit | None) -> list[int]:
        """Record the flags of a step in which some lanes are done; return which."""
        _, terminated, truncated, _ = outcome
        try:
            if limit is not None:
                truncated = list(map(operator.or_, truncated, limit.reached(t).tolist()))
            ended = list(itertools.compress(self._lanes, map(operator.or_, terminated, truncated)))
            for lane in ended:
                self._terminated[t, lane] = terminated[lane]
                self._truncated[t, lane] = truncated[lane]
        except NOT_RECORDED as error:
            raise bad_outcome(outcome, self._lanes) from error
        if self._compact:
            self._keep(t, ended, [row for _, row in self.roots])
        return ended

    def final_observations(self, batch: TensorDict, paths: Iterable[Path]) -> FinalObservations:
        """Return the next observations that no frame of a batch has at its root."""
        time = np.concatenate([np.full(len(lanes), t) for t, lanes, _ in self.final])
        at = (np.concatenate([lanes for _, lanes, _ in self.final]), time)[2 - batch.batch_dims :]
        columns = zip(*(rows for _, _, rows in self.final), strict=True)
        leaves = {path: torch.from_numpy(np.concatenate(column)) for path, column in zip(paths, columns, strict=True)}
        return FinalObservations(batch[TRAJECTORY_IDS][at], batch[STEP][at], leaves)

    def infos(self) -> dict[Path, Tensor]:
        """Return the columns of the infos."""
        return {("next", "info", key): _info_column(key, values) for key, values in self.info.items()}


def _info_column(key: str, values: list[Any]) -> Tensor:
    try:
        column = np.array(values)
        return torch.from_numpy(column.astype(np.float32) if column.dtype == np.float64 else column)
    except (TypeError, ValueError) as error:
        raise bad_info(key, values[0], error) from error
