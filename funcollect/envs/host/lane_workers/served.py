"""What a worker does for the process that has started it, besides steps and resets: functions of its simulators."""

from __future__ import annotations

from typing import Any, NamedTuple

import cloudpickle

from funcollect.processes.failures import check_sendable
from funcollect.protocols import SavableSnapshots, SimulatorsOfLanes

Applied = tuple[list[int], bytes]  # lanes, counted from the worker's first, and a function with its arguments, packed


class Snapshot(NamedTuple):
    """The snapshots of a worker's lanes.

    Attributes:
        lanes: an entry for each, as plain data where that is possible.
        refusal: why it is not; empty if the entries are plain data, or their simulators promise nothing else.
    """

    lanes: list[Any]
    refusal: str = ""


def snapshot(simulators: Any) -> Snapshot:
    """A snapshot of all lanes."""
    taken = simulators.snapshot()
    if not isinstance(simulators, SavableSnapshots):
        return Snapshot(list(taken))
    try:
        return Snapshot(list(simulators.snapshot_data(taken)))
    except TypeError as error:
        return Snapshot(list(taken), str(error))


def restore(simulators: Any, lanes: list[Any], refusal: str) -> None:
    """Restore what `snapshot` returned."""
    plain = isinstance(simulators, SavableSnapshots) and not refusal
    simulators.restore(simulators.snapshot_from(lanes) if plain else lanes)


def apply(simulators: Any, lanes: list[int], packed: bytes) -> list[Any]:
    """Call a function with the environments of some lanes."""
    if not isinstance(simulators, SimulatorsOfLanes):
        raise TypeError("the lanes have no objects that a function could be called with")
    function, args = cloudpickle.loads(packed)
    return simulators.apply(lanes, function, args)


def results_of(simulators: Any, lanes: list[int], packed: bytes) -> list[Any]:
    """`apply`; UnsentResultError if the results cannot be sent."""
    results = apply(simulators, lanes, packed)
    check_sendable(results)
    return results


def camera(simulators: Any, lane: int) -> tuple[str | None, float | None]:
    """The render mode and the frames per second of a lane; TypeError if it cannot be filmed."""
    if not hasattr(simulators, "camera"):
        raise TypeError(f"lane {lane} cannot be filmed, expected a Gymnasium environment that renders: film that")
    found = simulators.camera(lane)
    return found.mode, found.fps


def picture(simulators: Any, lane: int) -> Any:
    """The current picture of a lane."""
    return simulators.camera(lane).shoot()
