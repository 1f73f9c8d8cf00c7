"""What brings new simulators to the state of others: actions, calls of functions, and counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcollect.keys import Key
from funcollect.protocols import Outcome

LARGEST_LOG = 128 << 20  # bytes; almost twice what 1,000 steps of 1,024 lanes with 17 numbers each need
_JOINED = 64  # steps of short rollouts in one chunk, since a tensor takes half a kilobyte besides its numbers


class ActionLog:
    """The actions of the last steps, [steps, P, ...], in one chunk per rollout or some short ones.

    They have at most `limit` bytes, so the lanes of a longer episode cannot be replayed.
    """

    def __init__(self, num_lanes: int, limit: int = LARGEST_LOG) -> None:
        self._chunks: deque[Tensor] = deque()
        self._length = 0
        self.limit = limit  # 0 if no replay will need the actions
        self.ages = torch.zeros(num_lanes, dtype=torch.int64)  # [P], steps of the loop since each lane's reset

    def extend(self, actions: Tensor, ages: Tensor) -> None:
        """Add a rollout's actions, and drop those that no lane's episode needs."""
        self.ages = ages
        if not self.limit:
            return
        needed = min(int(ages.max()), self.limit * len(actions) // max(actions.nbytes, 1))
        newest = actions[max(len(actions) - needed, 0) :].clone()
        self._chunks.append(newest)
        self._length += len(newest)
        while len(self._chunks) > 1 and len(self._chunks[-2]) <= len(self._chunks[-1]) <= _JOINED // 2:
            newest = self._chunks.pop()
            self._chunks.append(torch.cat((self._chunks.pop(), newest)))
        while self._chunks and self._length - len(self._chunks[0]) >= needed:
            self._length -= len(self._chunks.popleft())
        if self._length > needed:
            self._chunks[0] = self._chunks[0][self._length - needed :]
            self._length = needed

    def since_reset(self) -> Tensor | None:
        """Return the actions of the last ``ages.max()`` steps, or None if they are not all kept."""
        longest = int(self.ages.max())
        if self._length < longest:
            return None
        return torch.cat(tuple(self._chunks))[-longest:] if longest else torch.empty(0, len(self.ages))

    def resume(self, actions: Tensor | None, ages: Tensor) -> None:
        """Continue the log with the result of another's `since_reset`, and its ages."""
        given = [] if actions is None or not len(actions) else [actions]
        self.ages, self._chunks, self._length = ages, deque(given), sum(map(len, given))


class AppliedCall(NamedTuple):
    """A function that was called with the environments of all lanes."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    steps: int  # of every lane before the call
    episodes: list[int]  # [P], the episode that each lane was in; -1 for none that can come again

    def lanes(self, episodes: Sequence[int], *, during: bool) -> list[int]:
        """The lanes in which the call was made during these episodes [P], or those in which it was made before."""
        return [lane for lane, own in enumerate(self.episodes) if (own == episodes[lane]) == during]


@dataclass(frozen=True, kw_only=True)
class SimulationRecord:
    """What brings new simulators to the state of these: for `fork` in memory, for `save` in a file."""

    key: Key
    episodes: list[int]  # [P], the episode that each lane is in
    steps: int  # of every lane since `init`
    unseeded: set[int]  # lanes that get a seed at their next reset in any case
    ages: Tensor  # [P] int64, steps of the loop since each lane's reset
    actions: Tensor | None  # [max(ages), P, ...], the latest ones, for simulators that are replayed
    snapshot: Any  # of simulators that give one
    last_outcome: Outcome  # which finished lanes repeat
    calls: list[AppliedCall] = field(default_factory=list)  # of functions, in order
