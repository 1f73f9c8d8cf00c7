"""Whether lanes in worker processes are faster than in one process."""

from __future__ import annotations

import copy
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from funcollect.envs.host.host_env import SimulatedEnv
from funcollect.specs import ActionSpec

_STEPS = 200  # that are timed, at most
_SECONDS = 0.2  # that they may take
_EXCHANGE = 200e-6  # seconds per step for waking workers that sleep and waiting for the last one (`benchmarks vector`)
_CLEARLY = 0.8  # the share of one process's time from which on workers are clearly faster


def spread(env: SimulatedEnv, policy_seconds: Callable[[int], float]) -> str:
    """Describe how the lanes of an environment are spread over workers, and whether that pays.

    `policy_seconds` returns the seconds of a call of the policy for a number of lanes.
    """
    workers, lanes = env.workers, env.num_envs or 1
    assert workers is not None
    cores = len(os.sched_getaffinity(0))
    step, busy = _time_of_a_step(env)
    alone = lanes * step
    most = math.ceil(lanes / workers.num_workers)  # lanes of one worker
    apart = most * step * max(1.0, busy * workers.num_workers / cores) + _EXCHANGE
    parts = [f"{lanes} lanes in {workers} on {cores} processors"]
    if workers.overlap > 1:
        once, half = policy_seconds(lanes), policy_seconds(lanes // 2)
        idle = max(cores - busy * workers.num_workers, 0.0)  # processors that the policy has to itself
        saved = once + apart - max(2 * half, apart + 2 * half * max(1.0 - idle, 0.0))
        parts.append(
            "one half of the lanes steps while the policy acts for the other: it takes "
            f"{once * 1e6:,.0f} µs for all, {half * 1e6:,.0f} µs for each half, so this saves about "
            f"{max(saved, 0.0) * 1e6:,.0f} µs of a step" + ("" if saved > 0 else ": leave overlap out")
        )
    parts.append(
        f"a step of one lane takes {step * 1e6:,.0f} µs here, so all take {alone * 1e6:,.0f} µs in one process, and "
        f"about {apart * 1e6:,.0f} µs in these, with {_EXCHANGE * 1e6:.0f} µs for the exchange"
    )
    if apart > _CLEARLY * alone:
        parts.append("one process would be about as fast, or faster: leave the workers out")
    return "; ".join(parts)


def _time_of_a_step(env: SimulatedEnv) -> tuple[float, float]:
    """The seconds that one lane takes for a step, the median over a few random ones here, and the share of CPU time."""
    assert env.open_group is not None
    simulators = env.open_group(0, 1)(replace(env, num_envs=1, workers=None, open_group=None))
    space, times, busy = copy.deepcopy(env.action_space), list[float](), 0.0
    try:
        simulators.reset([0], [0])
        until = time.perf_counter() + _SECONDS
        while len(times) < _STEPS and (not times or time.perf_counter() < until):
            action = _first_choice(env.action_spec) if env.action_spec.one_hot else np.asarray(space.sample())
            started, cpu = time.perf_counter(), time.process_time()
            simulators.send([0], action[None])
            _, (_, terminated, truncated, _) = simulators.receive()
            busy += time.process_time() - cpu
            times.append(time.perf_counter() - started)
            if terminated[0] or truncated[0]:
                simulators.reset([0], [len(times)])
    finally:
        simulators.close()
    return statistics.median(times), min(busy / sum(times), 1.0)


def _first_choice(spec: ActionSpec) -> npt.NDArray[np.int64]:
    """The one-hot action of the first choice of each component."""
    return np.concatenate([np.eye(1, count, dtype=np.int64)[0] for count in spec.categories])
