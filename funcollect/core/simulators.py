"""Live simulators behind a state: one state at a time holds them.

A `Simulation` keeps what a state that is a value would hold itself: which version of the state is the current one, how
many episodes each lane has begun, and the actions since, from which `fork` and `load` replay them.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from funcollect.errors import ClosedError, EnvError, NotCalledError, StaleStateError
from funcollect.keys import Key, Purpose, lane_keys
from funcollect.processes.failures import UnsentResultError
from funcollect.protocols import (
    DeviceEnv,
    DeviceSimulators,
    HostEnv,
    Outcome,
    RenewedSimulators,
    Simulators,
    SimulatorsOfLanes,
    SnapshotSimulators,
)
from funcollect.threefry import hashed_in_numpy
from funcollect.tree import Path

LARGEST_LOG = 128 << 20  # bytes; almost twice what 1,000 steps of 1,024 lanes with 17 numbers each need
_JOINED = 64  # steps of short rollouts in one chunk, since a tensor takes half a kilobyte besides its numbers
_PROGRESS = ("key", "episodes", "steps", "unseeded", "last_outcome", "calls")  # of simulators, which a record copies
_SEEDS = 64  # of episodes, drawn at once


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


class LiveSimulators:
    """Simulators, and the version of the state that may use them."""

    steps: int  # of every lane since `init`

    def __init__(self, env: HostEnv | DeviceEnv, simulators: Simulators | DeviceSimulators) -> None:
        self._finalizer = weakref.finalize(self, simulators.close)  # first of all: Ctrl-C may come at any moment
        self.env, self.simulators = env, simulators
        self.version, self.busy, self.closed = 0, False, False
        self.renewed = simulators if isinstance(simulators, RenewedSimulators) else None

    def __reduce__(self) -> Any:
        """Refuse to be copied or pickled: copies of MuJoCo and ALE would silently take another course."""
        raise TypeError(
            f"the simulators of {self.env} cannot be copied or pickled: take funcollect.fork(env, state), or "
            "funcollect.save(path, state)"
        )

    def seed_again(self) -> None:
        """Give every lane a seed at its next reset: after a call that did not end, simulators may stand anywhere."""

    def release(self) -> SimulatorHandle:
        """Return the handle of the next state."""
        self.busy = False
        return SimulatorHandle(self, self.version)

    def close(self) -> None:
        """Free the simulators, once."""
        self.closed = True
        self._finalizer()


class Simulation(LiveSimulators):
    """Simulators of lanes on the host, and their action log."""

    env: HostEnv
    simulators: Simulators

    def __init__(self, env: HostEnv, key: Key, lanes: Tensor, simulators: Simulators | None = None) -> None:
        """Open simulators, or use those of another simulation."""
        super().__init__(env, env.open() if simulators is None else simulators)
        self._each_episode = env.seeding == "episode"
        self.lanes: list[int] = lanes.tolist()
        self._announced = False  # whether those know the seeds of the next episodes
        self.calls: list[AppliedCall] = []
        self.changed_in_part = False  # whether a function raised, so that only some lanes' environments have changed
        self.rekey(key, [-1] * len(self.lanes), 0)
        self.action_log = ActionLog(len(self.lanes), LARGEST_LOG if env.forking == "replay" else 0)
        self.last_outcome: Outcome = ((), (), (), ())  # which finished lanes repeat

    def rekey(self, key: Key, episodes: list[int], steps: int) -> None:
        """Take further seeds from `key`, after the episodes with the numbers `episodes` [P] and so many steps."""
        self.key, self.episodes, self.steps = key, episodes, steps
        self.calls = [call._replace(episodes=[-1] * len(self.lanes)) for call in self.calls]
        self._seeds: list[tuple[int, list[int]]] = [(0, [])] * len(self.lanes)  # with the episode of the first one
        self._draw_seeds(slice(None))
        self.seed_again()

    @override
    def seed_again(self) -> None:
        self.unseeded = set(range(len(self.lanes)))

    def _draw_seeds(self, lanes: slice, first: int | None = None) -> None:
        """Draw the seeds of some lanes' episodes from `first`, or from each lane's next one, on: many at once."""
        keys = lane_keys(self.key, Purpose.RESET, np.array(self.lanes))
        firsts = [episode + 1 if first is None else first for episode in self.episodes[lanes]]
        numbers = np.add.outer(np.array(firsts, np.uint32), np.arange(_SEEDS, dtype=np.uint32))
        pair = keys[0][lanes, None], keys[1][lanes, None]
        seeds = hashed_in_numpy(pair, np.zeros((), np.uint32), numbers)[0].tolist()
        self._seeds[lanes] = zip(firsts, seeds, strict=True)

    def _seed(self, lane: int, episode: int) -> int:
        """The seed of an episode of a lane, the first word of its key."""
        if not 0 <= episode - self._seeds[lane][0] < _SEEDS:
            self._draw_seeds(slice(lane, lane + 1), episode)
        first, seeds = self._seeds[lane]
        return seeds[episode - first]

    def _next_seeds(self, lanes: Sequence[int]) -> list[int | None]:
        """The seeds of the next episodes of some lanes, None where the generator of an earlier episode continues."""
        return [
            self._seed(lane, self.episodes[lane] + 1) if self._each_episode or lane in self.unseeded else None
            for lane in lanes
        ]

    def announce(self, restarting: bool) -> None:
        """Announce whether, and how, lanes will be restarted to simulators that can use it."""
        if self.renewed is not None:
            every, self._announced = range(len(self.lanes)), restarting
            self.renewed.announce(every, self._next_seeds(every) if restarting else None)

    def restart(self, lanes: Sequence[int]) -> None:
        """Begin the next episode of each of `lanes`."""
        seeds = self._next_seeds(lanes)
        for lane in lanes:
            self.episodes[lane] += 1
        self.simulators.reset(lanes, seeds)
        if self.unseeded:
            self.unseeded.difference_update(lanes)
        if self._announced and self.renewed is not None:
            self.renewed.announce(lanes, self._next_seeds(lanes))

    def apply(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        """Call a function with the environment of each lane, and note that for copies."""
        self.calls.append(AppliedCall(function, args, self.steps, list(self.episodes)))
        try:
            return cast(SimulatorsOfLanes, self.simulators).apply(range(len(self.lanes)), function, args)
        except BaseException as error:
            if not isinstance(error, UnsentResultError):  # the function has returned in all lanes
                self.calls.pop()
            if isinstance(error, EnvError) and not isinstance(error, NotCalledError):
                self.changed_in_part = True
            raise

    def record(self) -> SimulationRecord:
        """Describe the state of the simulators."""
        forking = self.env.forking
        return SimulationRecord(
            **{name: copy(getattr(self, name)) for name in _PROGRESS},
            ages=self.action_log.ages,
            actions=self.action_log.since_reset() if forking == "replay" else None,
            snapshot=cast(SnapshotSimulators, self.simulators).snapshot() if forking == "snapshot" else None,
        )

    def go_on_as(self, record: SimulationRecord) -> None:
        """Take over the saved record, once the simulators have been brought to that state."""
        vars(self).update({name: copy(getattr(record, name)) for name in _PROGRESS})
        self.action_log.resume(record.actions, record.ages)

    def observation(self) -> dict[Path, Tensor]:
        """Return a copy of the current root observation."""
        return {path: torch.from_numpy(array.copy()) for path, array in self.simulators.observation.items()}

    def show(self, observation: Mapping[Path, Tensor]) -> None:
        """Write a state's root observation into the memory that the policy reads."""
        for path, array in self.simulators.observation.items():
            array[...] = observation[path].numpy()

    def hand_over(self) -> Simulators:
        """Return the simulators, for another simulation; this one is closed."""
        self.closed = True
        self._finalizer.detach()
        return self.simulators


