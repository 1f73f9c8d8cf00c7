"""The time of a compiled environment without the policy, from separate rollouts."""

from __future__ import annotations

import statistics
import time

from funcollect.core import api
from funcollect.core.request import Request
from funcollect.policies.random_policy import random_policy
from funcollect.protocols import JaxEnv

_SECONDS = 0.3  # that the rollouts take, about
_LEAST, _MOST = 3, 50  # rollouts


def environment_alone(env: JaxEnv, length: int, total_lanes: int, most: int | None) -> float:
    """Return the seconds of a rollout of `length` steps with random actions, the median of some, in the same loop.

    `most` is the number of steps after which a trajectory is truncated, or None.
    """
    policy, request = random_policy(env), Request(length=length, max_frames_per_traj=most)
    state = api.init_lanes(env, policy, seed=0, first_lane=0, total_lanes=total_lanes)
    state, _ = api.run(env, policy, state, request)  # compiles
    times: list[float] = []
    while len(times) < _LEAST or (sum(times) < _SECONDS and len(times) < _MOST):
        began = time.perf_counter()
        state, _ = api.run(env, policy, state, request)
        times.append(time.perf_counter() - began)
    return statistics.median(times)
