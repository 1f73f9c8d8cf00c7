"""The memory that an environment's process and its workers share."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from funcollect.processes.shared_memory import Memory
from funcollect.specs import ActionSpec, Leaf

Array = npt.NDArray[Any]

_ALIGNMENT = 64  # bytes
NO_SEED, NO_RESTART = -1, -2
INFO_BYTES = 1 << 15  # of a worker's pickled infos; larger ones are sent as a message


# Orders to a worker; plain numbers, since enumerations are slow to read.
STEP = 0  # all its lanes
STEP_CHOSEN = 1  # those that are marked
RESET = 2  # marked lanes
CALL = 3  # a function, which a message brings
CLOSE = 4  # everything, and end


class LaneBlock:
    """Arrays over one piece of shared memory, for P lanes of W workers. Each begins at a multiple of 64 bytes.

    Attributes:
        observation: [P, ...] by path.
        action: [P, ...], as in a batch.
        reward: [P] float64.
        terminated, truncated: [P] bool.
        chosen: [P] bool, the lanes of an order that is not for all lanes of a worker.
        seeds: [P] int64, for resets; `NO_SEED` for none.
        next_seeds: [P] int64, for the restart after an episode's end; `NO_RESTART` if there is none.
        ends: [P, ...] by path, the last observations of episodes whose lanes were restarted.
        order: [W] int8, see above.
        asked, answered: [W] int64, the number of the last order, and of the last one after whose answer the bell rang.
        failed: [W] bool, whether the last order has failed; a message tells how.
        info: [W, INFO_BYTES] uint8, pickled.
        info_size: [W] int64, in bytes; -1 if a message holds the infos.
    """

    def __init__(self, memory: Memory, layout: BlockLayout) -> None:
        arrays: dict[Any, Array] = {
            name: np.ndarray(shape, dtype, memory.data, start) for name, (start, shape, dtype) in layout.places.items()
        }
        self.observation, self.ends = (
            {path: arrays[name, path] for path in layout.paths} for name in ("observation", "ends")
        )
        self.action, self.reward = arrays["action"], arrays["reward"]
        self.terminated, self.truncated = arrays["terminated"], arrays["truncated"]
        self.chosen, self.seeds, self.next_seeds = arrays["chosen"], arrays["seeds"], arrays["next_seeds"]
        self.order, self.failed = arrays["order"], arrays["failed"]
        self.asked, self.answered = arrays["asked"], arrays["answered"]
        self.info, self.info_size = arrays["info"], arrays["info_size"]


class BlockLayout:
    """Where the arrays of a `LaneBlock` lie.

    Attributes:
        size: the bytes of the whole memory.
        places: the offset, shape and dtype of each array.
        paths: those of observations.
    """

    def __init__(
        self, leaves: tuple[Leaf, ...], action: ActionSpec, num_envs: int, num_workers: int, infos: bool
    ) -> None:
        self.size = 0
        self.places: dict[Any, tuple[int, tuple[int, ...], np.dtype[Any]]] = {}
        self.paths = [leaf.path for leaf in leaves]
        for leaf in leaves:
            for name in ("observation", "ends"):
                self._add((name, leaf.path), (num_envs, *leaf.shape), leaf.dtype)
        self._add("action", (num_envs, *action.shape), torch.empty(0, dtype=action.dtype).numpy().dtype)
        self._add("reward", (num_envs,), np.float64)
        for name in ("terminated", "truncated", "chosen"):
            self._add(name, (num_envs,), bool)
        for name in ("seeds", "next_seeds"):
            self._add(name, (num_envs,), np.int64)
        for name in ("asked", "answered"):
            self._add(name, (num_workers,), np.int64)
        self._add("order", (num_workers,), np.int8)
        self._add("failed", (num_workers,), bool)
        self._add("info", (num_workers, INFO_BYTES if infos else 0), np.uint8)
        self._add("info_size", (num_workers,), np.int64)

    def _add(self, name: Any, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        kind = np.dtype(dtype)
        self.places[name] = self.size, shape, kind
        self.size += math.prod(shape) * kind.itemsize
        self.size += -self.size % _ALIGNMENT

    def over(self, memory: Memory) -> LaneBlock:
        """The arrays over this memory."""
        return LaneBlock(memory, self)