@dataclass(frozen=True)
class SimulatorHandle:
    """A state's handle on simulators, which can be used once."""

    simulation: Any  # one of `LiveSimulators`
    version: int

    def claim(self, *, stale: bool = False) -> Any:
        """Return the simulation, and make this and earlier handles stale. Raises as `check` does."""
        self.check(stale=stale)
        if self.simulation.busy:
            self.simulation.seed_again()
        self.simulation.version += 1
        self.simulation.busy = True
        return self.simulation

    def check(self, *, stale: bool = False) -> None:
        """Raise ClosedError if the simulators were closed; unless `stale`, StaleStateError for a superseded handle."""
        held: LiveSimulators = self.simulation
        if held.closed:
            raise ClosedError(f"the simulators of {held.env} were closed: make a new state with funcollect.init")
        if held.renewed is not None:
            held.renewed.check_owner()
        if self.version != held.version and not stale:
            interrupted = "the call that used it did not end (an exception, or Ctrl-C)"
            reason = interrupted if held.busy else "a later state has taken its place"
            raise StaleStateError(_STALE.format(env=held.env, reason=reason))


_STALE = """this state over the simulators of {env} cannot be used again: {reason}.
Likely:
    _, batch = funcollect.rollout(env, policy, state, 128)      # the new state was dropped
Instead:
    state, batch = funcollect.rollout(env, policy, state, 128)
To continue twice from one state, take other = funcollect.fork(env, state) first, where simulators can be rebuilt.
To continue after an exception, begin new episodes: state = funcollect.recover(env, state)."""
