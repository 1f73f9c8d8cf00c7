"""Live simulators behind a state, used linearly: one state at a time holds them.

A `Simulation` keeps what a state that is a value would hold itself: which version of the state is the current one, how
many episodes each lane has begun, and the actions since, from which `fork` and `load` replay them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, cast

import numpy as np
import torch
from torch import Tensor
from typing_extensions import TypeVar, override

from funcollect.core.simulators.record import LARGEST_LOG, ActionLog, AppliedCall, SimulationRecord
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

_SEEDS = 64  # of episodes, drawn at once


class LiveSimulators:
    """Simulators, and the version of the state that may use them.

    Attributes:
        steps: steps of every lane since `init`.
    """

    steps: int

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

    def rekey(self, key: Key, episodes: list[int], steps: int) -> None:
        """Take further seeds from `key`, after the episodes with the numbers `episodes` [P] and so many steps."""
        raise NotImplementedError

    def seed_again(self) -> None:
        """Give every lane a seed at its next reset: after a call that did not end, simulators may stand anywhere."""

    def release(self) -> SimulatorHandle[Self]:
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

    @override
    def rekey(self, key: Key, episodes: list[int], steps: int) -> None:
        self.key, self.episodes, self.steps = key, episodes, steps
        self.calls = [call._replace(episodes=[-1] * len(self.lanes)) for call in self.calls]
        self._seeds: list[tuple[int, list[int]]] = [(0, [])] * len(self.lanes)  # with the episode of the first one
        self._draw_seeds(slice(None))
        self.seed_again()

    @override
    def seed_again(self) -> None:
        self._unseeded = set(range(len(self.lanes)))

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
        seeds: list[int | None] = []
        for lane in lanes:
            seeded = self._each_episode or lane in self._unseeded
            seeds.append(self._seed(lane, self.episodes[lane] + 1) if seeded else None)
        return seeds

    def renew(self) -> None:
        """Get ready for a reset of all lanes, also after a call that did not end."""
        if self.renewed is not None and self.renewed.renew():
            self.seed_again()

    def announce(self, restarting: bool) -> None:
        """Announce whether, and how, lanes will be restarted to simulators that can use it."""
        if self.renewed is not None:
            every, self._announced = range(len(self.lanes)), restarting
            self.renewed.announce(every, self._next_seeds(every) if restarting else None)

    def restart(self, lanes: Sequence[int]) -> None:
        """Begin the next episode of each of `lanes`.

        Each episode has a seed if the environment takes one per episode, otherwise only the first under a key.
        """
        seeds = self._next_seeds(lanes)
        for lane in lanes:
            self.episodes[lane] += 1
        self.simulators.reset(lanes, seeds)
        if self._unseeded:
            self._unseeded.difference_update(lanes)
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
            key=self.key,
            episodes=list(self.episodes),
            steps=self.steps,
            unseeded=set(self._unseeded),
            ages=self.action_log.ages,
            actions=self.action_log.since_reset() if forking == "replay" else None,
            snapshot=cast(SnapshotSimulators, self.simulators).snapshot() if forking == "snapshot" else None,
            last_outcome=self.last_outcome,
            calls=list(self.calls),
        )

    def go_on_as(self, record: SimulationRecord) -> None:
        """Take over the saved record, once the simulators have been brought to that state."""
        self.episodes, self.steps = list(record.episodes), record.steps
        self._unseeded, self.calls = set(record.unseeded), list(record.calls)
        self.action_log.resume(record.actions, record.ages)
        self.last_outcome = record.last_outcome

    def observation(self) -> dict[Path, Tensor]:
        """Return a copy of the current root observation."""
        return {path: torch.from_numpy(array.copy()) for path, array in self.simulators.observation.items()}

    def show(self, observation: Mapping[Path, Tensor]) -> None:
        """Write a state's root observation into the memory that the policy reads."""
        for path, array in self.simulators.observation.items():
            array[...] = observation[path].numpy()

    def hand_over(self) -> Simulators:
        """The simulators, for another simulation; this one is closed."""
        self.closed = True
        self._finalizer.detach()
        return self.simulators


Held = TypeVar("Held", bound=LiveSimulators, default=Any)


@dataclass(frozen=True)
class SimulatorHandle(Generic[Held]):
    """A state's handle on simulators, which can be used once."""

    simulation: Held
    version: int

    def claim(self, *, stale: bool = False) -> Held:
        """Use the handle: return its simulation, and make this and earlier handles stale. Raises as `check` does."""
        self.check(stale=stale)
        if self.simulation.busy:
            self.simulation.seed_again()
        self.simulation.version += 1
        self.simulation.busy = True
        return self.simulation

    def give_back(self) -> None:
        """Undo `claim`: the handle can be used after all."""
        self.simulation.version = self.version
        self.simulation.busy = False

    def check(self, *, stale: bool = False) -> None:
        """Raise ClosedError if the simulators were closed, and StaleStateError if a later handle supersedes this one.

        With `stale`, a superseded handle is accepted, as `recover` does. Simulators in other processes are closed for
        a process that was forked from the one that started them.
        """
        held = self.simulation
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
