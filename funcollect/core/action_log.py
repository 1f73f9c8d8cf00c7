"""The actions of the episodes in flight, from which `fork` and `load` replay them."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

LARGEST_LOG = 128 << 20  # bytes; almost twice what 1,000 steps of 1,024 lanes with 17 numbers each need
_JOINED = 64  # steps of short rollouts in one chunk, since a tensor takes half a kilobyte besides its numbers


class ActionLog:
    """The actions of the last steps, [steps, P, ...], of at most `limit` bytes: no longer episode can be replayed."""

    def __init__(self, num_lanes: int, limit: int = LARGEST_LOG) -> None:
        self._chunks: deque[Tensor] = deque()  # of one rollout, or several short ones
        self._length = 0
        self._short: list[Tensor] = []  # those of the last short rollouts, which will be one chunk
        self.limit = limit  # 0 if no replay will need the actions
        self.ages = torch.zeros(num_lanes, dtype=torch.int64)  # [P], steps of the loop since each lane's reset

    def extend(self, actions: Tensor, ages: Tensor) -> None:
        """Add a rollout's actions, and drop those that no lane's episode needs."""
        self.ages = ages
        if not self.limit:
            return
        self._short.append(actions.clone() if len(actions) < _JOINED else actions)
        if len(self._short) * len(actions) >= _JOINED:
            self._join()

    def _join(self) -> None:
        actions = self._short[0] if len(self._short) == 1 else torch.cat(self._short)
        self._short = []
        needed = min(int(self.ages.max()), self.limit * len(actions) // max(actions.nbytes, 1))
        self._chunks.append(actions[max(len(actions) - needed, 0) :].clone())
        self._length += len(self._chunks[-1])
        while self._chunks and self._length - len(self._chunks[0]) >= needed:
            self._length -= len(self._chunks.popleft())
        if self._length > needed:
            self._chunks[0] = self._chunks[0][self._length - needed :]
            self._length = needed

    def since_reset(self) -> Tensor | None:
        """Return the actions of the last ``ages.max()`` steps, or None if they are not all kept."""
        if self._short:
            self._join()
        longest = int(self.ages.max())
        if self._length < longest:
            return None
        return torch.cat(tuple(self._chunks))[-longest:] if longest else torch.empty(0, len(self.ages))

    def resume(self, actions: Tensor | None, ages: Tensor) -> None:
        """Continue the log with the result of another's `since_reset`, and its ages."""
        given = [] if actions is None or not len(actions) else [actions]
        self.ages, self._chunks, self._length, self._short = ages, deque(given), sum(map(len, given)), []
