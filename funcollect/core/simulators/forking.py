"""Forks of simulators: a second set, brought to the state of the first by replay or by a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from funcollect.core.simulators.simulation import FinishedLanes, Simulation, SimulatorHandle
from funcollect.core.state import CollectorState
from funcollect.envs.host.host_env import statistics_of
from funcollect.errors import ReplayError
from funcollect.protocols import SnapshotSimulators


def fork_simulation(source: Simulation, state: CollectorState) -> SimulatorHandle:
    """Rebuild the simulators and bring them to the state of the source's. Raises as `funcollect.fork` does."""
    env = source.env
    if kept := statistics_of(env):
        raise ReplayError(
            f"{env} cannot be forked: {kept}, which a replay does not restore: normalise in the first layer of the "
            "network instead"
        )
    if env.forking == "none":
        raise ReplayError(
            f"{env} is seeded by {env.seeding} and gives no snapshot, so it cannot be forked: begin a second run with "
            "funcollect.init, or take the same simulator through funcollect.envs.from_gymnasium"
        )
    copy = Simulation(env, source.key, state.lane)
    try:
        if env.forking == "replay":
            _replay(copy, source, state)
        else:
            snapshot = cast(SnapshotSimulators, source.simulators).snapshot()
            cast(SnapshotSimulators, copy.simulators).restore(snapshot)
        _compare(copy, state)
    except BaseException:
        copy.close()
        raise
    copy.go_on_as(source)
    return copy.release()


def _replay(copy: Simulation, source: Simulation, state: CollectorState) -> None:
    """Replay every lane's episode from its seed and its actions, all lanes in step.

    A lane is reset when its episode begins. Before that it takes the actions of other episodes, to no effect.
    """
    actions, ages = source.action_log.since_reset(), source.action_log.ages.tolist()
    if actions is None:
        raise ReplayError(
            "the current episode is too long for its actions to be kept, expected at most 2**20 steps: begin another "
            "with funcollect.reset(env, state), then fork"
        )
    lanes, length = range(len(ages)), len(actions)
    _restart(copy, lanes, state)
    finished = FinishedLanes(copy, ())
    for t in range(length):
        if late := [lane for lane in lanes if t and ages[lane] == length - t]:
            _restart(copy, late, state)
        _, terminated, truncated, _ = finished.step(actions[t])
        ended = [lane for lane in lanes if terminated[lane] or truncated[lane]]
        early = [lane for lane in ended if ages[lane] < length - t]
        finished.add(lane for lane in ended if lane not in early)
        if early:
            _restart(copy, early, state)
    if begun := [lane for lane in lanes if ages[lane] == 0 and length]:
        _restart(copy, begun, state)


def _restart(copy: Simulation, lanes: Sequence[int], state: CollectorState) -> None:
    """Begin the state's current episode in these lanes, once or again."""
    for lane in lanes:
        copy.episodes[lane] = int(state.episode[lane]) - 1
    copy.restart(lanes)


def _compare(copy: Simulation, state: CollectorState) -> None:
    """Raise ReplayError unless the copy has the observations of the state."""
    for path, value in copy.observation().items():
        wanted = state.observation[path]
        wrong = ~torch.isclose(value, wanted, rtol=0, atol=0, equal_nan=True).reshape(len(wanted), -1).all(-1)
        if bool(wrong.any()):
            lane = int(wrong.nonzero()[0])
            raise ReplayError(
                f"lane {lane}: replaying the episode's seed and actions gave another {'.'.join(path)}, expected the "
                "same: the environment is not a function of these. Let it draw from self.np_random, not from a global "
                "generator, or continue without a fork: the state can still be used"
            )
