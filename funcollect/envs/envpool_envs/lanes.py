"""EnvPool as simulators: lanes are stepped and reset by their indices, in whole or in part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from funcollect.envs.host.host_env import ONWARD, SimulatorsBase, batch_decoder
from funcollect.envs.host.rows import Rows
from funcollect.errors import EnvError
from funcollect.protocols import Outcome
from funcollect.specs import ActionSpec

Array = npt.NDArray[Any]


class EnvPoolLanes(SimulatorsBase):
    """A pool in synchronous mode, whose answers come in the order of the indices that are sent.

    Its own reset, at the step after an episode's end, never comes about: a lane that is done is reset by its index
    first, or is not stepped any more.

    Args:
        build: makes a pool from one seed for each lane.
        rows: where observations go.
        spec: how actions look.
        info_keys: which infos are wanted.
    """

    def __init__(
        self, build: Callable[[Sequence[int]], Any], rows: Rows, spec: ActionSpec, info_keys: tuple[str, ...]
    ) -> None:
        self._build = build
        self._pool: Any = None
        self._decode = batch_decoder(spec)
        self._info_keys = info_keys
        self._rows = rows
        self._num_envs = len(rows.leaves[0].array)
        self.observation = rows.arrays

    @override
    def reset(self, lanes: Sequence[int], seeds: Sequence[int | None], /) -> None:
        """Start an episode in each of `lanes`; with seeds, which all lanes get together, in a new pool."""
        if not lanes:
            return
        given = [seed for seed in seeds if seed is not None]
        try:
            if given:
                self.close()
                self._pool = self._build(given)
            index = np.array(lanes, np.int32)
            observation, _ = self._pool.reset(index)
        except Exception as error:
            raise EnvError(f"lanes {list(lanes)}: EnvPool's reset raised {error!r}: {ONWARD}") from error
        self._rows.write_batch(observation, index)

    @override
    def step(self, lanes: Sequence[int], action: Any, /) -> Outcome:
        index = None if len(lanes) == self._num_envs else np.array(lanes, np.int32)
        observation, reward, terminated, truncated, *infos = self._call(self._decode(action), index)
        self._rows.write_batch(observation, index)
        return reward, terminated.tolist(), truncated.tolist(), infos

    def _call(self, actions: Array, index: Array | None = None) -> list[Any]:
        """Observation, reward, terminated, truncated and the infos."""
        try:
            observation, reward, terminated, truncated, info = self._pool.step(actions, index)
        except Exception as error:
            raise EnvError(f"EnvPool's step raised {error!r}: {ONWARD}") from error
        return [observation, reward, terminated, truncated, *(info[key] for key in self._info_keys)]

    @override
    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
