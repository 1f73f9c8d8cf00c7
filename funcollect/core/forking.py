"""Copies of simulators, in memory or from a file: others are brought to the same state by replay or by a snapshot."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from funcollect.core.simulators import Simulation, SimulationRecord, SimulatorHandle
from funcollect.core.state import CollectorState
from funcollect.envs.host.host_env import statistics_of
from funcollect.errors import ReplayError
from funcollect.processes.failures import UnsentResultError
from funcollect.protocols import HostEnv, SavableSnapshots, SimulatorsOfLanes, SnapshotSimulators


def record_of(source: Simulation, aim: str, advice: str) -> SimulationRecord:
    """Describe the state of simulators for `rebuild`; ReplayError if they cannot be rebuilt.

    The message names the `aim`, such as "forked", and the `advice`.
    """
    env = source.env
    if kept := statistics_of(env):
        raise ReplayError(
            f"{env} cannot be {aim}: {kept}, which a replay does not restore: normalise in the policy instead "
            "(funcollect.normalized; funcollect.scale_rewards for rewards)"
        )
    if env.forking == "none" and env.seeding == "episode":
        raise ReplayError(
            f"{env} keeps no actions to replay, so it cannot be {aim}: make it without replayable=False (in "
            f"a class of your own, without forking='none'), or {advice}"
        )
    if env.forking == "none":
        raise ReplayError(f"{env} is seeded by {env.seeding} and gives no snapshot, so it cannot be {aim}: {advice}")
    if source.changed_in_part:
        raise ReplayError(
            f"{env} cannot be {aim}: a function was applied and raised in one lane, so that others may have been "
            "changed alone: make a new state with funcollect.init"
        )
    record = source.record()
    if env.forking == "replay" and record.actions is None:
        lane = int(record.ages.argmax())
        raise ReplayError(
            f"the episode of lane {lane} is too long to be replayed ({int(record.ages[lane]):,} steps; a state keeps "
            f"{source.action_log.limit >> 20} MiB of all lanes' actions), so {env} cannot be {aim}: begin another with "
            "funcollect.reset(env, state, mask), or limit episodes by max_episode_steps"
        )
    return record


def rebuild(
    env: HostEnv, record: SimulationRecord, state: CollectorState, *, saved: bool = False, simulators: Any = None
) -> SimulatorHandle:
    """Bring simulators to the recorded state, and compare their observations with those of `state`.

    They are new ones unless `simulators` are given. A `saved` record has its snapshot as plain data.
    """
    copy, returns = Simulation(env, record.key, state.lane, simulators), None
    try:
        if record.calls:
            _restart(copy, range(len(record.episodes)), state)
            _repeat_calls(copy, record)
        if env.forking == "replay":
            returns = _replay(copy, record, state)
        else:
            restoring, snapshot = cast(SnapshotSimulators, copy.simulators), record.snapshot
            if saved and isinstance(restoring, SavableSnapshots):
                snapshot = restoring.snapshot_from(snapshot)
            restoring.restore(snapshot)
        forked = "continue without a fork: the state can still be used"
        _compare(copy, returns, state, "load with episodes='restart', which begins new ones" if saved else forked)
    except BaseException:
        copy.close()
        raise
    copy.go_on_as(record)
    return copy.release()


def _replay(copy: Simulation, record: SimulationRecord, state: CollectorState) -> npt.NDArray[np.float64]:
    """Replay every lane's episode from its seed and its actions, all lanes in step; return the rewards' sums [P].

    A lane is reset when its episode begins, and not stepped before that, since the actions then belong to other
    episodes and may be illegal in this one.
    """
    returns = np.zeros(len(record.ages))
    actions, ages = cast(torch.Tensor, record.actions), record.ages.tolist()
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
    """Begin the state's current episode in these lanes, once or again."""
    for lane in lanes:
        copy.episodes[lane] = int(state.episode[lane]) - 1
    copy.restart(lanes)


def _repeat_calls(copy: Simulation, record: SimulationRecord, steps: int | None = None) -> None:
    """Repeat the calls of functions after so many steps of the current episodes; None for those before each of them."""
    for call in record.calls:
        replayed = copy.env.forking == "replay"
        lanes = call.lanes(record.episodes, during=steps is not None) if replayed else range(len(record.episodes))
        if steps in (None, call.steps) and lanes:
            with contextlib.suppress(UnsentResultError):  # nobody asks for the results
                cast(SimulatorsOfLanes, copy.simulators).apply(lanes, call.function, call.args)


def _compare(copy: Simulation, returns: npt.NDArray[np.float64] | None, state: CollectorState, otherwise: str) -> None:
    """Raise ReplayError unless the copy has the observations of the state, and its replay brought the same rewards."""
    for path, value in copy.observation().items():
        wanted = state.observation[path]
        wrong = ~torch.isclose(value, wanted, rtol=0, atol=0, equal_nan=True).reshape(len(wanted), -1).all(-1)
        if bool(wrong.any()):
            raise ReplayError(
                f"lane {int(wrong.nonzero()[0])}: replaying the episode's seed and actions gave another "
                f"{'.'.join(path)}, expected the same: the environment is not a function of these. Let it draw from "
                f"self.np_random, not from a global generator, or {otherwise}"
            )
    if returns is not None and (different := returns != state.returns.numpy()).any():
        lane = int(different.argmax())
        raise ReplayError(
            f"lane {lane}: replaying the episode's seed and actions gave the return {returns[lane]}, expected "
            f"{float(state.returns[lane])}: a wrapper keeps numbers from earlier episodes, such as a running mean of "
            f"rewards. Scale rewards in the batch instead (funcollect.scale_rewards), or {otherwise}"
        )
