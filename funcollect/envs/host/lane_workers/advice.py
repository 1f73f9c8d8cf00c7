"""Whether lanes in worker processes are faster than in one process."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt

from funcollect.envs.host.host_env import SimulatedEnv
from funcollect.envs.host.lane_workers.options import LaneWorkers
from funcollect.processes.system import usable_cpus
from funcollect.tree import Path

# From rows of observations and a number of steps, a function that chooses actions for these rows at a step.
RandomActions = Callable[[Mapping[Path, npt.NDArray[Any]], int], Callable[[int], Any]]

_STEPS = 200  # that are timed, at most
_SECONDS = 0.2  # that they may take
_EXCHANGE = 200e-6  # seconds per step for waking workers that sleep and waiting for the last one (`benchmarks vector`)
_CLEARLY = 0.8  # the share of one process's time from which on workers are clearly faster
WITHOUT_WORKERS = "leave the workers out"
WITHOUT_OVERLAP = "leave overlap out"


@dataclass(frozen=True, kw_only=True)
class LaneCosts:
    """What a step of all lanes costs, in seconds; `str` describes it.

    Attributes:
        lanes: their number.
        workers: the processes that they are spread over.
        cores: processors that this process may use.
        step: of one lane, the median of a few random ones in this process.
        busy: the share of a step in which it uses a processor.
        alone: all lanes in one process.
        apart: all lanes in the workers, with the exchange.
        once, half: a call of the policy for all lanes, and for each half, measured for ``overlap=2``, else 0.
    """

    lanes: int
    workers: LaneWorkers
    cores: int
    step: float
    busy: float
    alone: float
    apart: float
    once: float = 0.0
    half: float = 0.0

    @property
    def steps(self) -> float:
        """The steps of the lanes of one worker."""
        return self.apart - _EXCHANGE

    @property
    def pays(self) -> bool:
        """Whether the workers are clearly faster than one process."""
        return self.apart <= _CLEARLY * self.alone

    @property
    def saved(self) -> float:
        """The time saved by stepping one half of the lanes while the policy acts for the other; negative for a loss.

        Crowded workers have lanes of one half only. They rest while the policy acts for that half, so only the workers
        of the other half compete with the policy for processors.
        """
        crowded = self.workers.crowded(self.cores)
        at_work = self.workers.num_workers / 2 if crowded else self.workers.num_workers  # while the policy acts
        idle = max(self.cores - self.busy * at_work, 0.0)  # processors that the policy has to itself
        rest = self.half if crowded else 0.0
        period = self.apart + rest + (2 * self.half - rest) * max(1.0 - idle, 0.0)
        return self.once + self.apart - max(2 * self.half, period)

    def __str__(self) -> str:
        parts = [f"{self.lanes} lanes in {self.workers} on {self.cores} processors"]
        if self.workers.overlap > 1:
            parts.append(
                "one half of the lanes steps while the policy acts for the other: the policy takes "
                f"{self.once * 1e6:,.0f} µs for all, {self.half * 1e6:,.0f} µs for each half, so this saves about "
                f"{max(self.saved, 0.0) * 1e6:,.0f} µs of a step" + ("" if self.saved > 0 else f": {WITHOUT_OVERLAP}")
            )
        parts.append(
            f"a step of one lane takes {self.step * 1e6:,.0f} µs here, so all take {self.alone * 1e6:,.0f} µs in one "
            f"process, and about {self.apart * 1e6:,.0f} µs in these, with {_EXCHANGE * 1e6:.0f} µs for the exchange"
        )
        if not self.pays:
            parts.append(f"one process would be about as fast, or faster: {WITHOUT_WORKERS}")
        return "; ".join(parts)


def lane_costs(env: SimulatedEnv, policy_seconds: Callable[[int], float], random_actions: RandomActions) -> LaneCosts:
    """Time a few steps of one lane, for ``overlap=2`` the policy too, and estimate a step of all lanes.

    `policy_seconds` returns the seconds of a call of the policy for a number of lanes.
    """
    workers, lanes = env.workers, env.num_envs or 1
    assert workers is not None
    step, busy = _time_of_a_step(env, random_actions)
    costs = estimated_costs(lanes, workers, step, busy)
    return with_policy(costs, policy_seconds) if workers.overlap > 1 else costs


def estimated_costs(lanes: int, workers: LaneWorkers, step: float, busy: float) -> LaneCosts:
    """Estimate a step of all lanes from that of one: its seconds, and the share in which it uses a processor."""
    cores = cores_here()
    most = math.ceil(lanes / workers.num_workers)  # lanes of one worker
    return LaneCosts(
        lanes=lanes,
        workers=workers,
        cores=cores,
        step=step,
        busy=busy,
        alone=lanes * step,
        apart=most * step * max(1.0, busy * workers.num_workers / cores) + _EXCHANGE,
    )


def with_policy(costs: LaneCosts, policy_seconds: Callable[[int], float]) -> LaneCosts:
    """Time the policy for all lanes and for each half."""
    return replace(costs, once=policy_seconds(costs.lanes), half=policy_seconds(costs.lanes // 2))


def cores_here() -> int:
    """The processors that this process may use."""
    return len(usable_cpus())


def _time_of_a_step(env: SimulatedEnv, random_actions: RandomActions) -> tuple[float, float]:
    """The seconds that one lane takes for a step, the median over a few random ones here, and the share of CPU time."""
    assert env.open_group is not None
    simulators = env.open_group(0, 1)(replace(env, num_envs=1, workers=None, open_group=None))
    times, busy = list[float](), 0.0
    try:
        act = random_actions(simulators.observation, _STEPS)
        simulators.reset([0], [0])
        until = time.perf_counter() + _SECONDS
        while len(times) < _STEPS and (not times or time.perf_counter() < until):
            action = act(len(times))
            started, cpu = time.perf_counter(), time.process_time()
            simulators.send([0], action)
            _, (_, terminated, truncated, _) = simulators.receive()
            busy += time.process_time() - cpu
            times.append(time.perf_counter() - started)
            if terminated[0] or truncated[0]:
                simulators.reset([0], [len(times)])
    finally:
        simulators.close()
    return statistics.median(times), min(busy / sum(times), 1.0)
