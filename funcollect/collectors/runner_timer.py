"""Times the rollouts of a runner, in its own process or in a worker."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from funcollect.collectors.runner import Runner
from funcollect.core import api
from funcollect.core.timing.timed_loops import TimedLoops


class RolloutTimes(NamedTuple):
    """What a runner did for some time, in seconds. Rollouts and what lies between them make up all of it."""

    loop: str  # which ran
    frames: int  # that were collected
    seconds: float  # of all, without those that timing itself cost
    parts: Mapping[str, float]  # of the rollouts
    cpu: float  # CPU time of the process in the rollouts
    busy: float  # and between them
    waits: bool  # whether each timed call waited for an accelerator

    @property
    def between(self) -> float:
        """Seconds between the rollouts."""
        return max(self.seconds - sum(self.parts.values()), 0.0)

    @property
    def load(self) -> float:
        """The share of the rollouts' time in which the process uses a processor; at most 1."""
        return min(self.cpu / max(sum(self.parts.values()), 1e-9), 1.0)


class RunnerTimer:
    """Times the rollouts of a runner from its construction until `stop`."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._frames = runner.frames
        self._loops = runner.loops = TimedLoops()
        self._cpu, self._began = time.process_time(), time.perf_counter()

    def stop(self) -> RolloutTimes:
        """Let the runner run as before, and return the times."""
        seconds, cpu = time.perf_counter() - self._began, time.process_time() - self._cpu
        self._runner.loops = api.LOOPS
        loops = self._loops
        parts, cost = loops.parts()
        return RolloutTimes(
            loop=loops.loop,
            frames=self._runner.frames - self._frames,
            seconds=seconds - cost,
            parts=parts,
            cpu=loops.cpu,
            busy=max(cpu - loops.cpu, 0.0),
            waits=loops.waits,
        )
