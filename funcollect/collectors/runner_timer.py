"""Times the rollouts of a runner, in its own process or in a worker."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from funcollect.collectors.runner import Runner
from funcollect.core import api
from funcollect.core.timing import TimedLoops


class RolloutTimes(NamedTuple):
    """What a runner did for some time, in seconds. Rollouts and what lies between them make up all of it."""

    loop: str  # which ran
    frames: int  # that were collected
    seconds: float  # of all
    parts: Mapping[str, float]  # of the rollouts
    busy: float  # CPU time of the process between them

    @property
    def between(self) -> float:
        """Seconds between the rollouts."""
        return max(self.seconds - sum(self.parts.values()), 0.0)


class RunnerTimer:
    """Times the rollouts of a runner from its construction until `stop`."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._frames = runner, runner.frames
        self._loops = runner.loops = TimedLoops()
        self._cpu, self._began = time.process_time(), time.perf_counter()

    def stop(self) -> RolloutTimes:
        """Let the runner run as before, and return the times."""
        seconds, cpu = time.perf_counter() - self._began, time.process_time() - self._cpu
        runner, loops = self._runner, self._loops
        runner.loops = api.LOOPS
        frames = runner.frames - self._frames
        return RolloutTimes(loops.loop, frames, seconds, dict(loops.seconds), max(cpu - loops.cpu, 0.0))
