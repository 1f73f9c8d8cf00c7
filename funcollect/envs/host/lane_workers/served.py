"""What a worker does for the process that has started it, besides steps and resets: functions of its simulators."""

from __future__ import annotations

from typing import Any

from funcollect.protocols import SavableSnapshots


def snapshot(simulators: Any) -> list[Any]:
    """A snapshot, one entry for each lane, as plain data where that is possible."""
    taken = simulators.snapshot()
    return list(simulators.snapshot_data(taken) if isinstance(simulators, SavableSnapshots) else taken)


def restore(simulators: Any, data: list[Any]) -> None:
    """Restore what `snapshot` returned."""
    simulators.restore(simulators.snapshot_from(data) if isinstance(simulators, SavableSnapshots) else data)


def camera(simulators: Any, lane: int) -> tuple[str | None, float | None]:
    """The render mode and the frames per second of a lane; TypeError if it cannot be filmed."""
    if not hasattr(simulators, "camera"):
        raise TypeError(f"lane {lane} cannot be filmed, expected a Gymnasium environment that renders: film that")
    found = simulators.camera(lane)
    return found.mode, found.fps


def picture(simulators: Any, lane: int) -> Any:
    """The current picture of a lane."""
    return simulators.camera(lane).shoot()
