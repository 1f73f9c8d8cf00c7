"""The live simulators behind a state, which only the latest state may use, and how they are seeded and copied."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import copy as copied
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from funcollect import protocols
from funcollect.core.state import CollectorState, Handle
from funcollect.envs.host.host_env import statistics_of
from funcollect.envs.host.lane_workers.simulators import WorkerLanes
from funcollect.errors import ClosedError, EnvError, NotCalledError, ReplayError, StaleStateError
from funcollect.keys import Key, Purpose, key_from_seed, lane_keys
from funcollect.processes.failures import UnsentResultError
from funcollect.threefry import hashed_in_numpy
from funcollect.tree import Path

_PROGRESS = ("key", "episodes", "steps", "unseeded", "last_outcome", "calls", "options")  # copied by a record
_SEEDS = 64  # of consecutive episodes of a lane, a block, which are drawn at once
LARGEST_LOG = 128 << 20  # bytes; almost twice the actions of 1,000 steps of 1,024 lanes with 17 float32 each
_JOINED = 64  # steps of short rollouts joined in one chunk, since a tensor takes half a kilobyte beside its numbers


def episode_seeds(seed: int, lanes: npt.NDArray[np.int64], episodes: npt.NDArray[np.int64]) -> list[int | None]:
    """The seeds of N episodes of a run, the first words of their keys, from their lanes [N] and numbers there [N]."""
    keys = lane_keys(key_from_seed(seed), Purpose.RESET, lanes)
    seeds: list[int | None] = hashed_in_numpy(keys, np.zeros(1, np.uint32), episodes.astype(np.uint32))[0].tolist()
    return seeds


class AppliedCall(NamedTuple):
    """A function that was called with the environments of all lanes."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    steps: int  # of every lane before the call
    episodes: list[int]  # [P], the episode that each lane was in; -1 for one that is over


@dataclass(frozen=True, kw_only=True)
class SimulationRecord:
    """What `rebuild` needs to bring new simulators to the same state: in memory for `fork`, in a file for `save`."""

    key: Key
    episodes: list[int]  # [P], the episode that each lane is in
    steps: int  # of every lane since `init`
    unseeded: set[int]  # lanes that get a seed at their next reset, however the environment is seeded
    ages: Tensor  # [P] int64, steps of the loop since each lane's reset
    actions: Tensor | None  # [max(ages), P, ...], the latest ones, if the simulators are replayed
    snapshot: Any  # if the simulators offer one
    last_outcome: protocols.Outcome  # which finished lanes repeat
    calls: list[AppliedCall] = field(default_factory=list)  # in the order in which they were made
    options: dict[int, tuple[int, Any]] = field(default_factory=dict)  # by lane: an episode, and its reset's options


