"""Live simulators behind a state, used linearly: one state at a time holds them.

A handle remembers what a value would hold by itself: which version of the state is the current one, how many episodes
each lane has begun, and the actions since, from which `fork` replays them.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from funcollect.envs.host_env import HostEnv, Simulators
from funcollect.errors import ClosedError, StaleStateError
from funcollect.keys import EpisodeSeeds, Key

_LONGEST_JOURNAL = 1 << 20  # steps; a longer episode cannot be forked


class Journal:
    """The actions of the last steps, [steps, P, ...], in chunks as rollouts brought them."""

    def __init__(self, num_lanes: int) -> None:
        self._chunks: deque[Tensor] = deque()
        self._length = 0
        self.ages = torch.zeros(num_lanes, dtype=torch.int64)  # steps of the loop since each lane's reset

    def extend(self, actions: Tensor, ages: Tensor) -> None:
        """Add a rollout's actions; drop what no lane's episode needs."""
        self._chunks.append(actions.clone())
        self._length += len(actions)
        self.ages = ages
        needed = min(int(ages.max()), _LONGEST_JOURNAL)
        while self._chunks and self._length - len(self._chunks[0]) >= needed:
            self._length -= len(self._chunks.popleft())

    def since_reset(self) -> Tensor | None:
        """The actions of the last ``ages.max()`` steps; None where they are not all kept."""
        longest = int(self.ages.max())
        if self._length < longest:
            return None
        return torch.cat(tuple(self._chunks))[-longest:] if longest else torch.empty(0, len(self.ages))


class Simulation:
    """Simulators, their journal and the version that may use them."""

    def __init__(self, env: HostEnv, key: Key, lanes: Tensor) -> None:
        self.env = env
        self._each_episode = env.seeding == "episode"
        self.lanes: list[int] = lanes.tolist()
        self.simulators: Simulators = env.open()
        self.version = 0
        self.busy = False
        self.closed = False
        self.rekey(key, [-1] * len(self.lanes), 0)
        self.journal = Journal(len(self.lanes))
        self._finalizer = weakref.finalize(self, self.simulators.close)

    def __reduce__(self) -> Any:
        """Simulators are not copied or pickled: for MuJoCo and ALE a copy would go another way, silently."""
        raise TypeError(
            f"the simulators of {self.env} cannot be copied or pickled: take funcollect.fork(env, state), or save the "
            "collector's state_dict()"
        )

    def rekey(self, key: Key, episodes: list[int], steps: int) -> None:
        """Take the randomness of what follows from `key`; `episodes` [P] have been begun, `steps` made."""
        self.key = key
        self.episodes = episodes
        self.steps = steps
        self._seeds = [EpisodeSeeds.of(key, lane) for lane in self.lanes]

    def restart(self, lanes: Sequence[int]) -> None:
        """Begin the next episode of each of `lanes`, seeded as finely as the environment can be."""
        seeds: list[int | None] = []
        for lane in lanes:
            self.episodes[lane] = episode = self.episodes[lane] + 1
            seeds.append(self._seeds[lane][episode] if self._each_episode or not episode else None)
        self.simulators.reset(lanes, seeds)

    def observation(self) -> dict[tuple[str, ...], Tensor]:
        """A copy of the current root observation."""
        return {path: torch.from_numpy(array.copy()) for path, array in self.simulators.rows.arrays.items()}

    def release(self) -> Hold:
        """The hold of the next state."""
        self.busy = False
        return Hold(self, self.version)

    def close(self) -> None:
        """Free the simulators, once."""
        self.closed = True
        self._finalizer()


@dataclass(frozen=True)
class Hold:
    """A state's hold on a simulation: good for one use."""

    simulation: Simulation
    version: int

    def claim(self, *, stale: bool = False) -> Simulation:
        """The simulation, which this hold no longer covers afterwards.

        Args:
            stale: accept a hold that a later state has replaced, for a reset of all lanes.

        Raises:
            ClosedError: where the simulators were closed.
            StaleStateError: where this hold was used before.
        """
        self.check(stale=stale)
        self.simulation.version += 1
        self.simulation.busy = True
        return self.simulation

    def check(self, *, stale: bool = False) -> None:
        """Raise as `claim` does, without using the hold."""
        if self.simulation.closed:
            raise ClosedError(
                f"the simulators of {self.simulation.env} were closed: make a new state with funcollect.init"
            )
        if self.version != self.simulation.version and not stale:
            raise StaleStateError(_STALE.format(env=self.simulation.env, reason=self._reason()))

    def _reason(self) -> str:
        if self.simulation.busy:
            return "the call that used it did not end (an exception, or Ctrl-C)"
        return "a later state has taken its place"


_STALE = """this state over the simulators of {env} cannot be used again: {reason}.
Likely:
    _, batch = funcollect.rollout(env, policy, state, 128)      # the new state was dropped
Instead:
    state, batch = funcollect.rollout(env, policy, state, 128)
To go two ways from one state, take other = funcollect.fork(env, state) first.
To go on after an exception, begin new episodes: state = funcollect.reset(env, state)."""