class ActionLog:
    """The actions of the last steps, [steps, P, ...], up to `limit` bytes; a longer episode cannot be replayed."""

    def __init__(self, num_lanes: int, limit: int = LARGEST_LOG) -> None:
        self._chunks: deque[Tensor] = deque()  # the actions of one rollout each, or of several short ones
        self._short: list[Tensor] = []  # the actions of the last short rollouts, to be joined in one chunk
        self.limit = limit  # 0 if no replay will need the actions
        self.ages = torch.zeros(num_lanes, dtype=torch.int64)  # [P], steps of the loop since each lane's reset

    def extend(self, actions: Tensor, ages: Tensor) -> None:
        """Add a rollout's actions, and drop those that no lane's episode needs."""
        self.ages = ages
        if self.limit:
            self._short.append(actions.clone() if len(actions) < _JOINED else actions)
            if len(self._short) * len(actions) >= _JOINED:
                self._join()

    def _join(self) -> None:
        actions = self._short[0] if len(self._short) == 1 else torch.cat(self._short)
        self._short = []
        needed = min(int(self.ages.max()), self.limit * len(actions) // max(actions.nbytes, 1))
        self._chunks.append(actions[max(len(actions) - needed, 0) :].clone())
        surplus = sum(map(len, self._chunks)) - needed
        while self._chunks and surplus >= len(self._chunks[0]):
            surplus -= len(self._chunks.popleft())
        if surplus > 0:
            self._chunks[0] = self._chunks[0][surplus:]

    def since_reset(self) -> Tensor | None:
        """Return the actions of the last ``ages.max()`` steps, or None if they are not all kept."""
        if self._short:
            self._join()
        longest = int(self.ages.max())
        if sum(map(len, self._chunks)) < longest:
            return None
        return torch.cat(tuple(self._chunks))[-longest:] if longest else torch.empty(0, len(self.ages))

    def resume(self, actions: Tensor | None, ages: Tensor) -> None:
        """Continue the log of other simulators, from the result of its `since_reset` and its ages."""
        chunks = [] if actions is None or not len(actions) else [actions]
        self.ages, self._chunks, self._short = ages, deque(chunks), []


class LiveSimulators:
    """Simulators on the host or on a device, and the version of the state that may use them."""

    steps: int  # of every lane since `init`
    lanes: Sequence[int] = ()  # those that are seeded one by one

    def __init__(self, env: Any, simulators: Any) -> None:
        self._finalizer = weakref.finalize(self, simulators.close)  # first of all: Ctrl-C may come at any moment
        self.env, self.simulators = env, simulators
        self.version, self.busy, self.closed = 0, False, False  # busy: in a call, or since one that did not end
        self.worker_lanes = simulators if isinstance(simulators, WorkerLanes) else None

    def __reduce__(self) -> Any:
        mend = "take funcollect.fork(env, state), or funcollect.save(path, state)"  # copies of MuJoCo would diverge
        raise TypeError(f"the simulators of {self.env} cannot be copied or pickled: {mend}")

    def seed_again(self) -> None:
        """Give every lane a seed at its next reset: after a broken-off call, simulators may be in any state."""
        self.unseeded = set(range(len(self.lanes)))

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

    env: protocols.HostEnv
    simulators: protocols.Simulators

    def __init__(self, env: protocols.HostEnv, key: Key, lanes: Tensor, simulators: Any = None) -> None:
        super().__init__(env, env.open() if simulators is None else simulators)
        self._each_episode = env.seeding == "episode"
        self.lanes = lanes.tolist()
        paced: Any = self.simulators if isinstance(self.simulators, protocols.PacedSimulators) else None
        self.least_ready: int = paced.least_ready if paced else 0
        self.most_ahead: int = paced.most_ahead if paced else 0
        self.carried: Any = None  # the rows that lanes have made beyond the last rollout
        self._announced = False  # whether `worker_lanes` know the seeds of the next episodes
        self.calls: list[AppliedCall] = []
        self.changed_in_part = False  # whether a function raised, so that only some lanes' environments have changed
        self.rekey(key, [-1] * len(self.lanes), 0)
        self.action_log = ActionLog(len(self.lanes), LARGEST_LOG if env.forking == "replay" else 0)
        self.last_outcome: protocols.Outcome = ((), (), (), ())  # which finished lanes repeat

    def rekey(self, key: Key, episodes: list[int], steps: int) -> None:
        """Take the next seeds from `key`, as if lanes were in `episodes` [P] and had made `steps`."""
        self.key, self.episodes, self.steps = key, episodes, steps
        self.calls = [call._replace(episodes=[-1] * len(self.lanes)) for call in self.calls]
        self.options: dict[int, tuple[int, Any]] = {}  # by lane: an episode, and the options of its reset
        self._seeds: list[tuple[int, list[int]]] = [(-1, [])] * len(self.lanes)  # by lane: its last block, the seeds
        self._draw_seeds(slice(None), (episodes[0] + 1) // _SEEDS)
        self.seed_again()

    def _draw_seeds(self, lanes: slice, block: int) -> None:
        keys = lane_keys(self.key, Purpose.RESET, np.array(self.lanes))
        episodes = np.arange(block * _SEEDS, (block + 1) * _SEEDS, dtype=np.uint32)
        pair = keys[0][lanes, None], keys[1][lanes, None]
        by_lane = hashed_in_numpy(pair, np.zeros((), np.uint32), episodes)[0].tolist()
        self._seeds[lanes] = [(block, seeds) for seeds in by_lane]

    def _next_seed(self, lane: int) -> int | None:
        """The seed of a lane's next episode, the first word of its key; None if the lane's generator continues."""
        if not self._each_episode and lane not in self.unseeded:
            return None
        block, index = divmod(self.episodes[lane] + 1, _SEEDS)
        if self._seeds[lane][0] != block:
            self._draw_seeds(slice(lane, lane + 1), block)
        return self._seeds[lane][1][index]

    def announce(self, restarting: bool) -> None:
        """Tell workers, which can prepare it, whether lanes will be restarted, and from which seeds."""
        if self.worker_lanes is not None:
            lanes, self._announced = range(len(self.lanes)), restarting
            self.worker_lanes.announce(lanes, [*map(self._next_seed, lanes)] if restarting else None)

    def restart(self, lanes: Sequence[int]) -> None:
        """Begin the next episode of each of `lanes`."""
        seeds = [*map(self._next_seed, lanes)]
        for lane in lanes:
            self.episodes[lane] += 1
        if self.options and (options := [self._options(lane) for lane in lanes]) != [None] * len(lanes):
            cast(Any, self.simulators).reset(lanes, seeds, options)
        else:
            self.simulators.reset(lanes, seeds)
        if self.unseeded:
            self.unseeded.difference_update(lanes)
        if self._announced and self.worker_lanes is not None:
            self.worker_lanes.announce(lanes, [*map(self._next_seed, lanes)])

    def _options(self, lane: int) -> Any:
        """A copy of the options of the reset that begins a lane's current episode; None for none."""
        episode, options = self.options.get(lane, (-1, None))
        return deepcopy(options) if episode == self.episodes[lane] else None

    def apply(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        """Call a function with the environment of each lane, and record the call for copies."""
        self.calls.append(AppliedCall(function, args, self.steps, list(self.episodes)))
        try:
            return cast(protocols.SimulatorsOfLanes, self.simulators).apply(range(len(self.lanes)), function, args)
        except BaseException as error:
            if not isinstance(error, UnsentResultError):  # the function has returned in all lanes
                self.calls.pop()
            if isinstance(error, EnvError) and not isinstance(error, NotCalledError):
                self.changed_in_part = True
            raise

    def observation(self) -> dict[Path, Tensor]:
        """Return a copy of the current root observation."""
        return {path: torch.from_numpy(array.copy()) for path, array in self.simulators.observation.items()}

    def show(self, observation: Mapping[Path, Tensor]) -> None:
        """Write a state's root observation into the memory that the policy reads."""
        for path, array in self.simulators.observation.items():
            array[...] = observation[path].numpy()

    def hand_over(self) -> protocols.Simulators:
        """Close this simulation, and return its simulators for another one."""
        self.closed = True
        self._finalizer.detach()
        return self.simulators


@dataclass(frozen=True)
class SimulatorHandle(Handle):
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
        if held.worker_lanes is not None:
            held.worker_lanes.check_owner()
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


def record_of(source: Simulation, aim: str, advice: str) -> SimulationRecord:
    """Return what `rebuild` needs; ReplayError if simulators cannot be rebuilt, so not be "forked", say (the `aim`)."""
    env, why, mend = source.env, "", advice
    actions = source.action_log.since_reset() if env.forking == "replay" else None
    if kept := statistics_of(env):
        why, mend = f"{kept}, which a replay does not restore", "use funcollect.normalized and scale_rewards instead"
    elif env.forking == "none" and env.seeding == "episode":
        why, mend = "it keeps no actions to replay", f"make it without replayable=False or forking='none', or {advice}"
    elif env.forking != "snapshot" and env.seeding != "episode":
        why = f"it is seeded by {env.seeding} and gives no snapshot"
    elif source.changed_in_part:
        why, mend = "a function was applied and raised in one lane, not in all", "make a state by funcollect.init"
    elif env.forking == "replay" and actions is None:
        log = source.action_log
        lane, kept = int(log.ages.argmax()), f"a state keeps {log.limit >> 20} MiB of all lanes' actions"
        why = f"the episode of lane {lane} is too long to be replayed ({int(log.ages[lane]):,} steps; {kept})"
        mend = "begin another with funcollect.reset(env, state, mask), or limit them by max_episode_steps"
    if why:
        raise ReplayError(f"{env}: {why}, so it cannot be {aim}: {mend}")
    snapshot = cast(protocols.SnapshotSimulators, source.simulators).snapshot() if env.forking == "snapshot" else None
    progress = {name: copied(getattr(source, name)) for name in _PROGRESS}
    return SimulationRecord(**progress, ages=source.action_log.ages, actions=actions, snapshot=snapshot)


def rebuild(
    env: protocols.HostEnv, record: SimulationRecord, state: CollectorState, *, saved: bool = False, over: Any = None
) -> SimulatorHandle:
    """Bring new simulators, or those of `over`, to the recorded state; ReplayError if it differs from `state`.

    A `saved` record holds its snapshot as plain data.
    """
    copy, returns = Simulation(env, record.key, state.lane, over and over.hand_over()), None
    copy.options = copied(record.options)
    try:
        if record.calls:
            _restart(copy, range(len(record.episodes)), state)
            _repeat_calls(copy, record)
        if env.forking == "replay":
            returns = _replay(copy, record, state)
        else:
            restoring, snapshot = cast(protocols.SnapshotSimulators, copy.simulators), record.snapshot
            if saved and isinstance(restoring, protocols.SavableSnapshots):
                snapshot = restoring.snapshot_from(snapshot)
            restoring.restore(snapshot)
        forked = "continue without a fork: the state can still be used"
        _compare(copy, returns, state, "load with episodes='restart', which begins new ones" if saved else forked)
    except BaseException:
        copy.close()
        raise
    vars(copy).update({name: copied(getattr(record, name)) for name in _PROGRESS})
    copy.action_log.resume(record.actions, record.ages)
    return copy.release()


def _replay(copy: Simulation, record: SimulationRecord, state: CollectorState) -> npt.NDArray[np.float64]:
    """Replay every lane's episode from its seed and its actions, all lanes in step; return the sums [P] of rewards.

    A lane is reset when its episode begins, and not stepped before, since the earlier actions belong to other episodes
    and may be illegal in this one.
    """
    returns = np.zeros(len(record.ages))
    actions, ages = cast(Tensor, record.actions), record.ages.tolist()
    lanes, length = range(len(ages)), len(actions)
    _restart(copy, lanes, state)
    ended: set[int] = set()
    for t in range(length):
        if late := [lane for lane in lanes if t and ages[lane] == length - t]:
            _restart(copy, late, state)
        _repeat_calls(copy, record, record.steps - length + t)
        if not (live := [lane for lane in lanes if ages[lane] >= length - t and lane not in ended]):
            continue
        copy.simulators.send(live, actions[t][live])
        _, (reward, terminated, truncated, _) = copy.simulators.receive()
        returns[live] += np.array(reward, np.float32)
        ended.update(lane for lane, *flags in zip(live, terminated, truncated, strict=True) if any(flags))
    if begun := [lane for lane in lanes if ages[lane] == 0 and length]:
        _restart(copy, begun, state)
    _repeat_calls(copy, record, record.steps)
    return returns


def _restart(copy: Simulation, lanes: Sequence[int], state: CollectorState) -> None:
    """Begin, possibly again, the episodes that these lanes are in by the state."""
    for lane in lanes:
        copy.episodes[lane] = int(state.episode[lane]) - 1
    copy.restart(lanes)


def _repeat_calls(copy: Simulation, record: SimulationRecord, steps: int | None = None) -> None:
    """Repeat the calls made after `steps` steps in lanes still in that episode; for None, those of earlier episodes."""
    everywhere, during = copy.env.forking != "replay", steps is not None
    for call in record.calls:
        episodes = enumerate(zip(call.episodes, record.episodes, strict=True))
        lanes = [lane for lane, (then, now) in episodes if everywhere or (then == now) == during]
        if steps in (None, call.steps) and lanes:
            with contextlib.suppress(UnsentResultError):  # the results are not needed
                cast(protocols.SimulatorsOfLanes, copy.simulators).apply(lanes, call.function, call.args)


def _compare(copy: Simulation, returns: npt.NDArray[np.float64] | None, state: CollectorState, otherwise: str) -> None:
    for path, value in copy.observation().items():
        wanted = state.observation[path]
        wrong = ~torch.isclose(value, wanted, rtol=0, atol=0, equal_nan=True).reshape(len(wanted), -1).all(-1)
        if bool(wrong.any()):
            what = f"lane {int(wrong.nonzero()[0])}: replaying the episode's seed and actions gave another"
            why = "expected the same: the environment is not a function of these. Let it draw from self.np_random"
            raise ReplayError(f"{what} {'.'.join(path)}, {why}, not from a global generator, or {otherwise}")
    if returns is not None and (different := returns != state.returns.numpy()).any():
        lane = int(different.argmax())
        what = f"lane {lane}: replaying the episode's seed and actions gave the return {returns[lane]}, expected"
        why = "a wrapper keeps numbers from earlier episodes, such as a running mean of rewards: scale them in batches"
        raise ReplayError(f"{what} {float(state.returns[lane])}: {why} (funcollect.scale_rewards), or {otherwise}")
